"""Grids of fine-tuning runs over models, data sets, learning rates and seeds.

The runs of a grid are local processes or tasks of Slurm.
"""
