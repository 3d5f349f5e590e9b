"""Triton kernels for the operations between matrix products, and the self-test that selects them."""
