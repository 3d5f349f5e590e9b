"""`megaenc bench pretrain`: this project and transformers train the same model on the same documents, in turns."""

import contextlib
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megaenc import flags
from megaenc.bench import report, train_worker
from megaenc.bench.synthetic_docs import MASK
from megaenc.bench.train_worker import TrainingJob
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.model.config import get_preset
from megaenc.objectives import Attention
from megaenc.output_paths import check_output_file
from megaenc.processes import check_process_count
from megaenc.training.config import has_bf16

OURS, TENSOR_PARALLEL, PADDED, SORTED = "megaenc", "megaenc, TP", "transformers, padded", "transformers, by length"
TOLERANCE = {True: 1e-2, False: 1e-4}  # of the loss, in bfloat16 and in float32, relative
DESCRIPTION = """Train the same model on the same documents with megaenc and with transformers, in turns, and compare.

Beside each other stand the engine of `megaenc pretrain`, documents end to end, and a plain loop: transformers' EuroBERT (Llama
for clm), batches padded to their longest document, bfloat16 by autocast, torch's fused AdamW, the fastest attention of those that
run; once with the documents as they come and once sorted by length, so that little is padding. All must have the same loss over
all documents. Each turn is a process of its own that reads all documents; its first update is not timed.

megaenc bench pretrain --output bench.json
megaenc bench pretrain --model 210m --vocab-size 128256 --longest 2048 --batch 32 --documents 128"""


@dataclass(frozen=True)
class PretrainBenchConfig:
    """What is trained on what."""

    output: str = ""
    """JSON file for all figures"""
    model: str = "small"
    """preset of the model's shape"""
    vocab_size: int = 32768
    """ids of the vocabulary"""
    objective: str = "mlm(mask=0.4)"
    """clm or mlm(...), as in --objective-schedule"""
    documents: int = 32
    """documents that a turn reads in a pass"""
    batch: int = 8
    """documents of an update"""
    shortest: int = 12
    """tokens of the shortest document that there may be"""
    longest: int = 1024
    """tokens of the longest; lengths between are equally likely"""
    passes: int = 1
    """times that a turn reads the documents"""
    rounds: int = 3
    """turns of each side"""
    bf16: bool = field(default_factory=has_bf16)
    """compute in bfloat16; on where the processor has the instructions"""
    tensor_model_parallel_size: int = 1
    """above 1: one side more, megaenc on so many processes that share what one has"""

    def check(self) -> None:
        """InputError, naming the flag."""
        least = {"documents": 1, "batch": 1, "shortest": 2, "passes": 1, "rounds": 1, "tensor_model_parallel_size": 1}
        for name, lowest in (least | {"vocab_size": MASK + 2, "longest": self.shortest}).items():
            if (value := getattr(self, name)) < lowest:
                raise InputError(f"--{name.replace('_', '-')}: found {value}, expected {lowest} or more")
        check_process_count("--tensor-model-parallel-size", self.tensor_model_parallel_size)
        if self.documents % self.batch:
            raise InputError(f"--documents: found {self.documents}, expected a multiple of --batch {self.batch}")
        get_preset(self.model).check(self.tensor_model_parallel_size)
        objective = self.work("").objective_of(self.objective)
        if objective.shift != (objective.attention == Attention.CAUSAL) or objective.attention == Attention.PREFIX:
            raise InputError(f"--objective {self.objective}: transformers has no loss for it, expected clm or mlm(...)")

    def work(self, weights: str) -> TrainingJob:
        """Return what is the same for all sides."""
        names = ("vocab_size", "objective", "documents", "shortest", "batch", "passes", "bf16")
        same = {name: getattr(self, name) for name in names}
        return TrainingJob(shape=get_preset(self.model), seq_length=self.longest, weights=weights, **same)


def sides_of(
    settings: PretrainBenchConfig, weights: str
) -> dict[str, tuple[Callable[[TrainingJob], dict[str, Any]], TrainingJob]]:
    """Return all that are compared, in the order of a round: how each trains, and what."""
    work, parts = settings.work(weights), settings.tensor_model_parallel_size
    parallel = (train_worker.train_with_megaenc, dataclasses.replace(work, tensor_model_parallel_size=parts))
    return {
        OURS: (train_worker.train_with_megaenc, work),
        **({TENSOR_PARALLEL: parallel} if parts > 1 else {}),
        PADDED: (train_worker.train_with_transformers, work),
        SORTED: (train_worker.train_with_transformers, dataclasses.replace(work, by_length=True)),
    }


def fastest_kernel(work: TrainingJob) -> str:
    """Return which attention of transformers takes least for one pass over a batch of the documents."""
    seconds: dict[str, float] = {}
    for kernel in ("sdpa", "eager", "flash_attention_2"):
        tried = dataclasses.replace(work, kernel=kernel, documents=work.batch, passes=1)
        with contextlib.suppress(RuntimeError):  # not installed, out of memory
            seconds[kernel] = train_worker.turn(train_worker.train_with_transformers, tried)["seconds"]
    if not seconds:
        raise RuntimeError("transformers: none of its attentions runs here")
    print_rank_0("transformers: " + ", ".join(f"{kernel} attention {taken:.2f} s a step" for kernel, taken in seconds.items()))
    return min(seconds, key=seconds.__getitem__)


def same_losses(losses: Sequence[float], bf16: bool) -> bool:
    """Return whether all sides have the same loss over all documents, within rounding."""
    return all(abs(loss - losses[0]) <= TOLERANCE[bf16] * losses[0] for loss in losses)


