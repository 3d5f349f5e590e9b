"""Tokenise JSONL text once, into the .bin and .idx that training reads, with a .json beside them that says what they are."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import megaenc
from megaenc import flags
from megaenc.console import ProgressLine, quiet, say
from megaenc.data import readers
from megaenc.data.encoding import Encoder
from megaenc.data.indexed import IndexedWriter, token_dtype
from megaenc.data.sidecar import FORMAT, Sidecar, TokenizerIdentity
from megaenc.errors import InputError, one_line_errors
from megaenc.files import make_parent, refuse_existing, stopped_by_sigterm, whole_files
from megaenc.processes import Workers, usable_cores


@dataclass(frozen=True)
class PreprocessFlags:
    """What preprocessing takes."""

    input: tuple[str, ...]
    """JSONL files, plain or compressed with gzip or zstd, in the order given."""
    output_prefix: str
    """The files are OUTPUT_PREFIX_KEY_document.bin, .idx and .json, for each JSON key."""
    tokenizer: str
    """Folder of a Hugging Face fast tokenizer, or its name on the Hub."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the texts in each JSON object; each makes a corpus of its own."""
    append_eod: bool = False
    """End every document with the tokenizer's end-of-sequence token."""
    workers: int = field(default_factory=usable_cores)
    """Processes that tokenise."""
    skip_bad_lines: bool = False
    """Leave out lines that are not JSON or lack a key, and count them, instead of stopping at the first."""


@dataclass(frozen=True)
class TokenisedBlock:
    """What a worker makes of a block of lines: for each key the documents laid end to end."""

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    """int32[documents] for each key; documents without a token are left out."""
    documents: int
    skipped: int
    text_bytes: int
    position: int
    """Of the block, passed through."""


