"""Inputs, outputs and tokenizer of one preprocessing run, and the writing of its corpora."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import megaenc
from megaenc.atomic_io import atomic_files
from megaenc.console import ProgressLine
from megaenc.data.indexed.indexed_dataset import IndexedWriter, open_writers
from megaenc.data.indexed.metadata import FORMAT, CorpusMetadata, TokenizerIdentity
from megaenc.data.preprocess.config import PreprocessConfig
from megaenc.data.preprocess.outputs import compute_sha256, output_files
from megaenc.data.preprocess.resumable import BandKeys
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


@dataclass(frozen=True)
class PreprocessJob:
    """Inputs, outputs and tokenizer of one preprocessing run."""

    settings: PreprocessConfig
    prefixes: list[Path]
    inputs: resolve.ResolvedInputs
    block_tokenizer: BlockTokenizer
    identity: TokenizerIdentity
    vocab_size: int

    def build_plan(self) -> dict[str, object]:
        """Return plan.json's contents, all that decides the partitions: flags, input file stats, models and version."""
        files, plan = hashlib.sha256(), dataclasses.asdict(self.settings)
        for entry in self.inputs.file_stats():
            files.update(repr(entry).encode())
        replaced = ("output_prefix", "workers", "split_sentences", "punkt_language", "deduplicate")
        # Absent by default, as in folders of earlier versions.
        defaults = resolve.InputConfig(())
        replaced += tuple(name for name in ("encoding", "delimiter") if plan[name] == getattr(defaults, name))
        plan = {name: value for name, value in plan.items() if name not in replaced and not name.startswith("minhash_")}
        sentences = None if self.block_tokenizer.punkt is None else self.block_tokenizer.punkt.describe()
        method = self.block_tokenizer.deduplication
        special = self.block_tokenizer.special_tokens
        plan["append_eod"] = special.mode == "eod"
        del plan["special_tokens"]
        if special.mode == "template":  # absent otherwise, as in folders of earlier versions
            plan["special_tokens"] = special.to_json()
        return {
            "input": self.settings.input,
            "files": files.hexdigest(),
            **plan,
            "tokenizer": self.identity.fingerprint,
            "sentences": sentences,
            "deduplicate": None if method is None else method.describe(),
            "megaenc": megaenc.__version__,
        }

    def start_workers(self, count: int) -> AbstractContextManager[Tokenize]:
        """Start a pool of threads if as fast as processes, which need a second and a tokenizer each, else of processes."""
        tokenizer = self.block_tokenizer
        in_lines = all(isinstance(source, (LineFile, DelimitedFile)) for source in self.inputs.sources)  # small blocks
        in_rust = tokenizer.encoder.is_fast and tokenizer.punkt is None
        in_rust &= tokenizer.deduplication is None or tokenizer.deduplication.method == "exact"
        return start_pool(tokenizer, count, threads=in_lines and in_rust and count <= _MAX_THREADS)

    def tokenize_ranges(
        self,
        tokenize: Tokenize,
        writers: list[IndexedWriter],
        band_keys: BandKeys,
        ranges: Sequence[resolve.DocumentRange] | None,
        report: Callable[[TokenizedBlock, Counts, float], None],
    ) -> Counts:
        """Tokenize `ranges` of the input (None: all of it), pass the documents to the writers and return their counts.

        `report` is called after each block with it, the counts until then and the MB/s.
        """
        counts = dict.fromkeys(("documents", "skipped", "size"), 0)
        started = time.monotonic()
        try:
            for block in tokenize(resolve.read_blocks(self.inputs, ranges)):
                for writer, *columns in zip(writers, block.tokens, block.lengths, block.counts, strict=True):
                    writer.add_documents(*columns)
                for collected, keys in zip(band_keys, block.band_keys, strict=True):
                    collected.append(keys)
                for name in counts:
                    counts[name] += getattr(block, name)
                report(block, counts, counts["size"] / 1e6 / max(time.monotonic() - started, 1e-9))
        except InputError as error:
            # A file that changes may look damaged or kill the worker that maps it: report the change instead.
            self.inputs.check_unchanged(ranges)
            if isinstance(error, WorkerProcessDied) and "memory" in str(error):
                raise InputError(f"{error}; try fewer --workers, which need less memory") from None
            raise
        return counts

    def write_whole(
        self, tokenize: Tokenize, before_rename: Callable[[dict[str, str]], None] = lambda hashes: None
    ) -> list[CorpusMetadata]:
        """Tokenize the input in one go, write all corpora and return their metadata; see `write_corpora`."""
        with ProgressLine("tokenizing", self.inputs.known_size) as progress:

            def fill(writers: list[IndexedWriter]) -> tuple[Counts, list[int]]:
                def report(block: TokenizedBlock, counts: Counts, speed: float) -> None:
                    tokens = sum(writer.tokens for writer in writers)
                    progress.update(block.position, **{"MB/s": round(speed, 1)}, documents=counts["documents"], tokens=tokens)

                return self.tokenize_ranges(tokenize, writers, [], None, report), [0] * len(writers)

            return self.write_corpora(fill, before_rename)

    def write_corpora(
        self,
        fill: Callable[[list[IndexedWriter]], tuple[Counts, list[int]]],
        before_rename: Callable[[dict[str, str]], None],
    ) -> list[CorpusMetadata]:
        """Write all corpora with `fill` to temporary files, rename these and return the metadata.

        `fill` returns the counts and the number of duplicates removed by key. `before_rename` is called with the sha256 of each
        final file name; it may refuse by raising InputError.
        """
        finals, count = output_files(self.prefixes), len(self.prefixes)
        hashes: dict[str, str] = {}

        def check_before_rename() -> None:
            self.inputs.check_unchanged()
            before_rename(hashes)

        with atomic_files(*finals, before_rename=check_before_rename) as temporary:
            bins, jsons, indices = temporary[:count], temporary[count : 2 * count], temporary[2 * count :]
            with open_writers([*bins, *indices], self.block_tokenizer.dtype) as writers:
                counts, removed = fill(writers)
                for key, writer in zip(self.settings.json_keys, writers, strict=True):
                    if not writer.documents:
                        raise InputError(f"{self.settings.input[0]}: no document holds any text under `{key}`")
                corpora = [
                    self._build_metadata(writer, counts, number, files)
                    for writer, number, *files in zip(writers, removed, bins, indices, strict=True)
                ]
            for metadata, path in zip(corpora, jsons, strict=True):
                metadata.write(path)
            sha256 = (
                [corpus.sha256["bin"] for corpus in corpora],
                map(compute_sha256, jsons),
                [corpus.sha256["idx"] for corpus in corpora],
            )
            hashes.update(zip([path.name for path in finals], chain(*sha256), strict=True))
        return corpora

    def _build_metadata(self, writer: IndexedWriter, counts: Counts, removed: int, files: Sequence[Path]) -> CorpusMetadata:
        """Finish `writer`, which writes the .idx, and return its corpus's metadata; `files` are its .bin and .idx."""
        hashes = writer.finish()
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
            empty_documents=counts["documents"] - writer.documents - removed,
            skipped_lines=counts["skipped"],
            dtype=tokenizer.dtype,
            bin_bytes=files[0].stat().st_size,
            idx_bytes=files[1].stat().st_size,
            sha256=hashes,
            sources=self.inputs.origins,
            megaenc=megaenc.__version__,
            sentences=None if tokenizer.punkt is None else tokenizer.punkt.describe(),
            deduplication=None if tokenizer.deduplication is None else {**tokenizer.deduplication.describe(), "removed": removed},
            special_tokens=special.to_json(),
        )
