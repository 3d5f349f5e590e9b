"""Properties of a tokenizer that the other packages need, free of transformers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np


class TokenEnd(IntEnum):
    """Kind of a token by its last character, an IntEnum.

    Together with the next token, it decides where a word begins (`Vocabulary.word_codes`). Kinds
    from 0 to 8 are LETTER, DIGIT, SIGN (a single character of no other kind), SIGNS (several
    characters, of which the last is a sign), APOSTROPHE, SPACE (white space but LINE_END), LINE_END
    (line feed or carriage return), BREAK (such as an added token, after which a word always begins)
    and SAME (the kind of the token before).
    """

    LETTER = 0
    DIGIT = 1
    SIGN = 2
    """A single character that is none of the others."""
    SIGNS = 3
    """Several characters, of which the last is a sign."""
    APOSTROPHE = 4
    SPACE = 5
    LINE_END = 6
    BREAK = 7
    SAME = 8


@dataclass(frozen=True)
class Vocabulary:
    """Properties of a tokenizer: number of ids, ids of special tokens, fingerprint.

    `read_vocabulary` builds it. Ids, also of added tokens, are below `size`; some may be unused.
    `eos_id` (EOS, else SEP) and `mask_id` are None if the tokenizer lacks them; `special_ids`, a
    tuple, are all ids that are not text, ascending; `fingerprint` is equal for tokenizers that give
    all texts the same ids. `code_words` and `hash_text_rules` are functions that compute
    `word_codes` and `text_fingerprint` when these are read.
    """

    size: int
    eos_id: int | None
    """Id of the token that ends a document: EOS, else SEP; None without both."""
    mask_id: int | None
    """Id of the mask token; None without one."""
    special_ids: tuple[int, ...]
    """Ids that are not text, ascending; never hidden, nor predicted, except `eos_id` by `clm`."""
    fingerprint: str
    """sha256 in hex of everything that decides ids; equal for equal tokenizers wherever they are
    stored. Empty for a made-up vocabulary, which any file of collocations fits."""
    code_words: Callable[[], bytes] = field(default=bytes, repr=False, compare=False)
    """Compute `word_codes`, which takes a second for 128,000 ids."""
    hash_text_rules: Callable[[], str] = field(default=str, repr=False, compare=False)
    """Compute `text_fingerprint`."""

    @cached_property
    def word_codes(self) -> bytes:
        """Return the word code of each id, little-endian uint16; empty if unknown.

        Codes are unknown if tokens do not show where words begin. `starts_words` reads them. Bits 0
        to 6 tell whether a word begins with the token after each of the first seven kinds of
        `TokenEnd`; the high byte is the token's own kind.
        """
        return self.code_words()

    @cached_property
    def text_fingerprint(self) -> str:
        """Return the fingerprint without the tokenizer's template of special tokens.

        It is a sha256 in hex, equal for tokenizers that give a text the same ids apart from the
        special tokens around it.
        """
        return self.hash_text_rules()

    def is_of_tokenizer(self, *fingerprints: str | None) -> bool:
        """Return whether one of `fingerprints` is that of this tokenizer.

        It may be `fingerprint` or `text_fingerprint`; None is skipped.
        """
        return self.fingerprint in fingerprints or self.text_fingerprint in fingerprints

    def starts_words(self, tokens: np.ndarray) -> np.ndarray:
        """Return bool[T], whether a word begins with each of `tokens`, int64[T].

        `tokens` are successive ids of a text, below `size`. The first result is always True; all
        are if `word_codes` are unknown. An added token, such as a special one, is a word by itself.
        """
        starts = np.ones(len(tokens), dtype=bool)
        if not self.word_codes or not len(tokens):
            return starts
        codes = np.frombuffer(self.word_codes, "<u2")[tokens]
        ends = codes >> 8
        is_same = ends == TokenEnd.SAME
        if is_same.any():
            ends = ends[np.maximum.accumulate(np.where(is_same, 0, np.arange(len(ends))))]
            ends[ends == TokenEnd.SAME] = TokenEnd.LETTER  # no token before
        starts[1:] = ((codes[1:] | 1 << TokenEnd.BREAK) >> ends[:-1]) & 1
        return starts
