"""Tokenized texts as concatenated arrays, their encoder and their cache on disk."""

import dataclasses
import hashlib
import json
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaenc.atomic_io import atomic_files, find_stale_temp_files, remove_path, try_lock
from megaenc.data.tokenizer.fast_encode import load_backend, replace_surrogates
from megaenc.data.tokenizer.special_tokens import (
    SpecialTokens,
    resolve_special_tokens,
    set_special_tokens,
)
from megaenc.data.tokenizer.tokenizer import encode_documents, read_vocabulary
from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

_CACHE_FORMAT = 3  # of the files on disk, and of the rules below that say which tokens a text has
_TEXTS_PER_BATCH = 1024  # bounds the memory of offsets, which are Python objects


@dataclass(frozen=True)
class TokenizedTexts:
    """Tokenized texts in concatenated arrays, with further columns of a task.

    `TextEncoder.encode` and `from_rows` build it. `tokens`, int32[N], has the token ids of all n
    texts; `starts`, int64[n + 1], the offset of each text in `tokens`, then N. `columns` are arrays
    of a task by name, by row ([n, ...]) or by token ([N, ...]), as the task knows.
    `truncated_count` is the number of texts that were cut. Shapes are not checked.
    """

    tokens: np.ndarray
    """int32[N]: the token ids of all texts, concatenated."""
    starts: np.ndarray
    """int64[n + 1]: the start offset of each text, then N."""
    truncated_count: int = 0
    """Number of texts that were cut to the maximum length."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Further arrays of a task by name, by row ([n, ...]) or by token ([N, ...])."""

    @classmethod
    def from_rows(
        cls, rows: Sequence[np.ndarray], truncated: int, **columns: np.ndarray
    ) -> "TokenizedTexts":
        """Return the TokenizedTexts of `rows`, the token ids of one text each.

        Args:
            truncated: Number of texts that were cut.
            columns: Arrays of a task by name, by row or, concatenated, by token; not checked.
        """
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(concatenate_rows(rows, np.int32), starts, truncated, columns)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each text, int64[n]."""
        return np.diff(self.starts)

    def gather_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the token ids, int32[tokens], of each of the texts `rows`, in that order.

        The arrays are views of `tokens`.

        Args:
            rows: Indices of texts, from 0.
        """
        return [self.tokens[self.starts[row] : self.starts[row + 1]] for row in rows]

    def gather_token_column(self, column: str, rows: np.ndarray) -> np.ndarray:
        """Return the entries of a by-token column for the texts `rows`, concatenated.

        Args:
            column: Name of the column.
            rows: Indices of texts, from 0.
        """
        values = self.columns[column]
        return np.concatenate(
            [values[:0], *(values[self.starts[row] : self.starts[row + 1]] for row in rows)]
        )


def concatenate_rows(rows: Sequence[np.ndarray], dtype: type, *shape: int) -> np.ndarray:
    """Return the arrays `rows` concatenated along their first dimension as `dtype`.

    Args:
        shape: Dimensions of each row after the first, or ValueError is raised; without rows the
            result is empty, [0, *shape].
    """
    return np.concatenate([np.empty((0, *shape), dtype), *rows]).astype(dtype, copy=False)


def choose_special_tokens(
    tokenizer: "PreTrainedTokenizerFast", protocol: FinetuneConfig
) -> SpecialTokens:
    """Return the special tokens that `protocol` puts around each text.

    If its `add_bos` or `add_eos` is given, they are BOS (else CLS) before a text if `add_bos`, and
    EOS (else SEP) after it unless `add_eos` is False: `add_bos` True without `add_eos` adds both,
    `add_eos` False without `add_bos` adds nothing. If neither is given, they follow the mode
    `special_tokens` (see `resolve_special_tokens`).

    Raises:
        InputError: The tokenizer lacks a required token; an empty `special_tokens` requires none.
    """
    if not protocol.adds_named_tokens:
        return resolve_special_tokens(tokenizer, protocol.special_tokens)
    before = ()
    after = ()
    if protocol.add_bos:
        before = (_find_token(tokenizer, "bos", "cls"),)
    if protocol.add_eos is not False:
        after = (_find_token(tokenizer, "eos", "sep"),)
    return SpecialTokens("eod" if after else "none", before, after)


def _find_token(tokenizer: "PreTrainedTokenizerFast", role: str, instead: str) -> int:
    """Return the id of the token with `role`, or without one of that with `instead`.

    Raises:
        InputError: The tokenizer has neither.
    """
    for name in (role, instead):
        token = getattr(tokenizer, f"{name}_token_id")
        if token is not None:
            return token
    raise InputError(
        f"--add-{role}: the tokenizer {tokenizer.name_or_path} has no {role.upper()} token; "
        f"use --no-add-{role}"
    )


