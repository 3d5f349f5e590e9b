"""Grids of fine-tuning runs over models, data sets, learning rates and seeds, in local processes or on Slurm."""
