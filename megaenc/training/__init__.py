"""Pretraining: configuration, the training loop, checkpoints, validation, fault handling and logging."""
