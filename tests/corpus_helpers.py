"""Small corpora that tests write with megatron-core, or with our own writer and a .json."""

import json
from pathlib import Path

import numpy as np
import torch

from megaenc.data.indexed.indexed_dataset import IndexedWriter
from megaenc.data.packing.builder import RunData
from megaenc.data.tokenizer.vocabulary import Vocabulary

# Four documents: one sequence, three sequences, none at all, one sequence.
DOCUMENTS = [[[5, 6, 7]], [[10, 11], [12], [13, 14, 15]], [], [[20, 21]]]
VOCABULARY = Vocabulary(size=32, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="f" * 64)


def write_corpus(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16) -> str:
    """Write a corpus with megatron-core and return its prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def write_whole_corpus(prefix: Path, documents: list[list[int]], dtype: str = "uint16", **changes) -> str:
    """Write documents that end in id 0, with a .json in which `changes` are made, and return the prefix."""
    writer = IndexedWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), dtype)
    lengths = np.array([len(tokens) for tokens in documents], dtype=np.int32)
    writer.add_documents(np.concatenate(documents).astype(np.uint32), lengths, np.ones_like(lengths))
    sha256 = writer.finish()
    sidecar = {
        "format": 1,
        "tokenizer": {"name": "demo", "fingerprint": VOCABULARY.fingerprint, "eos_id": 0, "mask_id": 1, "text_fingerprint": None},
        "vocab_size": 100,
        "eod": 0,
        "append_eod": True,
        "documents": writer.documents,
        "sequences": writer.documents,
        "tokens": writer.tokens,
        "empty_documents": 0,
        "skipped_lines": 0,
        "dtype": dtype,
        "bin_bytes": Path(f"{prefix}.bin").stat().st_size,
        "idx_bytes": Path(f"{prefix}.idx").stat().st_size,
        "sha256": sha256,
        "sources": [],
        "megaenc": "0.1.0",
        "sentences": None,
        "deduplication": None,
        "special_tokens": {"mode": "eod", "before": [], "after": [0]},
    }
    Path(f"{prefix}.json").write_text(json.dumps(sidecar | changes))
    return str(prefix)


def damage(path: str | Path, offset: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def open_data(*data_path: str, split: str = "80,20,0", packing: str = "concat", seed: int = 1, **options) -> RunData:
    """The data of a run with packs of 32 tokens."""
    return RunData.open(data_path, VOCABULARY, split=split, packing=packing, seq_length=32, seed=seed, **options)


class Numbered:
    """Documents in memory whose tokens say where they come from: 1,000,000 * name + 1000 * document + place."""

    def __init__(self, lengths, name: int = 0):
        self.name = name
        self.document_lengths = np.array(lengths, dtype=np.int64)

    def read_spans(self, documents, starts, stops):
        pieces = zip(documents, starts, stops, strict=True)
        return np.concatenate([1_000_000 * self.name + 1000 * document + np.arange(*piece) for document, *piece in pieces])
