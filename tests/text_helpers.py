"""Small texts and a small tokenizer that the tests of the text side share."""

import csv
import functools
import gzip
import hashlib
import json
from itertools import pairwise
from pathlib import Path

from megaenc.data.preprocess.config import PreprocessConfig
from megaenc.data.tokenizer.tokenizer import train_tokenizer
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.tokenized import TextEncoder, choose_special_tokens

TEXTS = [
    (
        "The quick brown fox jumps over the lazy dog. The dog sleeps on, and the fox is gone "
        "before the morning comes."
    ),
    (
        "A document of more than one line.\n\n"
        "Its second paragraph says it's 3.14 or 1,000 of them, and they'll do.\r\n"
    ),
    "Café, naïve, Ångström; 日本語の文。 👩‍👩‍👧 and zero\u200bwidth\ufeff.",
    "The mask token spelled out, <|mask|> and <|eos|>, is text like any other.",
    "dog fox dog fox dog fox " * 20,
]

HOSTILE = [
    "",
    " ",
    "\n",
    "\x00 NUL \x00\x01\x7f",
    "line\r\nline\rline\u2028line\x85",
    "zero\u200bwidth \u200d\ufeff\u00ad",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ 𐍈",
    "e\u0301 \u00e9 \u0130 \u017f \ufb01 \u1e9e",
    "<|mask|> The<|eos|> <|eos|><|mask|>",
    "<|mas<|mask|>k|> newword newwords <|reserved|>x",
    "it's IT'S we'll 'Tis 1234567 x=1;;; ____",
    " " * 5000 + "x" * 20000 + "\n" * 3000,
    "the lazy dog " * 20000,
]


@functools.cache
def small_tokenizer():
    """Return a byte-level BPE of at most 400 ids, trained once; do not change it."""
    return train_tokenizer(TEXTS, 400)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """Write an object with id and text a line."""
    path.write_text(
        "".join(json.dumps({"id": index, "text": text}) + "\n" for index, text in enumerate(texts))
    )
    return path


def write_csv(path: Path, texts: list[str]) -> Path:
    """Write a header and rows of id and text, with the quotes of Python's writer."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("id", "text"), *enumerate(texts)])
    return path


def text_directory(directory: Path, texts: dict[str, str]) -> Path:
    """Write a file for each (path, text)."""
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def write_parquet(path: Path, texts: list[str], row_group_size: int = 2) -> Path:
    """Write columns of id and text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=row_group_size
    )
    return path


