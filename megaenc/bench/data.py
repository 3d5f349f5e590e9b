"""Compare the tokenization speed of megaenc, gigatoken, Hugging Face tokenizers and datasets, or of numbers of workers.

The backends take turns in new processes; the time excludes startup, imports and loading the tokenizer. megaenc writes .bin, .idx
and .json files with checksums and fsync; the others keep ids in memory. All ids must be identical. The first turn is a warm-up.
Without --input, installed documentation is tokenized.

With --compare workers, megaenc alone runs: each stage, 1 and --workers threads and processes, --simulated-workers processes that
sleep instead of tokenizing while everything else is real, and as many simulated nodes that claim partitions of one folder.

megaenc bench data --output bench.json
megaenc bench data --compare workers --workers 2 --output workers.json
megaenc bench data --input corpus.jsonl --tokenizer tokenizer --output bench.json
"""

import contextlib
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from megaenc import flags
from megaenc.bench import report, tokenize_backends
from megaenc.bench.preprocess_scaling import format_table as format_scaling
from megaenc.bench.preprocess_scaling import measure_scaling
from megaenc.console import ProgressLine, silence_libraries
from megaenc.data.sources import resolve
from megaenc.errors import InputError, format_error, handle_command_errors
from megaenc.output_paths import check_output_file
from megaenc.processes import Worker, check_process_count, python_environment, usable_core_count

_SECONDS = ("seconds", "processor_seconds", "process_seconds")
_RATIOS = {
    "ratio_encode_batch": ("encode_batch", "times as fast as a loop of encode_batch"),
    "ratio_encode_batch_fast": ("encode_batch_fast", "times as fast as a loop of encode_batch_fast"),
    "ratio_datasets_map": ("datasets.map", "times as fast as datasets.map"),
    "share_of_gigatoken": ("gigatoken", "of the speed of gigatoken"),
}


@dataclass(frozen=True)
class DataBenchConfig:
    """Flags of `megaenc bench data`: JSON file for results, text, tokenizer, size, rounds, workers and what to compare."""

    output: str = "bench.json"
    """JSON file for the results."""
    input: tuple[str, ...] = ()
    """Text files of any format that `megaenc preprocess` reads (default: documentation installed on this machine)."""
    json_key: resolve.JsonKey = "text"
    """Key of the text in JSON objects, or column in tables."""
    tokenizer: str = ""
    """Directory or Hub name of a Hugging Face fast tokenizer (default: one trained on the text)."""
    megabytes: float = 200.0
    """Size of the JSONL file: documents are repeated in shuffled order, or truncated, to this size."""
    rounds: int = 3
    """Timed turns of each backend."""
    workers: int = field(default_factory=usable_core_count)
    """Threads or processes of each backend."""
    compare: Literal["libraries", "workers"] = "libraries"
    """Compare libraries, or preprocessing with 1, --workers and --simulated-workers workers."""
    simulated_workers: int = 32
    """Workers and nodes to simulate with --compare workers."""


def measure_tokenization(config: DataBenchConfig) -> dict[str, Any]:
    """Run all tokenizers in turns, or preprocessing with several numbers of workers; return speeds and, of the former, ratios.

    Raises InputError for wrong input and for ids that differ.
    """
    report.check_positive(config, "rounds", "workers", "megabytes", "simulated_workers")
    check_process_count("--workers", config.workers)
    check_process_count("--simulated-workers", config.simulated_workers)
    if config.compare == "libraries" and config.simulated_workers != DataBenchConfig.simulated_workers:
        raise InputError(f"--simulated-workers {config.simulated_workers}: has no effect without --compare workers")
    check_output_file(Path(config.output), "--output", inputs=config.input)
    with tempfile.TemporaryDirectory(prefix="megaenc-bench-") as folder:
        text, tokenizer = _prepare_inputs(config, Path(folder))
        if config.compare == "workers":
            results = measure_scaling(text, tokenizer, config.workers, config.simulated_workers, config.rounds)
            return {"settings": asdict(config), "machine": report.describe_machine(), **results}
        turns: dict[str, list[dict[str, Any]]] = {backend: [] for backend in tokenize_backends.BACKENDS}
        with ProgressLine("comparing ids", len(tokenize_backends.BACKENDS) * (config.rounds + 1)) as progress:
            for turn in range(config.rounds + 1):
                names = list(tokenize_backends.BACKENDS)
                for backend in names[turn % len(names) :] + names[: turn % len(names)]:  # each turn starts with another backend
                    turns[backend].append(_run_turn(backend, text, tokenizer, config.workers))
                    progress.update(sum(map(len, turns.values())), description=f"turn {turn} of {config.rounds}: {backend}")
                _check_same_ids(turns)
        return {"settings": asdict(config), "machine": report.describe_machine(), **_summarize_turns(text.stat().st_size, turns)}


