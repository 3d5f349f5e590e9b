"""What is predicted from what, under which attention, and in which steps of a run."""

from megaenc.objectives.base import Attention, Objective, OptionError, Targets, option
from megaenc.objectives.clm import CausalLanguageModeling
from megaenc.objectives.masking import MaskedLanguageModeling, MaskedNextTokenPrediction, Masking
from megaenc.objectives.parser import parse_schedule
from megaenc.objectives.prefix_lm import PrefixLanguageModeling
from megaenc.objectives.registry import find, known, register
from megaenc.objectives.schedule import Choice, Phase, Schedule
from megaenc.objectives.validate import check_targets

__all__ = [
    "Attention",
    "CausalLanguageModeling",
    "Choice",
    "MaskedLanguageModeling",
    "MaskedNextTokenPrediction",
    "Masking",
    "Objective",
    "OptionError",
    "Phase",
    "PrefixLanguageModeling",
    "Schedule",
    "Targets",
    "check_targets",
    "find",
    "known",
    "option",
    "parse_schedule",
    "register",
]
