"""Pretraining: the settings of a run, its loop, optimizer, checkpoints and evaluation."""
