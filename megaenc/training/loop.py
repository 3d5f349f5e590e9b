"""Pretraining, as the paragraph that describes it reads: resume or begin, then update, validate, log and save until the end."""

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megaenc.backend import Backend
from megaenc.backend.process import rank
from megaenc.console import ProgressLine, say
from megaenc.errors import InputError
from megaenc.randomness import SampleRandomness
from megaenc.training.checkpoint import Checkpoints
from megaenc.training.engine import BatchResult, Engine
from megaenc.training.plan import Plan
from megaenc.training.run_folder import METRICS, VALIDATION, RunFolder


def pretrain(plan: Plan, backend: Backend) -> None:
    """Train from the newest checkpoint of `--save`, or from the beginning, to `--train-iters` or the next `--exit-interval`."""
    folder = _open_folder(plan)
    try:
        _pretrain(plan, backend, folder)
    finally:
        if folder:
            folder.close()


def _pretrain(plan: Plan, backend: Backend, folder: RunFolder | None) -> None:
    settings, output = plan.settings, plan.settings.output
    checkpoints = Checkpoints(Path(output.save) / "checkpoints") if output.save else None
    done = (checkpoints.latest() if checkpoints else None) or 0
    if done == settings.train_iters:
        say(f"{output.save} is complete: step {done} of {done}")
        return
    saved = checkpoints.state(done) if done else {}
    progress = {name: saved.get(name, 0) for name in ("tokens", "predicted_tokens", "flops")}
    engine = Engine(plan, backend)
    if done:
        checkpoints.load(engine, done)
    if folder:
        folder.cut(done if done else -1)
    say(_introduction(plan, backend, done))
    peak = _total_peak_flops(backend, plan.dtype)
    validation = _Validation(plan)
    if not done and settings.eval_every:
        _log(folder, VALIDATION, {"step": 0, **progress, "objectives": validation(engine)})

    with ProgressLine(plan.schedule.at(done + 1).text, total=settings.train_iters) as line:
        clock = perf_counter()
        for step in range(done + 1, settings.train_iters + 1):
            phase = plan.schedule.at(step)
            result, grad_norm = engine.update(step)
            seconds, clock = perf_counter() - clock, perf_counter()

            tokens = settings.global_batch_size * settings.data.seq_length
            progress["tokens"] += tokens
            progress["predicted_tokens"] += result.predicted
            progress["flops"] += result.flops
            row = {
                "step": step,
                "objective": phase.text,
                "phase": phase.index,
                "loss": result.loss,
                "accuracy": result.accuracy,
                "learning_rate": plan.learning_rate(step),
                "grad_norm": grad_norm,
                **progress,
                "tokens_per_second": tokens / seconds,
                "model_flops_utilization": result.flops / seconds / peak if peak else None,
                "step_seconds": seconds,
            }
            last = step == settings.train_iters
            if step % settings.log_every == 0 or last:
                _log(folder, METRICS, row)
            validate = bool(settings.eval_every) and (step % settings.eval_every == 0 or last)
            if validate:
                _log(folder, VALIDATION, {"step": step, **progress, "objectives": validation(engine)})
            line.update(step, description=phase.text, **_shown(result, tokens / seconds))

            leave = bool(output.exit_interval) and step % output.exit_interval == 0
            save = last or leave or (bool(output.save_interval) and step % output.save_interval == 0)
            if checkpoints and save:
                if folder:
                    folder.sync()
                checkpoints.save(engine, step, progress)
            if leave and not last:
                break
            if validate or save:
                clock = perf_counter()  # neither is part of the next step
    say(_conclusion(step, settings.train_iters, result, output.save))


def _open_folder(plan: Plan) -> RunFolder | None:
    """The run folder on rank 0; every rank leaves with the same InputError if it cannot be used."""
    if not plan.settings.output.save:
        return None
    folder, refusal = None, [None]
    if rank() == 0:
        try:
            folder = RunFolder(Path(plan.settings.output.save), plan)
        except InputError as error:
            refusal = [str(error)]
    dist.broadcast_object_list(refusal)
    if refusal[0]:
        raise InputError(refusal[0])
    return folder


class _Validation:
    """Held-out loss and accuracy under every objective of the schedule, on packs and masks that never change.

    `most_frequent` is the accuracy of always guessing the token that is most frequent among the labels.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        if plan.validation is None:
            return
        size = plan.settings.global_batch_size
        packs = plan.validation.first_sample_of_epoch(1)  # no held-out token twice, unless one batch needs more than there are
        self.batches = max(1, min(plan.settings.output.eval_iters, packs // size))
        self.objectives = {phase.text: phase.objective for phase in plan.schedule.phases}
        self.most_frequent = {text: self._most_frequent(objective) for text, objective in self.objectives.items()}

    def __call__(self, engine: Engine) -> dict[str, dict[str, Any]]:
        """By objective: loss, accuracy, most_frequent."""
        if self.plan.validation is None:
            return {}
        found = {text: engine.evaluate(self.plan.validation, self.batches, o) for text, o in self.objectives.items()}
        return {
            text: {"loss": result.loss, "accuracy": result.accuracy, "most_frequent": self.most_frequent[text]}
            for text, result in found.items()
        }

    def _most_frequent(self, objective) -> float | None:
        counts = np.zeros(self.plan.vocabulary.size, dtype=np.int64)
        for sample in range(self.batches * self.plan.settings.global_batch_size):
            pack = self.plan.validation[sample]
            labels = objective.targets(pack, SampleRandomness(0, pack.sample, pack.epoch)).labels
            counts += np.bincount(labels, minlength=len(counts))
        return int(counts.max()) / int(counts.sum()) if counts.any() else None


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


def _shown(result: BatchResult, tokens_per_second: float) -> dict[str, str]:
    loss = "-" if result.loss is None else f"{result.loss:.3f}"
    return {"loss": loss, "tokens/s": f"{tokens_per_second:,.0f}"}


def _introduction(plan: Plan, backend: Backend, done: int) -> str:
    settings, layout = plan.settings, plan.settings.layout
    where = f"{dist.get_world_size()} x {backend.description}"
    parallel = f"TP {layout.tensor_model_parallel_size}, PP {layout.pipeline_model_parallel_size}"
    parallel += f", DP {settings.data_parallel_size(dist.get_world_size())}" + (", SP" if layout.sequence_parallel else "")
    start = f"going on after step {done}" if done else "from new weights"
    phases = ", ".join(f"{phase.text} to step {phase.last_step}" for phase in plan.schedule.phases)
    millions = settings.shape.parameters(plan.vocabulary.size) / 1e6
    precision = "bf16" if settings.bf16 else "fp32"
    save = settings.output.save or "nowhere (give --save FOLDER to keep the run)"
    return (
        f"{settings.model}: {millions:.1f}M parameters in {precision} on {where} ({parallel}), {start}\n"
        f"  {phases}; {settings.global_batch_size} packs of {settings.data.seq_length} tokens a step; saved to {save}"
    )


def _conclusion(step: int, total: int, result: BatchResult, save: str) -> str:
    loss = "no target" if result.loss is None else f"loss {result.loss:.4f}"
    where = f", saved in {save}" if save else ""
    return f"step {step} of {total}: {loss}{where}"
