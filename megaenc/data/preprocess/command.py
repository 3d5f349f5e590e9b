"""Command `megaenc preprocess`: tokenization of text into the .bin, .idx and .json files that training reads."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import tyro

import megaenc
from megaenc import flags
from megaenc.atomic_io import atomic_files, exit_on_sigterm
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.data.indexed.indexed_dataset import IndexedWriter, open_writers, token_dtype
from megaenc.data.indexed.metadata import FORMAT, CorpusMetadata, TokenizerIdentity
from megaenc.data.preprocess.outputs import (
    compute_sha256,
    find_outputs_by_hash,
    output_files,
    output_prefixes,
    refuse_existing_outputs,
    report_stale_files,
)
from megaenc.data.preprocess.resumable import PartitionStore, open_work_folder, read_merge_record
from megaenc.data.preprocess.sentence_splitter import PunktModel, load_installed_punkt, train_punkt
from megaenc.data.preprocess.worker import BlockTokenizer
from megaenc.data.sources import resolve
from megaenc.data.sources.base import LineFile
from megaenc.errors import InputError, handle_command_errors
from megaenc.output_paths import check_parent_writable, create_parent_with_rollback, remove_new_parents_on_error
from megaenc.processes import ProcessPool, ThreadPool, check_process_count, usable_core_count

_MAX_PARTITIONS = 100_000  # with a few files each


@dataclass(frozen=True)
class PreprocessConfig(resolve.InputConfig):
    """Flags of `megaenc preprocess`: input, output prefix, tokenizer, keys, sentence splitting, workers and partitions."""

    output_prefix: str
    """Prefix of the output files, OUTPUT_PREFIX_KEY_document.bin, .idx and .json for each JSON key."""
    tokenizer: str
    """Hugging Face fast tokenizer, a folder or a name on the Hub."""
    json_keys: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--json-key",))] = ("text",)
    """Keys of the texts in each JSON object, or columns of a table. Each key gives a corpus of its own."""
    append_eod: bool = False
    """Append the tokenizer's end-of-sequence token to every document."""
    split_sentences: bool = False
    """Store each sentence, not each document, as a sequence of the .idx; needed for --packing sentences."""
    punkt_language: str = "english"
    """Language of nltk's Punkt model for --split-sentences. If it is not installed, a model is trained on the input."""
    workers: int = field(default_factory=usable_core_count)
    """Number of worker processes. JSONL and text lines that gigatoken can tokenize use threads up to four."""
    partitions: int = 1
    """Number of partitions of the input that are written one by one. After an interruption, the same command resumes."""
    skip_bad_lines: bool = False
    """Skip and count lines, rows and files without readable text instead of stopping at the first."""


_Counts = dict[str, int]
"""Number of `documents` and `skipped` ones, and parsed `size` in bytes."""


@dataclass(frozen=True)
class _PreprocessJob:
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
        for name in ("output_prefix", "workers", "split_sentences", "punkt_language"):
            del plan[name]
        sentences = None if self.block_tokenizer.punkt is None else self.block_tokenizer.punkt.describe()
        made_with = {"tokenizer": self.identity.fingerprint, "sentences": sentences, "megaenc": megaenc.__version__}
        return {"input": self.settings.input, "files": files.hexdigest(), **plan, **made_with}

    def build_metadata(self, writer: IndexedWriter, counts: _Counts, files: Sequence[Path]) -> CorpusMetadata:
        """Finish `writer`, which writes the .idx, and return its corpus's metadata; `files` are its .bin and .idx."""
        hashes = writer.finish()
        return CorpusMetadata(
            format=FORMAT,
            tokenizer=self.identity,
            vocab_size=self.vocab_size,
            eod=self.block_tokenizer.eod,
            append_eod=self.settings.append_eod,
            documents=writer.documents,
            sequences=writer.sequences,
            tokens=writer.tokens,
            empty_documents=counts["documents"] - writer.documents,
            skipped_lines=counts["skipped"],
            dtype=self.block_tokenizer.dtype,
            bin_bytes=files[0].stat().st_size,
            idx_bytes=files[1].stat().st_size,
            sha256=hashes,
            sources=self.inputs.origins,
            megaenc=megaenc.__version__,
            sentences=None if self.block_tokenizer.punkt is None else self.block_tokenizer.punkt.describe(),
        )


