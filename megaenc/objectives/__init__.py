"""What is predicted from what, under which attention, and in which steps of a run."""

from megaenc.objectives.base import Attention, Objective, OptionError, Targets, option
from megaenc.objectives.clm import CausalLanguageModeling
from megaenc.objectives.mlm import MaskedLanguageModeling
from megaenc.objectives.registry import find, known, register
from megaenc.objectives.schedule import Phase, Schedule, parse_schedule

__all__ = [
    "Attention",
    "CausalLanguageModeling",
    "MaskedLanguageModeling",
    "Objective",
    "OptionError",
    "Phase",
    "Schedule",
    "Targets",
    "find",
    "known",
    "option",
    "parse_schedule",
    "register",
]
