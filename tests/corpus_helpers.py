"""Small corpora that tests write with megatron-core or with our own writer."""

import json
from pathlib import Path

import numpy as np
import torch

from megaenc import counter_rng
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


def write_whole_corpus(
    prefix: Path, documents: list[list[int]], dtype: str = "uint16", **changes
) -> str:
    """Write documents that end in id 0 and a .json with `changes`; return the prefix."""
    writer = IndexedWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), dtype)
    lengths = np.array([len(tokens) for tokens in documents], dtype=np.int32)
    writer.add_documents(
        np.concatenate(documents).astype(np.uint32), lengths, np.ones_like(lengths)
    )
    sha256 = writer.finish()
    sidecar = {
        "format": 1,
        "tokenizer": {
            "name": "demo",
            "fingerprint": VOCABULARY.fingerprint,
            "eos_id": 0,
            "mask_id": 1,
            "text_fingerprint": None,
        },
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
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def open_data(
    *data_path: str, split: str = "80,20,0", packing: str = "concat", seed: int = 1, **options
) -> RunData:
    """Return the data of a run with packs of 32 tokens."""
    return RunData.open(
        data_path, VOCABULARY, split=split, packing=packing, seq_length=32, seed=seed, **options
    )


class Numbered:
    """Documents in memory whose tokens encode their origin.

    A token is 1,000,000 * name + 1000 * document + position.
    """

    def __init__(self, lengths, name: int = 0):
        self.name = name
        self.document_lengths = np.array(lengths, dtype=np.int64)

    def read_spans(self, documents, starts, stops):
        pieces = zip(documents, starts, stops, strict=True)
        return np.concatenate(
            [
                1_000_000 * self.name + 1000 * document + np.arange(*piece)
                for document, *piece in pieces
            ]
        )


class Sentences(Numbered):
    """Documents in memory, each a list of sentence lengths."""

    def __init__(self, documents):
        super().__init__(list(map(sum, documents)))
        self.sequence_lengths = np.array(
            [length for document in documents for length in document], dtype=np.int32
        )
        self.first_sequences = np.cumsum([0, *map(len, documents)])


def expected_packs(documents, seq_length, seed, epochs):
    """Return (epoch, tokens, cu_seqlens) of each pack that starts in the first epochs.

    `documents` are lists of sentence lengths. The order is that of the stream. A pack starts at the
    first sentence that begins after the previous pack.
    """
    nonempty = [index for index, document in enumerate(documents) if sum(document)]
    stream = []  # epoch, token, whether a sentence starts here, whether a document does
    for epoch in range(epochs + 40):
        for place in counter_rng.permutation(seed, "documents", len(nonempty), counters=(epoch,)):
            offset = 0
            for length in documents[nonempty[place]]:
                for position in range(length):
                    stream.append(
                        (
                            epoch,
                            1000 * nonempty[place] + offset + position,
                            position == 0,
                            offset + position == 0,
                        )
                    )
                offset += length
    packs = []
    position = 0
    while stream[position][0] < epochs:
        piece = stream[position : position + seq_length]
        cu_seqlens = (
            [0] + [place for place in range(1, seq_length) if piece[place][3]] + [seq_length]
        )
        packs.append((piece[0][0], [token for _, token, _, _ in piece], cu_seqlens))
        position += seq_length
        while not stream[position][2]:
            position += 1
    return packs


def read_in_any_order(packs, count):
    """Read the first packs in random order; return (epoch, tokens, cu_seqlens)."""
    found = {}
    for sample in np.random.default_rng(0).permutation(count).tolist():
        pack = packs[sample]
        assert (pack.tokens.dtype, pack.cu_seqlens.dtype, pack.positions.dtype) == (
            np.int64,
            np.int32,
            np.int64,
        )
        assert (
            packs.first_sample_of_epoch(pack.epoch)
            <= sample
            < packs.first_sample_of_epoch(pack.epoch + 1)
        )
        assert (pack.sample, packs.epoch_of_sample(sample)) == (sample, pack.epoch)
        assert pack.positions.tolist() == [
            place for length in np.diff(pack.cu_seqlens) for place in range(length)
        ]
        found[sample] = (pack.epoch, pack.tokens.tolist(), pack.cu_seqlens.tolist())
    return [found[sample] for sample in range(count)]
