"""Word boundaries between token ids, computed from a tokenizer.

They are the bytes of `Vocabulary.word_codes`.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from megaenc.data.tokenizer.vocabulary import TokenEnd

_CONTEXTS = ("a", "1", ".", "..", "a'", "a ", "a\n")  # end in each of the first kinds of TokenEnd
_ALWAYS = (1 << len(_CONTEXTS)) - 1
_BREAK = _ALWAYS | TokenEnd.BREAK << 8
_CHARACTER = re.compile(rb"[\x00-\x7f\xc0-\xff][\x80-\xbf]*")  # of UTF-8, complete or cut
# First bytes of characters that are mostly neither letter nor digit: Latin-1 signs, punctuation,
# full-width signs, emoji.
_SIGN_BYTES = b"\xc2\xe2\xef\xf0"


def compute_word_codes(backend: Tokenizer, size: int) -> bytes:
    """Return `Vocabulary.word_codes`, two bytes for each of `size` ids of a tokenizer.

    It is empty if the tokens do not show where words begin. A word is a pre-token: text that the
    tokenizer never joins with its neighbours. Added tokens, such as special ones, and ids without a
    token are words of their own; others show words as follows.

    - WordPiece: the tokens without `##` begin words;
    - SentencePiece and metaspace: tokens with `▁`, and any token after the end of a line, begin
      words; punctuation belongs to the word before it;
    - byte-level BPE: the tokenizer's own pre-tokenizer splits, or not, a text that ends as the
      token before (`TokenEnd`) from the token's first characters. So words differ if a split
      depends on more: an apostrophe that opens a quotation, the number of digits or signs in a row,
      the kind of a character of which the token holds the first bytes only.
    """
    model = backend.model
    pre_tokenizer = backend.pre_tokenizer
    vocab = backend.get_vocab(with_added_tokens=False)
    prefix = getattr(model, "continuing_subword_prefix", None)
    codes = np.full(size, _BREAK, dtype="<u2")
    if pre_tokenizer is not None and b'"ByteLevel"' in pre_tokenizer.__getstate__():
        byte_of = _byte_alphabet()
        splits = lru_cache(maxsize=None)(lambda text: _ask_pre_tokenizer(pre_tokenizer, text))
        for token, token_id in vocab.items():
            if {*token} <= byte_of.keys():
                codes[token_id] = _code_bytes(bytes(map(byte_of.__getitem__, token)), splits)
    elif prefix:
        for token, token_id in vocab.items():
            codes[token_id] = (0 if token.startswith(prefix) else _ALWAYS) | TokenEnd.LETTER << 8
    elif any(token.startswith("▁") for token in vocab):
        for token, token_id in vocab.items():
            codes[token_id] = _code_piece(token)
    else:
        return b""
    for token_id in backend.get_added_tokens_decoder():
        codes[token_id] = _BREAK
    return codes.tobytes()


def _code_bytes(token: bytes, splits: Callable[[str], int]) -> int:
    """Return the code of a token of byte-level BPE.

    `splits(text)` returns as bits after which contexts `text` begins a word.
    """
    characters = [_decode_character(character) for character in _CHARACTER.findall(token)]
    end = _kind_of("".join(characters)) if characters else TokenEnd.SAME
    continues_character = 0x80 <= token[0] < 0xC0
    return (0 if continues_character else splits("".join(characters[:2]))) | end << 8


def _decode_character(character: bytes) -> str:
    """Return a character of UTF-8, complete or cut.

    For the first bytes of one, it is a character of the same kind as most that begin so.
    """
    try:
        return character.decode()
    except UnicodeDecodeError:
        return "§" if character[0] in _SIGN_BYTES else "é"


def _ask_pre_tokenizer(pre_tokenizer: Any, text: str) -> int:
    """Return as bits after which of _CONTEXTS a piece of text begins with `text`.

    The pre-tokenizer decides.
    """
    # The last space or new line of several may belong to what follows: a word, which has its own
    # space after a space.
    after = ""
    if text.isspace():
        after = "b" if text[-1] in "\r\n" else " b"
    bits = 0
    for bit, context in enumerate(_CONTEXTS):
        pieces = pre_tokenizer.pre_tokenize_str(context + text + after)
        bits |= any(start == len(context) for _, (start, _) in pieces) << bit
    return bits


def _code_piece(token: str) -> int:
    """Return the code of a token of SentencePiece.

    It may be a byte such as `<0x0A>`.
    """
    if len(token) == 6 and token.startswith("<0x"):
        token = chr(int(token[3:5], 16))
    end = TokenEnd.LINE_END if token.endswith("\n") else TokenEnd.LETTER
    return (_ALWAYS if token.startswith(("▁", "\n")) else 1 << TokenEnd.LINE_END) | end << 8


def _kind_of(text: str) -> TokenEnd:
    last = text[-1]
    if last.isspace():
        return TokenEnd.LINE_END if last in "\r\n" else TokenEnd.SPACE
    if last.isalpha() or last.isnumeric():
        return TokenEnd.LETTER if last.isalpha() else TokenEnd.DIGIT
    if len(text) > 1:
        return TokenEnd.SIGNS
    return TokenEnd.APOSTROPHE if last == "'" else TokenEnd.SIGN


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE.

    Printable ones of Latin-1 stand for themselves, others begin at 256.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(unprintable)
    }
