"""Pretraining, as the paragraph that describes it reads: resume or begin, then update, validate, log and save until the end."""

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from megaenc.backend import Backend
from megaenc.console import ProgressLine, say
from megaenc.errors import InputError
from megaenc.objectives import Phase
from megaenc.training.checkpoint import Checkpoints, Damaged
from megaenc.training.engine import BatchResult, Engine
from megaenc.training.evaluation import Validation
from megaenc.training.plan import Plan
from megaenc.training.run_folder import METRICS, VALIDATION, RunFolder
from megaenc.training.start import PROGRESS, Start, digest
from megaenc.training.stopping import Stop
from megaenc.training.together import on_rank_0, shared_fate


def pretrain(plan: Plan, backend: Backend) -> bool:
    """Train from the newest checkpoint of `--save`, or the plan's start, to `--train-iters` or the next `--exit-interval`.

    False where a signal or `--exit-duration-in-mins` ended it before; then it is saved too, where there is a `--save`.
    """
    save = plan.settings.output.save
    checkpoints = Checkpoints(Path(save) / "checkpoints") if save else None
    with shared_fate(clean_up=checkpoints.abandon if checkpoints else lambda: None):
        folder = _open_folder(plan)
        try:
            return _pretrain(plan, backend, folder, checkpoints)
        finally:
            if folder:
                folder.close()


def _pretrain(plan: Plan, backend: Backend, folder: RunFolder | None, checkpoints: Checkpoints | None) -> bool:
    settings, output = plan.settings, plan.settings.output
    if folder:
        checkpoints.clean()
    saved = checkpoints.newest_good(plan.identity) if checkpoints else None
    resumed = saved["step"] if saved else 0
    done = resumed or plan.start.step
    if done == settings.total_iters:
        say(f"{output.save} is complete: step {done} of {done}")
        return True
    progress = {name: (saved if resumed else vars(plan.start))[name] for name in PROGRESS}
    engine = Engine(plan, backend)
    if resumed:
        checkpoints.load(engine, resumed)
    else:
        _begin(engine, plan.start)
    say(_introduction(plan, backend, resumed))
    peak = _total_peak_flops(backend, plan.dtype)
    validation = Validation(plan) if plan.validation else None
    if folder:
        folder.cut(resumed or -1)
    if validation and not resumed:
        _log(folder, VALIDATION, {"step": done, **progress, **validation(engine)})

    stop = Stop(output.exit_duration_in_mins, backend.device, by_signals=checkpoints is not None)
    with stop, ProgressLine(plan.schedule.text_at(done + 1), total=settings.total_iters) as line:
        for step in range(done + 1, settings.total_iters + 1):
            clock = perf_counter()
            result, grad_norm = engine.update(step)
            seconds = perf_counter() - clock

            progress["tokens"] += plan.step_tokens(step)
            progress["predicted_tokens"] += result.predicted
            progress["flops"] += result.flops
            row = _row(plan, step, result, grad_norm, progress, seconds, peak)
            last = step == settings.total_iters
            if _due(step, plan.log_every) or last:
                _log(folder, METRICS, row)
            line.update(step, description=row["objective"], **_shown(row))
            if validation and (_due(step, settings.eval_every) or last):
                _log(folder, VALIDATION, {"step": step, **progress, **validation(engine)})

            asked = stop.asked()
            leave = asked or _due(step, output.exit_interval)
            if checkpoints and (last or leave or _due(step, output.save_interval)):
                if folder:
                    folder.sync()
                checkpoints.save(engine, step, progress)
                if folder:
                    checkpoints.retain(step, output.keep_last, output.keep_every)
            if leave and not last:
                break
    say(_conclusion(step, settings.total_iters, result, output.save, asked))
    return last or not asked


def _begin(engine: Engine, start: Start) -> None:
    """Load what the run starts from, in whatever layout it was saved; an engine has its new weights already."""
    if not start.run:
        return
    parent = Checkpoints(Path(start.run) / "checkpoints")
    try:
        saved = parent.check(start.at)
    except Damaged as damage:
        raise InputError(f"{damage}; choose another checkpoint of {start.run}") from None
    if digest(saved["identity"]) != start.parent:
        raise InputError(f"{parent.path(start.at)} is a checkpoint of a different run than that of {start.run}; choose another")
    if start.kind == "branch":
        parent.load(engine, start.at)
    else:
        parent.load_weights(engine, start.at)


