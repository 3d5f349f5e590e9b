"""Tokenise text once, into the .bin and .idx that training reads, with a .json beside them that says what they are."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import megaenc
from megaenc import flags
from megaenc.atomic_io import atomic_files, exit_on_sigterm
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.data.indexed.indexed_dataset import IndexedWriter, open_writers, token_dtype
from megaenc.data.indexed.metadata import FORMAT, CorpusMetadata, TokenizerIdentity
from megaenc.data.preprocess.outputs import (
    output_files,
    output_prefixes,
    refuse_existing_outputs,
    compute_sha256,
    report_stale_files,
    find_outputs_by_hash,
)
from megaenc.data.preprocess.resumable import PartitionStore, read_merge_record, open_work_folder
from megaenc.data.preprocess.sentence_splitter import PunktModel, load_installed_punkt, train_punkt
from megaenc.data.preprocess.worker import BlockTokenizer
from megaenc.data.sources import resolve
from megaenc.data.sources.base import LineFile
from megaenc.errors import InputError, handle_command_errors
from megaenc.output_paths import check_parent_writable, create_parent_with_rollback, remove_new_parents_on_error
from megaenc.processes import ThreadPool, ProcessPool, check_process_count, usable_core_count

_MAX_PARTITIONS = 100_000  # each is a few files


@dataclass(frozen=True)
class PreprocessConfig(resolve.InputConfig):
    """What preprocessing takes."""

    output_prefix: str
    """The files are OUTPUT_PREFIX_KEY_document.bin, .idx and .json, for each JSON key."""
    tokenizer: str
    """Folder of a Hugging Face fast tokenizer, or its name on the Hub."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the texts in each JSON object, columns of a table; each makes a corpus of its own."""
    append_eod: bool = False
    """End every document with the tokenizer's end-of-sequence token."""
    split_sentences: bool = False
    """Make a sequence of the .idx of every sentence instead of every document; documents stay what they are."""
    punkt_language: str = "english"
    """Language of nltk's Punkt model for --split-sentences; where it is not installed, one is learnt from the input."""
    workers: int = field(default_factory=usable_core_count)
    """Processes that tokenise; up to four threads, where JSONL or lines of text go through gigatoken."""
    partitions: int = 1
    """Cut the input into so many parts: after a stop the same command goes on with the parts that are missing."""
    skip_bad_lines: bool = False
    """Leave out lines, rows and files that hold no text to read, and count them, instead of stopping at the first."""


_Counts = dict[str, int]
"""How many `documents` there were, how many were `skipped`, and the `size` of all in bytes as they were parsed."""


@dataclass(frozen=True)
class _PreprocessJob:
    """One run: what to read, what to do with it, and where it goes."""

    settings: PreprocessConfig
    prefixes: list[Path]
    found: resolve.ResolvedInputs
    work: BlockTokenizer
    identity: TokenizerIdentity
    vocab_size: int

    def plan(self) -> dict[str, object]:
        """What the parts of the corpus depend on."""
        files, plan = hashlib.sha256(), dataclasses.asdict(self.settings)
        for entry in self.found.files():
            files.update(repr(entry).encode())
        for name in ("output_prefix", "workers", "split_sentences", "punkt_language"):
            del plan[name]
        sentences = None if self.work.punkt is None else self.work.punkt.describe()
        made_with = {"tokenizer": self.identity.fingerprint, "sentences": sentences, "megaenc": megaenc.__version__}
        return {"input": self.settings.input, "files": files.hexdigest(), **plan, **made_with}

    def sidecar(self, writer: IndexedWriter, counts: _Counts, files: Sequence[Path]) -> CorpusMetadata:
        """Finish the corpus of one key; `files` are its .bin and .idx."""
        hashes = writer.finish()
        return CorpusMetadata(
            format=FORMAT,
            tokenizer=self.identity,
            vocab_size=self.vocab_size,
            eod=self.work.eod,
            append_eod=self.settings.append_eod,
            documents=writer.documents,
            sequences=writer.sequences,
            tokens=writer.tokens,
            empty_documents=counts["documents"] - writer.documents,
            skipped_lines=counts["skipped"],
            dtype=self.work.dtype,
            bin_bytes=files[0].stat().st_size,
            idx_bytes=files[1].stat().st_size,
            sha256=hashes,
            sources=self.found.origins,
            megaenc=megaenc.__version__,
            sentences=None if self.work.punkt is None else self.work.punkt.describe(),
        )


def preprocess(settings: PreprocessConfig) -> list[Path]:
    """Tokenise `settings.input`; return the corpus prefixes written (`OUTPUT_PREFIX_KEY_document`), one a key.

    All files appear whole or not at all, the .idx last; the bytes depend neither on the number of workers or partitions nor on
    the kind of file that a text came in. Raises InputError for input, tokenizer or output that cannot be used, for input that
    changes while it is read, and when a worker dies.
    """
    return prepare_preprocessing(settings)()


