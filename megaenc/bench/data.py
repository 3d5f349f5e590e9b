"""Tokenising speed beside the peers': the same JSONL through preprocessing, gigatoken alone, and Hugging Face's two ways.

Each way runs in a process of its own, in turns. Timed is the work alone: interpreter, imports and tokenizer are there before.
`megaenc` ends with .bin, .idx and .json on the disk, hashed and synced; the others with ids in memory. The first turn is not
counted; in each the ids of all are compared. Without --input it reads documentation that is installed here.

megaenc bench data --output bench.json
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
from typing import Any

import psutil

from megaenc import flags
from megaenc.bench import report, tokenize_backends
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
    "share_of_gigatoken": ("gigatoken", "of the speed of gigatoken alone"),
}


@dataclass(frozen=True)
class DataBenchConfig:
    """What the benchmark takes."""

    output: str = "bench.json"
    """JSON file for the figures."""
    input: tuple[str, ...] = ()
    """Text, of any kind that preprocessing reads; documentation that is installed here unless given."""
    json_key: str = "text"
    """Key of the text in each JSON object, column of a table."""
    tokenizer: str = ""
    """Folder of a Hugging Face fast tokenizer, or its name on the Hub; one is learnt from the text unless given."""
    megabytes: float = 200.0
    """Size of the JSONL that all read: documents come again, in another order, until there are as many, or are cut off there."""
    rounds: int = 3
    """Turns that are timed."""
    workers: int = field(default_factory=usable_core_count)
    """Threads or processes of each way."""


def bench(settings: DataBenchConfig) -> dict[str, Any]:
    """Compare the ways; return what goes into the JSON. Raises InputError for wrong input, and where ids differ."""
    report.check_positive(settings, "rounds", "workers", "megabytes")
    check_process_count("--workers", settings.workers)
    check_output_file(Path(settings.output), "--output")
    with tempfile.TemporaryDirectory(prefix="megaenc-bench-") as folder:
        text, tokenizer = _prepared(settings, Path(folder))
        turns: dict[str, list[dict[str, Any]]] = {way: [] for way in tokenize_backends.WAYS}
        with ProgressLine("comparing ids", len(tokenize_backends.WAYS) * (settings.rounds + 1)) as progress:
            for turn in range(settings.rounds + 1):
                names = list(tokenize_backends.WAYS)
                for way in names[turn % len(names) :] + names[: turn % len(names)]:  # each turn begins with another
                    turns[way].append(_turn(way, text, tokenizer, settings.workers))
                    progress.update(sum(map(len, turns.values())), description=f"turn {turn} of {settings.rounds}: {way}")
                _compare(turns)
        return {"settings": asdict(settings), "machine": report.machine(), **_figures(text.stat().st_size, turns)}


def _prepared(settings: DataBenchConfig, folder: Path) -> tuple[Path, str]:
    """(the JSONL that all read, the tokenizer)."""
    given = settings.input
    if not given:
        from megaenc.data.demo import build_demo_corpus

        given = (str(build_demo_corpus(folder / "demo").corpus),)
    found = resolve.resolve_inputs(resolve.InputConfig(given), [settings.json_key])
    documents, size, limit = [], 0, 1e6 * settings.megabytes
    for text in resolve.read_texts(found, settings.json_key):
        if text:
            documents.append(json.dumps({"id": f"{given[0]}:{len(documents)}", "text": text}, ensure_ascii=False) + "\n")
            size += len(text)
        if size > limit:
            break
    if not documents:
        raise InputError(f"{given[0]}: no document holds any text under `{settings.json_key}`")
    order, size, path = random.Random(0), 0, folder / "text.jsonl"
    with open(path, "wb") as stream:
        while size < limit:
            for document in documents:
                size += stream.write(document.encode(errors="replace"))
                if size >= limit:
                    break
            order.shuffle(documents)
    if settings.tokenizer:
        return path, settings.tokenizer
    from megaenc.data.tokenizer.train_command import TrainTokenizerConfig, train_and_save_tokenizer

    train_and_save_tokenizer(
        TrainTokenizerConfig(input=given, output=str(folder / "tokenizer"), vocab_size=8192, json_key=settings.json_key)
    )
    return path, str(folder / "tokenizer")


def _turn(way: str, text: Path, tokenizer: str, workers: int) -> dict[str, Any]:
    """Return what one process finds (`ways.turn`), and the most memory, in MiB, that it and those below it had together."""
    began = time.perf_counter()
    try:
        with report.at_work(tokenize_backends.turn, (way, str(text), tokenizer, workers), python_environment()) as [worker]:
            peak = _watched(worker)
            [found] = worker.results()
    except InputError:
        raise
    except Exception as error:  # of whichever library
        raise InputError(f"{way}: {type(error).__name__}: {format_error(error, 1000)}") from None
    return {**found, "process_seconds": time.perf_counter() - began, "peak_mib": max(peak, found["peak_mib"])}


def _watched(worker: Worker) -> float:
    """Wait for an answer; return the most MiB resident in the worker and all below it at once, shared pages counted in each."""
    peak, own = 0, psutil.Process(worker.process.pid)
    while not worker.connection.poll(0.1):
        with contextlib.suppress(psutil.Error):  # has just ended
            peak = max(peak, sum(one.memory_info().rss for one in [own, *own.children(recursive=True)]))
    return peak / 2**20


def _compare(turns: dict[str, list[dict[str, Any]]]) -> None:
    first = next(iter(turns))
    wanted = turns[first][0]
    for way, (*_, found) in turns.items():
        if found["sha256"] != wanted["sha256"]:
            raise InputError(
                f"{way}: found {found['documents']:,} documents, {found['tokens']:,} tokens, sha256 {found['sha256'][:12]}; "
                f"expected the ids of {first}: {wanted['documents']:,}, {wanted['tokens']:,}, {wanted['sha256'][:12]}"
            )


def _figures(size: int, turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of each way speed and memory over the timed turns; how many times as fast ours is in the same turn."""
    timed = {way: found[1:] for way, found in turns.items()}
    ours = timed["megaenc"]
    tokens = ours[0]["tokens"]
    amounts = {"megabytes_per_second": size / 1e6, "tokens_per_second": tokens}

    def times(way: str) -> dict[str, float]:
        return report.spread([theirs["seconds"] / mine["seconds"] for theirs, mine in zip(timed[way], ours, strict=True)])

    return {
        "bytes": size,
        "documents": ours[0]["documents"],
        "tokens": tokens,
        "ways": {
            way: {name: report.spread([amount / found["seconds"] for found in some]) for name, amount in amounts.items()}
            | {name: report.spread([found[name] for found in some]) for name in _SECONDS}
            | {"peak_mib": max(found["peak_mib"] for found in some)}
            for way, some in timed.items()
        },
        **{name: times(way) for name, (way, _) in _RATIOS.items()},
        "turns": turns,
    }


def table(found: dict[str, Any]) -> str:
    """The figures for the eye."""
    size = f"{found['bytes'] / 1e6:,.1f} MB of JSONL, {found['documents']:,} documents, {found['tokens']:,} tokens"
    lines = [f"{size}; the ids of all are identical", f"{'':18}{'MB/s':>8}{'lowest':>8}{'highest':>8}{'tokens/s':>14}{'MiB':>8}"]
    for way, row in found["ways"].items():
        speed = row["megabytes_per_second"]
        lines.append(
            f"{way:18}{speed['median']:8.1f}{speed['lowest']:8.1f}{speed['highest']:8.1f}"
            f"{row['tokens_per_second']['median']:14,.0f}{row['peak_mib']:8,.0f}"
        )
    for name, (_, what) in _RATIOS.items():
        row = found[name]
        lines.append(f"{row['median']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f}) {what}")
    return "\n".join(lines)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc bench data`."""
    silence_libraries()
    settings = flags.parse(DataBenchConfig, argv, prog="megaenc bench data", description=__doc__)
    report.run(bench, table, settings)
