"""The JSON beside a tokenised corpus: what megatron-core's .bin and .idx do not say, and the proof that they are whole."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc.console import printable
from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_regular

FORMAT = 1


@dataclass(frozen=True)
class TokenizerIdentity:
    """Which tokenizer made the corpus."""

    name: str
    """Name on the Hub, or the last part of the folder's path: for people; the fingerprint identifies."""
    fingerprint: str
    """As in megaenc.data.tokenizer.tokenizer.Vocabulary."""
    eos_id: int | None
    mask_id: int | None


@dataclass(frozen=True)
class CorpusMetadata:
    """One corpus: `PREFIX_KEY_document.json`. It gets its name before the .idx, without which nothing opens."""

    format: int
    tokenizer: TokenizerIdentity
    vocab_size: int
    """Number of token ids the tokenizer has."""
    eod: int | None
    """Token id that ends every document, or None when none was appended."""
    append_eod: bool
    documents: int
    sequences: int
    """Entries of the .idx: one a document, or one a sentence where documents are cut into sentences."""
    tokens: int
    """All tokens, end-of-document ones included."""
    empty_documents: int
    """Documents without a token, left out."""
    skipped_lines: int
    """Bad lines left out by --skip-bad-lines."""
    dtype: str
    """`uint16` or `int32`: how the .bin stores a token id."""
    bin_bytes: int
    idx_bytes: int
    sha256: dict[str, str]
    """Of the files: keys `bin` and `idx`."""
    sources: list[dict[str, Any]]
    """An entry an input: `path` (a name without folder), `bytes` on disk (null for the Hub's), `files` of a folder."""
    megaenc: str
    """Version of this package that wrote it."""
    sentences: dict[str, Any] | None = None
    """Settings of the sentence splitter (`sentence_splitter.Punkt`); None if each sequence is a document."""

    def write(self, path: Path) -> None:
        """Write to `path` as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


def sidecar_path(prefix: str | Path) -> Path:
    """The JSON that belongs to the corpus `prefix` (`.../corpus_text_document`)."""
    return Path(f"{prefix}.json")


def read_sidecar(prefix: str | Path) -> CorpusMetadata:
    """Read the sidecar of the corpus `prefix`. Raises InputError if missing, not JSON, of another format or incomplete."""
    path = sidecar_path(prefix)
    try:
        values = parse_json(read_regular(path))
    except FileNotFoundError:
        expected = "a corpus made by `megaenc preprocess` (give the path without .bin)"
        raise InputError(f"{path}: no such file; expected {expected}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); expected what `megaenc preprocess` wrote") from None
    values = _checked(path, values, CorpusMetadata)
    if values["format"] != FORMAT:
        raise InputError(f"{path}: field `format`: found {values['format']}, expected {FORMAT}; preprocess the text again")
    identity = _checked(path, values["tokenizer"], TokenizerIdentity, within="tokenizer.")
    for name in ("bin", "idx"):
        if not isinstance(values["sha256"].get(name), str):
            raise InputError(f"{path}: no field `sha256.{name}`; expected what `megaenc preprocess` wrote")
    for name, low, high in (*((count, 0, _MOST) for count in _COUNTS), ("vocab_size", 1, _MOST_IDS)):
        if not low <= values[name] <= high:
            raise InputError(f"{path}: field `{name}`: found {str(values[name])[:40]}, expected {low} to {high}")
    if values["eod"] is not None and not 0 <= values["eod"] < values["vocab_size"]:
        expected = f"0 to {values['vocab_size'] - 1} or null"
        raise InputError(f"{path}: field `eod`: found {str(values['eod'])[:40]}, expected {expected}")
    return CorpusMetadata(**{**values, "tokenizer": TokenizerIdentity(**identity)})


_COUNTS = ("documents", "sequences", "tokens", "empty_documents", "skipped_lines", "bin_bytes", "idx_bytes")
_MOST, _MOST_IDS = (1 << 63) - 1, 1 << 31  # of a file's bytes, and of ids as they are stored

# The JSON types of each annotated type, and what they are called; a nested dataclass is an object.
_ANYTHING = "an object or list"
_JSON_TYPES = {
    int: ((int,), "a whole number"),
    int | None: ((int, type(None)), "a whole number or null"),
    bool: ((bool,), "true or false"),
    str: ((str,), "text"),
    dict[str, str]: ((dict,), _ANYTHING),
    list[dict[str, Any]]: ((list,), _ANYTHING),
    dict[str, Any] | None: ((dict, type(None)), _ANYTHING),
    TokenizerIdentity: ((dict,), _ANYTHING),
}


def _checked(path: Path, values: Any, kind: type, within: str = "") -> dict[str, Any]:
    """The fields of `kind` out of `values`, each of its type; fields that `kind` does not know are left alone.

    A field with a default may be missing: files from before it was there are read as ever.
    """
    if not isinstance(values, dict):
        raise InputError(f"{path}: found a JSON {type(values).__name__}, expected an object")
    known = {}
    for field in dataclasses.fields(kind):
        if field.name not in values:
            if field.default is not dataclasses.MISSING:
                continue
            raise InputError(f"{path}: no field `{within}{field.name}`; expected what `megaenc preprocess` wrote")
        value, (kinds, expected) = values[field.name], _JSON_TYPES[field.type]
        if not isinstance(value, kinds) or (isinstance(value, bool) and field.type is not bool):
            raise InputError(f"{path}: field `{within}{field.name}`: found {json.dumps(value)[:40]}, expected {expected}")
        if isinstance(value, str) and value != printable(value):
            raise InputError(f"{path}: field `{within}{field.name}`: found {json.dumps(value)[:40]}, expected text in one line")
        known[field.name] = value
    return known
