"""What the console says of a run before its first step, after its last, and where its loss leaps."""

import torch.distributed as dist

from megaenc.backend import Backend, Kernels
from megaenc.objectives import Phase
from megaenc.training.engine import BatchResult
from megaenc.training.plan import Plan


def introduction(plan: Plan, backend: Backend, kernels: Kernels, fused: dict[str, bool], resumed: int) -> str:
    """Describe the run; `fused`: whether each kernel is used, by name; `resumed`: the step it continues after, or 0."""
    settings = plan.settings
    where = f"{dist.get_world_size()} x {backend.description}"
    parallel = settings.layout.describe(settings.shape.num_layers, dist.get_world_size())
    start = f"going on after step {resumed}" if resumed else plan.start.describe()
    phases = _phases(plan.schedule.phases)
    millions = settings.shape.parameters(plan.vocab_size) / 1e6
    precision = "bf16" if settings.bf16 else "fp32"
    save = settings.output.save or "nowhere (give --save FOLDER to keep the run)"
    computed = f"{parallel}; attention by {kernels.attention_backend}"
    if not backend.is_host:
        computed += f"; fused kernels: {', '.join(name for name, used in fused.items() if used) or 'none'}"
    return (
        f"{settings.model_name}: {millions:.1f}M parameters in {precision} on {where} ({computed}), {start}\n"
        f"  {phases}; {plan.settings.batch_text} packs of {settings.data.seq_length} tokens a step; saved to {save}\n"
        f"  {_reading(plan)}"
    )


def conclusion(step: int, total: int, result: BatchResult, save: str, asked: str | None) -> str:
    """How far the run has come, and why it ends there (`asked`: who wanted it to end)."""
    loss = "no target" if result.loss is None else f"loss {result.loss:.4f}"
    where = f", saved in {save}" if save else ""
    why = f"; stopped by {asked}" + (", the same command goes on" if save else "") if asked and step < total else ""
    return f"step {step} of {total}: {loss}{where}{why}"


def spike_found(plan: Plan, step: int, result: BatchResult, deviations: float) -> str:
    """What a spike of the loss at `step` looks like, and what becomes of it."""
    allowed, made = plan.settings.health.max_rewinds, len(plan.rewinds)
    what = f"rewind {made + 1} of {allowed}" if made < allowed else f"all of --max-rewinds {allowed} are made"
    return f"step {step}: loss {result.loss:.4f} is a spike, {deviations:.1f} deviations above the recent ones" + (
        f"; {what}" if allowed else ""
    )


def _reading(plan: Plan) -> str:
    """How much of each corpus the whole run reads."""
    rows = plan.reading
    parts = [
        f"{row.prefix}: " + (f"{100 * row.share:.4g} % of the packs, " if len(rows) > 1 else "") + f"{row.epochs:.2f} epochs"
        for row in rows
    ]
    return "; ".join(parts) + plan.skipped.describe()


def _phases(phases: tuple[Phase, ...], most: int = 6) -> str:
    """The first of them, and how many there are where that is not all."""
    shown = [f"{phase.text} to step {phase.last_step}" for phase in phases[:most]]
    return ", ".join(shown) + (f", ... ({len(phases):,} phases)" if len(phases) > most else "")
