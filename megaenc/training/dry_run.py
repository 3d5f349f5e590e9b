"""The output of `--dry-run`."""

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate

from rich import box
from rich.table import Table

from megaenc.backend import detect_backend
from megaenc.console import build_rich_console
from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.data_path import find_corpora, list_prefixes
from megaenc.dist_env import get_rank, get_world_size
from megaenc.errors import InputError
from megaenc.objectives import Phase
from megaenc.training.callbacks.run_messages import (
    describe_frozen,
    describe_uneven_shares,
    format_model,
)
from megaenc.training.checkpoint_dir import checkpoints_to_delete
from megaenc.training.config import PretrainConfig
from megaenc.training.plan import Plan
from megaenc.training.planning import check_device

_TABLE_PHASES = 12
_TABLE_CORPORA = 30
_SAMPLED_PACKS = 64  # to estimate the share of predicted tokens
_SAMPLED_STEPS = 100_000  # of a mixture


def print_dry_run(plan: Plan) -> None:
    """Print the plan of a run on standard output of rank 0, for --dry-run.

    It has model, layout, corpora, phases, objectives with numbers of predicted tokens estimated
    from some packs, learning rate and validation. It needs no process group: other ranks return at
    once. Settings that the device type of --gpu (without it, this machine) does not support are
    printed, not raised.
    """
    if get_rank():
        return
    console = build_rich_console(
        width=None if sys.stdout.isatty() else 120, highlight=False, markup=False
    )
    settings = plan.settings
    total = settings.total_iters
    processes = f"{get_world_size()} process{'es' if get_world_size() > 1 else ''}"
    if settings.output.gpu:
        processes += f" on {settings.output.gpu}"
    console.print(
        f"{format_model(plan)}, {processes}: "
        f"{settings.layout.describe(settings.shape.num_layers, get_world_size())}"
    )
    packings = dict.fromkeys(phase.settings.data.packing for phase in settings.phase_configs)
    console.print(
        f"{total:,} steps of {settings.batch_size_text} packs of {settings.seq_length_text} tokens "
        f"({', '.join(packings)}): {settings.tokens_after(total):,} tokens"
    )
    start = f"{plan.start.describe()}{plan.skipped.describe()}"
    for line in (*describe_frozen(settings), *describe_uneven_shares(settings)):
        console.print(line, soft_wrap=True)
    console.print(f"makes steps {plan.start.step + 1:,} to {total:,}, {start}", soft_wrap=True)
    console.print(_corpus_table(plan))
    special = plan.data.special_tokens
    remedy = (
        ""
        if special.count
        else "; `megaenc preprocess --special-tokens template` or `--append-eod` adds some"
    )
    console.print(
        f"special tokens of a document: {special.describe(plan.tokenizer)} "
        f"({special.mode}){remedy}",
        soft_wrap=True,
    )
    console.print(_phase_table(plan))
    console.print(_objective_table(plan))
    validation = "none"
    if plan.has_validation:
        validation = f"every {settings.eval_every:,} steps"
        if plan.validation_sets:
            validation += (
                f" on {', '.join(held_out.describe() for held_out in plan.validation_sets)}"
            )
        elif settings.phases:
            validation += " on the held-out text of each phase"
        if settings.phases:
            validation += ", in packs of the phase's length,"
        validation += f" under {', '.join(plan.validation_objectives)}"
    optimizer = settings.optimizer.optimizer
    optimizer_text = "" if optimizer == "adamw" else f"; optimizer {optimizer}"
    console.print(f"learning rate: {plan.learning_rate.describe()}{optimizer_text}")
    console.print(f"validation: {validation}", soft_wrap=True)
    if settings.output.save:
        console.print(_describe_checkpoints(plan))
    backend = detect_backend()
    try:
        check_device(settings, backend)
    except InputError as error:
        device = settings.output.gpu or "this machine"
        console.print(f"on {device} it would be refused: {error}", soft_wrap=True)
    if not backend.is_cpu and not settings.has_auto_micro_batches:
        console.print(
            f"`--micro-batch-size auto` measures how many packs fit {backend.description} at once"
        )


def _describe_checkpoints(plan: Plan) -> str:
    """Return a line with the numbers of checkpoints that the run writes and keeps."""
    settings = plan.settings
    output = settings.output
    total = settings.total_iters
    interval = output.save_interval or total
    steps = {total, *range(interval, total, interval), *settings.kept_steps}
    written = [step for step in steps if plan.start.step < step <= total]
    deleted = checkpoints_to_delete(
        [step for step in written if step < total],
        output.keep_last,
        output.keep_every,
        settings.kept_steps,
    )
    return f"checkpoints: {len(written):,}, of which {len(written) - len(deleted):,} stay"


def _corpus_table(plan: Plan) -> Table:
    """Return a table of the corpora with most packs, and a row for the others."""
    table = _new_table("corpus", "share", "tokens", "packs", "epochs", "left out")
    rows = plan.corpus_usage
    if len(rows) > _TABLE_CORPORA:
        rows.sort(key=lambda row: -row.packs)
    for row in rows[:_TABLE_CORPORA]:
        fraction = _format_fraction(row.share)
        table.add_row(
            row.prefix,
            fraction,
            f"{row.tokens:,}",
            f"{row.packs:,}",
            f"{row.epochs:.2f}",
            f"{100 * row.dropped:.1f} %",
        )
    smaller = rows[_TABLE_CORPORA:]
    if smaller:
        epochs = [row.epochs for row in smaller]
        table.add_row(
            f"... {len(smaller):,} smaller corpora, {sum(row.packs == 0 for row in smaller):,} "
            "without a pack",
            _format_fraction(sum(row.share for row in smaller)),
            f"{sum(row.tokens for row in smaller):,}",
            f"{sum(row.packs for row in smaller):,}",
            f"{min(epochs):.2f} to {max(epochs):.2f}",
        )
    return table


