"""`megaenc bench pretrain`: this project and transformers train the same model on the same documents, in turns."""

import dataclasses
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megaenc import flags
from megaenc.bench import report
from megaenc.bench.documents import MASK
from megaenc.bench.turns import Work
from megaenc.console import ProgressLine, quiet, say
from megaenc.errors import InputError, one_line_errors
from megaenc.model.config import preset
from megaenc.objectives import Attention
from megaenc.output_paths import check_output_file
from megaenc.processes import below, check_process_count, python_command, python_environment, usable_cores
from megaenc.training.settings import has_bf16

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
class BenchFlags:
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
        preset(self.model).check(self.tensor_model_parallel_size)
        objective = self.work("").objective_of(self.objective)
        if objective.shift != (objective.attention == Attention.CAUSAL) or objective.attention == Attention.PREFIX:
            raise InputError(f"--objective {self.objective}: transformers has no loss for it, expected clm or mlm(...)")

    def work(self, weights: str) -> Work:
        """The same for all sides."""
        return Work(
            shape=preset(self.model),
            vocab_size=self.vocab_size,
            objective=self.objective,
            documents=self.documents,
            shortest=self.shortest,
            seq_length=self.longest,
            batch=self.batch,
            passes=self.passes,
            bf16=self.bf16,
            weights=weights,
        )


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    program: str
    work: Work
    processes: int = 1

    def turn(self, folder: Path) -> dict[str, Any]:
        """Run it in processes of its own. RuntimeError with what it said last where it fails."""
        work, result = folder / "work.json", folder / "result.json"
        work.write_text(json.dumps(dataclasses.asdict(self.work)))
        result.unlink(missing_ok=True)
        words = python_command("-m")
        if self.processes > 1:
            words += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes), "-m"]
        threads = int(os.environ.get("OMP_NUM_THREADS", usable_cores()))
        environment = python_environment() | {"OMP_NUM_THREADS": str(max(1, threads // self.processes))}
        words += ["megaenc.bench.turns", self.program, str(work), str(result)]
        done = subprocess.run(below(words), env=environment, capture_output=True, text=True)
        if done.returncode or not result.exists():
            raise RuntimeError(f"{self.program} ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        return json.loads(result.read_text())


def sides_of(settings: BenchFlags, weights: str) -> dict[str, Side]:
    """By name, in the order of a round."""
    work = settings.work(weights)
    sides = {OURS: Side("megaenc", work)}
    if (parts := settings.tensor_model_parallel_size) > 1:
        sides[TENSOR_PARALLEL] = Side("megaenc", dataclasses.replace(work, tensor_model_parallel_size=parts), parts)
    sides[PADDED] = Side("transformers", work)
    sides[SORTED] = Side("transformers", dataclasses.replace(work, by_length=True))
    return sides


def fastest_kernel(side: Side, folder: Path) -> str:
    """Which attention of transformers takes least for one pass over a batch of the documents."""
    seconds: dict[str, float] = {}
    for kernel in ("sdpa", "eager", "flash_attention_2"):
        work = dataclasses.replace(side.work, kernel=kernel, documents=side.work.batch, passes=1)
        try:
            seconds[kernel] = dataclasses.replace(side, work=work).turn(folder)["seconds"]
        except RuntimeError:  # not installed, out of memory
            continue
    if not seconds:
        raise RuntimeError("transformers: none of its attentions runs here")
    say("transformers: " + ", ".join(f"{kernel} attention {taken:.2f} s a step" for kernel, taken in seconds.items()))
    return min(seconds, key=seconds.__getitem__)


def check_losses(losses: dict[str, float], bf16: bool) -> None:
    """RuntimeError unless all sides have the same loss over all documents, within rounding."""
    first, *others = losses.values()
    if any(not abs(other - first) <= TOLERANCE[bf16] * first for other in others):
        told = ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())
        raise RuntimeError(f"the sides have different losses, so they do not the same work: {told}")


def bench(settings: BenchFlags) -> dict[str, Any]:
    """All figures. Raises InputError for wrong settings, RuntimeError where a side fails or does other work."""
    settings.check()
    if settings.output:
        check_output_file(Path(settings.output), "--output")
    turns: dict[str, list[dict[str, Any]]] = {}
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides = sides_of(settings, str(folder / "weights.safetensors"))
        dataclasses.replace(sides[OURS], program="weights").turn(folder)
        kernel = fastest_kernel(sides[PADDED], folder)
        for side in (PADDED, SORTED):
            sides[side] = dataclasses.replace(sides[side], work=dataclasses.replace(sides[side].work, kernel=kernel))
        turns = {side: [] for side in sides}
        with ProgressLine("bench pretrain", total=settings.rounds * len(sides), closing=False) as progress:
            for number, (round_, side) in enumerate(itertools.product(range(settings.rounds), sides)):
                progress.update(number, round=f"{round_ + 1} of {settings.rounds}", at=side)
                if side == OURS:
                    rates.append(peak(settings.bf16))
                turns[side].append(sides[side].turn(folder))
                if round_ == 0:
                    check_losses({name: found[0]["loss"] for name, found in turns.items() if found}, settings.bf16)
    return figures(settings, kernel, turns, median(rates))


def peak(bf16: bool) -> float:
    """FLOP/s of this machine: measured on a processor, from the makers' sheets for an accelerator; 0 if not known."""
    code = "import sys, torch; from megaenc.backend.device import detect; "
    code += f"print(detect().peak_flops(torch.{'bfloat16' if bf16 else 'float32'}))"
    done = subprocess.run(below(python_command("-c", code)), env=python_environment(), capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def figures(settings: BenchFlags, kernel: str, turns: dict[str, list[dict[str, Any]]], rate: float) -> dict[str, Any]:
    """What the turns amount to; `rate`: FLOP/s of the machine."""
    work = settings.work("")
    documents = work.read()
    attention = work.objective_of(work.objective).attention
    predicted = turns[OURS][0]["predicted"]
    flops = work.shape.training_flops(work.vocab_size, predicted, documents.spans(attention)) * work.passes
    tokens = documents.tokens * work.passes
    sides = {}
    for side, found in turns.items():
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
        return median(each[key] / ours[key] for each, ours in zip(turns[other], turns[OURS], strict=True))

    found = {
        "settings": dataclasses.asdict(settings),
        "machine": report.machine(),
        "parameters": work.shape.parameters(work.vocab_size),
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
        "turns": turns,
    }
    if TENSOR_PARALLEL in turns:
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


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """`megaenc bench pretrain`."""
    quiet()
    settings = flags.parse(BenchFlags, argv, prog="megaenc bench pretrain", description=DESCRIPTION)
    began = time.monotonic()
    try:
        found = bench(settings)
    except RuntimeError as error:
        raise InputError(str(error)) from None
    print(table(found))
    if settings.output:
        report.write(settings.output, found)
        print(f"{settings.output}: written after {time.monotonic() - began:.0f} s")
