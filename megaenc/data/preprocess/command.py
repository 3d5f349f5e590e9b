"""Command `megaenc preprocess`: tokenization of text for training.

It writes the .bin, .idx and .json files that training reads.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaenc import flags
from megaenc.console import print_rank_0, silence_libraries
from megaenc.data.indexed.indexed_dataset import token_dtype
from megaenc.data.indexed.metadata import CorpusMetadata, TokenizerIdentity
from megaenc.data.preprocess.config import PreprocessConfig
from megaenc.data.preprocess.job import PreprocessJob
from megaenc.data.preprocess.outputs import output_files, output_prefixes, refuse_outputs
from megaenc.data.preprocess.partitions import write_in_partitions
from megaenc.data.preprocess.sentence_splitter import PunktModel, load_installed_punkt, train_punkt
from megaenc.data.preprocess.worker import BlockTokenizer, TokenIds
from megaenc.data.sources import resolve
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.errors import InputError, handle_command_errors
from megaenc.output_paths import (
    check_parent_writable,
    create_parent_with_rollback,
    remove_new_parents_on_error,
    report_stale_files,
)
from megaenc.processes import exit_on_sigterm


def preprocess(settings: PreprocessConfig) -> list[Path]:
    """Tokenize the input to a corpus per JSON key and return the corpora's prefixes.

    Prefixes are in the order of the keys. Messages, progress and a summary are printed. The .bin,
    .json and .idx of all corpora appear together or not at all, except that a kill between two
    renames may leave some, but not all .idx. Their bytes do not depend on workers, partitions or
    kinds of input files.

    Raises:
        InputError: Input, tokenizer or output is unusable, such as output that exists already;
            input changes meanwhile, or a worker dies.
    """
    return run_job(prepare_job(settings))


def prepare_job(settings: PreprocessConfig) -> PreprocessJob:
    """Return the job that `preprocess` runs, with flags, output and input checked.

    It prints messages about the input, loads the tokenizer and, for --split-sentences in a language
    without an installed model, trains a sentence model. No output is written.

    Raises:
        InputError: Flags, input or tokenizer are unusable, or output exists or cannot be written.
    """
    settings.check()
    deduplication = settings.deduplication()
    if deduplication is not None:
        deduplication.describe()  # refuses a missing package before the tokenizer is loaded
    prefixes = output_prefixes(settings.output_prefix, settings.keys)
    report_stale_files(*output_files(prefixes), settings.work_directory)
    refuse_outputs(prefixes, settings.work_directory if settings.uses_work_directory else None)
    inputs = resolve.resolve_inputs(settings, settings.keys, settings.token_dtype)
    for message in inputs.messages:
        print_rank_0(message)
    check_parent_writable(prefixes[0], "--output-prefix")
    # A slow import, after the checks.
    from megaenc.data.tokenizer.tokenizer import get_encoder, load_tokenizer, read_vocabulary

    tokenizer = load_tokenizer(settings.tokenizer)
    vocabulary = read_vocabulary(tokenizer)
    special_tokens = _choose_special_tokens(settings, tokenizer)
    directory = Path(settings.tokenizer)
    text_fingerprint = vocabulary.text_fingerprint
    if text_fingerprint == vocabulary.fingerprint:
        text_fingerprint = None
    identity = TokenizerIdentity(
        name=directory.resolve().name if directory.is_dir() else settings.tokenizer,
        fingerprint=vocabulary.fingerprint,
        eos_id=vocabulary.eos_id,
        mask_id=vocabulary.mask_id,
        text_fingerprint=text_fingerprint,
    )
    if settings.input_tokens is None:
        encoder = get_encoder(tokenizer)
    else:
        if not special_tokens.count and settings.special_tokens is None:
            _check_first_documents(settings, inputs, tokenizer)
        encoder = TokenIds(vocabulary.size, special_tokens)
    block_tokenizer = BlockTokenizer(
        encoder=encoder,
        keys=settings.keys,
        special_tokens=special_tokens,
        dtype=token_dtype(vocabulary.size),
        skip_bad=settings.skip_bad_lines,
        punkt=_load_or_train_punkt(settings, inputs) if settings.split_sentences else None,
        deduplication=deduplication,
    )
    return PreprocessJob(settings, prefixes, inputs, block_tokenizer, identity, vocabulary.size)


def run_job(job: PreprocessJob) -> list[Path]:
    """Write the corpora of a job, print a summary of each and return their prefixes.

    Prefixes are in the order of the JSON keys. Outputs and errors are those of `preprocess`.
    Missing parent directories are created, and partitions used if the settings need them.
    """
    started = time.monotonic()
    partition = job.settings.work_directory / "part"
    with (
        create_parent_with_rollback(job.prefixes[0], "--output-prefix"),
        remove_new_parents_on_error(partition),
    ):
        corpora = (
            write_in_partitions(job) if job.settings.uses_work_directory else job.write_corpora()
        )
    seconds = time.monotonic() - started
    for prefix, corpus in zip(job.prefixes, corpora, strict=True):
        print_rank_0(f"{prefix}: {_format_summary(corpus)}, in {seconds:.1f} s")
    return job.prefixes


def _choose_special_tokens(settings: PreprocessConfig, tokenizer: Any) -> SpecialTokens:
    """Return the special tokens of documents, and print them.

    Raises:
        InputError: The tokenizer lacks them; it is found before hours of work.
    """
    from megaenc.data.tokenizer.special_tokens import FLAG, read_template, resolve_special_tokens

    mode = settings.special_tokens_mode
    special = resolve_special_tokens(
        tokenizer, mode, "--append-eod" if settings.append_eod else FLAG
    )
    is_expected = settings.append_eod and special.after == (tokenizer.eos_token_id,)
    if special.count and not is_expected:
        instead = ""
        if special.mode != mode:
            instead = f", as the template of {settings.tokenizer} adds none"
        print_rank_0(
            f"special tokens of a document: {special.describe(tokenizer)} ({special.mode}{instead})"
        )
    if special.count:
        return special
    template = read_template(tokenizer)
    if template.count:
        print_rank_0(
            "no special token is added to documents; "
            f"{FLAG} template writes {template.describe(tokenizer)}"
        )
    else:
        remedy = "the tokenizer has none"
        end = tokenizer.eos_token or tokenizer.sep_token
        if end is not None:
            remedy = f"--append-eod appends {end}"
        print_rank_0(f"no EOS token is appended to documents; {remedy}")
    return special


def _check_first_documents(
    settings: PreprocessConfig, inputs: resolve.ResolvedInputs, tokenizer: Any
) -> None:
    """Raise InputError if one of the first documents of token ids has special tokens.

    Without --special-tokens, the metadata would have none.
    """
    from megaenc.data.tokenizer.special_tokens import FLAG, resolve_special_tokens

    special = resolve_special_tokens(tokenizer, "")
    block = next(resolve.read_blocks(inputs), None)
    documents = [] if block is None else block.parse(settings.keys, True).texts
    for (tokens,) in documents:
        if len(special.strip(tokens)) < len(tokens):
            raise InputError(
                f"--input-tokens {settings.input_tokens}: found special tokens of "
                f"{special.describe(tokenizer)} around a document, expected "
                f"{FLAG} {special.mode}, which adds missing ones, or {FLAG} none"
            )


def _load_or_train_punkt(settings: PreprocessConfig, inputs: resolve.ResolvedInputs) -> PunktModel:
    """Return the installed Punkt model of the language.

    If there is none, train one on the inputs.
    """
    punkt = load_installed_punkt(settings.punkt_language)
    if punkt is not None:
        print_rank_0(f"sentences: installed Punkt model for {punkt.language}")
        return punkt
    pieces = (
        block.parse(settings.keys, settings.skip_bad_lines) for block in resolve.read_blocks(inputs)
    )
    punkt = train_punkt(text for piece in pieces for texts in piece.texts for text in texts)
    print_rank_0(
        f"sentences: nltk has no Punkt model for {settings.punkt_language} (punkt_tab); "
        "trained one on the beginning of "
        f"the input, {len(punkt.parameters.abbrev_types):,} abbreviations"
    )
    return punkt


def _format_summary(corpus: CorpusMetadata) -> str:
    parts = [f"{corpus.documents:,} documents"]
    if corpus.sentences is not None:
        parts.append(f"{corpus.sequences:,} sentences")
    parts.append(f"{corpus.tokens:,} tokens of {corpus.dtype}")
    if corpus.empty_documents:
        parts.append(f"{corpus.empty_documents:,} empty documents left out")
    if corpus.deduplication is not None:
        parts.append(f"{corpus.deduplication['removed']:,} duplicates removed")
    if corpus.skipped_lines:
        parts.append(f"{corpus.skipped_lines:,} bad documents skipped")
    return ", ".join(parts)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc preprocess`: tokenize the input and print the counts.

    `argv` are the flags; None: those of this process. Wrong input exits with 2. It is also
    `tools/preprocess_data.py`.
    """
    silence_libraries()
    settings = flags.parse(PreprocessConfig, argv, prog="megaenc preprocess", description=__doc__)
    with exit_on_sigterm():
        preprocess(settings)
