"""Speed of preprocessing by workers and nodes: measured for few, simulated for many, for `megaenc bench data --compare workers`.

Simulated workers are real processes that sleep as long as tokenization takes and then return as many tokens. Reading, sending,
collecting, hashing and writing are real, so that the parent process limits them as it limits real ones. Simulated nodes are real
processes that claim real partitions of one folder and sleep instead of tokenizing.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaenc.bench import report
from megaenc.console import ProgressLine, format_number
from megaenc.data.indexed.indexed_dataset import IndexedWriter
from megaenc.data.preprocess.claims import Claim
from megaenc.data.preprocess.command import PreprocessConfig, prepare_job
from megaenc.data.preprocess.deduplicate import Deduplication, find_duplicates
from megaenc.data.preprocess.job import PreprocessJob
from megaenc.data.preprocess.partitions import SharedProgress, merge_partitions, take_partitions, write_missing
from megaenc.data.preprocess.resumable import BandKeys, PartitionStore
from megaenc.data.preprocess.worker import TokenizedBlock
from megaenc.data.sources import resolve
from megaenc.data.sources.text_files import TextBlock
from megaenc.errors import InputError
from megaenc.processes import ProcessPool, ThreadPool, python_environment

_PARTITIONS, _PARTITION_SECONDS = 64, 0.25  # of simulated nodes
_SORTED_DOCUMENTS = 1_000_000


@dataclass(frozen=True)
class SleepingTokenizer:
    """Callable from TextBlock to a TokenizedBlock of zeros of the usual size, after as long as tokenization usually takes."""

    seconds_per_byte: float
    tokens_per_byte: float
    documents_per_byte: float
    dtype: str

    def __call__(self, block: TextBlock) -> TokenizedBlock:
        """Sleep in proportion to the block's size and return documents of equal length."""
        documents = max(1, round(block.size * self.documents_per_byte))
        length = max(1, round(block.size * self.tokens_per_byte / documents))
        result = TokenizedBlock(
            [np.zeros(documents * length, self.dtype)],
            [np.full(documents, length, np.int32)],
            [np.ones(documents, np.int32)],
            [],
            documents,
            0,
            block.size,
            block.position,
        )
        time.sleep(self.seconds_per_byte * block.size)
        return result


def measure_scaling(text: Path, tokenizer: str, workers: int, simulated: int, rounds: int) -> dict[str, Any]:
    """Return speeds in MB/s of stages, of 1 and `workers` workers, of `simulated` workers, and the cost of claims by nodes."""
    size = text.stat().st_size
    stages: dict[str, list[dict[str, float]]] = {}
    plain: list[tuple[str, tuple[Any, ...]]] = [("read", ()), ("tokenize", ()), ("exact keys", ("exact",))]
    plain += [("minhash keys", ("minhash",))] if _has_rensa() else []
    plain += [(f"threads {count}", (count, True)) for count in sorted({1, workers})]
    plain += [(f"processes {count}", (count, False)) for count in sorted({1, workers})]
    plain += [("merge", ())]
    node_counts = sorted({1, 2, simulated})
    with ProgressLine("measuring", rounds * (len(plain) + 2) + len(node_counts)) as progress:

        def run(name: str, *options: Any) -> None:
            progress.update(sum(map(len, stages.values())), description=f"measuring {name}")
            with tempfile.TemporaryDirectory(dir=text.parent) as folder:
                arguments = (name.split(" ")[0], str(text), tokenizer, folder, options)
                with report.run_workers(run_stage, arguments, python_environment()) as [worker]:
                    [result] = worker.results()
            stages.setdefault(name, []).append(result)

        for _ in range(rounds):
            for name, options in plain:
                run(name, *options)
            usual = stages["tokenize"][-1]
            rates = (usual["tokens"] / size, usual["documents"] / size)
            run("instant 2", 2, 0.0, *rates)
            run(f"simulated {simulated}", simulated, stages["processes 1"][-1]["seconds"] / size, *rates)
        nodes = {}
        for count in node_counts:
            progress.update(sum(map(len, stages.values())) + len(nodes), description=f"measuring {count} nodes")
            nodes[str(count)] = _measure_nodes(count, text.parent)
    sorting = _measure_sorting()
    return {
        "bytes": size,
        "documents": stages["tokenize"][0]["documents"],
        "tokens": stages["tokenize"][0]["tokens"],
        "stages": {
            name: {
                "megabytes_per_second": report.summarize([size / 1e6 / turn["seconds"] for turn in turns]),
                "processor_seconds": report.summarize([turn["processor_seconds"] for turn in turns]),
            }
            for name, turns in stages.items()
        },
        "nodes": nodes,
        "sorting_seconds_per_million_keys": sorting,
        "turns": stages,
    }


