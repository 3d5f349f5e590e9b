r"""Compare the training speed of megaenc and transformers on equal models and data.

    python benchmarks/pretrain.py --output bench.json
    python benchmarks/pretrain.py --model 210m --vocab-size 128256 --longest 2048 \
        --batch 32 --documents 128

Contenders: the engine of `megaenc pretrain` with packed documents, and a plain loop over
transformers' EuroBERT (Llama for clm) with batches padded to their longest document, bfloat16
autocast, torch's fused AdamW and the fastest available attention; once with documents in random
order and once sorted by length, which minimizes padding. All must have the same loss over all
documents. They take turns; each turn is a new process that reads all documents, and its first step
is not timed.
"""

import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import common
import work
from synthetic import MASK
from work import TrainingJob

from megaenc import flags
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.dist_env import build_rank_variables
from megaenc.errors import InputError, handle_command_errors
from megaenc.machine import check_process_count, usable_core_count
from megaenc.model.config import get_preset
from megaenc.objectives import Attention
from megaenc.output_paths import check_output_file
from megaenc.training.config import has_bf16

OURS = "megaenc"
TENSOR_PARALLEL = "megaenc, TP"
PADDED = "transformers, padded"
SORTED = "transformers, by length"
TOLERANCE = {True: 1e-2, False: 1e-4}  # relative difference of losses, by bf16


@dataclass(frozen=True)
class PretrainBenchConfig:
    """Flags of the benchmark: output, model, objective, documents, rounds and dtype."""

    output: str = ""
    """JSON file for all results"""
    model: str = "small"
    """model preset"""
    vocab_size: int = 32768
    """vocabulary size"""
    objective: str = "mlm(mask=0.4)"
    """clm or mlm(...), as in --objective-schedule"""
    documents: int = 32
    """number of documents"""
    batch: int = 8
    """documents per step"""
    shortest: int = 12
    """minimum document length in tokens"""
    longest: int = 1024
    """maximum document length in tokens; lengths are uniformly distributed"""
    passes: int = 1
    """passes over the documents per turn"""
    rounds: int = 3
    """turns of each contender"""
    bf16: bool = field(default_factory=has_bf16)
    """compute in bfloat16; on by default if the processor has the instructions"""
    tensor_model_parallel_size: int = 1
    """above 1: adds a contender, megaenc with that many tensor-parallel processes on the same
    cores"""

    def check(self) -> None:
        """Check the ranges of numbers, and that transformers can train the objective.

        Raises:
            InputError: A value is wrong.
        """
        least = {
            "documents": 1,
            "batch": 1,
            "shortest": 2,
            "passes": 1,
            "rounds": 1,
            "tensor_model_parallel_size": 1,
        }
        for name, lowest in (least | {"vocab_size": MASK + 2, "longest": self.shortest}).items():
            if (value := getattr(self, name)) < lowest:
                raise InputError(
                    f"--{name.replace('_', '-')}: found {value}, expected {lowest} or more"
                )
        check_process_count("--tensor-model-parallel-size", self.tensor_model_parallel_size)
        if self.documents % self.batch:
            raise InputError(
                f"--documents: found {self.documents}, expected a multiple of --batch {self.batch}"
            )
        get_preset(self.model).check(self.tensor_model_parallel_size)
        objective = self.build_job("").parse_objective(self.objective)
        if (
            objective.shift != (objective.attention == Attention.CAUSAL)
            or objective.attention == Attention.PREFIX
        ):
            raise InputError(
                f"--objective {self.objective}: transformers has no loss for it, expected clm or "
                "mlm(...)"
            )

    def build_job(self, weights: str) -> TrainingJob:
        """Return the TrainingJob of all contenders; `weights` is the file of initial ones."""
        names = ("vocab_size", "objective", "documents", "shortest", "batch", "passes", "bf16")
        same = {name: getattr(self, name) for name in names}
        return TrainingJob(
            shape=get_preset(self.model), seq_length=self.longest, weights=weights, **same
        )


