"""Console view of a decoded pack.

It shows the text, document edges, and the tokens that an objective hides and predicts.
"""

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.tokenizer import decode_in_spans, read_vocabulary
from megaenc.objectives.base import Objective, Targets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Marks for how the model reads a token, also shown inside brackets.
AS_IS = "."
HIDDEN = "#"
REPLACED = ">"
KEPT = "="
PREDICTS = "›"
NO_PREDICTION = "·"

_STYLES = {
    HIDDEN: "bold black on yellow",
    REPLACED: "bold black on magenta",
    KEPT: "bold black on green",
}
_PREDICTS_STYLE = "bold cyan"
_SPECIAL_STYLE = "magenta"
_EDGE_STYLE = "blue"
# Control characters of the text must not reach the terminal.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32)} | {
    code: f"\\x{code:02x}" for code in range(0x7F, 0xA0)
}
_CONTROL_PICTURES |= {ord("\n"): "↵", ord("\t"): "⇥"}


@dataclass(frozen=True)
class TokenSpan:
    """Span of one token of a pack, or of all tokens of one character; see DecodedPack.

    It takes the token positions from `start` to before `stop` in the pack. `text` is decoded, also
    the label of a hidden token; `special` tells of a special token. `marks` has a character for
    each token: AS_IS; HIDDEN, the model reads the mask token; REPLACED, it reads another token,
    `reads` if the span is a single one ("" otherwise); KEPT, it reads the token unchanged and
    predicts it. `predicts` has the label at each token: None for no prediction or the token itself
    (see its mark), "" for the next token, else the label's text.
    """

    start: int
    stop: int
    text: str
    """Decoded text, which is also the label of a hidden token."""
    special: bool
    marks: str
    """One character per token: AS_IS; HIDDEN, the model reads the mask token; REPLACED, it reads
    another token; KEPT, it reads the token unchanged and predicts it."""
    reads: str
    """Replacement of a single REPLACED token, else empty."""
    predicts: tuple[str | None, ...]
    """Label predicted at each token: None for no prediction or the token itself (see its mark), ""
    for the next token, else the label's text."""


@dataclass(frozen=True)
class DecodedPack:
    """Pack decoded under an objective, by `decode_pack`.

    It has the `pack`, the `objective`, the `targets` that the objective makes of the pack, and in
    `pieces` the TokenSpans of each document.
    """

    pack: Pack
    objective: Objective
    targets: Targets
    pieces: tuple[tuple[TokenSpan, ...], ...]


def decode_pack(
    pack: Pack, objective: Objective, seed: int, tokenizer: "PreTrainedTokenizerFast"
) -> DecodedPack:
    """Return a pack decoded to text spans by document.

    The spans show the tokens that `objective` hides and predicts in a run of seed `seed`.
    `tokenizer` is that of the pack and of the objective's vocabulary.
    """
    vocabulary = read_vocabulary(tokenizer)
    targets = objective.targets(pack, SampleRandomness(seed, pack.sample, pack.epoch))

    def text_of(token: int) -> str:
        return tokenizer.backend_tokenizer.decode([int(token)], skip_special_tokens=False)

    marks = np.where(targets.inputs == pack.tokens, AS_IS, REPLACED)
    if vocabulary.mask_id is not None:
        marks[(marks == REPLACED) & (targets.inputs == vocabulary.mask_id)] = HIDDEN
    predicts: list[str | None] = [None] * len(pack.tokens)
    if objective.shift == 0 and not objective.classes:
        marks[targets.predict_at[marks[targets.predict_at] == AS_IS]] = KEPT
    else:
        for position, label in zip(targets.predict_at, targets.labels, strict=True):
            if objective.classes:
                predicts[position] = str(label)
            else:
                predicts[position] = "" if objective.shift == 1 else text_of(label)
    special = np.isin(pack.tokens, vocabulary.special_ids)
    pieces = []
    for start, end in pairwise(pack.cu_seqlens.tolist()):
        spans = []
        # Special tokens are decoded separately: the tokens before them may end in half a character.
        for is_special, places in groupby(
            range(start, end), key=lambda position: bool(special[position])
        ):
            ids = pack.tokens[list(places)].tolist()
            names = (
                [(1, name) for name in tokenizer.convert_ids_to_tokens(ids)] if is_special else []
            )
            for count, text in names or decode_in_spans(tokenizer, ids):
                stop = start + count
                span_marks = "".join(marks[start:stop])
                reads = text_of(targets.inputs[start]) if span_marks == REPLACED else ""
                spans.append(
                    TokenSpan(
                        start,
                        stop,
                        text,
                        is_special,
                        span_marks,
                        reads,
                        tuple(predicts[start:stop]),
                    )
                )
                start = stop
        pieces.append(tuple(spans))
    return DecodedPack(pack, objective, targets, tuple(pieces))


