"""Pretraining: configuration, training loop, checkpoints, validation and logging."""