def resolve_protocol(
    protocol: FinetuneConfig, tokenizer: "PreTrainedTokenizerFast"
) -> FinetuneConfig:
    """Return a copy of `protocol` that names the tokenizer's default special tokens.

    `protocol` must name none itself, which is not checked. The default is the tokenizer's template;
    if that adds nothing, EOS (else SEP) after a text, or without both nothing. If only this end or
    nothing is added, by a template too, `add_bos` and `add_eos` record it, as in results of earlier
    versions; else `special_tokens` is "template".
    """
    special = resolve_special_tokens(tokenizer, "")
    end = resolve_special_tokens(tokenizer, "eod") if special.after else SpecialTokens()
    mode = "template"
    if special.is_same(end):
        mode = end.mode
    return dataclasses.replace(protocol, special_tokens=mode).normalize_special_tokens()


@dataclass(frozen=True)
class TextEncoder:
    """Encoder of texts by a `tokenizer`, with special tokens and a maximum length.

    A text of more than `max_length` tokens with its `special_tokens` is cut at its end and keeps
    its last special tokens. Special tokens spelled in a text are tokenized as text. `encode` and
    `encode_with_offsets` call `progress`, which may be left out, with the numbers of tokenized and
    of all texts, every 1,024 texts.

    Raises:
        InputError: `max_length` is too small for any text.
    """

    tokenizer: "PreTrainedTokenizerFast"
    max_length: int
    special_tokens: SpecialTokens
    progress: Callable[[int, int], None] = lambda done, total: None
    """Callback (tokenized texts, total texts) of `encode` and `encode_with_offsets`."""

    def __post_init__(self) -> None:
        if self.max_text_tokens < 1:
            added = self.special_tokens.count
            raise InputError(
                f"--max-length: found {self.max_length}, "
                f"expected room for text next to {added} added tokens"
            )

    @property
    def max_text_tokens(self) -> int:
        """Return the maximum number of tokens of a text without special tokens."""
        return self.max_length - self.special_tokens.count

    @cached_property
    def cache_key(self) -> dict[str, Any]:
        """Return the values that determine a text's tokens, by name, as JSON values.

        They are part of the key of `load_or_compute`.
        """
        rule = {"max_length": self.max_length, "special_tokens": self.special_tokens.to_json()}
        return {
            "format": _CACHE_FORMAT,
            "tokenizer": read_vocabulary(self.tokenizer).fingerprint,
            **rule,
        }

    def add_special_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Return the ids of a text, cut to `max_text_tokens`, between special tokens.

        Returns:
            int32[<= max_length].
        """
        return self.special_tokens.surround(tokens[: self.max_text_tokens]).astype(np.int32)

    def align_to_row(self, values: np.ndarray, fill: int) -> np.ndarray:
        """Return `values`, one per token of a text, as the text's row of tokens is.

        The row is the result of `add_special_tokens`: cut, and with special tokens.

        Args:
            fill: Value at special tokens.

        Returns:
            int32[row's tokens].
        """
        before = [fill] * len(self.special_tokens.before)
        after = [fill] * len(self.special_tokens.after)
        return np.concatenate([before, values[: self.max_text_tokens], after]).astype(np.int32)

    def encode(self, texts: Sequence[str | tuple[str, str]]) -> TokenizedTexts:
        """Return `texts`, tokenized, cut and with special tokens, in order.

        A tuple is a pair of texts, which has the special tokens of the tokenizer's own pairs; the
        longer text is cut first. `texts` may have both texts and pairs.

        Raises:
            InputError: A text has no token and gets no special token; or there is a pair, and
                `special_tokens` are empty or not `has_room_for_pairs`.
        """
        rows = []
        truncated = 0
        for start in range(0, len(texts), _TEXTS_PER_BATCH):
            self.progress(start, len(texts))
            batch = texts[start : start + _TEXTS_PER_BATCH]
            if any(isinstance(text, tuple) for text in batch):
                encodings = self._encode_pairs(batch)
                rows += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
                truncated += sum(bool(encoding.overflowing) for encoding in encodings)
                continue
            for tokens in encode_documents(self.tokenizer, batch):
                truncated += len(tokens) > self.max_text_tokens
                rows.append(self.add_special_tokens(tokens))
        if empty := [text_number for text_number, row in enumerate(rows, start=1) if not len(row)]:
            raise InputError(
                f"text {empty[0]}: found no token, expected some text, or training with --add-eos"
            )
        return TokenizedTexts.from_rows(rows, truncated)

    def _encode_pairs(self, texts: Sequence[str | tuple[str, str]]) -> list["Encoding"]:
        """Return the encodings of texts and pairs, cut and with special tokens.

        Raises:
            InputError: A pair has no room or no special token.
        """
        if not self.special_tokens.count:
            raise InputError(
                "pairs of texts: found --special-tokens none, "
                "expected training with another mode, as their boundary needs a token, "
                "or, except in reranking, with a --pair-template with {text} and {text_pair}"
            )
        if not self.has_room_for_pairs:
            raise InputError(
                f"--max-length: found {self.max_length}, "
                "expected room for text next to the special tokens of a pair"
            )
        inputs = [
            replace_surrogates(text)
            if isinstance(text, str)
            else tuple(map(replace_surrogates, text))
            for text in texts
        ]
        return self._pair_tokenizer.encode_batch(inputs)

    @property
    def has_room_for_pairs(self) -> bool:
        """Return whether `max_length` has room for a pair with a token of each text.

        The special tokens of the pair count.
        """
        return self._pair_tokenizer.num_special_tokens_to_add(is_pair=True) + 2 <= self.max_length

    @cached_property
    def _pair_tokenizer(self) -> "Tokenizer":
        """Return the tokenizer that cuts as transformers' `truncation=True`.

        A text or a pair gets its special tokens too.
        """
        backend = _copy_plain(set_special_tokens(self.tokenizer, self.special_tokens))
        backend.enable_truncation(self.max_length, strategy="longest_first")
        return backend

    def encode_with_offsets(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield each text's token ids and character ranges, uncut, without special tokens.

        Characters are counted in the text after `replace_surrogates`, which may be shorter.

        Yields:
            Token ids, int32[tokens], and (start, end), end excluded, int32[tokens, 2].
        """
        for start in range(0, len(texts), _TEXTS_PER_BATCH):
            self.progress(start, len(texts))
            batch = [replace_surrogates(text) for text in texts[start : start + _TEXTS_PER_BATCH]]
            for encoding in self._fast_tokenizer.encode_batch(batch, add_special_tokens=False):
                yield (
                    np.array(encoding.ids, dtype=np.int32),
                    np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2),
                )

    @cached_property
    def _fast_tokenizer(self) -> "Tokenizer":
        return _copy_plain(self.tokenizer)


