"""Attention backends for packed batches, and the self-test that selects one."""
