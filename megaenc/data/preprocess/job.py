"""Inputs, outputs and tokenizer of one preprocessing run, which writes corpora."""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import megaenc
from megaenc.atomic_io import atomic_files
from megaenc.console import ProgressLine
from megaenc.data.indexed.indexed_dataset import IndexedWriter, open_writers
from megaenc.data.indexed.metadata import FORMAT, CorpusMetadata, TokenizerIdentity
from megaenc.data.preprocess.config import PreprocessConfig
from megaenc.data.preprocess.outputs import compute_sha256, output_files, refuse_outputs
from megaenc.data.preprocess.worker import BlockTokenizer, TokenizedBlock
from megaenc.data.sources import resolve
from megaenc.data.sources.base import LineFile
from megaenc.data.sources.delimited_files import DelimitedFile
from megaenc.data.sources.text_files import TextBlock
from megaenc.data.worker_pool import WorkerProcessDied, start_pool
from megaenc.errors import InputError

Tokenize = Callable[[Iterable[TextBlock]], Iterator[TokenizedBlock]]
"""Function of a worker pool, which tokenizes blocks in parallel and yields them in order."""
Counts = dict[str, int]
"""Number of `documents` and `skipped` ones, and parsed `size` in bytes."""
# More threads would wait for each other, because parsing holds the interpreter's lock.
_MAX_THREADS = 4


@dataclass
class CorpusOutputs:
    """Corpora that are being written, in the order of the JSON keys.

    `PreprocessJob.open_outputs` yields it. The block fills the `writers`, `removed` (number of
    duplicates of each key, at first 0) and `counts` (those of `tokenize_ranges` for the whole
    input); `metadata` are there after the block.
    """

    writers: list[IndexedWriter]
    removed: list[int]
    counts: Counts = field(default_factory=dict)
    metadata: list[CorpusMetadata] = field(default_factory=list)