def build_renderables(decoded: DecodedPack) -> list[Any]:
    """Return rich renderables of a decoded pack, in the order in which to print them.

    They are counts, the text of each document with hidden and predicted tokens marked, and a
    legend.
    """
    from rich.rule import Rule
    from rich.text import Text

    pack = decoded.pack
    objective = decoded.objective
    count = len(decoded.targets.predict_at)
    changed = int((decoded.targets.inputs != pack.tokens).sum())
    total = len(pack.tokens)
    pieces = len(decoded.pieces)
    lines = [
        Text(
            f"pack {pack.sample} (epoch {pack.epoch}): {total} tokens of {pieces} "
            f"document{'s' * (pieces > 1)}",
            "bold",
        ),
        Text(f"{objective.describe(every=True)}, {objective.attention} attention"),
        Text(
            f"{count} tokens predicted ({100 * count / total:.1f} %), "
            f"{changed} changed in the model's input"
        ),
    ]
    for index, piece in enumerate(decoded.pieces, 1):
        title = f"document {index} of the pack: tokens {piece[0].start} to {piece[-1].stop - 1}"
        lines.append(Rule(Text(title, _EDGE_STYLE), align="left", style=_EDGE_STYLE))
        lines.append(Text().join(_format_span(span) for span in piece))
    lines.append(Rule(Text("legend", _EDGE_STYLE), align="left", style=_EDGE_STYLE))
    return [*lines, _build_legend(decoded)]


def _format_span(span: TokenSpan) -> Any:
    """Return a span as rich Text.

    Hidden tokens are in brackets, predictions have marks.
    """
    from rich.text import Text

    inner = span.text.translate(_CONTROL_PICTURES)
    line = Text()
    if span.special:
        line.append(inner, _SPECIAL_STYLE)
    elif set(span.marks) == {AS_IS}:
        line.append(inner)
    else:
        # The space before a word stays outside its brackets.
        if inner.startswith(" ") and inner.strip():
            line.append(" ")
            inner = inner[1:]
        inner = inner if inner.strip() else inner.replace(" ", "␣")
        several = f":{span.marks}" if len(span.marks) > 1 else ""
        mark = {
            HIDDEN: "",
            REPLACED: f"{REPLACED}{span.reads.translate(_CONTROL_PICTURES)}",
            KEPT: KEPT,
        }.get(span.marks, "")
        style = _STYLES[next(mark for mark in span.marks if mark != AS_IS)]
        line.append(f"[{inner}{several}{mark}]", style)
    if any(label is not None for label in span.predicts):
        for label in span.predicts:
            named = f"“{label.translate(_CONTROL_PICTURES)}”" if label else ""
            line.append(NO_PREDICTION if label is None else PREDICTS + named, _PREDICTS_STYLE)
    if "\n" in span.text and set(span.marks) == {AS_IS}:
        line.append("\n")
    return line


def _build_legend(decoded: DecodedPack) -> Any:
    """Return a rich table that explains the marks that occur in the pack."""
    from rich.table import Table
    from rich.text import Text

    spans = [span for piece in decoded.pieces for span in piece]
    several = [span for span in spans if len(span.marks) > 1]
    marks = {mark for span in spans for mark in span.marks}
    labels = {label for span in spans for label in span.predicts if label is not None}
    label, noun = ("1", "class ") if decoded.objective.classes else ("dog", "")
    suffix = "in place of `word`" if labels else "and predicts `word` here"
    cut = any(set(span.marks) != {AS_IS} for span in several)
    special = next((span.text for span in spans if span.special), "")
    prefix = "a character of several tokens:"
    entries = [
        (
            HIDDEN in marks,
            "[word]",
            _STYLES[HIDDEN],
            f"hidden: the model reads the mask token {suffix}",
        ),
        (
            REPLACED in marks,
            "[word>dog]",
            _STYLES[REPLACED],
            f"replaced: the model reads `dog` {suffix}",
        ),
        (
            KEPT in marks,
            "[word=]",
            _STYLES[KEPT],
            "unchanged: the model reads `word` and predicts it here",
        ),
        (
            cut,
            "[é:.#]",
            _STYLES[HIDDEN],
            f"{prefix} . unchanged, # hidden, > replaced, = unchanged and predicted",
        ),
        ("" in labels, f"word{PREDICTS}", _PREDICTS_STYLE, "predicts the next token"),
        (any(labels), f"word{PREDICTS}“{label}”", _PREDICTS_STYLE, f"predicts {noun}`{label}`"),
        (
            labels and several,
            f"é{PREDICTS}{NO_PREDICTION}",
            _PREDICTS_STYLE,
            f"{prefix} {PREDICTS} predicts, {NO_PREDICTION} does not",
        ),
        (special, special, _SPECIAL_STYLE, "special token"),
        (any("\n" in span.text for span in spans), "↵", "", "new line in the text"),
        (True, "── tokens", _EDGE_STYLE, "edge of a document: attention does not cross it"),
    ]
    legend = Table.grid(padding=(0, 2))
    for occurs, example, style, meaning in entries:
        if occurs:
            legend.add_row(Text(example, style), meaning)
    return legend
