"""Flags of `megaenc preprocess` and their checks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megaenc.data.preprocess.deduplicate import Deduplication
from megaenc.data.sources import resolve
from megaenc.data.sources.base import TOKEN_DTYPES
from megaenc.data.tokenizer.special_tokens import SpecialTokensMode
from megaenc.errors import InputError
from megaenc.flags import Bounds, PositiveInt
from megaenc.machine import check_process_count, usable_core_count

_MINHASH = Deduplication("minhash")


@dataclass(frozen=True)
class PreprocessConfig(resolve.InputConfig):
    """Flags of `megaenc preprocess`, with those of InputConfig; each is a field.

    The constructor checks nothing, `check` does. `input`, `output_prefix` and `tokenizer` are
    required; each of `json_keys` (text, by default) gives a corpus of its own. `input_tokens` reads
    ids instead of texts (None: texts). Documents get `special_tokens` (None: by `append_eod`, else
    none) and with `split_sentences` a sequence per sentence, by the model of `punkt_language`.
    `deduplicate` is None, "exact" or "minhash" with the minhash_ flags. `workers` processes (by
    default one per usable core) work on `partitions` parts (1); `skip_bad_lines` counts bad
    documents instead of stopping.
    """

    output_prefix: str
    """Prefix of the output files, OUTPUT_PREFIX_KEY_document.bin, .idx and .json for each JSON
    key."""
    tokenizer: str
    """Hugging Face fast tokenizer, a directory or a name on the Hub."""
    json_keys: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--json-key",))] = ("text",)
    """Keys of the texts in each JSON object, or columns of a table. Each key gives a corpus of its
    own."""
    input_tokens: str | None = None
    """Column of token ids of --tokenizer to read from MDS shards instead of texts, such as
    input_ids; a column of bytes needs a dtype, as in tokens:int64. --special-tokens adds those that
    a document lacks."""
    append_eod: bool = False
    """Append the tokenizer's end-of-sequence token, or without one SEP, to every document:
    --special-tokens eod."""
    special_tokens: SpecialTokensMode | None = None
    """Special tokens around every document. template: those that the tokenizer puts around a text,
    such as [CLS] ... [SEP]; eod: EOS, or without one SEP, after it; none, the default: only the
    text."""
    split_sentences: bool = False
    """Store each sentence, not each document, as a sequence of the .idx; needed for --packing
    sentences."""
    punkt_language: str = "english"
    """Language of nltk's Punkt model for --split-sentences. If it is not installed, a model is
    trained on the input."""
    workers: PositiveInt = field(default_factory=usable_core_count)
    """Number of worker processes. JSONL, CSV, TSV and text lines that gigatoken can tokenize use
    threads up to four."""
    partitions: Annotated[int, Bounds(low=1, high=100_000)] = 1  # each has a few files
    """Number of partitions of the input, shared by all nodes that run the same command; after an
    interruption, it resumes."""
    deduplicate: Literal["exact", "minhash"] | None = None
    """Remove documents with the text of an earlier one (exact), or with most word n-grams in common
    (minhash; needs rensa)."""
    minhash_ngram_size: Annotated[int, Bounds(low=1, high=1000)] = _MINHASH.ngram_size
    """Number of lower-case words of an n-gram for --deduplicate minhash."""
    minhash_buckets: Annotated[int, Bounds(low=1, high=1000)] = _MINHASH.buckets
    """Number of buckets. Documents that share one are duplicates; similarity s does so with
    probability 1 - (1 - s^h)^buckets."""
    minhash_hashes_per_bucket: Annotated[int, Bounds(low=1, high=100)] = _MINHASH.hashes_per_bucket
    """Number h of hashes that agree in a shared bucket. 14 buckets of 8 find 92 % of pairs of
    similarity 0.8, 5 % at 0.5."""
    skip_bad_lines: bool = False
    """Skip and count lines, rows and files without readable text instead of stopping at the
    first."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys or columns of texts, or the one column of --input-tokens.

        Each becomes a corpus.
        """
        if self.input_tokens is None:
            return self.json_keys
        return (self.input_tokens.partition(":")[0],)

    @property
    def token_dtype(self) -> str | None:
        """Return the dtype in --input-tokens COLUMN:DTYPE; None for texts.

        It is empty if the flag names none, as for columns of arrays, which have their own.
        """
        return None if self.input_tokens is None else self.input_tokens.partition(":")[2]

    @property
    def special_tokens_mode(self) -> SpecialTokensMode:
        """Return `eod` for --append-eod, else the mode of --special-tokens or `none`."""
        if self.append_eod:
            return "eod"
        return self.special_tokens or "none"

    @property
    def uses_work_directory(self) -> bool:
        """Return whether partitions are written to `work_directory` first and then merged.

        Deduplication needs it too: duplicates are known only when all documents have been read.
        """
        return self.partitions > 1 or self.deduplicate is not None

    @property
    def work_directory(self) -> Path:
        """Return the path of the directory of the partitions, OUTPUT_PREFIX_parts."""
        return Path(f"{self.output_prefix}_parts")

    def deduplication(self) -> Deduplication | None:
        """Return the method of --deduplicate with its parameters; None without it.

        The parameters are those of the --minhash flags, as they are.
        """
        if self.deduplicate is None:
            return None
        return Deduplication(
            self.deduplicate,
            self.minhash_ngram_size,
            self.minhash_buckets,
            self.minhash_hashes_per_bucket,
        )

    def check(self) -> None:
        """Raise InputError for flags that contradict, have no effect or a wrong value.

        Wrong values are too many workers and an unknown dtype of --input-tokens.
        """
        if self.append_eod and self.special_tokens not in (None, "eod"):
            raise InputError(
                f"--append-eod: found with --special-tokens {self.special_tokens}, expected one of "
                "them"
            )
        check_process_count("--workers", self.workers)
        if self.input_tokens is not None:
            self._check_input_tokens()
        if self.punkt_language != "english" and not self.split_sentences:
            raise InputError(
                f"--punkt-language {self.punkt_language}: expected --split-sentences with it"
            )
        if self.deduplicate != "minhash":
            for name in ("ngram_size", "buckets", "hashes_per_bucket"):
                value = getattr(self, f"minhash_{name}")
                if value != getattr(_MINHASH, name):
                    flag = f"--minhash-{name.replace('_', '-')}"
                    raise InputError(f"{flag} {value}: expected --deduplicate minhash with it")

    def _check_input_tokens(self) -> None:
        if self.token_dtype not in ("", *TOKEN_DTYPES):
            raise InputError(
                f"--input-tokens {self.input_tokens}: unknown dtype, expected one of "
                f"{', '.join(TOKEN_DTYPES)}"
            )
        needs_text = (
            ("--json-keys", self.json_keys != ("text",)),
            ("--split-sentences", self.split_sentences),
            ("--deduplicate", self.deduplicate is not None),
        )
        for flag, is_set in needs_text:
            if is_set:
                raise InputError(f"{flag}: found with --input-tokens, expected text")