def preprocess(settings: PreprocessConfig) -> list[Path]:
    """Tokenize the input to a .bin, .idx and .json per JSON key; return their prefixes; InputError if it is unusable.

    Files appear complete or not at all, the .idx last. Their bytes do not depend on workers, partitions or kinds of input files.
    Raises InputError for unusable input, tokenizer or output, for input that changes meanwhile, and if a worker dies.
    """
    return prepare_preprocessing(settings)()


def prepare_preprocessing(settings: PreprocessConfig) -> Callable[[], list[Path]]:
    """Check flags and input, load the tokenizer; return a function that writes the corpora and returns their prefixes."""
    if settings.partitions > _MAX_PARTITIONS:
        raise InputError(f"--partitions {settings.partitions}: expected at most {_MAX_PARTITIONS:,}")
    prefixes = output_prefixes(settings.output_prefix, settings.json_keys)
    folder = Path(f"{settings.output_prefix}_parts")
    report_stale_files(*output_files(prefixes), folder)
    recorded = read_merge_record(folder) if settings.partitions > 1 else {}  # checked later, under the lock
    refuse_existing_outputs(prefixes, allowed=[prefixes[0].with_name(name) for name in recorded])
    for name in ("workers", "partitions"):
        if getattr(settings, name) < 1:
            raise InputError(f"--{name} {getattr(settings, name)}: expected at least 1")
    check_process_count("--workers", settings.workers)
    if settings.punkt_language != "english" and not settings.split_sentences:
        raise InputError(f"--punkt-language {settings.punkt_language}: expected --split-sentences with it")
    inputs = resolve.resolve_inputs(settings, settings.json_keys)
    for message in inputs.messages:
        print_rank_0(message)
    check_parent_writable(prefixes[0], "--output-prefix")
    return partial(_run_job, _build_job(settings, prefixes, inputs), folder)


def _run_job(job: _PreprocessJob, folder: Path) -> list[Path]:
    """Write the corpora of a job, print a summary of each and return their prefixes."""
    started = time.monotonic()
    with create_parent_with_rollback(job.prefixes[0], "--output-prefix"), remove_new_parents_on_error(folder / "part"):
        if job.settings.partitions > 1:
            corpora = _write_in_partitions(job, folder)
        else:
            with _start_workers(job, job.settings.workers) as workers:
                corpora = _write_corpora(
                    job, partial(_tokenize_ranges, job, workers), lambda hashes: refuse_existing_outputs(job.prefixes)
                )
    seconds = time.monotonic() - started
    for prefix, corpus in zip(job.prefixes, corpora, strict=True):
        print_rank_0(f"{prefix}: {_format_summary(corpus)}, in {seconds:.1f} s")
    return job.prefixes


def _build_job(settings: PreprocessConfig, prefixes: list[Path], inputs: resolve.ResolvedInputs) -> _PreprocessJob:
    """Load the tokenizer and build the job that writes the corpora at `prefixes`. Raises InputError."""
    from megaenc.data.tokenizer.tokenizer import get_encoder, load_tokenizer, read_vocabulary

    tokenizer = load_tokenizer(settings.tokenizer)
    vocabulary = read_vocabulary(tokenizer)
    if settings.append_eod and vocabulary.eos_id is None:
        raise InputError(
            f"--append-eod: tokenizer {settings.tokenizer} has no end-of-sequence token to append; expected an eos_token"
        )
    if not settings.append_eod:  # before hours of work
        remedy = f"--append-eod appends {tokenizer.eos_token}" if vocabulary.eos_id is not None else "the tokenizer has none"
        print_rank_0(f"no EOS token is appended to documents; {remedy}")
    folder = Path(settings.tokenizer)
    identity = TokenizerIdentity(
        name=folder.resolve().name if folder.is_dir() else settings.tokenizer,
        fingerprint=vocabulary.fingerprint,
        eos_id=vocabulary.eos_id,
        mask_id=vocabulary.mask_id,
    )
    block_tokenizer = BlockTokenizer(
        encoder=get_encoder(tokenizer),
        keys=settings.json_keys,
        eod=vocabulary.eos_id if settings.append_eod else None,
        dtype=token_dtype(vocabulary.size),
        skip_bad=settings.skip_bad_lines,
        punkt=_load_or_train_punkt(settings, inputs) if settings.split_sentences else None,
    )
    return _PreprocessJob(settings, prefixes, inputs, block_tokenizer, identity, vocabulary.size)


