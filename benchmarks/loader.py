"""Measure data loading: startup on a large corpus, and tokens per second.

    python benchmarks/loader.py --output loader.json

The index belongs to a synthetic corpus with log-normal document lengths and a sparse .bin file.
First one process, then several open it, split it, shuffle its documents and build the first pack,
then more. Tokens per second of one loader process are measured on a smaller corpus of random ids in
the page cache, for each packing: as packs, and as micro-batches with MLM targets.
"""

import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import common
import numpy as np
import psutil

from megaenc import flags
from megaenc.console import ProgressLine, silence_libraries
from megaenc.data.indexed.indexed_dataset import (
    HEADER,
    MAGIC,
    TOKEN_TYPES,
    VERSION,
    IndexArrays,
    IndexedWriter,
)
from megaenc.data.packing.packed_dataset import CorpusPackedDataset
from megaenc.errors import InputError, format_error, handle_command_errors
from megaenc.machine import check_process_count
from megaenc.output_paths import check_output_file

PACKINGS = ("concat", "random-length", "sentences")
_SENTENCE_LENGTH = 25  # tokens
_VOCAB_SIZE = 30_000
_CHUNK = 1 << 22  # documents whose index entries are written at once
_PACKS = 200  # read after the first one from the large index
_NO_TOKENS = np.empty(0, np.uint16)


@dataclass(frozen=True)
class LoaderBenchConfig:
    """Flags of the benchmark: output, corpora, packings, rounds and processes."""

    output: str = "loader.json"
    """JSON file for the results."""
    documents: int = 100_000_000
    """Documents of the large index, which takes 20 bytes of disk each during the benchmark."""
    mean_length: int = 500
    """Mean tokens of a document."""
    seq_length: int = 2048
    """Tokens of a pack."""
    tokens: int = 100_000_000
    """Tokens of the corpus whose reading is timed."""
    micro_batch_size: int = 12
    """Packs of a micro-batch."""
    rounds: int = 3
    """Repeats of each measurement."""
    seconds: float = 2.0
    """Duration of reading in each repeat."""
    packings: tuple[str, ...] = PACKINGS
    """Values of --packing to measure."""
    data_order: Literal["blocks", "documents"] = "blocks"
    """Shuffling of a corpus of more than 1,048,576 documents; see the flag of `megaenc
    pretrain`."""
    processes: int = 4
    """Processes that open the index together, in addition to a single one; 1 measures only the
    single one."""


def draw_lengths(documents: int, mean: int, seed: int = 0) -> np.ndarray:
    """Return log-normal document lengths in tokens, int32[documents].

    They are at least 1; 5 % exceed 3 x `mean`.
    """
    drawn = np.random.default_rng(seed).standard_normal(documents, dtype=np.float32)
    np.exp(drawn, out=drawn)
    drawn *= mean / np.exp(0.5)
    return np.maximum(drawn, 1, out=drawn).astype(np.int32)


def write_corpus(
    prefix: Path, lengths: np.ndarray, counts: np.ndarray, tokens: np.ndarray = _NO_TOKENS
) -> None:
    """Write PREFIX.bin and .idx of sequences; without tokens, a sparse .bin.

    Args:
        lengths: Tokens of each sequence.
        counts: Sequences of each document.
    """
    files = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    writer = IndexedWriter(*files, "uint16")
    writer.add_documents(tokens, lengths, counts)
    writer.finish()
    os.truncate(files[0], 2 * writer.tokens)