def prepare_preprocessing(settings: PreprocessConfig) -> Callable[[], list[Path]]:
    """The part of `preprocess` that looks at flags and input and loads the tokenizer; calling what it returns does the rest."""
    if settings.partitions > _MAX_PARTITIONS:
        raise InputError(f"--partitions {settings.partitions}: expected at most {_MAX_PARTITIONS:,}")
    prefixes = output_prefixes(settings.output_prefix, settings.json_keys)
    folder = Path(f"{settings.output_prefix}_parts")
    report_stale_files(*output_files(prefixes), folder)
    noted = read_merge_record(folder) if settings.partitions > 1 else {}  # whether they are what was noted is seen under the lock
    refuse_existing_outputs(prefixes, but=[prefixes[0].with_name(name) for name in noted])
    for name in ("workers", "partitions"):
        if getattr(settings, name) < 1:
            raise InputError(f"--{name} {getattr(settings, name)}: expected at least 1")
    check_process_count("--workers", settings.workers)
    if settings.punkt_language != "english" and not settings.split_sentences:
        raise InputError(f"--punkt-language {settings.punkt_language}: expected --split-sentences with it")
    found = resolve.resolve_inputs(settings, settings.json_keys)
    for remark in found.messages:
        print_rank_0(remark)
    check_parent_writable(prefixes[0], "--output-prefix")
    return partial(_run_job, _build_job(settings, prefixes, found), folder)


def _run_job(job: _PreprocessJob, folder: Path) -> list[Path]:
    started = time.monotonic()
    with create_parent_with_rollback(job.prefixes[0], "--output-prefix"), remove_new_parents_on_error(folder / "part"):
        if job.settings.partitions > 1:
            made = _write_in_partitions(job, folder)
        else:
            with _start_workers(job, job.settings.workers) as workers:
                made = _write_corpora(job, partial(_tokenize_ranges, job, workers), lambda hashes: refuse_existing_outputs(job.prefixes))
    seconds = time.monotonic() - started
    for prefix, corpus in zip(job.prefixes, made, strict=True):
        print_rank_0(f"{prefix}: {_format_summary(corpus)}, in {seconds:.1f} s")
    return job.prefixes


def _build_job(settings: PreprocessConfig, prefixes: list[Path], found: resolve.ResolvedInputs) -> _PreprocessJob:
    from megaenc.data.tokenizer.tokenizer import get_encoder, load_tokenizer, read_vocabulary

    tokenizer = load_tokenizer(settings.tokenizer)
    vocabulary = read_vocabulary(tokenizer)
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
    work = BlockTokenizer(
        encoder=get_encoder(tokenizer),
        keys=settings.json_keys,
        eod=vocabulary.eos_id if settings.append_eod else None,
        dtype=token_dtype(vocabulary.size),
        skip_bad=settings.skip_bad_lines,
        punkt=_load_or_train_punkt(settings, found) if settings.split_sentences else None,
    )
    return _PreprocessJob(settings, prefixes, found, work, identity, vocabulary.size)


def _load_or_train_punkt(settings: PreprocessConfig, found: resolve.ResolvedInputs) -> PunktModel:
    punkt = load_installed_punkt(settings.punkt_language)
    if punkt is not None:
        print_rank_0(f"sentences: Punkt's model of {punkt.language}, as installed")
        return punkt
    pieces = (block.documents(settings.json_keys, settings.skip_bad_lines) for block in resolve.read_blocks(found))
    punkt = train_punkt(text for piece in pieces for texts in piece.texts for text in texts)
    print_rank_0(
        f"sentences: nltk's data hold no Punkt model of {settings.punkt_language} (punkt_tab); learnt one from the beginning of "
        f"the input, {len(punkt.parameters.abbrev_types):,} abbreviations"
    )
    return punkt


def _write_corpora(
    job: _PreprocessJob, fill: Callable[[list[IndexedWriter]], _Counts], last_look: Callable[[dict[str, str]], None]
) -> list[CorpusMetadata]:
    """Have `fill` write every corpus to temporary names; rename them when all are whole.

    `last_look` comes right before that, is given the sha256 of each file by its name to be, and may refuse by an InputError.
    """
    finals, count = output_files(job.prefixes), len(job.prefixes)
    hashes: dict[str, str] = {}

    def look() -> None:
        job.found.check_unchanged()
        last_look(hashes)

    with atomic_files(*finals, last_look=look) as temporary:
        bins, notes, indices = temporary[:count], temporary[count : 2 * count], temporary[2 * count :]
        with open_writers([*bins, *indices], job.work.dtype) as writers:
            counts = fill(writers)
            for key, writer in zip(job.settings.json_keys, writers, strict=True):
                if not writer.documents:
                    raise InputError(f"{job.settings.input[0]}: no document holds any text under `{key}`")
            made = [job.sidecar(writer, counts, files) for writer, *files in zip(writers, bins, indices, strict=True)]
        for corpus, path in zip(made, notes, strict=True):
            corpus.write(path)
        told = [corpus.sha256["bin"] for corpus in made], map(compute_sha256, notes), [corpus.sha256["idx"] for corpus in made]
        hashes.update(zip([path.name for path in finals], chain(*told), strict=True))
    return made


