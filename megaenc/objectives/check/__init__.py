"""Checks of a training objective before a run.

They cover its contract, leaks, statistics, speed, and equal training in every layout.
"""
