"""Merging of checkpoints: methods on tensors, and the run directory of the result."""
