"""Plots and summaries of pretraining runs."""
