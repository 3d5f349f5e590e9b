"""How fast a run gets what it reads: the index of a great many documents, and the tokens a second of one loader process.

The index is that of a made-up corpus: an .idx of so many documents, whose lengths are log-normal, beside a .bin that is a hole
in the disk. A process of its own opens it, splits it, lays its documents in random order and cuts the first pack; then as many
processes as a machine may have, which share what they make. The tokens come from a smaller
corpus of random ids, in the page cache, through each packing: as packs, and as micro-batches with MLM's targets.

megaenc bench loader --output loader.json
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megaenc import flags
from megaenc.bench import report
from megaenc.console import ProgressLine, quiet, say
from megaenc.data.indexed import HEADER, MAGIC, VERSION
from megaenc.errors import InputError, one_line_errors
from megaenc.files import stopped_by_sigterm
from megaenc.output_paths import check_output_file
from megaenc.processes import below, check_process_count, python_command, python_environment

PACKINGS = ("concat", "random-length", "sentences")
_SENTENCE = 25  # tokens
_IDS = 30_000


@dataclass(frozen=True)
class LoaderBenchFlags:
    """What the benchmark takes."""

    output: str = "loader.json"
    """JSON file for the figures."""
    documents: int = 100_000_000
    """Documents of the index; it takes 20 bytes of disk for each while it is measured."""
    mean_length: int = 500
    """Tokens of a document."""
    seq_length: int = 2048
    """Tokens of a pack."""
    tokens: int = 100_000_000
    """Tokens of the corpus that is read."""
    micro_batch_size: int = 12
    """Packs of a micro-batch."""
    rounds: int = 3
    """Turns of each measurement."""
    seconds: float = 2.0
    """How long each turn reads."""
    packings: tuple[str, ...] = PACKINGS
    """Ways to cut packs."""
    processes: int = 4
    """Processes of one machine that open the index together, after one alone has; 1: only that."""


def lengths_of(documents: int, mean: int) -> np.ndarray:
    """int32[documents] in tokens, at least 1: log-normal, as texts of the web are: one in twenty has over three times `mean`."""
    drawn = np.random.default_rng(0).standard_normal(documents, dtype=np.float32)
    np.exp(drawn, out=drawn)
    drawn *= mean / np.exp(0.5)
    return np.maximum(drawn, 1, out=drawn).astype(np.int32)


def write_index(prefix: Path, lengths: np.ndarray, counts: np.ndarray | None = None) -> None:
    """PREFIX.idx of sequences of these lengths, uint16; `counts`: the sequences of each document, 1 unless given."""
    documents = len(lengths) if counts is None else len(counts)
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, 8, len(lengths), documents + 1))
        lengths.tofile(stream)
        ends = np.cumsum(lengths, dtype=np.int64)
        ends -= lengths
        ends *= 2
        ends.tofile(stream)
        del ends
        edges = np.arange(documents + 1) if counts is None else np.concatenate([[0], np.cumsum(counts)])
        edges.astype(np.int64).tofile(stream)


def bench(settings: LoaderBenchFlags) -> dict[str, Any]:
    """Measure; return what goes into the JSON. Raises InputError for wrong flags."""
    sizes = ("documents", "mean_length", "seq_length", "tokens", "micro_batch_size", "rounds", "seconds", "processes")
    report.check_positive(settings, *sizes)
    check_process_count("--processes", settings.processes)
    wrong = [name for name in settings.packings if name not in PACKINGS]
    if wrong or not settings.packings:
        raise InputError(f"--packings {' '.join(wrong) or '(none)'}: expected some of {', '.join(PACKINGS)}")
    check_output_file(Path(settings.output), "--output")
    with tempfile.TemporaryDirectory(prefix="megaenc-bench-") as folder:
        prefixes = _written(settings, Path(folder))
        index: dict[str, list[dict[str, float]]] = {packing: [] for packing in settings.packings}
        together: dict[str, list[dict[str, float]]] = {packing: [] for packing in settings.packings}
        reading: dict[str, list[dict[str, float]]] = {packing: [] for packing in settings.packings}
        measures = [("index", index, 1), ("index", together, settings.processes), ("reading", reading, 1)]
        if settings.processes == 1:
            del measures[1]
        with ProgressLine("measuring", len(measures) * settings.rounds * len(settings.packings)) as progress:
            for turn in range(settings.rounds):
                for packing in settings.packings:
                    for what, found, processes in measures:
                        found[packing].append(_turn(what, prefixes[what], packing, settings, processes))
                        done = sum(len(turns) for _, kind, _ in measures for turns in kind.values())
                        progress.update(done, description=f"turn {turn + 1} of {settings.rounds}: {packing}, {what}")
    spreads = {"index": _spreads(index), "index_together": _spreads(together), "reading": _spreads(reading)}
    return {"settings": asdict(settings), "machine": report.machine(), **spreads}


def _written(settings: LoaderBenchFlags, folder: Path) -> dict[str, Path]:
    prefixes = {what: folder / what for what in ("index", "reading")}
    lengths = lengths_of(settings.documents, settings.mean_length)
    write_index(prefixes["index"], lengths)
    with open(f"{prefixes['index']}.bin", "wb") as stream:
        stream.truncate(2 * int(lengths.sum(dtype=np.int64)))
    lengths = lengths_of(max(1, settings.tokens // settings.mean_length), settings.mean_length)
    counts = -(-lengths // _SENTENCE)
    sequences = np.full(int(counts.sum()), _SENTENCE, np.int32)
    sequences[np.cumsum(counts) - 1] = lengths - _SENTENCE * (counts - 1)
    write_index(prefixes["reading"], sequences, counts)
    with open(f"{prefixes['reading']}.bin", "wb") as stream:
        np.random.default_rng(1).integers(0, _IDS, int(lengths.sum(dtype=np.int64)), np.uint16).tofile(stream)
    return prefixes


def _turn(what: str, prefix: Path, packing: str, settings: LoaderBenchFlags, processes: int) -> dict[str, float]:
    """Of several processes: the seconds of the slowest, the processor's of all, and the memory that they have together."""
    words = ("megaenc.bench.loader", "--turn", what, str(prefix), packing, json.dumps(asdict(settings)))
    environment = {
        **python_environment(),
        "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_RUN_ID": f"bench-{os.getpid()}",
    }
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    below(python_command("-m", *words)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
            for _ in range(processes)
        ]
        rows = [process.stdout.readline() for process in started]  # each then waits, so that all are there at once
        memory = [_own_share(process.pid) if row else 0.0 for process, row in zip(started, rows, strict=True)]
        for process in started:
            _, said = process.communicate()
            if process.returncode:
                lines = said.strip().splitlines() or [f"ended with exit code {process.returncode}"]
                raise InputError(f"{packing}, {what}: {lines[-1].removeprefix('error: ')}")
    found = [json.loads(row) for row in rows]
    if processes == 1:
        return found[0]
    seconds, computed = max(row["seconds"] for row in found), sum(row["processor_seconds"] for row in found)
    return {"seconds": seconds, "processor_seconds": computed, "gib": sum(memory)}


