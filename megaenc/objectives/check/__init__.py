"""Checks of a training objective: contract, leaks, statistics, speed, and equal training in every layout."""