# So many threads have the interpreter's lock, which parsing takes, to themselves most of the time; more wait for each other.
_MAX_THREADS = 4


def _start_workers(job: _PreprocessJob, count: int) -> ProcessPool | ThreadPool:
    """Threads where they do as well as processes, which take a second to start, and each a copy of the tokenizer in memory."""
    in_lines = all(isinstance(source, LineFile) for source in job.found.sources)  # blocks of which are small, whatever they hold
    threads = in_lines and count <= _MAX_THREADS and job.work.encoder.is_fast and job.work.punkt is None
    return (ThreadPool if threads else ProcessPool)(job.work, count)


def _write_in_partitions(job: _PreprocessJob, folder: Path) -> list[CorpusMetadata]:
    """As `_write_corpora`, part by part: those that `folder` holds already are not made again."""
    spans = resolve.partition_inputs(job.found, job.settings.partitions)
    with open_work_folder(folder, job.plan()):
        parts = PartitionStore(folder, job.settings.json_keys, job.work.dtype, len(spans))
        missing = parts.missing_partitions()
        # What these parts have made may be made again; anything else may be by a process that has just left the folder.
        ours = find_outputs_by_hash(job.prefixes, read_merge_record(folder))
        refuse_existing_outputs(job.prefixes, but=ours)
        if len(missing) < len(spans):
            print_rank_0(f"{folder}: {len(spans) - len(missing)} of {len(spans)} parts are there; goes on with the others")
        elif len(spans) < job.settings.partitions:
            print_rank_0(f"--partitions {job.settings.partitions}: the input can be cut into {len(spans)} parts at most")

        def merge(writers: list[IndexedWriter]) -> _Counts:
            noted = parts.merge(writers)
            return {name: sum(counts[name] for counts in noted) for name in noted[0]}

        def last_look(hashes: dict[str, str]) -> None:
            parts.record_merge(hashes)
            refuse_existing_outputs(job.prefixes, but=ours)

        try:
            with _start_workers(job, job.settings.workers if missing else 0) as workers:
                for number in missing:
                    fill = partial(_tokenize_ranges, job, workers, spans=spans[number], label=f"part {number + 1} of {len(spans)}")
                    parts.write(number, fill, last_look=partial(job.found.check_unchanged, spans[number]))
            return _write_corpora(job, merge, last_look)
        except BaseException:
            if done := len(spans) - len(parts.missing_partitions()):
                also = "" if done < len(spans) else ", or remove the folder"
                print_rank_0(f"{folder}: {done} of {len(spans)} parts are done; the same command goes on from there{also}")
            raise


def _tokenize_ranges(
    job: _PreprocessJob,
    workers: ProcessPool | ThreadPool,
    writers: list[IndexedWriter],
    spans: Sequence[resolve.DocumentRange] | None = None,
    label: str = "tokenising",
) -> _Counts:
    """Run the workers over `spans` (None: all) of the input and write what they make of it."""
    counts = dict.fromkeys(("documents", "skipped", "size"), 0)
    started = time.monotonic()
    try:
        with ProgressLine(label, job.found.known_size) as progress:
            for block in workers.map(resolve.read_blocks(job.found, spans)):
                for writer, *columns in zip(writers, block.tokens, block.lengths, block.counts, strict=True):
                    writer.add_documents(*columns)
                for name in counts:
                    counts[name] += getattr(block, name)
                speed = counts["size"] / 1e6 / max(time.monotonic() - started, 1e-9)
                tokens = sum(writer.tokens for writer in writers)
                progress.update(block.position, **{"MB/s": round(speed, 1)}, documents=counts["documents"], tokens=tokens)
    except InputError:
        # A file that changes may look damaged, or kill the worker that has it mapped: then that it changed is the error.
        job.found.check_unchanged(spans)
        raise
    return counts


def _format_summary(corpus: CorpusMetadata) -> str:
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
    """The command `megaenc preprocess`, also known as tools/preprocess_data.py."""
    silence_libraries()
    settings = flags.parse(PreprocessConfig, argv, prog="megaenc preprocess", description=__doc__)
    with exit_on_sigterm():
        preprocess(settings)
