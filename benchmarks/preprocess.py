"""Compare tokenization speed of megaenc, gigatoken, HF tokenizers and datasets.

    python benchmarks/preprocess.py --output bench.json
    python benchmarks/preprocess.py --input corpus.jsonl --tokenizer tokenizer --output bench.json

The backends take turns in new processes; the time excludes startup, imports and loading the
tokenizer. megaenc writes .bin, .idx and .json files with checksums and fsync; the others keep ids
in memory. All ids must be identical. The first turn is a warm-up. Without --input, installed
documentation is tokenized.
"""

import contextlib
import hashlib
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import common
import numpy as np
import psutil

from megaenc import flags
from megaenc.console import ProgressLine, silence_libraries
from megaenc.data.sources import resolve
from megaenc.dist_env import die_with_parent
from megaenc.errors import InputError, handle_command_errors
from megaenc.machine import check_process_count, usable_core_count
from megaenc.output_paths import check_output_file

Ids = tuple[np.ndarray, np.ndarray]
Work = Callable[[], Callable[[], Ids]]
"""Timed function of a backend, which returns a function for ids, uint32[tokens], and lengths,
int64[documents]."""

_BATCH_SIZE = 1000  # documents, as in datasets.map
_SECONDS = ("seconds", "processor_seconds", "process_seconds")
_RATIOS = {
    "ratio_encode_batch": ("encode_batch", "times as fast as a loop of encode_batch"),
    "ratio_encode_batch_fast": (
        "encode_batch_fast",
        "times as fast as a loop of encode_batch_fast",
    ),
    "ratio_datasets_map": ("datasets.map", "times as fast as datasets.map"),
    "share_of_gigatoken": ("gigatoken", "of the speed of gigatoken"),
}


@dataclass(frozen=True)
class DataBenchConfig:
    """Flags of the benchmark: output, text, tokenizer, size, rounds and workers."""

    output: str = "bench.json"
    """JSON file for the results."""
    input: tuple[str, ...] = ()
    """Text files of any format that `megaenc preprocess` reads (default: documentation installed on
    this machine)."""
    json_key: resolve.JsonKey = "text"
    """Key of the text in JSON objects, or column in tables."""
    tokenizer: str = ""
    """Directory or Hub name of a Hugging Face fast tokenizer (default: one trained on the text)."""
    megabytes: float = 200.0
    """Size of the JSONL file: documents are repeated in shuffled order, or truncated, to this
    size."""
    rounds: int = 3
    """Timed turns of each backend."""
    workers: int = field(default_factory=usable_core_count)
    """Threads or processes of each backend."""


def measure_tokenization(config: DataBenchConfig) -> dict[str, Any]:
    """Run all tokenizers in turns; return speeds and ratios.

    Raises:
        InputError: Input is wrong, or ids differ.
    """
    common.check_positive(config, "rounds", "workers", "megabytes")
    check_process_count("--workers", config.workers)
    check_output_file(Path(config.output), "--output", inputs=config.input)
    with tempfile.TemporaryDirectory(prefix="megaenc-bench-") as directory:
        text, tokenizer = _prepare_inputs(config, Path(directory))
        turns: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS}
        with ProgressLine("comparing ids", len(BACKENDS) * (config.rounds + 1)) as progress:
            for turn in range(config.rounds + 1):
                names = list(BACKENDS)
                # Each turn starts with another backend
                for backend in names[turn % len(names) :] + names[: turn % len(names)]:
                    turns[backend].append(_run_turn(backend, text, tokenizer, config.workers))
                    progress.update(
                        sum(map(len, turns.values())),
                        description=f"turn {turn} of {config.rounds}: {backend}",
                    )
                _check_same_ids(turns)
        return {
            "settings": asdict(config),
            "machine": common.describe_machine(),
            **_summarize_turns(text.stat().st_size, turns),
        }


def _prepare_inputs(config: DataBenchConfig, directory: Path) -> tuple[Path, str]:
    """Write the JSONL file that all backends read; return its path and a tokenizer's.

    Without --input or --tokenizer they are made.
    """
    inputs = config.input
    if not inputs:
        from megaenc.data.demo import build_demo_corpus

        inputs = (str(build_demo_corpus(directory / "demo").corpus),)
    resolved = resolve.resolve_inputs(resolve.InputConfig(inputs), [config.json_key])
    documents = []
    size = 0
    limit = 1e6 * config.megabytes
    for text in resolve.read_texts(resolved, config.json_key):
        if text:
            documents.append(
                json.dumps(
                    {"id": f"{inputs[0]}:{len(documents)}", "text": text}, ensure_ascii=False
                )
                + "\n"
            )
            size += len(text)
        if size > limit:
            break
    if not documents:
        raise InputError(
            f"{inputs[0]}: no document has text under `{config.json_key}`; set --json-key"
        )
    generator = random.Random(0)
    size = 0
    path = directory / "text.jsonl"
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
        TrainTokenizerConfig(
            input=inputs,
            output=str(directory / "tokenizer"),
            vocab_size=8192,
            json_key=config.json_key,
        )
    )
    return path, str(directory / "tokenizer")


