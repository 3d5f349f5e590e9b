"""Header and footer of a run on the console."""

import itertools
import math
from typing import Any

from megaenc.backend import Backend
from megaenc.dist_env import get_world_size
from megaenc.model.freezing import canonical_freeze
from megaenc.training.config import PretrainConfig
from megaenc.training.plan import Plan

_HEADER_PHASES = 6
_HEADER_CORPORA = 6
_MAX_EXCESS = 0.05  # of the largest share over the mean, from which on it is worth a line


def format_model(plan: Plan) -> str:
    """Return name, number of parameters and precision of the model as text.

    It is such as `tiny: 12.3M parameters in bf16`.
    """
    millions = plan.settings.shape.parameter_count(plan.vocab_size) / 1e6
    return (
        f"{plan.settings.model_name}: {millions:.1f}M parameters in "
        f"{'bf16' if plan.settings.bf16 else 'fp32'}"
    )


def format_run_header(plan: Plan, backend: Backend, kernels: dict[str, Any], resumed: int) -> str:
    """Return the lines of text at the start of a run, without a newline at the end.

    They name model, devices, kernels, starting point, phases, --save, corpora and skipped packs,
    and have those of `describe_frozen` and `describe_uneven_shares`.

    Args:
        backend: Hardware of this process.
        kernels: `Engine.kernel_metadata`.
        resumed: Step after which the run is resumed; 0 for none.
    """
    settings = plan.settings
    phases = plan.schedule.phases
    rows = plan.corpus_usage
    computed = (
        f"{settings.layout.describe(settings.shape.num_layers, get_world_size())}; attention by "
        f"{kernels['attention']}"
    )
    if not backend.is_cpu:
        computed += (
            "; fused kernels: "
            f"{', '.join(name for name, used in kernels['fused'].items() if used) or 'none'}"
        )
    start = f"resuming after step {resumed}" if resumed else plan.start.describe()
    phase_text = ", ".join(
        f"{phase.text} to step {phase.last_step}" for phase in phases[:_HEADER_PHASES]
    )
    more = f", ... ({len(phases):,} phases)" if len(phases) > _HEADER_PHASES else ""
    save = settings.output.save or "nowhere (give --save DIR to keep the run)"
    largest = (
        rows
        if len(rows) <= _HEADER_CORPORA
        else sorted(rows, key=lambda row: -row.packs)[:_HEADER_CORPORA]
    )
    percent_texts = [
        f"{100 * row.share:.4g} % of the packs, " if len(rows) > 1 else "" for row in largest
    ]
    data_text = "; ".join(
        f"{row.prefix}: {percent_text}{row.epochs:.2f} epochs"
        for row, percent_text in zip(largest, percent_texts, strict=True)
    )
    data_text += (
        f"; {len(rows) - len(largest):,} smaller corpora" if len(largest) < len(rows) else ""
    )
    notes = [*describe_frozen(settings), *describe_uneven_shares(settings)]
    note_text = "".join(f"\n  {line}" for line in notes)
    return (
        f"{format_model(plan)} on {get_world_size()} x {backend.description} ({computed}), "
        f"{start}\n"
        f"  {phase_text}{more}; {settings.batch_size_text} packs of {settings.seq_length_text} "
        f"tokens a step; saved to {save}\n"
        f"  {data_text}{plan.skipped.describe()}{note_text}"
    )


def describe_frozen(settings: PretrainConfig) -> list[str]:
    """Return a line for each range of steps that freezes parts of the model.

    A range has neighboring phases with the same parts. Of more than 6 ranges the list has the first
    6 and a line with the number of the others; it is empty if nothing is frozen.
    """
    lines = []
    for parts, group in itertools.groupby(
        settings.phase_configs,
        lambda phase: canonical_freeze(phase.settings.optimizer.freeze, phase.settings.shape),
    ):
        phases = list(group)
        if parts:
            steps = f"{phases[0].first_step:,} to {phases[-1].last_step:,}"
            lines.append(f"steps {steps} freeze {', '.join(parts)}")
    more = len(lines) - _HEADER_PHASES
    if more > 0:
        lines[_HEADER_PHASES:] = [f"... {more:,} more ranges of steps that freeze parts"]
    return lines


def describe_uneven_shares(settings: PretrainConfig) -> list[str]:
    """Return a line for each global batch size that leaves some ranks much more work.

    These are sizes at which the data-parallel rank with most packs has over 5 % more than the mean;
    the list is empty if there are none. Only the sizes after a ramp-up are considered. The number
    of ranks is that of this launch.
    """
    ranks = settings.data_parallel_size(get_world_size())
    lines = []
    for batch in dict.fromkeys(
        phase.settings.global_batch_size for phase in settings.phase_configs
    ):
        excess = math.ceil(batch / ranks) / (batch / ranks) - 1
        if excess > _MAX_EXCESS:
            even = max(1, round(batch / ranks)) * ranks
            lines.append(
                f"--global-batch-size {batch}: the ranks with most packs have {100 * excess:.0f} "
                "% more than the mean, which all "
                f"others wait for; {even} packs are equal shares"
            )
    return lines


def format_run_footer(
    step: int, total: int, loss: float | None, save: str, stop_reason: str | None
) -> str:
    """Return the last console line of a run: step, loss and directory.

    Args:
        step: Last trained step.
        total: Last step of the run as planned.
        loss: Loss of the last step; None if it had no target.
        save: Run directory; empty without one.
        stop_reason: Reason for an end before `total`, such as SIGTERM; None without one.
    """
    saved = f", saved in {save}" if save else ""
    stopped = ""
    if stop_reason and step < total:
        stopped = f"; stopped by {stop_reason}" + (", the same command resumes it" if save else "")
    return (
        f"step {step} of {total}: "
        f"{'no target' if loss is None else f'loss {loss:.4f}'}{saved}{stopped}"
    )