def write_index(prefix: Path, documents: int, mean: int) -> None:
    """Write PREFIX.idx and a sparse PREFIX.bin in constant memory.

    Each document has one sequence of about `mean` tokens.
    """
    code = next(code for code, dtype in TOKEN_TYPES.items() if dtype == np.uint16)
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, code, documents, documents + 1))
        stream.truncate(HEADER.size + 20 * documents + 8)
    index = IndexArrays.map(f"{prefix}.idx", mode="r+")
    tokens = 0
    for first in range(0, documents, _CHUNK):
        numbers = np.arange(first, min(first + _CHUNK, documents))
        lengths = draw_lengths(len(numbers), mean, seed=first // _CHUNK)
        ends = tokens + np.cumsum(lengths, dtype=np.int64)
        place = slice(first, first + len(numbers))
        index.lengths[place] = lengths
        index.pointers[place] = 2 * (ends - lengths)
        index.documents[place] = numbers
        tokens = int(ends[-1])
    index.documents[documents] = documents
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(2 * tokens)


def measure_loader(config: LoaderBenchConfig) -> dict[str, Any]:
    """Return median, lowest and highest of startup and reading, by packing.

    Raises:
        InputError: A flag is wrong.
    """
    sizes = (
        "documents",
        "mean_length",
        "seq_length",
        "tokens",
        "micro_batch_size",
        "rounds",
        "seconds",
        "processes",
    )
    common.check_positive(config, *sizes)
    check_process_count("--processes", config.processes)
    unknown = [name for name in config.packings if name not in PACKINGS]
    if unknown or not config.packings:
        raise InputError(
            f"--packings {' '.join(unknown) or '(none)'}: expected some of {', '.join(PACKINGS)}"
        )
    check_output_file(Path(config.output), "--output")
    with tempfile.TemporaryDirectory(prefix="megaenc-bench-") as directory:
        prefixes = _write_corpora(config, Path(directory))
        measures = {
            "index": ("index", 1),
            "index_together": ("index", config.processes),
            "reading": ("reading", 1),
        }
        results: dict[str, dict[str, list]] = {
            name: {packing: [] for packing in config.packings} for name in measures
        }
        if config.processes == 1:
            del measures["index_together"]
        rounds = list(itertools.product(range(config.rounds), config.packings, measures.items()))
        with ProgressLine("measuring", len(rounds)) as progress:
            for done, (turn, packing, (name, (measure, processes))) in enumerate(rounds, 1):
                results[name][packing].append(
                    _run_turn(measure, prefixes[measure], packing, config, processes)
                )
                progress.update(
                    done, description=f"turn {turn + 1} of {config.rounds}: {packing}, {measure}"
                )
    spreads = {
        name: {
            packing: {
                key: common.summarize([turn[key] for turn in turns])
                for key in next(iter(turns), ())
            }
            for packing, turns in each.items()
        }
        for name, each in results.items()
    }
    return {"settings": asdict(config), "machine": common.describe_machine(), **spreads}


def _write_corpora(config: LoaderBenchConfig, directory: Path) -> dict[str, Path]:
    """Write the corpora of both measurements and return their prefixes by measurement."""
    prefixes = {name: directory / name for name in MEASURES}
    write_index(prefixes["index"], config.documents, config.mean_length)
    lengths = draw_lengths(max(1, config.tokens // config.mean_length), config.mean_length)
    counts = -(-lengths // _SENTENCE_LENGTH)
    sequences = np.full(int(counts.sum()), _SENTENCE_LENGTH, np.int32)
    sequences[np.cumsum(counts) - 1] = lengths - _SENTENCE_LENGTH * (counts - 1)
    tokens = np.random.default_rng(1).integers(
        0, _VOCAB_SIZE, int(lengths.sum(dtype=np.int64)), np.uint16
    )
    write_corpus(prefixes["reading"], sequences, counts, tokens)
    return prefixes


def _run_turn(
    measure: str, prefix: Path, packing: str, config: LoaderBenchConfig, processes: int
) -> dict[str, float]:
    """Run a measurement in new processes.

    Returns:
        The result of a single process; of several, the seconds of the slowest, and total CPU
        seconds and GiB.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_RUN_ID": f"bench-{os.getpid()}",
    }
    # Memory counts while all processes are alive: shared pages are divided between them.
    barrier = (
        multiprocessing.get_context("spawn").Manager().Barrier(processes) if processes > 1 else None
    )
    item = (str(prefix), packing, config, barrier)
    try:
        rows = common.run_processes(MEASURES[measure], item, *[environment] * processes)
    except RuntimeError as error:
        raise InputError(f"{packing}, {measure}: {format_error(error, 1000)}") from None
    if processes == 1:
        return rows[0]
    return {
        "seconds": max(row["seconds"] for row in rows),
        "processor_seconds": sum(row["processor_seconds"] for row in rows),
        "gib": sum(row["shared_gib"] for row in rows),
    }


def _open_packs(prefix: str, packing: str, config: LoaderBenchConfig) -> CorpusPackedDataset:
    """Return the training packs of a corpus."""
    from megaenc.data.indexed.corpus import Corpus, parse_split
    from megaenc.data.packing.builder import PACKINGS as kinds
    from megaenc.data.packing.builder import split_corpus

    corpus = Corpus.open(prefix)
    train, *_ = split_corpus(corpus, parse_split("99,1,0"), config.data_order)
    # Each document of the index is one sentence
    corpus.metadata = SimpleNamespace(sentences="made up")
    packs = kinds[packing](corpus, train, config.seq_length, seed=1)
    corpus.metadata = None
    return packs


def measure_index(arguments: tuple[str, str, LoaderBenchConfig, Any]) -> dict[str, float]:
    """Open a corpus and read packs; return seconds, CPU seconds, packs/s and GiB.

    Seconds are to the first pack, and packs are counted per CPU second. `arguments` are prefix,
    packing, config, and a barrier of all processes that do so.
    """
    import torch  # noqa: F401 - keeps the import out of the timing

    from megaenc.backend.megatron import import_megatron

    import_megatron()
    prefix, packing, config, barrier = arguments
    start = time.perf_counter()
    cpu_start = time.process_time()
    packs = _open_packs(prefix, packing, config)
    packs[0]
    results = {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - cpu_start,
    }
    reading_start = time.process_time()
    for sample in range(1, _PACKS + 1):
        packs[sample]
    results["packs_per_processor_second"] = _PACKS / (time.process_time() - reading_start)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    fields = {
        "peak_gib": "VmHWM",
        "after_gib": "VmRSS",
        "mapped_gib": "RssFile",
        "anonymous_gib": "RssAnon",
    }
    for name, field in fields.items():
        results[name] = int(status[field].split()[0]) / 2**20
    if barrier is not None:
        barrier.wait()
        results["shared_gib"] = psutil.Process().memory_full_info().pss / 2**30
        barrier.wait()
    return results


def measure_reading(arguments: tuple[str, str, LoaderBenchConfig, None]) -> dict[str, float]:
    """Return tokens per second of reading packs and of MLM micro-batches, by name.

    `arguments` are prefix, packing and config.
    """
    import torch

    from megaenc.data.tokenizer.vocabulary import Vocabulary
    from megaenc.objectives import MaskedLanguageModeling
    from megaenc.training.micro_batches import build_micro_batch

    torch.set_num_threads(1)
    prefix, packing, config, _ = arguments
    packs = _open_packs(prefix, packing, config)
    vocabulary = Vocabulary(_VOCAB_SIZE, 0, 1, (0, 1), "")
    packs.stream.corpus.check_vocabulary(vocabulary)
    objective = MaskedLanguageModeling(vocabulary)
    size = config.micro_batch_size
    cpu = torch.device("cpu")
    readers = {
        "packs": (1, lambda first: packs[first]),
        "micro_batches": (
            size,
            lambda first: build_micro_batch(packs, range(first, first + size), objective, 1, cpu),
        ),
    }
    results = {}
    first = 0
    for name, (step, read) in readers.items():
        read(first)
        start = time.perf_counter()
        count = 0
        while (spent := time.perf_counter() - start) < config.seconds:
            first += step
            read(first)
            count += step
        results[f"{name}_tokens_per_second"] = count * config.seq_length / spent
    return results


MEASURES = {"index": measure_index, "reading": measure_reading}


def format_table(results: dict[str, Any]) -> str:
    """Return a table of startup time, memory and reading speed by packing."""
    documents = results["settings"]["documents"]
    lines = [
        f"{documents:,} documents, from opening to the first pack; millions of tokens per second "
        "of one process"
    ]
    processes = f"of {results['settings']['processes']} processes"
    lines.append(
        f"{'':16}{'s':>8}{'GiB':>8}{'packs/CPU s':>13}{processes + ', s':>20}{'GiB':>8}"
        f"{'packs':>10}{'with MLM':>10}"
    )
    for packing, row in results["index"].items():
        read = results["reading"][packing]
        packs = read["packs_tokens_per_second"]["median"] / 1e6
        batches = read["micro_batches_tokens_per_second"]["median"] / 1e6
        seconds = row["seconds"]["median"]
        gib = row["peak_gib"]["median"]
        rate = row["packs_per_processor_second"]["median"]
        shared = results["index_together"][packing] or {
            "seconds": row["seconds"],
            "gib": row["peak_gib"],
        }
        together = (shared[name]["median"] for name in ("seconds", "gib"))
        lines.append(
            f"{packing:16}{seconds:8.1f}{gib:8.2f}{rate:13,.0f}"
            + "{:20.1f}{:8.2f}{:10.1f}{:10.1f}".format(*together, packs, batches)
        )
    return "\n".join(lines)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Measure loading, write the results as JSON to --output, and print a table."""
    silence_libraries()
    config = flags.parse(
        LoaderBenchConfig, argv, prog="python benchmarks/loader.py", description=__doc__
    )
    results = measure_loader(config)
    common.write_report(config.output, results)
    print(format_table(results))
    print(f"written to {config.output}")


if __name__ == "__main__":
    main()