def check_losses(losses: dict[str, float], bf16: bool) -> None:
    """Raise RuntimeError unless they are the same."""
    if not same_losses(list(losses.values()), bf16):
        told = ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())
        raise RuntimeError(f"the sides have different losses, so they do not the same work: {told}")


def bench(settings: PretrainBenchConfig) -> dict[str, Any]:
    """All figures. Raises InputError for wrong settings, RuntimeError where a side fails or does other work."""
    settings.check()
    if settings.output:
        check_output_file(Path(settings.output), "--output")
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = f"{folder}/weights.safetensors"
        work = settings.work(weights)
        train_worker.turn(train_worker.write_weights, work)
        kernel = fastest_kernel(work)
        sides = sides_of(settings, weights)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        with ProgressLine("bench pretrain", total=settings.rounds * len(sides), closing=False) as progress:
            for number, (round_, name) in enumerate(itertools.product(range(settings.rounds), sides)):
                progress.update(number, round=f"{round_ + 1} of {settings.rounds}", at=name)
                if name == OURS:
                    rates.append(train_worker.turn(train_worker.peak_flops, work)["peak"])
                train, part = sides[name]
                found[name].append(train_worker.turn(train, dataclasses.replace(part, kernel=kernel)))
                if round_ == 0:
                    check_losses({name: each[0]["loss"] for name, each in found.items() if each}, settings.bf16)
    return figures(settings, kernel, found, median(rates))


def figures(settings: PretrainBenchConfig, kernel: str, taken: dict[str, list[dict[str, Any]]], rate: float) -> dict[str, Any]:
    """What the turns amount to; `rate`: FLOP/s of the machine."""
    work = settings.work("")
    documents = work.read()
    attention = work.objective_of(work.objective).attention
    predicted = taken[OURS][0]["predicted"]
    flops = work.shape.training_flops(work.vocab_size, predicted, documents.spans(attention)) * work.passes
    tokens = documents.tokens * work.passes
    sides = {}
    for side, found in taken.items():
        sides[side] = {
            "tokens_per_second": report.spread([tokens / each["seconds"] for each in found]),
            "useful_flops_per_second": report.spread([flops / each["seconds"] for each in found]),
            "share_of_peak": flops / median(each["seconds"] for each in found) / rate if rate else None,
            "cpu_seconds": report.spread([each["cpu_seconds"] for each in found]),
            "peak_memory": max(each["peak_memory"] for each in found),
            "loss": found[0]["loss"],
        }

    def ratio(other: str, key: str = "seconds") -> float:
        """The median over rounds."""
        return median(each[key] / ours[key] for each, ours in zip(taken[other], taken[OURS], strict=True))

    found = {
        "settings": dataclasses.asdict(settings),
        "machine": report.machine(),
        "parameters": work.shape.parameter_count(work.vocab_size),
        "tokens": tokens,
        "predicted": predicted * work.passes,
        "flops": flops,
        "peak_flops": rate,
        "transformers_attention": kernel,
        "tokens_per_second": sides[OURS]["tokens_per_second"]["median"],
        "gemm_share": sides[OURS]["share_of_peak"],
        "ratio_padded": ratio(PADDED),
        "ratio_sorted": ratio(SORTED),
        "sides": sides,
        "turns": taken,
    }
    if TENSOR_PARALLEL in taken:
        found["tensor_parallel_cpu_ratio"] = ratio(TENSOR_PARALLEL, "cpu_seconds")
    return found


def table(found: dict[str, Any]) -> str:
    """For the console."""
    kind = "bfloat16" if found["settings"]["bf16"] else "float32"
    rate = f"{found['peak_flops'] / 1e9:,.0f} GFLOP/s" if found["peak_flops"] else "unknown"
    objective = found["settings"]["objective"]
    lines = [
        f"{found['parameters'] / 1e6:.0f}M parameters, {objective}, {kind}; {found['tokens']:,} tokens a turn",
        f"matrix products of this machine: {rate}",
        f"{'':<24} {'tokens/s':>10} {'lowest':>10} {'highest':>10} {'GFLOP/s':>10} {'of peak':>8} {'CPU s':>8} {'GiB':>6}",
    ]
    for side, each in found["sides"].items():
        rates, share = each["tokens_per_second"], each["share_of_peak"]
        lines.append(
            f"{side:<24} {rates['median']:>10,.0f} {rates['lowest']:>10,.0f} {rates['highest']:>10,.0f} "
            f"{each['useful_flops_per_second']['median'] / 1e9:>10,.1f} {'' if share is None else f'{100 * share:.0f} %':>8} "
            f"{each['cpu_seconds']['median']:>8.1f} {each['peak_memory'] / 2**30:>6.2f}"
        )
    lines.append(f"{found['ratio_padded']:.2f} times the padded peer, {found['ratio_sorted']:.2f} times the one sorted by length")
    if "tensor_parallel_cpu_ratio" in found:
        lines.append(f"tensor parallel: {found['tensor_parallel_cpu_ratio']:.2f} times the processor time of one process")
    return "\n".join(lines)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """`megaenc bench pretrain`."""
    silence_libraries()
    settings = flags.parse(PretrainBenchConfig, argv, prog="megaenc bench pretrain", description=DESCRIPTION)
    began = time.monotonic()
    try:
        found = bench(settings)
    except RuntimeError as error:
        raise InputError(str(error)) from None
    print(table(found))
    if settings.output:
        report.write(settings.output, found)
        print(f"{settings.output}: written after {time.monotonic() - began:.0f} s")
