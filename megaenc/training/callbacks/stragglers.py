"""Detection of ranks that slow down the others, without waiting times.

A step takes equally long on all ranks, because they wait for each other. The work of a rank is
measured by:

- data: wall-clock time of building its micro-batches;
- compute: on a CPU the processor time of its thread in forward, backward and optimizer step; on an
  accelerator the device time of the forward passes of its stage, which only wait for its
  tensor-parallel group;
- probe: a small matrix product that needs no other rank, which detects a slow device within such a
  group.
"""

import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megaenc.console import print_rank_0
from megaenc.training.callbacks.base import Callback, StepReport
from megaenc.training.run_dir import STRAGGLERS_FILE
from megaenc.training.timers import DATA, FORWARD_BACKWARD, OPTIMIZER

if TYPE_CHECKING:
    from megaenc.training.trainer import Trainer

SLOW_RATIO = 1.2
"""Ratio to the median from which a rank is slow."""
CONSECUTIVE_REPORTS = 3
"""Number of consecutive reports that make a slow rank a straggler."""
REPORTED_RANKS = 4
"""Number of ranks in a report."""

RANK_FIELDS = np.dtype(
    [
        ("rank", "i8"),
        ("host", "S64"),
        ("tensor", "i8"),
        ("pipeline", "i8"),
        ("data", "i8"),
        ("data_seconds", "f8"),
        ("compute_seconds", "f8"),
        ("probe_seconds", "f8"),
    ]
)
"""Place of a rank, and the seconds of its own work.

Data and compute are those of a step, on average.
"""