@dataclass(frozen=True)
class PreprocessJob:
    """One preprocessing run, which tokenizes its inputs and writes its outputs.

    `prepare_job` builds it. `write_corpora` does all of it in one go; the other methods are for
    runs in partitions. `settings` are the flags, `inputs` the resolved inputs, and
    `block_tokenizer` tokenizes them. `prefixes` are the output paths without extension, in the
    order of the JSON keys. `identity` and `vocab_size` are those of the tokenizer, for the
    metadata.
    """

    settings: PreprocessConfig
    prefixes: list[Path]
    inputs: resolve.ResolvedInputs
    block_tokenizer: BlockTokenizer
    identity: TokenizerIdentity
    vocab_size: int

    def build_plan(self) -> dict[str, object]:
        """Return the contents of plan.json, all that decides the bytes of partitions.

        These are flags, paths, sizes and times of input files, models and version. Processes with
        equal plans share a work directory.
        """
        files = hashlib.sha256()
        for entry in self.inputs.file_stats():
            files.update(repr(entry).encode())
        replaced = ("output_prefix", "workers", "append_eod", "split_sentences", "punkt_language")
        flags = {
            name: value
            for name, value in dataclasses.asdict(self.settings).items()
            if name not in replaced and not name.startswith("minhash_")
        }
        tokenizer = self.block_tokenizer
        return {
            "input": self.settings.input,
            "files": files.hexdigest(),
            **flags,
            "tokenizer": self.identity.fingerprint,
            "special_tokens": tokenizer.special_tokens.to_json(),
            "sentences": None if tokenizer.punkt is None else tokenizer.punkt.describe(),
            "deduplicate": None
            if tokenizer.deduplication is None
            else tokenizer.deduplication.describe(),
            "megaenc": megaenc.__version__,
        }

    def start_workers(self, count: int) -> AbstractContextManager[Tokenize]:
        """Start a pool of `count` threads or processes that tokenize blocks.

        Threads are used if they are as fast as processes, which need a second and a tokenizer each.

        Returns:
            Context manager of the pool, whose value is the function that tokenizes: it takes an
            iterable of TextBlocks and yields a TokenizedBlock for each, in order. It reads at most
            two blocks per worker ahead, and raises InputError if a worker process dies.
        """
        tokenizer = self.block_tokenizer
        # Blocks of these sources are small.
        in_lines = all(
            isinstance(source, (LineFile, DelimitedFile)) for source in self.inputs.sources
        )
        in_rust = tokenizer.encoder.is_fast and tokenizer.punkt is None
        in_rust &= tokenizer.deduplication is None or tokenizer.deduplication.method == "exact"
        return start_pool(tokenizer, count, threads=in_lines and in_rust and count <= _MAX_THREADS)

    def tokenize_ranges(
        self,
        tokenize: Tokenize,
        writers: list[IndexedWriter],
        band_keys: list[list[np.ndarray]],
        ranges: Sequence[resolve.DocumentRange] | None,
        report: Callable[[float, Counts, float], None],
    ) -> Counts:
        """Tokenize part of the input, pass it to the writers and return its counts.

        `tokenize` is the function of a pool of `start_workers`. Documents are added to `writers`,
        one for each JSON key, which are not finished, and band keys to the list of each key in
        `band_keys`, which has no list without deduplication. `ranges` None is all of the input.
        After each block `report` is called with bytes on disk of `ranges` and counts until then,
        and the mean MB/s of decompressed text. Counts are of `documents`, of `skipped` bad ones,
        and of decompressed bytes (`size`).

        Raises:
            InputError: A document is bad, the input has changed, or a worker process has died.
        """
        counts = dict.fromkeys(("documents", "skipped", "size"), 0)
        first = 0.0 if ranges is None else resolve.measure_ranges(self.inputs, ranges)[0]
        started = time.monotonic()
        try:
            for block in tokenize(resolve.read_blocks(self.inputs, ranges)):
                for place, writer in enumerate(writers):
                    writer.add_documents(
                        block.tokens[place], block.lengths[place], block.counts[place]
                    )
                for collected, keys in zip(band_keys, block.band_keys, strict=True):
                    collected.append(keys)
                for name in counts:
                    counts[name] += getattr(block, name)
                speed = counts["size"] / 1e6 / max(time.monotonic() - started, 1e-9)
                report(max(0.0, block.position - first), counts, speed)
        except InputError as error:
            # A file that changes may look damaged or kill the worker that maps it.
            self.inputs.check_unchanged(ranges)
            if isinstance(error, WorkerProcessDied) and "memory" in str(error):
                raise InputError(f"{error}; try fewer --workers, which need less memory") from None
            raise
        self.inputs.check_unchanged(ranges)
        return counts

    def write_corpora(self) -> list[CorpusMetadata]:
        """Tokenize the input in one go, write all corpora and return their metadata.

        The metadata are in the order of the JSON keys. Progress is printed. Errors are those of
        `tokenize_ranges`, `open_outputs` and `refuse_outputs`. A job with deduplication needs
        `write_in_partitions` instead.
        """
        with (
            self.start_workers(self.settings.workers) as tokenize,
            ProgressLine("tokenizing", self.inputs.known_size) as progress,
            self.open_outputs(lambda hashes: refuse_outputs(self.prefixes)) as outputs,
        ):

            def report(position: float, counts: Counts, speed: float) -> None:
                tokens = sum(writer.tokens for writer in outputs.writers)
                progress.update(
                    position,
                    **{"MB/s": round(speed, 1)},
                    documents=counts["documents"],
                    tokens=tokens,
                )

            outputs.counts = self.tokenize_ranges(tokenize, outputs.writers, [], None, report)
        return outputs.metadata

    @contextlib.contextmanager
    def open_outputs(self, check: Callable[[dict[str, str]], None]) -> Iterator[CorpusOutputs]:
        """Yield all corpora to fill; after the `with` block write metadata and rename.

        The block fills the CorpusOutputs, and does not finish the writers. If the block fails, no
        file appears. Existing files are replaced unless `check` refuses. The outputs' directory
        must exist.

        Args:
            check: Called before renaming with the sha256 of each file by name without directory; it
                may refuse by raising an error.

        Raises:
            InputError: A corpus has no document, or a file cannot be written.
        """
        count = len(self.prefixes)
        hashes: dict[str, str] = {}
        with atomic_files(
            *output_files(self.prefixes), before_rename=lambda: check(hashes)
        ) as temporary:
            bins = temporary[:count]
            jsons = temporary[count : 2 * count]
            indices = temporary[2 * count :]
            with open_writers([*bins, *indices], self.block_tokenizer.dtype) as writers:
                outputs = CorpusOutputs(writers, [0] * count)
                yield outputs
                for key, writer in zip(self.settings.keys, writers, strict=True):
                    if not writer.documents:
                        raise InputError(
                            f"{self.settings.input[0]}: no document holds any text under `{key}`"
                        )
                for place in range(count):
                    outputs.metadata.append(
                        self._build_metadata(outputs, place, bins[place], indices[place])
                    )
            for prefix, metadata, path in zip(self.prefixes, outputs.metadata, jsons, strict=True):
                metadata.write(path)
                for suffix, sha256 in {**metadata.sha256, "json": compute_sha256(path)}.items():
                    hashes[f"{prefix.name}.{suffix}"] = sha256

    def _build_metadata(
        self, outputs: CorpusOutputs, place: int, bin_path: Path, idx_path: Path
    ) -> CorpusMetadata:
        """Finish writer number `place`, which writes the .idx, and return the metadata."""
        writer = outputs.writers[place]
        hashes = writer.finish()
        removed = outputs.removed[place]
        tokenizer = self.block_tokenizer
        special = tokenizer.special_tokens
        return CorpusMetadata(
            format=FORMAT,
            tokenizer=self.identity,
            vocab_size=self.vocab_size,
            eod=special.after[-1] if special.after else None,
            append_eod=bool(special.after),
            documents=writer.documents,
            sequences=writer.sequences,
            tokens=writer.tokens,
            empty_documents=outputs.counts["documents"] - writer.documents - removed,
            skipped_lines=outputs.counts["skipped"],
            dtype=tokenizer.dtype,
            bin_bytes=bin_path.stat().st_size,
            idx_bytes=idx_path.stat().st_size,
            sha256=hashes,
            sources=self.inputs.origins,
            megaenc=megaenc.__version__,
            sentences=None if tokenizer.punkt is None else tokenizer.punkt.describe(),
            deduplication=None
            if tokenizer.deduplication is None
            else {**tokenizer.deduplication.describe(), "removed": removed},
            special_tokens=special.to_json(),
        )