def _load_or_train_punkt(settings: PreprocessConfig, inputs: resolve.ResolvedInputs) -> PunktModel:
    """Return the installed Punkt model of the language, or train one on the inputs if there is none."""
    punkt = load_installed_punkt(settings.punkt_language)
    if punkt is not None:
        print_rank_0(f"sentences: installed Punkt model for {punkt.language}")
        return punkt
    pieces = (block.parse(settings.json_keys, settings.skip_bad_lines) for block in resolve.read_blocks(inputs))
    punkt = train_punkt(text for piece in pieces for texts in piece.texts for text in texts)
    print_rank_0(
        f"sentences: nltk has no Punkt model for {settings.punkt_language} (punkt_tab); trained one on the beginning of "
        f"the input, {len(punkt.parameters.abbrev_types):,} abbreviations"
    )
    return punkt


def _write_corpora(
    job: _PreprocessJob, fill: Callable[[list[IndexedWriter]], _Counts], before_rename: Callable[[dict[str, str]], None]
) -> list[CorpusMetadata]:
    """Write all corpora with `fill` to temporary files, rename these and return the metadata.

    `before_rename` is called with the sha256 of each final file name; it may refuse by raising InputError.
    """
    finals, count = output_files(job.prefixes), len(job.prefixes)
    hashes: dict[str, str] = {}

    def check_before_rename() -> None:
        job.inputs.check_unchanged()
        before_rename(hashes)

    with atomic_files(*finals, before_rename=check_before_rename) as temporary:
        bins, jsons, indices = temporary[:count], temporary[count : 2 * count], temporary[2 * count :]
        with open_writers([*bins, *indices], job.block_tokenizer.dtype) as writers:
            counts = fill(writers)
            for key, writer in zip(job.settings.json_keys, writers, strict=True):
                if not writer.documents:
                    raise InputError(f"{job.settings.input[0]}: no document holds any text under `{key}`")
            corpora = [job.build_metadata(writer, counts, files) for writer, *files in zip(writers, bins, indices, strict=True)]
        for metadata, path in zip(corpora, jsons, strict=True):
            metadata.write(path)
        sha256 = (
            [corpus.sha256["bin"] for corpus in corpora],
            map(compute_sha256, jsons),
            [corpus.sha256["idx"] for corpus in corpora],
        )
        hashes.update(zip([path.name for path in finals], chain(*sha256), strict=True))
    return corpora


# More threads would wait for each other, because parsing holds the interpreter's lock.
_MAX_THREADS = 4


def _start_workers(job: _PreprocessJob, count: int) -> ProcessPool | ThreadPool:
    """Return a pool of threads if they are as fast as processes, which need a second and a tokenizer each, else of processes."""
    in_lines = all(isinstance(source, LineFile) for source in job.inputs.sources)  # small blocks
    threads = in_lines and count <= _MAX_THREADS and job.block_tokenizer.encoder.is_fast and job.block_tokenizer.punkt is None
    return (ThreadPool if threads else ProcessPool)(job.block_tokenizer, count)


