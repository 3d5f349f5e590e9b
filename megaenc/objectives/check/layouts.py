"""Checks that an objective trains alike in every layout.

Layouts are micro-batches, tensor and pipeline parallelism, and stop and resume.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from megaenc.console import silence_libraries
from megaenc.data.worker_pool import WorkerProcessDied, start_workers
from megaenc.dist_env import build_rank_variables
from megaenc.errors import InputError, first_error_line
from megaenc.objectives.base import Objective
from megaenc.objectives.check.load import register_objective
from megaenc.objectives.check.measure import CheckResult, make_packs
from megaenc.objectives.masking import text_token_ids
from megaenc.processes import python_environment

if TYPE_CHECKING:
    from megaenc.training.micro_batches import MicroBatch

_PACKS = 16  # of the micro-batches
_LENGTH = 256
_STEPS = 6
_RANKS = 4
_TOLERANCE = 1e-5
# Time limits of a run and of a collective operation.
_SECONDS = 300
_COLLECTIVE_SECONDS = 60
_DOCUMENTS = 400  # of the corpus
_IDS = 300  # largest vocabulary of the tokenizer

# A model that two layers x two ranks can share. At higher rates rounding grows from step to step.
_FLAGS = [
    "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "160",
    "--num-attention-heads", "4", "--num-query-groups", "2",
    "--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "8",
    "--train-iters", str(_STEPS), "--lr", "5e-4", "--lr-warmup-iters", "2",
    "--lr-wsd-decay-iters", "2", "--no-bf16", "--eval-interval", "0", "--log-interval", "1",
]  # fmt: skip
_LAYOUT = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
_RESUMED = ("step", "loss", "grad_norm", "accuracy", "predicted_tokens")  # equal after a stop
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def check_micro_batches(objective: Objective) -> CheckResult:
    """Return the check `micro-batches`: packs give equal tensors in every micro-batch.

    Micro-batches are built of all packs, of one each, in another order and in a prefetching thread.
    An exception of the objective is a failed result.
    """
    silence_libraries()
    try:
        rows = _build_rows(objective)
    except Exception as error:  # foreign code may raise anything
        return CheckResult(
            "micro-batches", False, f"{type(error).__name__}: {first_error_line(error)}"
        )
    for description, row, parts in rows:
        difference = _find_difference(row, parts)
        if difference:
            text = f"{difference}: {description} unlike one by one; expected no state between calls"
            return CheckResult("micro-batches", False, text)
    return CheckResult(
        "micro-batches",
        True,
        f"{_PACKS} packs are equal in one row, one by one, in another order and in threads",
    )


def _build_rows(objective: Objective) -> list[tuple[str, "MicroBatch", list["MicroBatch"]]]:
    """Return (description, micro-batch, parts), micro-batches and their parts.

    A micro-batch must equal its parts, which have one pack each, when they are joined.
    """
    import torch

    from megaenc.training.micro_batches import MicroBatch, Prefetcher, build_micro_batch

    packs = list(make_packs(_PACKS, _LENGTH))

    def build(samples: Sequence[int]) -> MicroBatch:
        return build_micro_batch(packs, samples, objective, 1, torch.device("cpu"))

    samples = range(_PACKS)
    single = [build([sample]) for sample in samples]
    rows = [
        ("in one row", build(samples), single),
        ("in one row, last pack first", build(samples[::-1]), single[::-1]),
    ]
    # This thread builds other packs at the same time, as a validation does.
    batches = Prefetcher(build).iterate([[sample] for sample in samples])
    for sample, batch in zip(samples, batches, strict=True):
        other_sample = _PACKS - 1 - sample
        rows.append(("in a prefetching thread", batch, [single[sample]]))
        rows.append(("next to that thread", build([other_sample]), [single[other_sample]]))
    return rows


def _find_difference(row: "MicroBatch", parts: Sequence["MicroBatch"]) -> str:
    """Return the name of the first value in which a row differs from its parts joined.

    The text is empty if there is none.
    """
    import torch

    def get_factors(batch: "MicroBatch") -> tuple[torch.Tensor, ...]:
        """Return the weights, and the ids and probabilities of label distributions.

        They are empty without any.
        """
        weights = batch.predictions.weights
        empty = torch.ones(0)
        return (
            empty if weights is None else weights,
            *(batch.predictions.soft_labels or (empty, empty)),
        )

    factors = zip(get_factors(row), *map(get_factors, parts), strict=True)
    factor_names = ("weights", "ids of label distributions", "probabilities of label distributions")
    positions = [part.predictions.positions + index * _LENGTH for index, part in enumerate(parts)]
    prefixes = [length for part in parts for length in part.packing.prefixes]
    values = {
        "inputs": (row.tokens[0], torch.cat([part.tokens[0] for part in parts])),
        "positions": (row.positions, torch.cat([part.positions for part in parts])),
        "predictions": (row.predictions.positions, torch.cat(positions)),
        "labels": (row.predictions.labels, torch.cat([part.predictions.labels for part in parts])),
        "divisor of the loss": (
            torch.tensor(row.loss_count),
            torch.tensor(sum(part.loss_count for part in parts)),
        ),
        "prefixes": (torch.tensor(row.packing.prefixes), torch.tensor(prefixes)),
    }
    for name, (factor, *part_factors) in zip(factor_names, factors, strict=True):
        values[name] = (factor, torch.cat(part_factors))
    for name, (actual, expected) in values.items():
        if not torch.equal(actual, expected):
            return name
    if row.predictions.weights is not None and len(row.predictions.weights) != len(
        row.predictions.labels
    ):
        return "weights, which some packs have and others lack"
    return ""


@dataclass(frozen=True)
class _TrainingJob:
    """Run of a process: objective, flags and environment variables.

    The objective is as given to the command. Without flags the process only imports.
    """

    objective: str
    options: tuple[str, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str]


def check_training(objective: str, options: Sequence[str]) -> list[CheckResult]:
    """Train a tiny model in several layouts and return the results of comparisons.

    It is trained in one process, in four (tensor 2 x pipeline 2), and with a stop. The processes
    use the loopback interface, one thread and float32. They and their files are gone when the call
    returns. A training of over 300 s has failed.

    Args:
        objective: NAME, NAME(OPTIONS) or MODULE:CLASS, as in `load_objective`.
        options: NAME=VALUE each, only for MODULE:CLASS.

    Returns:
        The results `layouts` and `resume`, or only a failed `layouts` if training does not succeed.
    """
    with tempfile.TemporaryDirectory(prefix="megaenc-objective-") as directory:
        try:
            return _compare_runs(Path(directory), objective, tuple(options))
        except InputError as error:
            return [CheckResult("layouts", False, str(error))]


def _compare_runs(directory: Path, objective: str, options: tuple[str, ...]) -> list[CheckResult]:
    """Return the results of `check_training`.

    The corpus and the runs are in `directory`.
    """
    flags = (*_FLAGS, *_write_corpus(directory))
    # No accelerators, and one thread each.
    environment = {
        name: value
        for name, value in python_environment().items()
        if not name.startswith("TORCHELASTIC_")
    }
    environment |= {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with (
        tempfile.TemporaryFile() as output,
        start_workers(_run_job, _RANKS, environment, output) as workers,
    ):

        def run(name: str, *more: str, ranks: int = 1) -> list[dict[str, Any]]:
            """Train or resume a run on the first workers; return its rows of metrics."""
            words = (*flags, *more, "--save", str(directory / name))
            futures = []
            for worker, variables in zip(workers, build_rank_variables(ranks), strict=False):
                futures.append(worker.submit(_TrainingJob(objective, options, words, variables)))
            try:
                _wait_for_all(futures)
            except Exception as error:  # foreign code may raise anything, in any process
                text = _describe_failure(error, output)
                raise InputError(
                    f"training in {ranks} process{'es' * (ranks > 1)} failed: {text}"
                ) from None
            return [
                json.loads(line)
                for line in (directory / name / "metrics.jsonl").read_text().splitlines()
            ]

        # The others import while the first one trains.
        imports = [
            worker.submit(_TrainingJob(objective, options, (), {})) for worker in workers[1:]
        ]
        stop = ("--exit-interval", str(_STEPS // 2))
        single = run("one")
        run("one-stopped", *stop)
        single_stopped = run("one-stopped", *stop)
        _wait_for_all(imports)
        parallel = run("four", *_LAYOUT, ranks=_RANKS)
        run("four-stopped", *_LAYOUT, *stop, ranks=_RANKS)
        parallel_stopped = run("four-stopped", *_LAYOUT, *stop, ranks=_RANKS)
    differing = []
    for layout, rows, resumed_rows in (
        ("1 process", single, single_stopped),
        (f"{_RANKS} processes", parallel, parallel_stopped),
    ):
        values = [[row[name] for name in _RESUMED] for row in rows]
        resumed_values = [[row[name] for name in _RESUMED] for row in resumed_rows]
        if values != resumed_values:
            differing.append(layout)
    text = f"stopped after step {_STEPS // 2} and resumed, "
    if differing:
        text += f"other losses in {' and '.join(differing)}; expected no state between steps"
    else:
        text += "all losses and gradient norms are equal bit by bit in both layouts"
    return [_compare_layouts(single, parallel), CheckResult("resume", not differing, text)]


def _compare_layouts(single: list[dict[str, Any]], parallel: list[dict[str, Any]]) -> CheckResult:
    """Compare the rows of metrics of one process and of several.

    The check fails if a loss or norm differs by more than 1e-5 of it.
    """
    text = f"{_STEPS} steps in 1 process and in {_RANKS} (tensor 2 x pipeline 2): "
    worst = 0.0
    for expected, actual in zip(single, parallel, strict=True):
        for name in ("predicted_tokens", "loss", "grad_norm"):
            # null without predictions
            expected_value = expected[name] or 0.0
            actual_value = actual[name] or 0.0
            difference = abs(expected_value - actual_value) / max(abs(expected_value), 1e-30)
            worst = max(worst, difference)
            if not difference <= (0 if name == "predicted_tokens" else _TOLERANCE):  # also for NaN
                text += (
                    f"{name} {expected_value:.7g} and {actual_value:.7g} "
                    f"in step {expected['step']}; expected equal targets on all ranks"
                )
                return CheckResult("layouts", False, text)
    return CheckResult(
        "layouts",
        True,
        f"{text}losses and gradient norms within {worst:.0e} (limit {_TOLERANCE:.0e})",
    )


def _write_corpus(directory: Path) -> tuple[str, ...]:
    """Write a tokenizer and a made-up corpus; return the flags that name them."""
    silence_libraries()
    from megaenc.data.indexed.indexed_dataset import open_writers, token_dtype
    from megaenc.data.tokenizer.tokenizer import read_vocabulary, train_tokenizer

    tokenizer = train_tokenizer(["made-up text"], _IDS)
    tokenizer.save_pretrained(directory / "tokenizer")
    vocabulary = read_vocabulary(tokenizer)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 150, size=_DOCUMENTS, dtype=np.int32)
    tokens = rng.choice(text_token_ids(vocabulary), size=lengths.sum())
    tokens[np.cumsum(lengths) - 1] = vocabulary.eos_id
    with open_writers(
        [directory / "corpus.bin", directory / "corpus.idx"], token_dtype(vocabulary.size)
    ) as [writer]:
        writer.add_documents(tokens, lengths, np.ones_like(lengths))
        writer.finish()
    return "--data-path", str(directory / "corpus"), "--tokenizer", str(directory / "tokenizer")


def _wait_for_all(futures: Sequence[Future]) -> None:
    """Wait until all futures are done, or raise the exception of the first that fails.

    Raises:
        InputError: They take longer than _SECONDS.
    """
    done, pending = wait(futures, _SECONDS, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if pending:
        raise InputError(f"no answer in {_SECONDS} s")


def _describe_failure(error: Exception, output: IO[bytes]) -> str:
    """Return one line on an exception of a run.

    For a process that died it has the last line of the processes' `output`.
    """
    if isinstance(error, WorkerProcessDied):
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
        return f"{error}; last output: {lines[-1].strip() if lines else 'none'}"
    if isinstance(error, InputError):
        return first_error_line(error)
    return f"{type(error).__name__}: {first_error_line(error)}"


def _run_job(job: _TrainingJob) -> None:
    """Train or resume a run in a worker process, or only import."""
    import torch

    from megaenc import backend
    from megaenc.training.config import parse_config
    from megaenc.training.planning import build_plan
    from megaenc.training.trainer import train_plan

    schedule = register_objective(job.objective, job.options)
    if not job.flags:
        return
    for name in _LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(job.environment)
    plan = build_plan(
        parse_config([*job.flags, "--objective-schedule", schedule], "megaenc objective check")
    )
    device = backend.init_distributed(
        plan.settings.layout, plan.settings.seed, timeout=timedelta(seconds=_COLLECTIVE_SECONDS)
    )
    torch.set_num_threads(1)
    try:
        train_plan(plan, device)
    finally:
        backend.destroy_distributed()