def _format_fraction(fraction: float) -> str:
    """Return a share in percent with two decimals, or two digits if it is small."""
    percent = 100 * fraction
    return f"{percent:.2f} %" if percent >= 0.1 or not percent else f"{percent:.2g} %"


def _phase_table(plan: Plan) -> Table:
    """Return a table of steps and tokens of each phase of the objective schedule."""
    changing = {
        name: format_value for name, format_value in _PHASE_COLUMNS.items() if plan.settings.phases
    }
    for name, format_value in _RARE_COLUMNS.items():
        if len({format_value(phase.settings) for phase in plan.settings.phase_configs}) > 1:
            changing[name] = format_value
    table = _new_table("phase", "steps", "tokens", "tokens so far", *changing)
    phases = plan.schedule.phases
    for phase in phases[:_TABLE_PHASES]:
        before = plan.settings.tokens_after(phase.first_step - 1)
        after = plan.settings.tokens_after(phase.last_step)
        settings = plan.settings.phase_at(phase.first_step).settings
        cells = [
            f"{phase.first_step:,} to {phase.last_step:,}",
            f"{after - before:,}",
            f"{after:,}",
        ]
        table.add_row(
            phase.text, *cells, *(format_value(settings) for format_value in changing.values())
        )
    if len(phases) > _TABLE_PHASES:
        table.add_row(
            f"... {len(phases) - _TABLE_PHASES:,} more phases", f"to {phases[-1].last_step:,}"
        )
    return table


_PHASE_COLUMNS: dict[str, Callable[[PretrainConfig], str]] = {
    "packs a step": lambda settings: settings.batch_size_text,
    "tokens a pack": lambda settings: f"{settings.data.seq_length:,}",
    "rotary base": lambda settings: f"{settings.shape.rotary_base:,.0f}",
    "corpora": lambda settings: (
        f"{len(list_prefixes(find_corpora(settings.data.data_path))) or 1:,}"
    ),
}
"""Columns of the phase table in a run with `phases`."""
_RARE_COLUMNS: dict[str, Callable[[PretrainConfig], str]] = {
    "weight decay": lambda settings: f"{settings.optimizer.weight_decay:g}",
    "temperature": lambda settings: f"{settings.data.blend_temperature:g}",
    "packing": lambda settings: settings.data.packing,
}
"""Columns of the phase table if the phases differ in them."""


def _is_mixture(phase: Phase) -> bool:
    """Return whether each step of `phase` draws one of several objectives."""
    return len(phase.choices) > 1 and not phase.is_sum


def _objective_table(plan: Plan) -> Table:
    """Return a table of steps, tokens and predicted tokens of each objective.

    They are totals over all phases.
    """
    parts_of: dict[str, list[range]] = defaultdict(list)
    steps_of: dict[str, int] = defaultdict(int)
    tokens_of: dict[str, int] = defaultdict(int)
    estimated: set[str] = set()
    # Mixtures are evaluated step by step, long ones only at every `mixture_stride`-th step.
    mixture_stride = max(
        1, sum(len(phase) for phase in plan.schedule.phases if _is_mixture(phase)) // _SAMPLED_STEPS
    )
    for phase in plan.schedule.phases:
        is_mixture = _is_mixture(phase)
        stride = mixture_stride if is_mixture else len(phase)
        for first in range(phase.first_step, phase.last_step + 1, stride):
            part = range(first, min(first + stride, phase.last_step + 1))
            text = plan.schedule.text_at(first)
            estimated |= {text} if is_mixture and stride > 1 else set()
            # The rest of a mixture may have other objectives.
            parts_of[text].append(part[:1] if is_mixture else part)
            steps_of[text] += len(part)
            tokens_of[text] += plan.settings.tokens_after(part[-1]) - plan.settings.tokens_after(
                part[0] - 1
            )
    table = _new_table("objective", "steps", "tokens", "predicted, about")
    for text, parts in parts_of.items():
        steps = steps_of[text]
        tokens = tokens_of[text]
        fraction = _predicted_fraction(plan, parts)
        about = "about " if text in estimated else ""
        table.add_row(
            text,
            f"{about}{steps:,}",
            f"{about}{tokens:,}",
            f"{fraction * tokens:,.0f} ({100 * fraction:.1f} %)",
        )
    return table


def _predicted_fraction(plan: Plan, parts: list[range]) -> float:
    """Return the estimated share of predicted tokens over the steps in `parts`.

    Packs are sampled evenly.
    """
    predicted = 0
    tokens = 0
    ends = list(accumulate(map(len, parts)))
    for sample in range(_SAMPLED_PACKS):
        position = sample * ends[-1] // _SAMPLED_PACKS
        part = bisect_right(ends, position)
        step = parts[part][position - ends[part]]  # negative: from the end of the part
        packs = plan.data_at(step).train
        pack = packs[
            packs.first_sample + (sample if packs.samples is None else sample % packs.samples)
        ]
        randomness = SampleRandomness(plan.settings.seed, pack.sample, pack.epoch)
        predicted += sum(
            len(objective.targets(pack, randomness).labels)
            for _, objective in plan.schedule.objectives(step)
        )
        tokens += len(pack.tokens)
    return predicted / tokens


def _new_table(text_column: str, *number_columns: str) -> Table:
    """Return an empty table with a text column and right-aligned columns."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(text_column, overflow="fold")
    for name in number_columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
