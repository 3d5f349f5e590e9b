r"""Encoding of plain text to token ids by gigatoken or the Hugging Face tokenizer.

gigatoken is used if its ids equal those of the Hugging Face tokenizer. No token is added before or
after the text, and special tokens spelled out in it are text: the ids are those of `tokenizer(text,
add_special_tokens=False, split_special_tokens=True)`. Unpaired surrogates (JSON can hold one,
`"\ud800"`; no Unicode encoding can) are replaced with U+FFFD beforehand.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from megaenc.errors import InputError, first_error_line

# Texts on which tokenizers have differed: white space, contractions, digits, scripts without
# spaces, combining marks, joiners, control characters, characters beyond the basic plane,
# long runs.
PROBES = (
    "Plain English, with a contraction or two: it's, we'll, THEY'RE, I'd've; "
    "and 3.14159 or 1,000,000 of them.",
    " leading, trailing and  double   spaces \t tabs\t\tand\n\nnew lines\r\nof\rtwo kinds \n \n",
    "no-break\u00a0space, \u2003em space, \u3000wide, \u2028line and \u2029paragraph ends, "
    "\x85next line, \x0b\x0c\x1c\x1d",
    "NUL \x00 and \x01\x02\x7f, zero\u200bwidth\u200c\u200d\ufeff, soft\u00adhyphen, \ufffd, "
    "\ufffe, \U0010ffff",
    "e\u0301 \u00e9 \u212b \u1e9b\u0323 \ufb01 \u0130\u0131 \u00df \u1e9e \u01c4"
    "\u03a3\u03c3\u03c2 I\u0307 \u2460 \u00bd \u2167 \u0663\u0664",
    "\u65e5\u672c\u8a9e\u306e\u6587\u3002 \u4e2d\u6587\u6587\u672c\uff0c\u6ca1\u6709\u7a7a\u683c"
    " \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940"
    " \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd "
    "\u2764\ufe0f"
    " \U00010348 \U0001d518\U0001d52b\U0001d526",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # comment\n\n\n"
    "#include <stdio.h>\n<|endoftext|> [MASK] </s> <unk> $$\\LaTeX$$ \u2581x",
    "https://example.org/a?b=c&d=%20e#f user@example.org"
    " C:\\path\\to\\file __init__ --flag=value 0xDEADBEEF 1e-5 2024-02-29T12:00:00Z",
    "a" * 300 + " " * 300 + "!" * 300 + "\n" * 50 + "1" * 100 + " " * 17 + "x",
    "",
)


def load_backend(tokenizer_json: str) -> Tokenizer:
    """Return the tokenizers.Tokenizer in the text of a tokenizer.json.

    Raises:
        InputError: It cannot be loaded, as one whose ids repeat.
    """
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # tokenizers has no type of its own
        raise InputError(
            f"tokenizer.json: {first_error_line(error)}; expected a Hugging Face fast tokenizer"
        ) from None


class FastEncoder:
    """Encoder of documents by gigatoken if its ids match, else by tokenizers.

    `FastEncoder(tokenizer_json)` is built from the text of a tokenizer.json; InputError if it
    cannot be loaded. `use_gigatoken` False never uses gigatoken, and True uses it, if it supports
    the tokenizer, without comparing ids. Called with texts, it returns the ids of each as
    uint32[tokens]: special tokens are not added, and those spelled in a text are text. It is
    picklable, and needs no transformers.
    """

    def __init__(self, tokenizer_json: str, use_gigatoken: bool | None = None) -> None:
        """Build an encoder from the text of a tokenizer.json.

        Args:
            tokenizer_json: Serialized backend of a Hugging Face fast tokenizer.
            use_gigatoken: True: gigatoken is used if it supports the tokenizer; False: it is not;
                None: it is used if its ids on PROBES and on words of the vocabulary equal those of
                tokenizers, too.

        Raises:
            InputError: The tokenizer cannot be loaded.
        """
        self._reference = load_backend(tokenizer_json)
        self._reference.no_padding()
        self._reference.no_truncation()
        self._reference.encode_special_tokens = True  # a special token spelled in the text is text
        config = json.loads(tokenizer_json)
        # Special tokens are text, so gigatoken does not get them; other added tokens stay tokens.
        added = [token for token in config.get("added_tokens") or [] if not token.get("special")]
        spelled = sorted({token["content"] for token in added}, key=len, reverse=True)
        self._spells_added_token = (
            re.compile("|".join(map(re.escape, spelled))).search if spelled else None
        )
        # Added tokens may match normalized text, which `_spells_added_token` does not search.
        findable = config.get("normalizer") is None or not any(
            token.get("normalized") for token in added
        )
        self._gigatoken: Any = None
        if findable if use_gigatoken is None else use_gigatoken:
            self._gigatoken = _load_gigatoken(
                json.dumps({**config, "added_tokens": added, "post_processor": None})
            )
        if (
            use_gigatoken is None
            and self._gigatoken is not None
            and not self._matches_reference(self._gigatoken)
        ):
            self._gigatoken = None
        self._json = tokenizer_json

    @property
    def is_fast(self) -> bool:
        """Return whether gigatoken encodes documents, instead of tokenizers.

        Documents with an added token that is not special are encoded by tokenizers in any case.
        """
        return self._gigatoken is not None

    def __reduce__(self):
        return FastEncoder, (self._json, self.is_fast)

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text as uint32[tokens], in order.

        No token is added before or after a text, special tokens spelled in it are text, and
        unpaired surrogates become U+FFFD.
        """
        texts = [replace_surrogates(text) for text in texts]
        if self._gigatoken is None:
            return self._encode_reference(texts)
        spells = self._spells_added_token or (lambda text: False)
        slow = iter(self._encode_reference([text for text in texts if spells(text)]))
        return [
            next(slow) if spells(text) else self._gigatoken.encode(text.encode()) for text in texts
        ]

    def encode_concatenated(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts concatenated, and the token count of each text.

        The ids are those that the encoder returns when it is called with the same texts.

        Returns:
            uint32[tokens] and int64[texts].
        """
        if self._gigatoken is None or self._spells_added_token is not None:
            rows = self(texts)
            lengths = np.array([len(row) for row in rows], np.int64)
            return np.concatenate([np.empty(0, np.uint32), *rows]), lengths
        return _encode_batch(self._gigatoken, texts)

    def _encode_reference(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        return [
            np.array(row.ids, dtype=np.uint32)
            for row in self._reference.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def _matches_reference(self, gigatoken: Any) -> bool:
        """Return whether gigatoken gives the reference's ids.

        They are compared on PROBES and on words of the vocabulary.
        """
        size = self._reference.get_vocab_size()
        words = [self._reference.decode([token]) for token in range(0, size, max(1, size // 4000))]
        texts = [
            *PROBES,
            *(" ".join(words[start : start + 50]) for start in range(0, len(words), 50)),
            "".join(words),
        ]
        texts = [*map(replace_surrogates, texts)]
        if self._spells_added_token is not None:
            texts = [text for text in texts if not self._spells_added_token(text)]
        rows = self._encode_reference(texts)
        try:
            tokens, lengths = _encode_batch(gigatoken, texts)
            single_rows = [gigatoken.encode(text.encode()) for text in texts]
            if not np.array_equal(tokens, np.concatenate(rows)):
                return False
            return lengths.tolist() == [*map(len, rows)] and all(
                np.array_equal(single, row) for single, row in zip(single_rows, rows, strict=True)
            )
        except Exception:  # the reference can encode everything
            return False


def replace_surrogates(text: str) -> str:
    """Return `text` with unpaired surrogates replaced by U+FFFD.

    Paired ones become the character that they encode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _load_gigatoken(tokenizer_json: str) -> Any:
    """Load gigatoken's tokenizer for a serialized backend; None if not supported."""
    try:
        from gigatoken.gigatoken_rs import load_hf_json

        return load_hf_json(tokenizer_json)
    except Exception:  # unsupported by gigatoken
        return None


def _encode_batch(gigatoken: Any, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Encode texts with gigatoken in this thread.

    Returns:
        uint32[tokens], the ids concatenated, and the length of each text.
    """
    try:
        # The caller decides on the number of threads.
        layout = gigatoken.encode_batch(list(texts), parallel=False).layout
    except TypeError:  # unpaired surrogate
        layout = gigatoken.encode_batch(
            [replace_surrogates(text) for text in texts], parallel=False
        ).layout
    return np.asarray(layout.content.data, np.uint32), np.diff(layout.offsets.data)
