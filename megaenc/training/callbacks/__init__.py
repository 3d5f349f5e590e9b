"""Callbacks of a run: metrics, profiles, loss spikes, stragglers, and plug-ins."""

from megaenc.training.callbacks.base import Callback, StepReport

__all__ = ["Callback", "StepReport"]
