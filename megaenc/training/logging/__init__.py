"""Metrics of a run: the logger, its backends, and the detection of stragglers."""
