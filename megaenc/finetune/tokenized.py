"""Tokenised texts: ids end to end, cut to the length that the model reads, made once and kept on disk."""

import hashlib
import json
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megaenc.atomic_io import atomic_files, find_stale_temp_files, remove_path, try_lock
from megaenc.data.tokenizer.fast_encode import replace_surrogates
from megaenc.data.tokenizer.tokenizer import encode_documents, read_vocabulary
from megaenc.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_CACHE_FORMAT = 2  # of the files on disk, and of the rules below that say which tokens a text has
_TEXTS_PER_BATCH = 1024  # texts whose offsets are held as Python objects


@dataclass(frozen=True)
class TokenizedTexts:
    """Tokenised texts, row after row."""

    tokens: np.ndarray
    """int32[N]: all texts end to end."""
    starts: np.ndarray
    """int64[n + 1]: where each text starts, and N."""
    truncated: int = 0
    """Texts that were longer than the model reads and lost their ends."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """What else a task needs: arrays by row ([n, ...]) or by token ([N, ...])."""

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], truncated: int, **columns: np.ndarray) -> "TokenizedTexts":
        """Lay `rows` (int[tokens] each) end to end."""
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(concatenate_rows(rows, np.int32), starts, truncated, columns)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64[n]: tokens of each text."""
        return np.diff(self.starts)

    def gather_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of these rows, int32[tokens] each."""
        return [self.tokens[self.starts[row] : self.starts[row + 1]] for row in rows]

    def gather_token_column(self, column: str, rows: np.ndarray) -> np.ndarray:
        """Return a column that has an entry for each token, of these rows end to end."""
        values = self.columns[column]
        return np.concatenate([values[:0], *(values[self.starts[row] : self.starts[row + 1]] for row in rows)])


def concatenate_rows(rows: Sequence[np.ndarray], dtype: type, *shape: int) -> np.ndarray:
    """Return `rows` end to end, `shape` being that of an entry; an empty array where there is none."""
    return np.concatenate([np.empty((0, *shape), dtype), *rows]).astype(dtype, copy=False)


@dataclass(frozen=True)
class TextEncoder:
    """Turns texts into rows of tokens, BOS before and EOS after them; a special token spelled in a text stays text.

    Texts are cut so that a row has at most `max_length` tokens and still ends with EOS. Tokenizers without BOS or EOS use their
    CLS and SEP tokens. Raises InputError for a tokenizer that has neither, and for a `max_length` with no room for text.
    """

    tokenizer: "PreTrainedTokenizerFast"
    max_length: int
    add_bos: bool = False
    add_eos: bool = True
    progress: Callable[[int, int], None] = lambda done, total: None
    """Is told how many of the texts given to a call are done."""

    def __post_init__(self) -> None:
        for name, tokens in (("bos", self._bos_ids), ("eos", self._eos_ids)):
            if tokens == [None]:
                raise InputError(
                    f"--add-{name}: the tokenizer {self.tokenizer.name_or_path} has no {name.upper()} token; "
                    f"leave it out with --no-add-{name}"
                )
        if self.max_text_tokens < 1:
            added = self.add_bos + self.add_eos
            raise InputError(f"--max-length: found {self.max_length}, expected room for text beside {added} added tokens")

    @cached_property
    def _bos_ids(self) -> list[int | None]:
        token = self.tokenizer.bos_token_id
        return [self.tokenizer.cls_token_id if token is None else token] * self.add_bos

    @cached_property
    def _eos_ids(self) -> list[int | None]:
        token = self.tokenizer.eos_token_id
        return [self.tokenizer.sep_token_id if token is None else token] * self.add_eos

    @property
    def max_text_tokens(self) -> int:
        """Tokens of the text itself in a row, at most."""
        return self.max_length - self.add_bos - self.add_eos

    @cached_property
    def cache_key(self) -> dict[str, str | int | bool]:
        """All that determines the rows of a text."""
        rule = {"max_length": self.max_length, "add_bos": self.add_bos, "add_eos": self.add_eos}
        return {"format": _CACHE_FORMAT, "tokenizer": read_vocabulary(self.tokenizer).fingerprint, **rule}

    def add_special_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Return int32[at most max_length]: the row of a text's tokens."""
        return np.concatenate([self._bos_ids, tokens[: self.max_text_tokens], self._eos_ids]).astype(np.int32)

    def align_to_row(self, values: np.ndarray, other: int) -> np.ndarray:
        """Return int32[tokens of the row]: `values`, one for each token of a text, cut like it, and `other` for BOS and EOS."""
        return np.concatenate([[other] * self.add_bos, values[: self.max_text_tokens], [other] * self.add_eos]).astype(np.int32)

    def encode(self, texts: Sequence[str]) -> TokenizedTexts:
        """Make a row of each text. Raises InputError for a text without a token where no BOS or EOS is added."""
        rows, truncated = [], 0
        for start in range(0, len(texts), _TEXTS_PER_BATCH):
            self.progress(start, len(texts))
            for tokens in encode_documents(self.tokenizer, texts[start : start + _TEXTS_PER_BATCH]):
                if not len(tokens) and not (self.add_bos or self.add_eos):
                    raise InputError(f"text {len(rows) + 1}: found no token, expected some text, or an end with --add-eos")
                truncated += len(tokens) > self.max_text_tokens
                rows.append(self.add_special_tokens(tokens))
        return TokenizedTexts.from_rows(rows, truncated)

    def encode_with_offsets(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield each text's tokens, int32[tokens], with first character and one past the last, int32[tokens, 2]; nothing is cut.

        Characters are those of the text as `replace_surrogates` gives it.
        """
        for start in range(0, len(texts), _TEXTS_PER_BATCH):
            self.progress(start, len(texts))
            some = [replace_surrogates(text) for text in texts[start : start + _TEXTS_PER_BATCH]]
            for found in self._fast_tokenizer.encode_batch(some, add_special_tokens=False):
                yield np.array(found.ids, dtype=np.int32), np.array(found.offsets, dtype=np.int32).reshape(-1, 2)

    @cached_property
    def _fast_tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # a special token spelled in the text is text
        return backend


TokenizedSplit = TokenizedTexts | dict[str, TokenizedTexts]


def load_or_compute(
    folder: Path, key: dict, make: Callable[[], TokenizedSplit], waiting: Callable[[], None] = lambda: None
) -> TokenizedSplit:
    """Return what `make` returns, from a file of `folder` if it was made before under the same `key` (of JSON values).

    The file appears when it is whole; one that cannot be read is made again. Of several processes that want it one makes it; the
    others wait and call `waiting` now and then. Raises InputError where nothing can be written.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = folder / f"{name}.npz"
    while (found := _read_cache_file(path)) is None:
        with try_lock(folder / f".{name}.lock") as mine:
            if mine and (found := _read_cache_file(path)) is None:  # else another process has made it meanwhile
                for left in find_stale_temp_files(path):
                    remove_path(left)
                found, arrays = make(), {}
                for part, rows in (found if isinstance(found, dict) else {"": found}).items():
                    own = {"tokens": rows.tokens, "starts": rows.starts, "truncated": np.array(rows.truncated_count)}
                    arrays |= {f"{part}:{name}": array for name, array in (own | rows.columns).items()}
                with atomic_files(path) as [temporary], open(temporary, "wb") as stream:
                    np.savez(stream, **arrays)
        if found is not None:
            break
        waiting()
        time.sleep(0.2)
    return found


def _read_cache_file(path: Path) -> TokenizedSplit | None:
    found: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    try:
        with np.load(path, allow_pickle=False) as stored:
            for whole in stored.files:
                part, _, name = whole.partition(":")
                found[part][name] = stored[whole]
        parts = {
            part: TokenizedTexts(arrays.pop("tokens"), arrays.pop("starts"), int(arrays.pop("truncated")), arrays)
            for part, arrays in found.items()
        }
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return parts[""] if list(parts) == [""] else parts