def _own_share(process: int) -> float:
    """GiB that a process has resident; of what several have, its part."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 2**20


def _spreads(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    return {
        packing: {name: report.spread([turn[name] for turn in turns]) for name in (turns[0] if turns else ())}
        for packing, turns in found.items()
    }


def _packs(prefix: str, packing: str, settings: dict[str, Any]):
    from megaenc.data.corpus import Corpus, parse_split
    from megaenc.data.run_data import PACKINGS as kinds
    from megaenc.data.run_data import parts_of

    corpus = Corpus.open(prefix)
    train, *_ = parts_of(corpus, parse_split("99,1,0"))
    corpus.sidecar = SimpleNamespace(sentences="made up")  # in the index each document is one
    packs = kinds[packing](corpus, train, settings["seq_length"], seed=1)
    corpus.sidecar = None
    return packs


def measure_index(prefix: str, packing: str, settings: dict[str, Any], held: list[object]) -> dict[str, float]:
    """From opening a corpus to its first pack: seconds, and the GiB resident then at most, the mapped .idx included.

    The packs are put into `held`.
    """
    import torch  # noqa: F401 - here, so that the clock does not count it

    from megaenc.backend.megatron import import_megatron

    import_megatron()
    began, computed = time.perf_counter(), time.process_time()
    packs = _packs(prefix, packing, settings)
    packs[0]
    held.append(packs)
    seconds, computed = time.perf_counter() - began, time.process_time() - computed
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    gib = {name: int(status[field].split()[0]) / 2**20 for name, field in (("peak_gib", "VmHWM"), ("after_gib", "VmRSS"))}
    return {"seconds": seconds, "processor_seconds": computed, **gib, "mapped_gib": int(status["RssFile"].split()[0]) / 2**20}


def measure_reading(prefix: str, packing: str, settings: dict[str, Any], held: list[object]) -> dict[str, float]:
    """Tokens a second, read for so many seconds after a first look at each pack's neighbourhood: as packs, as micro-batches."""
    import torch

    from megaenc.data.vocabulary import Vocabulary
    from megaenc.objectives import MaskedLanguageModeling
    from megaenc.training.batches import micro_batch

    torch.set_num_threads(1)
    packs = _packs(prefix, packing, settings)
    packs.stream.corpus.check_vocabulary(Vocabulary(_IDS, 0, 1, (0, 1), ""))
    objective = MaskedLanguageModeling(Vocabulary(_IDS, 0, 1, (0, 1), ""))
    size, cpu = settings["micro_batch_size"], torch.device("cpu")
    ways = {
        "packs": (1, lambda first: packs[first]),
        "micro_batches": (size, lambda first: micro_batch(packs, range(first, first + size), objective, 1, cpu)),
    }
    found, first = {}, 0
    for name, (step, read) in ways.items():
        read(first)
        began, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < settings["seconds"]:
            first += step
            read(first)
            count += step
        found[f"{name}_tokens_per_second"] = count * settings["seq_length"] / spent
    return found


