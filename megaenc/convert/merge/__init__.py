"""Merging of checkpoints: methods on tensors, and the run folder of the result."""