def run_stage(arguments: tuple[str, str, str, str, tuple[Any, ...]]) -> dict[str, float]:
    """Run (stage, text, tokenizer, folder, options) once; return its seconds and this process's processor seconds."""
    stage, text, tokenizer, folder, options = arguments
    partitions = 4 if stage == "merge" else 1
    job = prepare_job(PreprocessConfig((text,), f"{folder}/out", tokenizer, workers=2, partitions=partitions))
    with ExitStack() as stack:
        work = _STAGES[stage](job, Path(folder), stack, *options)
        seconds, processor_seconds = time.perf_counter(), time.process_time()
        counts = work()
        seconds, processor_seconds = time.perf_counter() - seconds, time.process_time() - processor_seconds
    return {"seconds": seconds, "processor_seconds": processor_seconds, **(counts or {})}


def _prepare_read(job: PreprocessJob, folder: Path, stack: ExitStack) -> Callable[[], None]:
    """Return the function to time: read all blocks."""

    def read() -> None:
        for _ in resolve.read_blocks(job.inputs):
            pass

    return read


def _prepare_tokenize(job: PreprocessJob, folder: Path, stack: ExitStack) -> Callable[[], dict[str, float]]:
    """Return the function to time: parse and tokenize all blocks in one thread."""
    blocks = list(resolve.read_blocks(job.inputs))

    def tokenize() -> dict[str, float]:
        results = [job.block_tokenizer(block) for block in blocks]
        return {"documents": sum(each.documents for each in results), "tokens": sum(len(each.tokens[0]) for each in results)}

    return tokenize


def _prepare_keys(job: PreprocessJob, folder: Path, stack: ExitStack, method: str) -> Callable[[], None]:
    """Return the function to time: compute the band keys of all documents in one thread."""
    blocks = [[text for (text,) in block.parse(["text"], False).texts] for block in resolve.read_blocks(job.inputs)]
    deduplication = Deduplication(method)
    deduplication(["a"])

    def compute() -> None:
        for texts in blocks:
            deduplication(texts)

    return compute


def _prepare_pool(job: PreprocessJob, stack: ExitStack, pool: ProcessPool | ThreadPool, count: int) -> Callable[[], None]:
    """Return the function to time: write the corpus by a pool whose workers have started."""
    workers = stack.enter_context(pool)
    blocks = [block for block, _ in zip(resolve.read_blocks(job.inputs), range(2 * count), strict=False)]
    for _ in workers.map(blocks):  # loads tokenizers
        pass

    def write() -> None:
        job.write_whole(workers)

    return write


def _prepare_workers(job: PreprocessJob, folder: Path, stack: ExitStack, count: int, threads: bool) -> Callable[[], None]:
    """Return the function to time: write the corpus by `count` threads or processes that tokenize."""
    return _prepare_pool(job, stack, (ThreadPool if threads else ProcessPool)(job.block_tokenizer, count), count)


def _prepare_simulated(
    job: PreprocessJob, folder: Path, stack: ExitStack, count: int, seconds_per_byte: float, *rates: float
) -> Callable[[], None]:
    """Return the function to time: write the corpus by `count` processes that sleep, as `SleepingTokenizer`."""
    tokenizer = SleepingTokenizer(seconds_per_byte, *rates, job.block_tokenizer.dtype)
    return _prepare_pool(job, stack, ProcessPool(tokenizer, count), count)


def _prepare_merge(job: PreprocessJob, folder: Path, stack: ExitStack) -> Callable[[], None]:
    """Return the function to time: merge four partitions."""
    ranges = resolve.partition_inputs(job.inputs, job.settings.partitions)
    store = PartitionStore(folder / "out_parts", job.build_plan(), job.settings.json_keys, job.block_tokenizer.dtype, len(ranges))
    store.open()
    write_missing(job, store, ranges)

    def merge() -> None:
        merge_partitions(job, store)

    return merge


_STAGES = {
    "read": _prepare_read,
    "tokenize": _prepare_tokenize,
    "exact": _prepare_keys,
    "minhash": _prepare_keys,
    "threads": _prepare_workers,
    "processes": _prepare_workers,
    "instant": _prepare_simulated,
    "simulated": _prepare_simulated,
    "merge": _prepare_merge,
}