class StragglerDetector(Callback):
    """Callback of --log-straggler: detector of ranks that slow down the others.

    Every --straggler-interval steps it compares the ranks' seconds of data, compute and a probe,
    without waiting times (`compare_ranks`). Rank 0 writes the REPORTED_RANKS slowest to
    stragglers.jsonl, and prints those that were slow, with more than SLOW_RATIO times the median,
    in CONSECUTIVE_REPORTS reports.
    """

    def __init__(self, trainer: "Trainer"):
        super().__init__(trainer)
        self._interval = trainer.plan.settings.monitoring.straggler_interval
        self._forward = None if trainer.backend.is_cpu else ForwardTimer(trainer.engine.chunks)
        self._place = (
            dist.get_rank(),
            socket.gethostname(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
        self._data_seconds = 0.0
        self._compute_seconds = 0.0
        self._steps = -1  # the first step, with its setup, is not measured
        # Consecutive reports in which each rank was slow.
        self._slow_reports_R = np.zeros(dist.get_world_size(), dtype=np.int64)

    def after_step(self, report: StepReport) -> None:
        """Add this rank's times of a step, and report the slowest ranks if due.

        All ranks call this together. The first step of the process is not measured. Rank 0 prints a
        line for a rank that was slow in CONSECUTIVE_REPORTS consecutive reports, once until it is
        no longer slow. Of more than REPORTED_RANKS such ranks in a report, it only counts the rest.
        Errors are those of `MetricsLogger.log`.
        """
        step = report.step
        engine = self.trainer.engine
        timers = engine.step_timers
        thread_seconds = (
            timers.processor[FORWARD_BACKWARD]
            - timers.processor[DATA]
            + timers.processor[OPTIMIZER]
        )
        compute = self._forward.pop_seconds() if self._forward else thread_seconds
        self._steps += 1
        if self._steps:
            relative_load = engine.relative_load(step)  # ranks may have a pack more than others
            self._data_seconds += timers.wall[DATA] / relative_load
            self._compute_seconds += compute / relative_load
        if step % self._interval or not self._steps:
            return
        ranks = self._gather_ranks()
        ratios_R, slow_in_R = compare_ranks(ranks)
        rows = [
            dict(zip(RANK_FIELDS.names, rank.tolist(), strict=True))
            | {"host": rank["host"].decode(), "ratio": float(ratio), "slow_in": str(slow_in)}
            for rank, ratio, slow_in in zip(ranks, ratios_R, slow_in_R, strict=True)
        ]
        slowest = [rows[rank] for rank in np.argsort(-ratios_R, kind="stable")[:REPORTED_RANKS]]
        row = {
            "step": step,
            "steps": self._steps,
            "slowest_rank": slowest[0]["rank"],
            "slowest_ratio": slowest[0]["ratio"],
        }
        self.trainer.logger.log(STRAGGLERS_FILE, row | {"ranks": slowest})
        self._steps = 0
        self._data_seconds = 0.0
        self._compute_seconds = 0.0
        # Each straggler is named once, and again only after it has recovered.
        self._slow_reports_R = np.where(ratios_R > SLOW_RATIO, self._slow_reports_R + 1, 0)
        stragglers = np.flatnonzero(self._slow_reports_R == CONSECUTIVE_REPORTS)
        for row in [rows[rank] for rank in stragglers[:REPORTED_RANKS]]:
            print_rank_0(
                f"straggler: rank {row['rank']} on {row['host']} (tensor {row['tensor']}, "
                f"pipeline {row['pipeline']}, "
                f"data {row['data']}) took {row['ratio']:.2f} times the median of comparable "
                "ranks in "
                f"{CONSECUTIVE_REPORTS} consecutive reports, mostly in {row['slow_in']}"
            )
        if len(stragglers) > REPORTED_RANKS:
            print_rank_0(f"straggler: {len(stragglers) - REPORTED_RANKS} more ranks")

    def _gather_ranks(self) -> np.ndarray:
        """Return RANK_FIELDS[ranks], with the mean seconds of a step of each rank."""
        device = self.trainer.backend.device
        seconds = (
            self._data_seconds / self._steps,
            self._compute_seconds / self._steps,
            time_matmul(device),
        )
        local_row = np.array([(*self._place, *seconds)], dtype=RANK_FIELDS)
        local_bytes = torch.from_numpy(local_row.view(np.uint8)).to(device)
        all_bytes = local_bytes.new_zeros(dist.get_world_size() * len(local_bytes))
        dist.all_gather_into_tensor(all_bytes, local_bytes)
        return all_bytes.cpu().numpy().view(RANK_FIELDS)


def compare_ranks(ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compare the seconds of each rank with the median of comparable ranks.

    Data and probe are the same work for all ranks; compute is compared within a pipeline stage. The
    median of an even number of ranks is the lower of the middle two. Divisors are 1e-9 or more.

    Args:
        ranks: Array of the structured data type RANK_FIELDS, [R].

    Returns:
        The larger of two ratios, float64[R]: data and compute to the sum of their medians, and the
        probe to its median; and the slowest work, str[R]: "the probe" if its ratio is the larger,
        else "data" or "compute", whichever is more seconds above its median.
    """
    data_R = ranks["data_seconds"]
    compute_R = ranks["compute_seconds"]
    probe_R = ranks["probe_seconds"]
    median_compute_R = np.zeros_like(compute_R)
    for stage in np.unique(ranks["pipeline"]):
        in_stage_R = ranks["pipeline"] == stage
        median_compute_R[in_stage_R] = _lower_median(compute_R[in_stage_R])
    median_data = _lower_median(data_R)
    work_ratio_R = (data_R + compute_R) / np.maximum(median_data + median_compute_R, 1e-9)
    probe_ratio_R = probe_R / max(_lower_median(probe_R), 1e-9)
    is_mostly_data_R = data_R - median_data >= compute_R - median_compute_R
    slow_in_R = np.where(
        probe_ratio_R > work_ratio_R, "the probe", np.where(is_mostly_data_R, "data", "compute")
    )
    return np.maximum(work_ratio_R, probe_ratio_R), slow_in_R


def _lower_median(values: np.ndarray) -> float:
    return float(np.quantile(values, 0.5, method="lower"))


class ForwardTimer:
    """Timer of this accelerator's seconds in forward passes during training.

    It is made from the rank's model chunks, and adds hooks to them, for good, that record CUDA
    events. `pop_seconds`, after a synchronization of the device, returns the seconds since its
    last call. Forward passes without gradients, as in a validation, are not timed.
    """

    def __init__(self, chunks: list[torch.nn.Module]):
        self._events: list[torch.cuda.Event] = []  # begin, end, begin, end, ...
        for chunk in chunks:
            chunk.register_forward_pre_hook(self._record)
            chunk.register_forward_hook(self._record)

    def _record(self, *_: Any) -> None:
        """Record an event at the begin or end of a forward pass."""
        if torch.is_grad_enabled():  # not in a validation
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()

    def pop_seconds(self) -> float:
        """Return the accelerator's seconds in forward passes since the last call.

        They are 0 without a pass. The caller must have synchronized the device, so that the passes
        have ended; torch raises an error if one has not.
        """
        events = self._events
        self._events = []
        return (
            sum(
                begin.elapsed_time(end)
                for begin, end in zip(events[::2], events[1::2], strict=True)
            )
            / 1000
        )


def time_matmul(device: torch.device, repeats: int = 5) -> float:
    """Return the seconds of a fixed number of matrix products on `device`.

    They are the minimum of `repeats` measurements, each of all products. CPUs and accelerators
    compute different numbers and sizes, so that only equal devices compare. An accelerator is
    synchronized.
    """
    host = device.type == "cpu"
    size, products = (384, 1) if host else (2048, 50)
    matrix = torch.ones(size, size, device=device, dtype=torch.float32 if host else torch.bfloat16)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        if not host:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best
