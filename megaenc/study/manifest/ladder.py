"""Manifest section `ladder`: models for scaling laws of objectives.

Each objective is trained at several sizes and budgets. One number, the depth, gives the size:

- A model has as many heads as layers, each 64 wide, and a SwiGLU layer 8/3 as wide as the model, up
  to a multiple of 64. Loss depends little on the ratio of width and depth (Kaplan et al.,
  2001.08361).
- The peak learning rate is 0.003239 - 0.0001395 ln N (Kaplan et al., equation D.1): 1.3e-3 for a
  million parameters, 3.5e-4 for a billion.
- The standard deviation of initial weights is sqrt(2 / (5 width)) (Nguyen and Salazar, 1910.05895):
  0.02 at a width of 1,000.
- A step has 0.58 D^0.571 tokens (Step Law, Li et al., 2503.04715), as a power of two of packs. D is
  the geometric mean of the tokens that 6 N D FLOPs allow at the size's lowest and highest budget.
- Warm-up is a tenth of the shortest run, and the decay a fifth of each (Haegele et al.,
  2405.18392), so that runs of a size share the steps before their decays.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megaenc import flags
from megaenc.console import format_number, truncate_text
from megaenc.errors import InputError
from megaenc.estimate.work import build_phases
from megaenc.flags import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)
from megaenc.model.config import ModelConfig
from megaenc.study.manifest.expand import ManifestEntry, build_schedules, expected_length_model
from megaenc.study.manifest.pretrain_args import build_run_config, prefix_errors
from megaenc.training.config import PretrainConfig

LADDER = "ladder"
"""Group of the models whose losses are fitted."""
TRIED_RATES = "ladder, other rates"
"""Group of the models with other learning rates than the rule's."""
_FFN_MULTIPLE = 64
_WARMUP_FRACTION = 0.1
_DECAY_FRACTION = 0.2
_COUNTED_STEPS = 10_000  # of the schedule whose FLOPs per step are counted


@dataclass(frozen=True)
class LadderObjective:
    """Item of a ladder's `objectives`: how its models are trained.

    `clm_share`, `mask` and `schedule` are as in an entry of `models`; `rate_factor` multiplies the
    peak learning rate of the rule.
    """

    clm_share: Fraction = 0.0
    """share of the steps trained with CLM before MLM"""
    mask: PositiveFraction | None = None
    """share of the tokens that MLM masks"""
    schedule: str = ""
    """value of --objective-schedule instead of these two"""
    rate_factor: PositiveFloat = 1.0
    """peak learning rate over that of the rule"""


@dataclass(frozen=True)
class LadderEntry:
    """Manifest section `ladder`: sizes, budgets and objectives of its models.

    There is a model for each of `depths`, each budget and each of `objectives`, a list of
    dictionaries with the fields of LadderObjective. Budgets are FLOPs, `budgets`, or
    `tokens_per_parameter`. `seeds` and `rate_factors` add models at some sizes; the latter are
    those of the lowest budget with the rate multiplied by each factor.
    """

    depths: tuple[PositiveInt, ...] = ()
    """numbers of layers; each is a size, named `d6` for 6"""
    budgets: tuple[PositiveFloat, ...] = ()
    """training FLOPs of a run, the same for all sizes and objectives"""
    tokens_per_parameter: tuple[PositiveFloat, ...] = ()
    """training tokens of a run by parameter, instead of `budgets`"""
    ratio_range: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 1e9)
    """lowest and highest tokens per parameter; a size has the budgets within. The tokens of a
    budget are budget / (6 N)"""
    head_width: PositiveInt = 64
    """width of a head, and so of a model per layer; less gives more sizes below a million
    parameters"""
    objectives: list = field(default_factory=list)
    """recipes as {clm_share: 0.25, mask: 0.3} or {schedule: ...}, with rate_factor if its peak rate
    is not that of the rule"""
    seeds: PositiveInt = 1
    """pretraining seeds at `seed_depths`"""
    seed_depths: tuple[PositiveInt, ...] = ()
    """sizes that are trained with every seed; default: the middle one"""
    rate_factors: tuple[PositiveFloat, ...] = ()
    """peak rates to try at `rate_depths` and the lowest budget, over that of the objective"""
    rate_depths: tuple[PositiveInt, ...] = ()
    """sizes at which rates are tried; default: the smallest and the middle one"""
    eval_tokens: PositiveInt = 65_536
    """held-out tokens of a validation, the same for all sizes"""
    points: tuple[str, ...] = ()
    """files ladder-points.csv of earlier reports, whose runs are fitted too unless they have a
    directory; relative to the manifest"""


