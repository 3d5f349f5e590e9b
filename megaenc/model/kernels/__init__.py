"""Triton kernels of what lies between matrix products, and the check that decides which of them a model is computed by."""
