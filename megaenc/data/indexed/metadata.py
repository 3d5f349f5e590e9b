"""Metadata of a tokenized corpus, PREFIX.json: tokenizer, counts, hashes, sources."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc.console import escape_unprintable
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_regular_file

FORMAT = 1


@dataclass(frozen=True)
class TokenizerIdentity:
    """Tokenizer of a corpus: name, fingerprints, and ids of two special tokens.

    `name` is that on the Hub, or the last part of the directory's path; only the fingerprints,
    those of `Vocabulary`, identify the tokenizer (`text_fingerprint` is None if it is equal to
    `fingerprint`). `eos_id` (EOS, else SEP) and `mask_id` are those of `Vocabulary`, None if the
    tokenizer lacks them. `CorpusMetadata` has the number of ids (`vocab_size`), and tells whether
    documents end with a special token (`eod`).
    """

    name: str
    """Name on the Hub, or the last part of the directory's path; only the fingerprint identifies
    the tokenizer."""
    fingerprint: str
    """See `Vocabulary.fingerprint`."""
    eos_id: int | None
    mask_id: int | None
    text_fingerprint: str | None
    """See `Vocabulary.text_fingerprint`; None if it is `fingerprint`."""


@dataclass(frozen=True)
class CorpusMetadata:
    """Contents of a corpus's PREFIX.json, which describe its .bin and .idx.

    Preprocessing writes them, `read_corpus_metadata` reads them; the file is renamed before the
    .idx, so that no corpus opens without it. `format` is the file's version and `megaenc` the
    program's. `tokenizer` and its `vocab_size`, `eod` (id that ends each document, None without
    `append_eod`) and `special_tokens` tell how text became ids. `documents`, `sequences` and
    `tokens` are numbers, and so are `empty_documents` and `skipped_lines`, which were left out.
    `dtype` (uint16 or int32), `bin_bytes`, `idx_bytes` and `sha256` (hex, by bin and idx) are of
    the files, `sources` one dict per input. `sentences` and `deduplication` describe these steps,
    None without.
    """

    format: int
    tokenizer: TokenizerIdentity
    vocab_size: int
    """Number of token ids of the tokenizer, with added tokens and without padding."""
    eod: int | None
    """Token id that ends every document; None if none was appended."""
    append_eod: bool
    """True if `eod` ends every document."""
    documents: int
    sequences: int
    """Sequences in the .idx: one per document, or one per sentence with --split-sentences."""
    tokens: int
    """Number of tokens, special tokens included."""
    empty_documents: int
    """Number of documents left out because they hold no token."""
    skipped_lines: int
    """Number of bad lines, rows or files left out by --skip-bad-lines."""
    dtype: str
    """Token dtype of the .bin, `uint16` or `int32`."""
    bin_bytes: int
    idx_bytes: int
    sha256: dict[str, str]
    """sha256 of the files in hex, under `bin` and `idx`."""
    sources: list[dict[str, Any]]
    """One entry per input, see `ResolvedInputs.origins`."""
    megaenc: str
    """Version of megaenc that wrote the corpus."""
    sentences: dict[str, Any] | None
    """Output of `PunktModel.describe`; None if each sequence is a document."""
    deduplication: dict[str, Any] | None
    """Output of `Deduplication.describe` with `removed`, the number of documents left out as
    duplicates; None without."""
    special_tokens: dict[str, Any]
    """Output of `SpecialTokens.to_json`."""

    @property
    def surrounding_tokens(self) -> SpecialTokens:
        """Return the special tokens around each document, from the field `special_tokens`."""
        return SpecialTokens.from_json(self.special_tokens, "field `special_tokens`")

    def write(self, path: Path) -> None:
        """Write all fields of the metadata to the file `path` as a JSON object.

        The file is replaced in place, not atomically.
        """
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


def metadata_path(prefix: str | Path) -> Path:
    """Return PREFIX.json, the path of a corpus's metadata.

    `prefix` is the path of the corpus without extension, as in `.../corpus_text_document`.
    """
    return Path(f"{prefix}.json")


def read_corpus_metadata(prefix: str | Path) -> CorpusMetadata:
    """Return the checked contents of PREFIX.json.

    They are not compared with the .bin and .idx, and unknown fields are ignored.

    Args:
        prefix: Path of the corpus without extension.

    Raises:
        InputError: The file is missing, not JSON, of another format or incomplete, or a value is
            out of range.
    """
    path = metadata_path(prefix)
    try:
        values = parse_json(read_regular_file(path))
    except FileNotFoundError:
        expected = "a corpus made by `megaenc preprocess` (give the path without .bin)"
        raise InputError(f"{path}: no such file; expected {expected}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(
            f"{path}: not JSON ({error}); expected what `megaenc preprocess` wrote"
        ) from None
    values = _check_fields(path, values, CorpusMetadata)
    if values["format"] != FORMAT:
        raise InputError(
            f"{path}: field `format`: found {values['format']}, expected {FORMAT}; "
            "preprocess the text again"
        )
    identity = _check_fields(path, values["tokenizer"], TokenizerIdentity, within="tokenizer.")
    for name in ("bin", "idx"):
        if not isinstance(values["sha256"].get(name), str):
            raise InputError(
                f"{path}: no field `sha256.{name}`; expected what `megaenc preprocess` wrote"
            )
    bounds = [(name, 0, _MAX_COUNT) for name in _COUNT_FIELDS]
    for name, low, high in [*bounds, ("vocab_size", 1, _MAX_VOCABULARY)]:
        if not low <= values[name] <= high:
            raise InputError(
                f"{path}: field `{name}`: found {str(values[name])[:40]}, expected {low} to {high}"
            )
    if values["eod"] is not None and not 0 <= values["eod"] < values["vocab_size"]:
        expected = f"0 to {values['vocab_size'] - 1} or null"
        raise InputError(
            f"{path}: field `eod`: found {str(values['eod'])[:40]}, expected {expected}"
        )
    special = values["special_tokens"]
    tokens = SpecialTokens.from_json(special, f"{path}: field `special_tokens`")
    if max((*tokens.before, *tokens.after), default=0) >= values["vocab_size"]:
        expected = f"ids below {values['vocab_size']}"
        raise InputError(
            f"{path}: field `special_tokens`: found {json.dumps(special)[:60]}, expected {expected}"
        )
    return CorpusMetadata(**{**values, "tokenizer": TokenizerIdentity(**identity)})


_COUNT_FIELDS = (
    "documents",
    "sequences",
    "tokens",
    "empty_documents",
    "skipped_lines",
    "bin_bytes",
    "idx_bytes",
)
_MAX_COUNT = (1 << 63) - 1  # bytes of a file
_MAX_VOCABULARY = 1 << 31  # ids that the .bin can store

# For each annotated type: its JSON types and their name in errors. A nested dataclass is an object.
_OBJECT_OR_LIST = "an object or list"
_JSON_TYPES = {
    int: ((int,), "a whole number"),
    int | None: ((int, type(None)), "a whole number or null"),
    bool: ((bool,), "true or false"),
    str: ((str,), "text"),
    str | None: ((str, type(None)), "text or null"),
    dict[str, str]: ((dict,), _OBJECT_OR_LIST),
    dict[str, Any]: ((dict,), _OBJECT_OR_LIST),
    list[dict[str, Any]]: ((list,), _OBJECT_OR_LIST),
    dict[str, Any] | None: ((dict, type(None)), _OBJECT_OR_LIST),
    TokenizerIdentity: ((dict,), _OBJECT_OR_LIST),
}


def _check_fields(path: Path, values: Any, kind: type, within: str = "") -> dict[str, Any]:
    """Return the fields of the dataclass `kind` from the JSON object `values`.

    Unknown fields are ignored.

    Args:
        within: Prefix of the field names in errors.

    Raises:
        InputError: A field is missing or of another type.
    """
    if not isinstance(values, dict):
        raise InputError(f"{path}: found a JSON {type(values).__name__}, expected an object")
    known = {}
    for field in dataclasses.fields(kind):
        if field.name not in values:
            raise InputError(
                f"{path}: no field `{within}{field.name}`; expected what `megaenc preprocess` wrote"
            )
        value = values[field.name]
        kinds, expected = _JSON_TYPES[field.type]
        if not isinstance(value, kinds) or (isinstance(value, bool) and field.type is not bool):
            raise InputError(
                f"{path}: field `{within}{field.name}`: "
                f"found {json.dumps(value)[:40]}, expected {expected}"
            )
        if isinstance(value, str) and value != escape_unprintable(value):
            raise InputError(
                f"{path}: field `{within}{field.name}`: "
                f"found {json.dumps(value)[:40]}, expected text in one line"
            )
        known[field.name] = value
    return known