def _run_turn(backend: str, text: Path, tokenizer: str, workers: int) -> dict[str, Any]:
    """Run a backend once in a new process; add the process's seconds to the result."""
    start = time.perf_counter()
    try:
        [results] = common.run_processes(run_backend, (backend, str(text), tokenizer, workers), {})
    except RuntimeError as error:
        raise InputError(f"{backend}: {error}") from None
    return {**results, "process_seconds": time.perf_counter() - start}


def _check_same_ids(turns: dict[str, list[dict[str, Any]]]) -> None:
    """Check that all backends have the ids of the first one in the last turn.

    Raises:
        InputError: Ids differ.
    """
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
    """Return speed and memory of each backend, and megaenc's speedups.

    They are over the timed turns; speedups are within the same turn.
    """
    timed = {backend: turn[1:] for backend, turn in turns.items()}
    ours = timed["megaenc"]
    tokens = ours[0]["tokens"]
    amounts = {"megabytes_per_second": size / 1e6, "tokens_per_second": tokens}

    def speedups(backend: str) -> dict[str, float]:
        return common.summarize(
            [
                theirs["seconds"] / mine["seconds"]
                for theirs, mine in zip(timed[backend], ours, strict=True)
            ]
        )

    return {
        "bytes": size,
        "documents": ours[0]["documents"],
        "tokens": tokens,
        "ways": {
            backend: {
                name: common.summarize([amount / turn["seconds"] for turn in backend_turns])
                for name, amount in amounts.items()
            }
            | {name: common.summarize([turn[name] for turn in backend_turns]) for name in _SECONDS}
            | {"peak_mib": max(turn["peak_mib"] for turn in backend_turns)}
            for backend, backend_turns in timed.items()
        },
        **{name: speedups(backend) for name, (backend, _) in _RATIOS.items()},
        "turns": turns,
    }


def format_table(results: dict[str, Any]) -> str:
    """Return a table of speed and memory by tokenizer, and megaenc's ratios."""
    size = (
        f"{results['bytes'] / 1e6:,.1f} MB of JSONL, {results['documents']:,} documents, "
        f"{results['tokens']:,} tokens"
    )
    lines = [
        f"{size}; the ids of all are identical",
        f"{'':18}{'MB/s':>8}{'lowest':>8}{'highest':>8}{'tokens/s':>14}{'MiB':>8}",
    ]
    for backend, row in results["ways"].items():
        speed = row["megabytes_per_second"]
        lines.append(
            f"{backend:18}{speed['median']:8.1f}{speed['lowest']:8.1f}{speed['highest']:8.1f}"
            f"{row['tokens_per_second']['median']:14,.0f}{row['peak_mib']:8,.0f}"
        )
    for name, (_, description) in _RATIOS.items():
        row = results[name]
        lines.append(
            f"{row['median']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f}) {description}"
        )
    return "\n".join(lines)


def prepare_megaenc(text: str, tokenizer: str, workers: int, directory: str) -> Work:
    """Return the function to time, which preprocesses `text` into `directory`.

    The function returns a getter of ids and lengths.
    """
    from megaenc.data.indexed.indexed_dataset import IndexArrays
    from megaenc.data.indexed.metadata import read_corpus_metadata
    from megaenc.data.preprocess.command import PreprocessConfig, prepare_job, run_job

    job = prepare_job(PreprocessConfig((text,), f"{directory}/out", tokenizer, workers=workers))

    def work() -> Callable[[], Ids]:
        (prefix,) = run_job(job)

        def ids() -> Ids:
            index = IndexArrays.map(f"{prefix}.idx")
            return np.fromfile(f"{prefix}.bin", read_corpus_metadata(prefix).dtype).astype(
                np.uint32
            ), np.array(index.lengths, np.int64)

        return ids

    return work


def prepare_gigatoken(text: str, tokenizer: str, workers: int, directory: str) -> Work:
    """Return the function to time, which encodes the JSONL file `text` by gigatoken.

    The function returns a getter of ids and lengths.
    """
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    from gigatoken import JsonlFileSource, Tokenizer

    from megaenc.data.tokenizer.tokenizer import load_tokenizer

    config = json.loads(load_tokenizer(tokenizer).backend_tokenizer.to_str())
    # Special tokens in the text are plain text
    config["added_tokens"] = [token for token in config["added_tokens"] if not token["special"]]
    encoder = Tokenizer.from_json(json.dumps({**config, "post_processor": None}))

    def work() -> Callable[[], Ids]:
        encoding = encoder.encode_files(JsonlFileSource([text]))
        return lambda: (
            np.asarray(encoding.layout.content.data),
            np.diff(encoding.layout.offsets.data),
        )

    return work