def _prepare_inputs(config: DataBenchConfig, folder: Path) -> tuple[Path, str]:
    """Write the JSONL file that all backends read; return its path and that of the tokenizer."""
    inputs = config.input
    if not inputs:
        from megaenc.data.demo import build_demo_corpus

        inputs = (str(build_demo_corpus(folder / "demo").corpus),)
    resolved = resolve.resolve_inputs(resolve.InputConfig(inputs), [config.json_key])
    documents, size, limit = [], 0, 1e6 * config.megabytes
    for text in resolve.read_texts(resolved, config.json_key):
        if text:
            documents.append(json.dumps({"id": f"{inputs[0]}:{len(documents)}", "text": text}, ensure_ascii=False) + "\n")
            size += len(text)
        if size > limit:
            break
    if not documents:
        raise InputError(f"{inputs[0]}: no document has text under `{config.json_key}`; set --json-key")
    generator, size, path = random.Random(0), 0, folder / "text.jsonl"
    with open(path, "wb") as stream:
        while size < limit:
            for document in documents:
                size += stream.write(document.encode(errors="replace"))
                if size >= limit:
                    break
            generator.shuffle(documents)
    if config.tokenizer:
        return path, config.tokenizer
    from megaenc.data.tokenizer.train_command import TrainTokenizerConfig, train_and_save_tokenizer

    train_and_save_tokenizer(
        TrainTokenizerConfig(input=inputs, output=str(folder / "tokenizer"), vocab_size=8192, json_key=config.json_key)
    )
    return path, str(folder / "tokenizer")


def _run_turn(backend: str, text: Path, tokenizer: str, workers: int) -> dict[str, Any]:
    """Run a backend once in a new process; return its result with the peak MiB of the process and its children together."""
    start = time.perf_counter()
    try:
        with report.run_workers(
            tokenize_backends.run_backend, (backend, str(text), tokenizer, workers), python_environment()
        ) as [worker]:
            peak = _watch_peak_memory(worker)
            [results] = worker.results()
    except InputError:
        raise
    except Exception as error:  # any library's
        raise InputError(f"{backend}: {type(error).__name__}: {format_error(error, 1000)}") from None
    return {**results, "process_seconds": time.perf_counter() - start, "peak_mib": max(peak, results["peak_mib"])}


def _watch_peak_memory(worker: Worker) -> float:
    """Wait for a worker's result; return the peak resident MiB summed over the worker and its children."""
    peak, own = 0, psutil.Process(worker.process.pid)
    while not worker.connection.poll(0.1):
        with contextlib.suppress(psutil.Error):  # a process that just ended
            peak = max(peak, sum(one.memory_info().rss for one in [own, *own.children(recursive=True)]))
    return peak / 2**20


def _check_same_ids(turns: dict[str, list[dict[str, Any]]]) -> None:
    """Raise InputError if the last turn's ids of a backend differ from the first backend's."""
    first = next(iter(turns))
    reference = turns[first][0]
    for backend, (*_, result) in turns.items():
        if result["sha256"] != reference["sha256"]:
            raise InputError(
                f"{backend}: found {result['documents']:,} documents, {result['tokens']:,} tokens, "
                f"sha256 {result['sha256'][:12]}; expected the ids of {first}: "
                f"{reference['documents']:,}, {reference['tokens']:,}, {reference['sha256'][:12]}"
            )


def _summarize_turns(size: int, turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return speed and memory of each backend over the timed turns, and megaenc's speedups within the same turn."""
    timed = {backend: turn[1:] for backend, turn in turns.items()}
    ours = timed["megaenc"]
    tokens = ours[0]["tokens"]
    amounts = {"megabytes_per_second": size / 1e6, "tokens_per_second": tokens}

    def speedups(backend: str) -> dict[str, float]:
        return report.summarize([theirs["seconds"] / mine["seconds"] for theirs, mine in zip(timed[backend], ours, strict=True)])

    return {
        "bytes": size,
        "documents": ours[0]["documents"],
        "tokens": tokens,
        "ways": {
            backend: {
                name: report.summarize([amount / turn["seconds"] for turn in backend_turns]) for name, amount in amounts.items()
            }
            | {name: report.summarize([turn[name] for turn in backend_turns]) for name in _SECONDS}
            | {"peak_mib": max(turn["peak_mib"] for turn in backend_turns)}
            for backend, backend_turns in timed.items()
        },
        **{name: speedups(backend) for name, (backend, _) in _RATIOS.items()},
        "turns": turns,
    }


def format_table(results: dict[str, Any]) -> str:
    """Return the results as text for the console: a row of speed and memory per tokenizer, then megaenc's ratios."""
    size = f"{results['bytes'] / 1e6:,.1f} MB of JSONL, {results['documents']:,} documents, {results['tokens']:,} tokens"
    lines = [f"{size}; the ids of all are identical", f"{'':18}{'MB/s':>8}{'lowest':>8}{'highest':>8}{'tokens/s':>14}{'MiB':>8}"]
    for backend, row in results["ways"].items():
        speed = row["megabytes_per_second"]
        lines.append(
            f"{backend:18}{speed['median']:8.1f}{speed['lowest']:8.1f}{speed['highest']:8.1f}"
            f"{row['tokens_per_second']['median']:14,.0f}{row['peak_mib']:8,.0f}"
        )
    for name, (_, description) in _RATIOS.items():
        row = results[name]
        lines.append(f"{row['median']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f}) {description}")
    return "\n".join(lines)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `megaenc bench data`: compare tokenizers, write the results as JSON to --output, print a table."""
    silence_libraries()
    config = flags.parse(DataBenchConfig, argv, prog="megaenc bench data", description=__doc__)
    report.run_benchmark(measure_tokenization, format_table if config.compare == "libraries" else format_scaling, config)