def _copy_plain(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    """Return a copy of a tokenizer's backend that neither pads nor cuts.

    Special tokens spelled in a text are read as text.
    """
    backend = load_backend(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    return backend


TokenizedSplit = TokenizedTexts | dict[str, TokenizedTexts]
"""Tokenized texts of a split; in retrieval two, by name: "queries" and "documents"."""


def load_or_compute(
    directory: Path,
    key: dict,
    compute: Callable[[], TokenizedSplit],
    on_wait: Callable[[], None] = lambda: None,
) -> TokenizedSplit:
    """Return the split cached under `key` in `directory`, or compute and cache it.

    Of several processes one calls `compute`; the others wait and call `on_wait` five times a
    second. On a file system without locks each may compute. If `compute` fails, its error is
    raised, and the next process computes. The directory is created. The file is named after a hash
    of the key and written atomically; an unreadable one is recomputed.

    Args:
        key: JSON object of everything that determines the split.

    Raises:
        InputError: The cache cannot be written.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = directory / f"{name}.npz"
    while (split := _read_cache_file(path)) is None:
        with try_lock(directory / f".{name}.lock") as is_locked:
            # Another process may have written it meanwhile.
            if is_locked and (split := _read_cache_file(path)) is None:
                for stale_file in find_stale_temp_files(path):
                    remove_path(stale_file)
                split = compute()
                arrays = {}
                for part, rows in (split if isinstance(split, dict) else {"": split}).items():
                    row_arrays = {
                        "tokens": rows.tokens,
                        "starts": rows.starts,
                        "truncated": np.array(rows.truncated_count),
                    }
                    arrays |= {
                        f"{part}:{name}": array
                        for name, array in (row_arrays | rows.columns).items()
                    }
                with atomic_files(path) as [temporary], open(temporary, "wb") as stream:
                    np.savez(stream, **arrays)
        if split is not None:
            break
        on_wait()
        time.sleep(0.2)
    return split


def _read_cache_file(path: Path) -> TokenizedSplit | None:
    """Read a cache file; return None if it is missing or damaged."""
    arrays_by_part: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    try:
        with np.load(path, allow_pickle=False) as stored:
            for key in stored.files:
                part, _, name = key.partition(":")
                arrays_by_part[part][name] = stored[key]
        parts = {
            part: TokenizedTexts(
                arrays.pop("tokens"), arrays.pop("starts"), int(arrays.pop("truncated")), arrays
            )
            for part, arrays in arrays_by_part.items()
        }
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return parts[""] if list(parts) == [""] else parts