def build_contenders(
    config: PretrainBenchConfig, weights: str
) -> dict[str, tuple[Callable[[TrainingJob], dict[str, Any]], TrainingJob]]:
    """Return (training function, job) of each contender by name, megaenc first.

    They are in the order of a round.
    """
    job = config.build_job(weights)
    parts = config.tensor_model_parallel_size
    parallel = (work.train_with_megaenc, dataclasses.replace(job, tensor_model_parallel_size=parts))
    return {
        OURS: (work.train_with_megaenc, job),
        **({TENSOR_PARALLEL: parallel} if parts > 1 else {}),
        PADDED: (work.train_with_transformers, job),
        SORTED: (work.train_with_transformers, dataclasses.replace(job, by_length=True)),
    }


def measure_peak_flops(job: TrainingJob) -> float:
    """Return the peak FLOP/s of this machine; 0 if unknown.

    It is measured on a CPU, and taken from data sheets for accelerators.
    """
    import torch

    from megaenc.backend import detect_backend

    return detect_backend().peak_flops(torch.bfloat16 if job.bf16 else torch.float32)


def run_turn(side: Callable[[TrainingJob], Any], job: TrainingJob) -> Any:
    """Call `side(job)` in new processes, one per tensor-parallel rank.

    All ranks have the same result.
    """
    count = job.tensor_model_parallel_size
    threads = int(os.environ.get("OMP_NUM_THREADS", usable_core_count()))
    environment = {"OMP_NUM_THREADS": str(max(1, threads // count))}
    return common.run_processes(
        side, job, *(environment | rank for rank in build_rank_variables(count))
    )[0]


def find_fastest_attention(job: TrainingJob) -> str:
    """Return the name of transformers' attention that is fastest for one batch.

    Raises:
        RuntimeError: None runs here.
    """
    seconds: dict[str, float] = {}
    for kernel in ("sdpa", "eager", "flash_attention_2"):
        trial = dataclasses.replace(job, kernel=kernel, documents=job.batch, passes=1)
        with contextlib.suppress(RuntimeError):  # not installed, out of memory
            seconds[kernel] = run_turn(work.train_with_transformers, trial)["seconds"]
    if not seconds:
        raise RuntimeError("transformers: no attention implementation runs here")
    print_rank_0(
        "transformers: "
        + ", ".join(
            f"{kernel} attention {duration:.2f} s a step" for kernel, duration in seconds.items()
        )
    )
    return min(seconds, key=seconds.__getitem__)


def losses_match(losses: Sequence[float], bf16: bool) -> bool:
    """Return whether all losses are close to the first.

    The relative tolerance is 1e-2 if `bf16`, else 1e-4.
    """
    return all(abs(loss - losses[0]) <= TOLERANCE[bf16] * losses[0] for loss in losses)


def check_losses(losses: dict[str, float], bf16: bool) -> None:
    """Check that losses differ by no more than the dtype's rounding.

    Raises:
        RuntimeError: They differ; the message lists them by contender.
    """
    if not losses_match(list(losses.values()), bf16):
        values = ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())
        raise RuntimeError(
            f"the contenders' losses differ, so their work is not the same: {values}"
        )


def measure_pretraining(config: PretrainBenchConfig) -> dict[str, Any]:
    """Train with each contender in turn; return speeds and ratios.

    Raises:
        RuntimeError: A contender fails, or their losses differ.
    """
    config.check()
    if config.output:
        check_output_file(Path(config.output), "--output")
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        weights = f"{directory}/weights.safetensors"
        job = config.build_job(weights)
        run_turn(work.write_weights, job)
        kernel = find_fastest_attention(job)
        sides = build_contenders(config, weights)
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        with ProgressLine(
            "bench pretrain", total=config.rounds * len(sides), closing=False
        ) as progress:
            for number, (round_, name) in enumerate(itertools.product(range(config.rounds), sides)):
                progress.update(number, round=f"{round_ + 1} of {config.rounds}", at=name)
                if name == OURS:
                    rates.append(run_turn(measure_peak_flops, job))
                train, part = sides[name]
                turns[name].append(run_turn(train, dataclasses.replace(part, kernel=kernel)))
                if round_ == 0:
                    check_losses(
                        {name: each[0]["loss"] for name, each in turns.items() if each}, config.bf16
                    )
    return summarize_turns(config, kernel, turns, median(rates))


def summarize_turns(
    config: PretrainBenchConfig, kernel: str, turns: dict[str, list[dict[str, Any]]], rate: float
) -> dict[str, Any]:
    """Return speed and memory by contender, and ratios.

    Args:
        kernel: transformers' attention.
        rate: Peak FLOP/s.
    """
    job = config.build_job("")
    documents = job.read_documents()
    attention = job.parse_objective(job.objective).attention
    predicted = turns[OURS][0]["predicted"]
    flops = (
        job.shape.training_flops(job.vocab_size, predicted, documents.spans(attention)) * job.passes
    )
    tokens = documents.tokens * job.passes
    sides = {}
    for side, side_turns in turns.items():
        sides[side] = {
            "tokens_per_second": common.summarize(
                [tokens / each["seconds"] for each in side_turns]
            ),
            "useful_flops_per_second": common.summarize(
                [flops / each["seconds"] for each in side_turns]
            ),
            "share_of_peak": flops / median(each["seconds"] for each in side_turns) / rate
            if rate
            else None,
            "cpu_seconds": common.summarize([each["cpu_seconds"] for each in side_turns]),
            "peak_memory": max(each["peak_memory"] for each in side_turns),
            "loss": side_turns[0]["loss"],
        }

    def ratio(other: str, key: str = "seconds") -> float:
        """Return the median ratio of `key` to megaenc's over rounds."""
        return median(
            each[key] / ours[key] for each, ours in zip(turns[other], turns[OURS], strict=True)
        )

    results = {
        "settings": dataclasses.asdict(config),
        "machine": common.describe_machine(),
        "parameters": job.shape.parameter_count(job.vocab_size),
        "tokens": tokens,
        "predicted": predicted * job.passes,
        "flops": flops,
        "peak_flops": rate,
        "transformers_attention": kernel,
        "tokens_per_second": sides[OURS]["tokens_per_second"]["median"],
        "gemm_share": sides[OURS]["share_of_peak"],
        "ratio_padded": ratio(PADDED),
        "ratio_sorted": ratio(SORTED),
        "sides": sides,
        "turns": turns,
    }
    if TENSOR_PARALLEL in turns:
        results["tensor_parallel_cpu_ratio"] = ratio(TENSOR_PARALLEL, "cpu_seconds")
    return results


def format_table(results: dict[str, Any]) -> str:
    """Return a table of speed and memory by contender, and megaenc's speedups."""
    kind = "bfloat16" if results["settings"]["bf16"] else "float32"
    rate = f"{results['peak_flops'] / 1e9:,.0f} GFLOP/s" if results["peak_flops"] else "unknown"
    objective = results["settings"]["objective"]
    lines = [
        f"{results['parameters'] / 1e6:.0f}M parameters, {objective}, {kind}; "
        f"{results['tokens']:,} tokens per turn",
        f"matrix products of this machine: {rate}",
        f"{'':<24} {'tokens/s':>10} {'lowest':>10} {'highest':>10} {'GFLOP/s':>10} {'of peak':>8} "
        f"{'CPU s':>8} {'GiB':>6}",
    ]
    for side, row in results["sides"].items():
        rates = row["tokens_per_second"]
        share = row["share_of_peak"]
        lines.append(
            f"{side:<24} {rates['median']:>10,.0f} {rates['lowest']:>10,.0f} "
            f"{rates['highest']:>10,.0f} "
            f"{row['useful_flops_per_second']['median'] / 1e9:>10,.1f} "
            f"{'' if share is None else f'{100 * share:.0f} %':>8} "
            f"{row['cpu_seconds']['median']:>8.1f} {row['peak_memory'] / 2**30:>6.2f}"
        )
    lines.append(
        f"{results['ratio_padded']:.2f} times padded transformers, {results['ratio_sorted']:.2f} "
        "times sorted by length"
    )
    if "tensor_parallel_cpu_ratio" in results:
        lines.append(
            f"tensor parallel: {results['tensor_parallel_cpu_ratio']:.2f} times the processor time "
            "of one process"
        )
    return "\n".join(lines)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Time all contenders, print a table, and write JSON to --output if given."""
    silence_libraries()
    config = flags.parse(
        PretrainBenchConfig, argv, prog="python benchmarks/pretrain.py", description=__doc__
    )
    start = time.monotonic()
    try:
        results = measure_pretraining(config)
    except RuntimeError as error:
        raise InputError(str(error)) from None
    print(format_table(results))
    if config.output:
        common.write_report(config.output, results)
        print(f"{config.output}: written after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