def _prepare_encode_batch(
    method: str, text: str, tokenizer: str, workers: int, directory: str
) -> Work:
    """Return the function to time, a loop over a batch method of HF tokenizers.

    The method is multithreaded; `encode_batch_fast` omits the tokens' offsets in the text.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(workers)}
    from megaenc.data.tokenizer.tokenizer import load_tokenizer

    backend = load_tokenizer(tokenizer).backend_tokenizer
    backend.encode_special_tokens = True  # special tokens in the text are plain text
    encode_batch = getattr(backend, method)

    def work() -> Callable[[], Ids]:
        rows: list[np.ndarray] = []
        with open(text, encoding="utf-8") as lines:
            texts = (json.loads(line)["text"] for line in lines)
            while batch := list(islice(texts, _BATCH_SIZE)):
                rows.extend(
                    np.array(row.ids, np.uint32)
                    for row in encode_batch(batch, add_special_tokens=False)
                )
        return lambda: (np.concatenate(rows), np.array([len(row) for row in rows]))

    return work


def prepare_datasets_map(text: str, tokenizer: str, workers: int, directory: str) -> Work:
    """Return the function to time, which encodes `text` by datasets' batched `map`.

    The function returns a getter of ids and lengths.
    """
    os.environ |= {
        "HF_DATASETS_CACHE": f"{directory}/cache",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers > 1 else "true"
    import datasets

    from megaenc.data.tokenizer.tokenizer import load_tokenizer

    hf_tokenizer = load_tokenizer(tokenizer)
    datasets.disable_progress_bars()

    def work() -> Callable[[], Ids]:
        def encode(batch: dict) -> dict:
            encoded = hf_tokenizer(
                batch["text"],
                add_special_tokens=False,
                split_special_tokens=True,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
            return {"ids": encoded["input_ids"]}

        data = datasets.load_dataset(
            "json", data_files=text, split="train", cache_dir=f"{directory}/cache"
        )
        mapped = data.map(
            encode,
            batched=True,
            remove_columns=data.column_names,
            num_proc=workers if workers > 1 else None,
        )

        def ids() -> Ids:
            columns = mapped.with_format("arrow")[:]["ids"].chunks
            lengths = [np.diff(column.offsets.to_numpy()).astype(np.int64) for column in columns]
            return np.concatenate(
                [column.flatten().to_numpy().astype(np.uint32) for column in columns]
            ), np.concatenate(lengths)

        return ids

    return work


BACKENDS = {
    "megaenc": prepare_megaenc,
    "gigatoken": prepare_gigatoken,
    "encode_batch": partial(_prepare_encode_batch, "encode_batch"),
    "encode_batch_fast": partial(_prepare_encode_batch, "encode_batch_fast"),
    "datasets.map": prepare_datasets_map,
}


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and its ended children."""
    return sum(os.times()[:4])


@contextlib.contextmanager
def _watch_peak_memory(results: dict[str, float]) -> Iterator[None]:
    """Record the peak resident MiB of this process and its children in `results`.

    The peak is that of their sum, during the block.
    """
    ended = threading.Event()
    own = psutil.Process()
    results["peak_mib"] = 0.0

    def watch() -> None:
        while not ended.wait(0.1):
            with contextlib.suppress(psutil.Error):  # a process that just ended
                size = sum(one.memory_info().rss for one in [own, *own.children(recursive=True)])
                results["peak_mib"] = max(results["peak_mib"], size / 2**20)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    ended.set()
    watcher.join()


def run_backend(arguments: tuple[str, str, str, int]) -> dict[str, Any]:
    """Run a backend once; return seconds, memory, counts and a SHA-256 of the ids.

    `arguments` are backend, text, tokenizer and workers.
    """
    # Workers forked by libraries, such as datasets.map, would otherwise outlive a killed parent.
    os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))
    name, text, tokenizer, workers = arguments
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=Path(text).parent) as directory:
        work = BACKENDS[name](text, tokenizer, workers, directory)
        with _watch_peak_memory(results):
            start = time.perf_counter()
            cpu_start = _cpu_seconds()
            read_ids = work()
            results["seconds"] = time.perf_counter() - start
            results["processor_seconds"] = _cpu_seconds() - cpu_start
        results["peak_mib"] = max(results["peak_mib"], common.peak_resident_bytes() / 2**20)
        ids, lengths = read_ids()
        lengths = lengths[lengths > 0].astype("<i8")  # preprocessing drops documents without tokens
        digest = hashlib.sha256(np.ascontiguousarray(ids, "<u4").data)
        digest.update(lengths.data)
    return results | {"documents": len(lengths), "tokens": len(ids), "sha256": digest.hexdigest()}


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Compare tokenizers, write the results as JSON to --output, and print a table."""
    silence_libraries()
    config = flags.parse(
        DataBenchConfig, argv, prog="python benchmarks/preprocess.py", description=__doc__
    )
    results = measure_tokenization(config)
    common.write_report(config.output, results)
    print(format_table(results))
    print(f"written to {config.output}")


if __name__ == "__main__":
    main()