@dataclass(frozen=True)
class Tokenise:
    """The work on one block: parse the lines, encode the texts, append the end of document."""

    encoder: Encoder
    keys: tuple[str, ...]
    eod: int | None
    dtype: str
    skip_bad_lines: bool

    def __call__(self, block: readers.Block) -> TokenisedBlock:
        documents = readers.parse_block(block, self.keys, skip_bad_lines=self.skip_bad_lines)
        columns = [self._column([texts[at] for texts in documents.texts]) for at in range(len(self.keys))]
        return TokenisedBlock(
            tokens=[tokens for tokens, _ in columns],
            lengths=[lengths for _, lengths in columns],
            documents=len(documents.texts),
            skipped=documents.skipped,
            text_bytes=len(block.data),
            position=block.position,
        )

    def _column(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        rows = [row for row in self.encoder(texts) if len(row)]
        lengths = np.array([len(row) for row in rows], dtype=np.int32)
        if self.eod is not None:
            end = np.array([self.eod], dtype=np.uint32)
            rows = [part for row in rows for part in (row, end)]
            lengths += 1
        return np.concatenate([np.empty(0, np.uint32), *rows]).astype(self.dtype), lengths


def preprocess(settings: PreprocessFlags) -> list[Path]:
    """Tokenise `settings.input`; return the corpus prefixes written (`OUTPUT_PREFIX_KEY_document`), one a key.

    All files appear whole or not at all, the .json last; the bytes do not depend on the number of workers or on compression.
    Raises InputError for input, tokenizer or output that cannot be used, and when a worker dies.
    """
    started = time.monotonic()
    prefixes = _output_prefixes(settings)
    total = readers.input_bytes(settings.input)
    if settings.workers < 1:
        raise InputError(f"--workers {settings.workers}: expected at least 1")

    from megaenc.data.tokenizer import encoder_of, load_tokenizer, vocabulary_of

    tokenizer = load_tokenizer(settings.tokenizer)
    vocabulary = vocabulary_of(tokenizer)
    if settings.append_eod and vocabulary.eos_id is None:
        raise InputError(
            f"--append-eod: tokenizer {settings.tokenizer} has no end-of-sequence token to append; expected an eos_token"
        )
    folder = Path(settings.tokenizer)
    identity = TokenizerIdentity(
        name=folder.resolve().name if folder.is_dir() else settings.tokenizer,
        fingerprint=vocabulary.fingerprint,
        eos_id=vocabulary.eos_id,
        mask_id=vocabulary.mask_id,
    )
    eod = vocabulary.eos_id if settings.append_eod else None
    work = Tokenise(encoder_of(tokenizer), settings.json_keys, eod, token_dtype(vocabulary.size), settings.skip_bad_lines)

    def sidecar(writer: IndexedWriter, counts: "_Counts", files: tuple[Path, Path]) -> Sidecar:
        hashes = writer.finish()
        return Sidecar(
            format=FORMAT,
            tokenizer=identity,
            vocab_size=vocabulary.size,
            eod=eod,
            append_eod=settings.append_eod,
            documents=writer.documents,
            sequences=writer.documents,
            tokens=writer.tokens,
            empty_documents=counts.documents - writer.documents,
            skipped_lines=counts.skipped,
            dtype=work.dtype,
            bin_bytes=files[0].stat().st_size,
            idx_bytes=files[1].stat().st_size,
            sha256=hashes,
            sources=[{"path": Path(path).name, "bytes": Path(path).stat().st_size} for path in settings.input],
            megaenc=megaenc.__version__,
        )

    make_parent(prefixes[0], "--output-prefix")
    made = _write(settings, prefixes, total, work, sidecar)
    seconds = time.monotonic() - started
    for prefix, corpus in zip(prefixes, made, strict=True):
        say(f"{prefix}: {_summary(corpus)}, in {seconds:.1f} s")
    return prefixes


@dataclass
class _Counts:
    documents: int = 0
    skipped: int = 0
    text_bytes: int = 0


def _write(
    settings: PreprocessFlags,
    prefixes: list[Path],
    total: int,
    work: Tokenise,
    sidecar: Callable[[IndexedWriter, _Counts, tuple[Path, Path]], Sidecar],
) -> list[Sidecar]:
    """Run the workers over the input and write every corpus to temporary names; rename them when all are whole."""
    finals = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx", ".json") for prefix in prefixes]
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(whole_files(*finals))
        count = len(prefixes)
        bins, indices, notes = temporary[:count], temporary[count : 2 * count], temporary[2 * count :]
        writers = []
        for here, there in zip(bins, indices, strict=True):
            writers.append(IndexedWriter(here, there, work.dtype))
            stack.callback(writers[-1].close)
        counts = _tokenise(settings, total, work, writers)
        for key, writer in zip(settings.json_keys, writers, strict=True):
            if not writer.documents:
                raise InputError(
                    f"{settings.input[0]}: no document holds any text under `{key}`; expected one JSON object a line"
                )
        made = [sidecar(writer, counts, files) for writer, *files in zip(writers, bins, indices, strict=True)]
        for corpus, path in zip(made, notes, strict=True):
            corpus.write(path)
        _output_prefixes(settings)  # refuses what another attempt has put there meanwhile
    return made


def _tokenise(settings: PreprocessFlags, total: int, work: Tokenise, writers: list[IndexedWriter]) -> _Counts:
    counts = _Counts()
    started = time.monotonic()
    with Workers(work, settings.workers) as workers, ProgressLine("tokenising", total) as progress:
        for block in workers.map(readers.read_blocks(settings.input)):
            for writer, tokens, lengths in zip(writers, block.tokens, block.lengths, strict=True):
                writer.add(tokens, lengths)
            counts.documents += block.documents
            counts.skipped += block.skipped
            counts.text_bytes += block.text_bytes
            speed = counts.text_bytes / 1e6 / max(time.monotonic() - started, 1e-9)
            tokens = sum(writer.tokens for writer in writers)
            progress.update(block.position, **{"MB/s": round(speed, 1)}, documents=counts.documents, tokens=tokens)
    return counts


def _output_prefixes(settings: PreprocessFlags) -> list[Path]:
    """The corpus prefix of each key. Raises InputError when a file of theirs exists, or the flags name none or one twice."""
    if not Path(settings.output_prefix).name or settings.output_prefix.endswith("/"):
        raise InputError(f"--output-prefix {settings.output_prefix}: ends in no file name; expected something like out/corpus")
    if not settings.json_keys or len(set(settings.json_keys)) < len(settings.json_keys):
        raise InputError(f"--json-keys {' '.join(settings.json_keys)}: expected one or more different keys")
    prefixes = []
    for key in settings.json_keys:
        if not key or "/" in key:
            raise InputError(f"--json-keys {key!r}: cannot be part of a file name; expected a key without `/`")
        prefixes.append(Path(f"{settings.output_prefix}_{key}_document"))
        for suffix in (".json", ".bin", ".idx"):
            refuse_existing(Path(f"{prefixes[-1]}{suffix}"), "--output-prefix")
    return prefixes


def _summary(corpus: Sidecar) -> str:
    parts = [f"{corpus.documents:,} documents", f"{corpus.tokens:,} tokens of {corpus.dtype}"]
    if corpus.empty_documents:
        parts.append(f"{corpus.empty_documents:,} empty documents left out")
    if corpus.skipped_lines:
        parts.append(f"{corpus.skipped_lines:,} bad lines skipped")
    return ", ".join(parts)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc preprocess`, also known as tools/preprocess_data.py."""
    quiet()
    settings = flags.parse(PreprocessFlags, argv, prog="megaenc preprocess", description=__doc__)
    with stopped_by_sigterm():
        preprocess(settings)
