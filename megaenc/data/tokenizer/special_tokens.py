"""Special tokens around a text: a template, only an end of text, or none."""

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from megaenc.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SpecialTokensMode = Literal["template", "eod", "none"]
"""template: the tokenizer's own, such as [CLS] text [SEP]; eod: EOS, or without one SEP, after the
text; none: only the text."""
SpecialTokensChoice = Literal["", "template", "eod", "none"]
"""A mode, or empty for that of the tokenizer."""
FLAG = "--special-tokens"
_PROBED_TOKENS = 1000  # of the vocabulary, to find a text that has a token


@dataclass(frozen=True)
class SpecialTokens:
    """Mode of --special-tokens, and the token ids `before` and `after` each text.

    The `mode` is `template`, `eod` or, by default, `none`; the ids are tuples, empty by default.
    `resolve_special_tokens` builds it for a tokenizer; `surround` adds the ids, `strip` drops them.
    """

    mode: SpecialTokensMode = "none"
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, values: Any, place: str) -> Self:
        """Return the SpecialTokens of a JSON object as `to_json` gives it.

        Raises:
            InputError: `values` is another object; the message begins with `place`.
        """
        try:
            tokens = cls(values["mode"], tuple(values["before"]), tuple(values["after"]))
        except (KeyError, TypeError):
            tokens = None
        is_valid = tokens is not None and tokens.mode in ("template", "eod", "none")
        if not is_valid or not all(
            type(token) is int and token >= 0 for token in (*tokens.before, *tokens.after)
        ):
            expected = '{"mode": template, eod or none, "before": token ids, "after": token ids}'
            raise InputError(f"{place}: found {json.dumps(values)[:60]}, expected {expected}")
        return tokens

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of "mode" and the lists of ids "before" and "after"."""
        return {"mode": self.mode, "before": list(self.before), "after": list(self.after)}

    @property
    def count(self) -> int:
        """Return the number of special tokens that are put around a text."""
        return len(self.before) + len(self.after)

    def is_same(self, other: "SpecialTokens") -> bool:
        """Return whether both put the same tokens around a text, whatever their modes."""
        return self.before == other.before and self.after == other.after

    def surround(self, tokens: np.ndarray) -> np.ndarray:
        """Return `tokens`, ids of a text, between the special ones, as int64[T + count]."""
        return np.concatenate([self.before, tokens, self.after]).astype(np.int64)

    def strip(self, tokens: np.ndarray) -> np.ndarray:
        """Return `tokens`, ids of a text, without the special ones around it.

        All ids of `before` are removed once if `tokens` begin with them, and all of `after` if they
        end with them. The result is a slice of `tokens`.
        """
        before = len(self.before)
        after = len(self.after)
        if tuple(tokens[:before]) == self.before:
            tokens = tokens[before:]
        if after and tuple(tokens[-after:]) == self.after:
            tokens = tokens[:-after]
        return tokens

    def describe(self, tokenizer: "PreTrainedTokenizerFast") -> str:
        """Return the tokens around a text for the console, such as `[CLS] ... [SEP]`.

        The text is `...`, also if there are no tokens.
        """
        before = tokenizer.convert_ids_to_tokens(list(self.before))
        after = tokenizer.convert_ids_to_tokens(list(self.after))
        return " ".join([*before, "...", *after])


def read_template(tokenizer: "PreTrainedTokenizerFast") -> SpecialTokens:
    """Return the special tokens that the tokenizer itself puts around one text.

    Their mode is `template`, also if there are none. They are found in the ids of a short text:
    "a", or else a token of the vocabulary.

    Raises:
        InputError: The tokenizer gives none of these texts a token, apart from special ones.
    """
    for text in _iterate_texts(tokenizer):
        encoding = tokenizer(text)
        ids = encoding["input_ids"]
        is_text = [sequence is not None for sequence in encoding.sequence_ids(0)]
        if any(is_text):
            start = is_text.index(True)
            end = len(ids) - is_text[::-1].index(True)
            return SpecialTokens("template", tuple(ids[:start]), tuple(ids[end:]))
    raise InputError(
        f"tokenizer {tokenizer.name_or_path}: "
        "gives no token for the texts of its own tokens, expected some"
    )


def _iterate_texts(tokenizer: "PreTrainedTokenizerFast") -> Iterator[str]:
    """Yield short texts, of which one has a token.

    A vocabulary of amino acids, for example, has none for most letters.
    """
    yield "a"
    special = set(tokenizer.all_special_ids)
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    for token, id in entries[:_PROBED_TOKENS]:
        if id not in special:
            yield token


def resolve_special_tokens(
    tokenizer: "PreTrainedTokenizerFast", mode: SpecialTokensChoice, flag: str = FLAG
) -> SpecialTokens:
    """Return the special tokens that a mode of --special-tokens gives to a text.

    `none` gives none. `eod` appends the tokenizer's `eos_token`, or else its `sep_token`.
    `template`, and an empty `mode`, give the template of the tokenizer; if that adds nothing,
    `eod`. An empty `mode` is `none` for a tokenizer without any token to add. The result has the
    mode that applied.

    Args:
        flag: Flag of the mode, which the error names.

    Raises:
        InputError: `template` or `eod` finds no token to add, or `read_template` raises it.
    """
    if mode == "none":
        return SpecialTokens()
    if mode != "eod":
        template = read_template(tokenizer)
        if template.count:
            return template
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is not None:
        return SpecialTokens("eod", after=(end,))
    if not mode:
        return SpecialTokens()
    raise InputError(
        f"{flag}: tokenizer {tokenizer.name_or_path} has no end-of-sequence token to append; "
        "expected `eos_token` or `sep_token` "
        f"in its tokenizer_config.json, or {FLAG} none"
    )


def set_special_tokens(
    tokenizer: "PreTrainedTokenizerFast", special: SpecialTokens
) -> "PreTrainedTokenizerFast":
    """Return a tokenizer that adds exactly `special` to a text.

    It is `tokenizer` itself if it does so already, whatever it adds to a pair, else a changed copy.
    Between the two texts of a pair, the copy puts the tokens after a text, or if there are none
    those before it: `A <eos> B <eos>`.
    """
    if special.is_same(read_template(tokenizer)):
        return tokenizer
    return set_template(tokenizer, special, between=special.after or special.before)


def set_template(
    tokenizer: "PreTrainedTokenizerFast", special: SpecialTokens, *, between: Sequence[int]
) -> "PreTrainedTokenizerFast":
    """Return a copy of a tokenizer with `special` around a text or a pair.

    All token type ids are 0. The copy neither truncates nor pads.

    Args:
        between: Ids of the tokens between the two texts of a pair.
    """
    from tokenizers import Tokenizer

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    known: dict[str, dict[str, Any]] = {}

    def build_pieces(ids: Sequence[int]) -> list[dict[str, Any]]:
        pieces = []
        for id in ids:
            token = tokenizer.convert_ids_to_tokens(id)
            known[token] = {"id": token, "ids": [id], "tokens": [token]}
            pieces.append({"SpecialToken": {"id": token, "type_id": 0}})
        return pieces

    before = build_pieces(special.before)
    middle = build_pieces(between)
    after = build_pieces(special.after)
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [*before, first, *after],
        "pair": [*before, first, *middle, second, *after],
        "special_tokens": known,
    }
    kept = drop_template(content["post_processor"])
    content["post_processor"] = {"type": "Sequence", "processors": [*kept, template]}
    content |= {"truncation": None, "padding": None}
    changed = copy.deepcopy(tokenizer)
    changed._tokenizer = Tokenizer.from_str(json.dumps(content))
    return changed


def drop_template(post_processor: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the parts of a post-processor that add no special tokens.

    `post_processor` is the object in tokenizer.json; None has no parts. The parts are ByteLevel's,
    which only correct the characters that a token stands for.
    """
    if post_processor is None:
        return []
    parts = (
        post_processor["processors"] if post_processor["type"] == "Sequence" else [post_processor]
    )
    return [part for part in parts if part["type"] == "ByteLevel"]