@dataclass(frozen=True)
class LadderSize:
    """Size of a ladder with the flags of its runs, as of `plan_size`.

    `name` is that in the manifest's `sizes`, `flags` are of `megaenc pretrain` by field name, and
    `steps` has the number of steps of each budget, ascending, for each objective in order.
    """

    name: str
    flags: Mapping[str, Any]
    steps: tuple[tuple[int, ...], ...]


def build_ladder_entry(values: Mapping[str, Any]) -> LadderEntry:
    """Return the checked section `ladder` of a manifest.

    Objectives become LadderObjectives. Depths and budgets are ascending, and `seed_depths` and
    `rate_depths` filled in.

    Args:
        values: Values of the section by key.

    Raises:
        InputError: A value is unknown, missing, repeated or impossible.
    """
    entry = flags.replace_fields(LadderEntry(), dict(values), source="ladder")
    budget_keys = [name for name in ("budgets", "tokens_per_parameter") if getattr(entry, name)]
    if len(budget_keys) != 1:
        raise InputError(
            f"ladder: found {' and '.join(budget_keys) or 'neither'} of `budgets` and "
            "`tokens_per_parameter`, expected one of them"
        )
    for name in ("depths", "objectives"):
        if not getattr(entry, name):
            raise InputError(f"ladder: field `{name}`: found none, expected at least one")
    for name in ("depths", *budget_keys, "rate_factors"):
        for value, times in Counter(getattr(entry, name)).items():
            if times > 1:
                raise InputError(f"ladder: field `{name}`: found {value:g} twice, expected once")
    objectives = []
    for index, recipe in enumerate(entry.objectives, 1):
        place = f"ladder: objectives, entry {index}"
        if not isinstance(recipe, dict):
            raise InputError(
                f"{place}: found {truncate_text(repr(recipe))}, expected keys such as clm_share "
                "and mask"
            )
        objectives.append(flags.replace_fields(LadderObjective(), dict(recipe), source=place))
        recipe = replace(objectives[-1], rate_factor=1.0)
        if any(recipe == replace(earlier, rate_factor=1.0) for earlier in objectives[:-1]):
            raise InputError(
                f"{place}: found the recipe of an earlier entry, expected each once; "
                "`rate_factors` tries other rates"
            )
    depths = tuple(sorted(entry.depths))
    middle = depths[(len(depths) - 1) // 2]
    entry = replace(
        entry,
        depths=depths,
        budgets=tuple(sorted(entry.budgets)),
        tokens_per_parameter=tuple(sorted(entry.tokens_per_parameter)),
        objectives=objectives,
        seed_depths=entry.seed_depths or (middle,),
        rate_depths=entry.rate_depths or tuple(dict.fromkeys((depths[0], middle))),
    )
    for name in ("seed_depths", "rate_depths"):
        for depth in getattr(entry, name):
            if depth not in depths:
                raise InputError(
                    f"ladder: field `{name}`: found {depth}, expected some of `depths`: "
                    f"{', '.join(map(str, depths))}"
                )
    return entry


def expand_ladder(
    ladder: LadderEntry, pretrain: Mapping[str, Any], vocab_size: int, is_evaluated: bool
) -> tuple[dict[str, Mapping[str, Any]], list[ManifestEntry]]:
    """Return the sizes and the entries of `models` that a ladder stands for.

    Models with the rule's rate have the group LADDER, those with others TRIED_RATES.

    Args:
        ladder: Section, as of `build_ladder_entry`.
        pretrain: Flags of all runs by field name.
        vocab_size: Vocabulary size of the tokenizer, without padding.
        is_evaluated: Whether the models of the group LADDER are evaluated beyond their losses.

    Raises:
        InputError: `pretrain` has a flag that the rule sets, or a run would have no step.
    """
    sizes = {}
    entries = []
    for depth in ladder.depths:
        size = plan_size(ladder, depth, pretrain, vocab_size)
        for name in sorted(size.flags.keys() & pretrain.keys() - {"micro_batch_size"}):
            raise InputError(
                f"pretrain: field `{name}`: found together with `ladder`, which sets it by size"
            )
        sizes[size.name] = size.flags
        seeds = ladder.seeds if depth in ladder.seed_depths else 1
        for objective, steps in zip(ladder.objectives, size.steps, strict=True):
            lr = _round(objective.rate_factor * size.flags["lr"])
            entry = replace(_build_entry(objective), size=(size.name,))
            entries.append(
                replace(
                    entry,
                    pretrain={} if lr == size.flags["lr"] else {"lr": lr},
                    steps=steps,
                    seed=tuple(range(1, seeds + 1)),
                    group=LADDER,
                    evaluate=is_evaluated,
                )
            )
            factors = ladder.rate_factors if depth in ladder.rate_depths else ()
            tried = tuple(_round(factor * lr) for factor in factors if factor != 1)
            if tried:
                entries.append(
                    replace(
                        entry,
                        steps=steps[:1],
                        peak_rate=tried,
                        group=TRIED_RATES,
                        evaluate=False,
                    )
                )
    return sizes, entries


def _build_entry(objective: LadderObjective) -> ManifestEntry:
    """Return the entry of an objective, without size, steps and group."""
    return ManifestEntry(
        clm_share=(objective.clm_share,) if objective.clm_share else (),
        mask=() if objective.mask is None else (objective.mask,),
        schedule=objective.schedule,
        place="ladder",
    )


def build_schedule(objective: LadderObjective, steps: int) -> str:
    """Return the --objective-schedule of a run of `steps` steps with an objective.

    Raises:
        InputError: `objective` has MLM without a mask ratio.
    """
    [schedule] = build_schedules(_build_entry(objective), steps)
    return schedule


def _round(number: float) -> float:
    """Return a number with three digits."""
    return float(f"{number:.3g}")


def plan_size(
    ladder: LadderEntry, depth: int, pretrain: Mapping[str, Any], vocab_size: int
) -> LadderSize:
    """Return a size of a ladder by the rule of this module.

    Raises:
        InputError: A run would have no step.
    """
    width = ladder.head_width * depth
    name = f"d{depth}"
    size_flags = {
        "num_layers": depth,
        "hidden_size": width,
        "ffn_hidden_size": math.ceil(8 * width / 3 / _FFN_MULTIPLE) * _FFN_MULTIPLE,
        "num_attention_heads": depth,
        "num_query_groups": depth,
        "init_method_std": _round(math.sqrt(0.4 / width)),
        "lr_wsd_decay_fraction": _DECAY_FRACTION,
    }
    config = build_run_config({**pretrain, **size_flags})
    parameters = count_parameters(config.shape, vocab_size)
    size_flags["lr"] = peak_rate(parameters)
    seq_length = config.data.seq_length
    low, high = ladder.ratio_range
    lengths = [budget / (6 * parameters) for budget in ladder.budgets]
    lengths += [ratio * parameters for ratio in ladder.tokens_per_parameter]
    lengths = [length for length in lengths if low <= length / parameters <= high]
    if not lengths:
        raise InputError(
            f"ladder: field `ratio_range`: found {low:g} to {high:g}, which no budget of {name} "
            f"meets ({format_number(parameters)} parameters); expected another range, or budgets"
        )
    tokens = math.sqrt(lengths[0] * lengths[-1])
    packs = 2 ** max(0, round(math.log2(0.58 * tokens**0.571 / seq_length)))
    size_flags["global_batch_size"] = packs
    micro_batch_size = config.micro_batch_size
    if isinstance(micro_batch_size, int):
        size_flags["micro_batch_size"] = min(micro_batch_size, packs)
    size_flags["eval_iters"] = max(1, ladder.eval_tokens // (packs * seq_length))
    config = build_run_config({**pretrain, **size_flags})
    steps = []
    for index, objective in enumerate(ladder.objectives, 1):
        with prefix_errors(f"ladder: objectives, entry {index}"):
            step_flops = _count_step_flops(objective, config, vocab_size)
        # steps of the rule's 6 N D FLOPs, or of the tokens
        step_tokens = step_flops / (6 * parameters) if ladder.budgets else packs * seq_length
        steps.append(tuple(round(length / step_tokens) for length in lengths))
    fewest = min(counts[0] for counts in steps)
    if fewest < 1:
        raise InputError(
            f"ladder: a run of {name} has no step of {packs * seq_length:,} tokens at the lowest "
            "budget; expected higher budgets or fewer layers"
        )
    size_flags["lr_warmup_iters"] = round(_WARMUP_FRACTION * fewest)
    return LadderSize(name, size_flags, tuple(steps))


def peak_rate(parameters: int) -> float:
    """Return the peak learning rate of the rule for a number of parameters."""
    return _round(0.003239 - 0.0001395 * math.log(parameters))


def count_parameters(shape: ModelConfig, vocab_size: int) -> int:
    """Return the parameters that compute: all but an untied input embedding.

    This is the N of the scaling laws. The output layer counts, as its products do in FLOPs.
    """
    embedding = vocab_size * shape.hidden_size if shape.untie_embeddings_and_output_weights else 0
    return shape.parameter_count(vocab_size) - embedding


def _count_step_flops(objective: LadderObjective, config: PretrainConfig, vocab_size: int) -> float:
    """Return the mean FLOPs of an objective's steps, forward and backward."""
    schedule = build_schedule(objective, _COUNTED_STEPS)
    run = replace(config, objective_schedule=schedule, train_iters=_COUNTED_STEPS)
    flops = sum(
        steps * phase.passes * work.flops(config.shape, vocab_size)
        for phase in build_phases(run, vocab_size, expected_length_model(config))
        for work, steps in phase.parts
    )
    return config.global_batch_size * flops / _COUNTED_STEPS
