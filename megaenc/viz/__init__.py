"""Plots and summaries of any run."""
