"""Training objectives, their attention masks and their schedule.

The objectives range from CLM and MLM to diffusion and plug-ins.
"""

from megaenc.objectives.base import Attention, Objective, OptionError, SoftLabels, Targets, option
from megaenc.objectives.clm import CausalLanguageModeling
from megaenc.objectives.diffusion import MaskedDiffusion
from megaenc.objectives.distillation import Distillation
from megaenc.objectives.gpt_bert import GPTBERT
from megaenc.objectives.masking import (
    MaskedLanguageModeling,
    MaskedNextTokenPrediction,
    Masking,
    text_token_mask,
)
from megaenc.objectives.parser import parse_schedule
from megaenc.objectives.prefix_lm import PrefixLanguageModeling
from megaenc.objectives.pseudo_perplexity import (
    PseudoPerplexity,
    build_pseudo_perplexities,
    compute_perplexity,
    pseudo_perplexity_shifts,
)
from megaenc.objectives.registry import find, known, register
from megaenc.objectives.schedule import Phase, Schedule, ScheduledObjective
from megaenc.objectives.span_corruption import SpanCorruption
from megaenc.objectives.validate import check_targets

__all__ = [
    "GPTBERT",
    "Attention",
    "CausalLanguageModeling",
    "Distillation",
    "MaskedDiffusion",
    "MaskedLanguageModeling",
    "MaskedNextTokenPrediction",
    "Masking",
    "Objective",
    "OptionError",
    "Phase",
    "PrefixLanguageModeling",
    "PseudoPerplexity",
    "Schedule",
    "ScheduledObjective",
    "SoftLabels",
    "SpanCorruption",
    "Targets",
    "build_pseudo_perplexities",
    "check_targets",
    "compute_perplexity",
    "find",
    "known",
    "option",
    "parse_schedule",
    "pseudo_perplexity_shifts",
    "register",
    "text_token_mask",
]
