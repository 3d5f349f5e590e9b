"""Callbacks of a run, which observe its steps: metrics, profiles, loss spikes, stragglers, and those of other packages."""

from megaenc.training.callbacks.base import Callback, StepReport

__all__ = ["Callback", "StepReport"]