def _has_rensa() -> bool:
    """Return whether rensa is installed."""
    try:
        Deduplication("minhash").describe()
    except InputError:
        return False
    return True


def _measure_nodes(count: int, folder: Path) -> dict[str, float]:
    """Return seconds, claims and partitions written twice of `count` processes that share a folder, and those of ideal ones."""
    with tempfile.TemporaryDirectory(dir=folder) as shared:
        item = (shared, _PARTITIONS, _PARTITION_SECONDS)
        with report.run_workers(simulate_node, item, *[python_environment()] * count) as workers:
            results = [list(worker.results()) for worker in _wait_until_ready(workers, Path(shared))]
        claims = len(list(Path(shared, "parts").glob("*.claim-*")))
    written = [number for [(_, numbers)] in results for number in numbers]
    seconds = max(end for [(end, _)] in results)
    return {"seconds": seconds, "claims": claims, "written": len(written), "twice": len(written) - len(set(written))}


def _wait_until_ready(workers: list[Any], folder: Path) -> Iterator[Any]:
    """Wait until every node has created its file in `folder`, let all go on, and yield the workers."""
    while len(list(folder.glob("ready*"))) < len(workers):
        if any(worker.exit_code() is not None for worker in workers):
            break
        time.sleep(0.01)
    (folder / "go").touch()
    yield from workers


def simulate_node(item: tuple[str, int, float]) -> tuple[float, list[int]]:
    """Claim and write partitions of (folder, partitions, seconds each) when all are ready; return seconds and the numbers."""
    folder, count, seconds = Path(item[0]), *item[1:]
    store = PartitionStore(folder / "parts", {"simulated": True}, ["text"], "uint16", count)
    (folder / f"ready{time.monotonic_ns()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.005)
    started, written = time.monotonic(), []

    def fill(writers: list[IndexedWriter], band_keys: BandKeys) -> dict[str, int]:
        time.sleep(seconds)
        writers[0].add_documents(np.zeros(8, np.uint16), np.full(1, 8, np.int32), np.ones(1, np.int32))
        return {"documents": 1}

    def write(number: int, claim: Claim) -> None:
        store.write(number, fill)
        written.append(number)

    store.open()
    with ProgressLine("simulating", count) as line:
        take_partitions(store, SharedProgress(store, [1.0] * count, line), store.missing_partitions(), write)
    return time.monotonic() - started, written


def _measure_sorting() -> float:
    """Return the seconds to find duplicates by one band of a million random keys, a tenth of them equal to others."""
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 1 << 63, (1, _SORTED_DOCUMENTS), np.uint64)
    keys[:, : _SORTED_DOCUMENTS // 10] = keys[:, -_SORTED_DOCUMENTS // 10 :]
    started = time.perf_counter()
    find_duplicates(_SORTED_DOCUMENTS, 1, lambda band: iter([keys]))
    return (time.perf_counter() - started) * 1e6 / _SORTED_DOCUMENTS


def format_table(results: dict[str, Any]) -> str:
    """Return the results as text for the console: stages, measured and simulated workers, nodes."""
    size = f"{results['bytes'] / 1e6:,.1f} MB of JSONL, {results['documents']:,} documents, {results['tokens']:,} tokens"
    lines = [size, f"{'':20}{'MB/s':>9}{'lowest':>9}{'highest':>9}{'MB per CPU s of the parent':>28}"]
    for name, row in results["stages"].items():
        speed = row["megabytes_per_second"]
        lines.append(
            f"{name:20}{speed['median']:9.1f}{speed['lowest']:9.1f}{speed['highest']:9.1f}"
            f"{results['bytes'] / 1e6 / max(row['processor_seconds']['median'], 1e-3):28.0f}"
        )
    lines.append(f"simulated nodes that share {_PARTITIONS} partitions of {_PARTITION_SECONDS} s each:")
    for count, row in results["nodes"].items():
        ideal = -(-_PARTITIONS // int(count)) * _PARTITION_SECONDS
        amounts = f"{row['claims']} claims, {row['twice']} partitions written twice"
        lines.append(f"{count:>4} nodes: {row['seconds']:.2f} s (without overhead {ideal:.2f}), {amounts}")
    seconds = results["sorting_seconds_per_million_keys"]
    lines.append(f"finding duplicates: {format_number(seconds)} s per million documents and band")
    return "\n".join(lines)
