"""Tokenization backends compared by `megaenc bench data`.

A backend takes a JSONL file, a tokenizer, a number of workers and a temporary directory. It loads its libraries and returns the
function to be timed, which returns a function for the ids, uint32[tokens], and lengths, int64[documents].
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megaenc.processes import peak_resident_bytes
from megaenc.torchelastic import die_with_parent

Ids = tuple[np.ndarray, np.ndarray]
Work = Callable[[], Callable[[], Ids]]

_BATCH_SIZE = 1000  # documents, as in datasets.map


def prepare_megaenc(text: str, tokenizer: str, workers: int, folder: str) -> Work:
    """Return the function to time: preprocess `text` into files in `folder`, and return a getter of ids and lengths."""
    from megaenc.data.indexed.indexed_dataset import IndexArrays
    from megaenc.data.indexed.metadata import read_corpus_metadata
    from megaenc.data.preprocess.command import PreprocessConfig, prepare_preprocessing

    run = prepare_preprocessing(PreprocessConfig((text,), f"{folder}/out", tokenizer, workers=workers))

    def work() -> Callable[[], Ids]:
        (prefix,) = run()

        def ids() -> Ids:
            index = IndexArrays.map(f"{prefix}.idx")
            return np.fromfile(f"{prefix}.bin", read_corpus_metadata(prefix).dtype).astype(np.uint32), np.array(
                index.lengths, np.int64
            )

        return ids

    return work


def prepare_gigatoken(text: str, tokenizer: str, workers: int, folder: str) -> Work:
    """Return the function to time: encode the JSONL file `text` by gigatoken, and return a getter of ids and lengths."""
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    from gigatoken import JsonlFileSource, Tokenizer

    from megaenc.data.tokenizer.tokenizer import load_tokenizer

    config = json.loads(load_tokenizer(tokenizer).backend_tokenizer.to_str())
    config["added_tokens"] = [
        token for token in config["added_tokens"] if not token["special"]
    ]  # special tokens in the text are plain text
    encoder = Tokenizer.from_json(json.dumps({**config, "post_processor": None}))

    def work() -> Callable[[], Ids]:
        encoding = encoder.encode_files(JsonlFileSource([text]))
        return lambda: (np.asarray(encoding.layout.content.data), np.diff(encoding.layout.offsets.data))

    return work


def _prepare_encode_batch(method: str, text: str, tokenizer: str, workers: int, folder: str) -> Work:
    """Return the timed function of a loop over a batch method of Hugging Face tokenizers, which is multithreaded.

    `encode_batch_fast` omits the tokens' offsets in the text.
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
                rows.extend(np.array(row.ids, np.uint32) for row in encode_batch(batch, add_special_tokens=False))
        return lambda: (np.concatenate(rows), np.array([len(row) for row in rows]))

    return work


def prepare_datasets_map(text: str, tokenizer: str, workers: int, folder: str) -> Work:
    """Return the function to time: encode `text` by datasets' batched `map`, and return a getter of ids and lengths."""
    os.environ |= {"HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
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

        data = datasets.load_dataset("json", data_files=text, split="train", cache_dir=f"{folder}/cache")
        mapped = data.map(encode, batched=True, remove_columns=data.column_names, num_proc=workers if workers > 1 else None)

        def ids() -> Ids:
            columns = mapped.with_format("arrow")[:]["ids"].chunks
            lengths = [np.diff(column.offsets.to_numpy()).astype(np.int64) for column in columns]
            return np.concatenate([column.flatten().to_numpy().astype(np.uint32) for column in columns]), np.concatenate(lengths)

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


def run_backend(arguments: tuple[str, str, str, int]) -> dict[str, Any]:
    """Run (backend, text, tokenizer, workers) once; return seconds, memory, counts and a SHA-256 of the ids, by name."""
    # Workers forked by libraries, such as datasets.map, would otherwise outlive a killed parent.
    os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))
    name, text, tokenizer, workers = arguments
    with tempfile.TemporaryDirectory(dir=Path(text).parent) as folder:
        work = BACKENDS[name](text, tokenizer, workers, folder)
        start, cpu_seconds = time.perf_counter(), _cpu_seconds()
        result = work()
        seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu_seconds
        peak = peak_resident_bytes() / 2**20
        ids, lengths = result()
        lengths = lengths[lengths > 0].astype("<i8")  # preprocessing drops documents without tokens
        digest = hashlib.sha256(np.ascontiguousarray(ids, "<u4").data)
        digest.update(lengths.data)
    results = {"seconds": seconds, "processor_seconds": cpu_seconds, "peak_mib": peak, "documents": len(lengths)}
    return {**results, "tokens": len(ids), "sha256": digest.hexdigest()}