def write_mds(
    directory: Path,
    encodings: dict[str, str],
    samples: list[dict[str, bytes]],
    sizes: dict[str, int] | None = None,
    *,
    shard_samples: int = 2,
    compress: bool = False,
) -> Path:
    """Write encoded samples as MDS shards and index.json, as MosaicML streaming does.

    `sizes` has the columns whose values all have the same number of bytes.
    """
    from backports import zstd

    sizes = sizes or {}
    directory.mkdir(parents=True)
    shards = []
    for first in range(0, len(samples), shard_samples):
        entry = {
            "version": 2,
            "format": "mds",
            "compression": "zstd:7" if compress else None,
            "hashes": ["sha1", "xxh64"],
            "size_limit": 1 << 26,
            "column_names": list(encodings),
            "column_encodings": list(encodings.values()),
            "column_sizes": [sizes.get(name) for name in encodings],
        }
        rows = []
        for sample in samples[first : first + shard_samples]:
            lengths = [len(sample[name]) for name in encodings if name not in sizes]
            head = b"".join(length.to_bytes(4, "little") for length in lengths)
            rows.append(head + b"".join(sample[name] for name in encodings))
        header = json.dumps(entry).encode()
        ends = [4 + 4 * (len(rows) + 1) + len(header)]
        for row in rows:
            ends.append(ends[-1] + len(row))
        numbers = b"".join(number.to_bytes(4, "little") for number in [len(rows), *ends])
        data = numbers + header + b"".join(rows)

        def describe(name: str, content: bytes) -> dict:
            (directory / name).write_bytes(content)
            hashes = {"sha1": hashlib.sha1(content).hexdigest(), "xxh64": "unknown"}
            return {"basename": name, "bytes": len(content), "hashes": hashes}

        name = f"shard.{len(shards):05}.mds"
        entry |= {"samples": len(rows), "raw_data": describe(name, data), "zip_data": None}
        if compress:
            entry["zip_data"] = describe(f"{name}.zstd", zstd.compress(data))
            (directory / name).unlink()
        shards.append(entry)
    (directory / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return directory


def parse_blocks(
    blocks, keys=("text",), *, skip_bad: bool = False
) -> tuple[list[tuple[str, ...]], int]:
    """Return the texts of all documents of blocks, and the number of skipped ones."""
    parsed = [block.parse(keys, skip_bad) for block in blocks]
    return [texts for documents in parsed for texts in documents.texts], sum(
        documents.skipped for documents in parsed
    )


def every_source(directory: Path) -> tuple[list[Path], list[str]]:
    """Write an input of each kind; return the paths and the texts of all.

    Kinds are known by suffix or by first bytes.
    """
    import datasets
    from backports import zstd

    inside = {"a.txt": "first", "b.md": "second " * 9, "c.text": "third"}
    mixed = text_directory(directory / "mixed", inside)
    write_parquet(mixed / "d.parquet", TEXTS[:2])
    lines = write_jsonl(directory / "lines", TEXTS)
    packed_lines = directory / "lines.jsonl.gz"
    packed_lines.write_bytes(gzip.compress(lines.read_bytes()))
    rows = write_csv(directory / "rows.csv.zst", TEXTS)
    rows.write_bytes(zstd.compress(rows.read_bytes()))
    table = write_parquet(directory / "table", TEXTS)
    saved = directory / "saved"
    datasets.Dataset.from_dict({"text": ["left out", *TEXTS]}).select(range(1, 6)).save_to_disk(
        saved, num_shards=2
    )
    shards = write_mds(
        directory / "shards", {"text": "str"}, [{"text": text.encode()} for text in TEXTS]
    )
    return [lines, mixed, packed_lines, rows, table, saved, shards], [
        *TEXTS,
        *inside.values(),
        *TEXTS[:2],
        *TEXTS * 5,
    ]


def corpus_settings(corpus: Path, tokenizer: str, name: str = "out", **changes) -> PreprocessConfig:
    """Return settings for a corpus `name` next to the text: one process, EOS at ends."""
    settings = {"append_eod": True, "workers": 1, **changes}
    return PreprocessConfig((str(corpus),), str(corpus.parent / name), tokenizer, **settings)


def reference_ids(tokenizer, text: str) -> list[int]:
    """Return the ids that transformers itself makes of plain text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def documents_of(prefix: Path) -> list[list[list[int]]]:
    """Return the sequences of token ids of each document, as megatron-core reads them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    document_indices = dataset.document_indices.tolist()
    return [
        [dataset[sequence].tolist() for sequence in range(*pair)]
        for pair in pairwise(document_indices)
    ]


def contents(prefix: Path) -> list[bytes]:
    """Return the bytes of the .bin and of the .idx."""
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in (".bin", ".idx")]


def text_encoder(
    tokenizer, max_length: int, *, add_bos: bool = False, add_eos: bool = True
) -> TextEncoder:
    """Return a TextEncoder with the given --add-bos and --add-eos."""
    protocol = FinetuneConfig(add_bos=add_bos, add_eos=add_eos)
    return TextEncoder(tokenizer, max_length, choose_special_tokens(tokenizer, protocol))


def serve_hub(directory: Path, monkeypatch, tables: list[dict]) -> None:
    """Replace the Hub by one data set with a Parquet file for each table.

    Any name loads it with the real load_dataset.
    """
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    (directory / "hub").mkdir()
    for index, columns in enumerate(tables):
        pq.write_table(pa.table(columns), directory / "hub" / f"train-{index}.parquet")
    real = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, *rest, **options: real(str(directory / "hub"), *rest, **options),
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(directory / "cache"))
