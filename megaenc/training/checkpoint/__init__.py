"""Checkpoint writing, loading and integrity."""