def _write_in_partitions(job: _PreprocessJob, folder: Path) -> list[CorpusMetadata]:
    """Write the missing partitions into `folder`, merge all into the corpora and return the metadata."""
    ranges = resolve.partition_inputs(job.inputs, job.settings.partitions)
    with open_work_folder(folder, job.build_plan()):
        partitions = PartitionStore(folder, job.settings.json_keys, job.block_tokenizer.dtype, len(ranges))
        missing = partitions.missing_partitions()
        # Outputs of these partitions may be overwritten; others may come from a process that has just finished here.
        own_outputs = find_outputs_by_hash(job.prefixes, read_merge_record(folder))
        refuse_existing_outputs(job.prefixes, allowed=own_outputs)
        if len(missing) < len(ranges):
            print_rank_0(f"{folder}: {len(ranges) - len(missing)} of {len(ranges)} partitions exist; writing the others")
        elif len(ranges) < job.settings.partitions:
            print_rank_0(f"--partitions {job.settings.partitions}: the input can be split into at most {len(ranges)} partitions")

        def merge(writers: list[IndexedWriter]) -> _Counts:
            partition_counts = partitions.merge(writers)
            return {name: sum(counts[name] for counts in partition_counts) for name in partition_counts[0]}

        def before_rename(hashes: dict[str, str]) -> None:
            partitions.record_merge(hashes)
            refuse_existing_outputs(job.prefixes, allowed=own_outputs)

        try:
            with _start_workers(job, job.settings.workers if missing else 0) as workers:
                for number in missing:
                    fill = partial(
                        _tokenize_ranges, job, workers, ranges=ranges[number], label=f"partition {number + 1} of {len(ranges)}"
                    )
                    partitions.write(number, fill, before_rename=partial(job.inputs.check_unchanged, ranges[number]))
            return _write_corpora(job, merge, before_rename)
        except BaseException:
            if done := len(ranges) - len(partitions.missing_partitions()):
                alternative = "" if done < len(ranges) else ", or remove the folder"
                print_rank_0(
                    f"{folder}: {done} of {len(ranges)} partitions are done; run the same command to resume{alternative}"
                )
            raise


def _tokenize_ranges(
    job: _PreprocessJob,
    workers: ProcessPool | ThreadPool,
    writers: list[IndexedWriter],
    ranges: Sequence[resolve.DocumentRange] | None = None,
    label: str = "tokenizing",
) -> _Counts:
    """Tokenize `ranges` of the input (None: all of it), pass the documents to the writers and return their counts."""
    counts = dict.fromkeys(("documents", "skipped", "size"), 0)
    started = time.monotonic()
    try:
        with ProgressLine(label, job.inputs.known_size) as progress:
            for block in workers.map(resolve.read_blocks(job.inputs, ranges)):
                for writer, *columns in zip(writers, block.tokens, block.lengths, block.counts, strict=True):
                    writer.add_documents(*columns)
                for name in counts:
                    counts[name] += getattr(block, name)
                speed = counts["size"] / 1e6 / max(time.monotonic() - started, 1e-9)
                tokens = sum(writer.tokens for writer in writers)
                progress.update(block.position, **{"MB/s": round(speed, 1)}, documents=counts["documents"], tokens=tokens)
    except InputError:
        # A file that changes may look damaged or kill the worker that maps it: report the change instead.
        job.inputs.check_unchanged(ranges)
        raise
    return counts


def _format_summary(corpus: CorpusMetadata) -> str:
    """Format the counts of a corpus for the console."""
    parts = [f"{corpus.documents:,} documents"]
    if corpus.sentences is not None:
        parts.append(f"{corpus.sequences:,} sentences")
    parts.append(f"{corpus.tokens:,} tokens of {corpus.dtype}")
    if corpus.empty_documents:
        parts.append(f"{corpus.empty_documents:,} empty documents left out")
    if corpus.skipped_lines:
        parts.append(f"{corpus.skipped_lines:,} bad documents skipped")
    return ", ".join(parts)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc preprocess` (tools/preprocess_data.py): tokenize the input to .bin, .idx and .json; print the counts."""
    silence_libraries()
    settings = flags.parse(PreprocessConfig, argv, prog="megaenc preprocess", description=__doc__)
    with exit_on_sigterm():
        preprocess(settings)