def _due(step: int, interval: int | None) -> bool:
    return bool(interval) and step % interval == 0


def _row(
    plan: Plan, step: int, result: BatchResult, grad_norm: float, progress: dict[str, Any], seconds: float, peak: float
) -> dict[str, Any]:
    """What metrics.jsonl says of one step; tokens, predicted_tokens and flops are those of the run so far."""
    return {
        "step": step,
        "objective": plan.schedule.text_at(step),
        "phase": plan.schedule.at(step).index,
        "loss": result.loss,
        "accuracy": result.accuracy,
        "learning_rate": plan.learning_rate(step),
        "grad_norm": grad_norm,
        **progress,
        "tokens_per_second": plan.step_tokens(step) / seconds,
        "model_flops_utilization": result.flops / seconds / peak if peak else None,
        "step_seconds": seconds,
    }


def _open_folder(plan: Plan) -> RunFolder | None:
    """The run folder on rank 0; every rank leaves with the same InputError if it cannot be used."""
    if not plan.settings.output.save:
        return None
    folders: list[RunFolder] = []
    on_rank_0(lambda: folders.append(RunFolder(Path(plan.settings.output.save), plan)))
    return folders[0] if folders else None


def _log(folder: RunFolder | None, file: str, row: dict[str, Any]) -> None:
    if folder:
        folder.log(file, row)


def _total_peak_flops(backend: Backend, dtype: torch.dtype) -> float:
    """FLOP/s that all processes of the run reach together; 0 if that of one is unknown."""
    peaks = torch.tensor([backend.peak_flops(dtype)], dtype=torch.float64, device=backend.device)
    lowest = peaks.clone()
    dist.all_reduce(peaks)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return float(peaks) if float(lowest) > 0 else 0.0


def _shown(row: dict[str, Any]) -> dict[str, str]:
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    return {"loss": loss, "tokens/s": f"{row['tokens_per_second']:,.0f}"}


def _introduction(plan: Plan, backend: Backend, resumed: int) -> str:
    settings = plan.settings
    where = f"{dist.get_world_size()} x {backend.description}"
    parallel = settings.layout.describe(settings.shape.num_layers, dist.get_world_size())
    start = f"going on after step {resumed}" if resumed else plan.start.describe()
    phases = _phases(plan.schedule.phases)
    millions = settings.shape.parameters(plan.vocabulary.size) / 1e6
    precision = "bf16" if settings.bf16 else "fp32"
    save = settings.output.save or "nowhere (give --save FOLDER to keep the run)"
    return (
        f"{settings.model}: {millions:.1f}M parameters in {precision} on {where} ({parallel}), {start}\n"
        f"  {phases}; {plan.settings.batch_text} packs of {settings.data.seq_length} tokens a step; saved to {save}\n"
        f"  {_reading(plan)}"
    )


def _reading(plan: Plan) -> str:
    """How much of each corpus the whole run reads."""
    rows = plan.reading
    parts = [
        f"{row.prefix}: " + (f"{100 * row.share:.4g} % of the packs, " if len(rows) > 1 else "") + f"{row.epochs:.2f} epochs"
        for row in rows
    ]
    return "; ".join(parts)


def _phases(phases: tuple[Phase, ...], most: int = 6) -> str:
    """The first of them, and how many there are where that is not all."""
    shown = [f"{phase.text} to step {phase.last_step}" for phase in phases[:most]]
    return ", ".join(shown) + (f", ... ({len(phases):,} phases)" if len(phases) > most else "")


def _conclusion(step: int, total: int, result: BatchResult, save: str, asked: str | None) -> str:
    loss = "no target" if result.loss is None else f"loss {result.loss:.4f}"
    where = f", saved in {save}" if save else ""
    why = f"; stopped by {asked}" + (", the same command goes on" if save else "") if asked and step < total else ""
    return f"step {step} of {total}: {loss}{where}{why}"