def table(found: dict[str, Any]) -> str:
    """The figures for the eye."""
    documents = found["settings"]["documents"]
    lines = [f"{documents:,} documents, from opening them to the first pack; millions of tokens a second of one process"]
    processes = f"of {found['settings']['processes']} processes"
    lines.append(f"{'':16}{'s':>8}{'GiB':>8}{processes + ', s':>20}{'GiB':>8}{'packs':>10}{'with MLM':>10}")
    for packing, row in found["index"].items():
        read = found["reading"][packing]
        packs, batches = (read[f"{name}_tokens_per_second"]["median"] / 1e6 for name in ("packs", "micro_batches"))
        seconds, gib = row["seconds"]["median"], row["peak_gib"]["median"]
        shared = found["index_together"][packing] or {"seconds": row["seconds"], "gib": row["peak_gib"]}
        together = (shared[name]["median"] for name in ("seconds", "gib"))
        lines.append(
            "{:16}{:8.1f}{:8.2f}{:20.1f}{:8.2f}{:10.1f}{:10.1f}".format(packing, seconds, gib, *together, packs, batches)
        )
    return "\n".join(lines)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc bench loader`."""
    quiet()
    settings = flags.parse(LoaderBenchFlags, argv, prog="megaenc bench loader", description=__doc__)
    with stopped_by_sigterm():
        found = bench(settings)
        report.write(settings.output, found)
        say(table(found))
        say(f"written to {settings.output}")


@one_line_errors
def _turn_main() -> None:
    what, prefix, packing, settings = sys.argv[2:]
    quiet()
    measure = {"index": measure_index, "reading": measure_reading}[what]
    held: list[object] = []
    print(json.dumps(measure(prefix, packing, json.loads(settings), held)), flush=True)
    sys.stdin.read()  # what is held stays until the others have been looked at


if __name__ == "__main__":
    _turn_main() if sys.argv[1:2] == ["--turn"] else main()
