"""A pack for the eye: its text, the edges of its documents, and what an objective hides in it and predicts from it."""

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

# How the model reads a token; these characters are also what the picture shows inside brackets.
AS_IS, HIDDEN, REPLACED, KEPT = ".", "#", ">", "="
PREDICTS, NO_PREDICTION = "›", "·"

_STYLES = {HIDDEN: "bold black on yellow", REPLACED: "bold black on magenta", KEPT: "bold black on green"}
_PREDICTS_STYLE, _SPECIAL_STYLE, _EDGE_STYLE = "bold cyan", "magenta", "blue"
# No control character of the text reaches the terminal.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32)} | {code: f"\\x{code:02x}" for code in range(0x7F, 0xA0)}
_CONTROL_PICTURES |= {ord("\n"): "↵", ord("\t"): "⇥"}


@dataclass(frozen=True)
class TokenSpan:
    """Tokens start..stop-1 of a pack: one token, or the several that one character takes."""

    start: int
    stop: int
    text: str
    """What the corpus holds there: also the label of a token that is hidden."""
    special: bool
    marks: str
    """A character a token: AS_IS; HIDDEN, the model reads the mask token; REPLACED, it reads another; KEPT, it reads the token
    itself and predicts it all the same."""
    reads: str
    """What stands in for a single REPLACED token, else empty."""
    predicts: tuple[str | None, ...]
    """For each token None, or the text of the label that the model's output there should predict where that is neither this
    token nor the next; "" where it is the next. A token that is predicted where it stands has None: its mark says so."""


@dataclass(frozen=True)
class DecodedPack:
    """A pack under an objective; `pieces` are those of its documents, in stretches."""

    pack: Pack
    objective: Objective
    targets: Targets
    pieces: tuple[tuple[TokenSpan, ...], ...]


def decode_pack(pack: Pack, objective: Objective, seed: int, tokenizer: "PreTrainedTokenizerFast") -> DecodedPack:
    """Decode `pack` with the targets that `objective` gives it in a run with `seed`."""
    vocabulary = read_vocabulary(tokenizer)
    targets = objective.targets(pack, SampleRandomness(seed, pack.sample, pack.epoch))

    def text_of(token: int) -> str:
        return tokenizer.backend_tokenizer.decode([int(token)], skip_special_tokens=False)

    marks = np.where(targets.inputs == pack.tokens, AS_IS, REPLACED)
    if vocabulary.mask_id is not None:
        marks[(marks == REPLACED) & (targets.inputs == vocabulary.mask_id)] = HIDDEN
    predicts: list[str | None] = [None] * len(pack.tokens)
    if objective.shift == 0:
        marks[targets.predict_at[marks[targets.predict_at] == AS_IS]] = KEPT
    else:
        for at, label in zip(targets.predict_at, targets.labels, strict=True):
            predicts[at] = "" if objective.shift == 1 else text_of(label)
    special = np.isin(pack.tokens, vocabulary.special_ids)
    pieces = []
    for start, end in pairwise(pack.edges.tolist()):
        stretches = []
        # A special token stands alone: what comes before it may be half a character.
        for is_special, places in groupby(range(start, end), key=lambda at: bool(special[at])):
            ids = pack.tokens[list(places)].tolist()
            names = [(1, name) for name in tokenizer.convert_ids_to_tokens(ids)] if is_special else []
            for count, text in names or decode_in_spans(tokenizer, ids):
                stop = start + count
                own = "".join(marks[start:stop])
                reads = text_of(targets.inputs[start]) if own == REPLACED else ""
                stretches.append(TokenSpan(start, stop, text, is_special, own, reads, tuple(predicts[start:stop])))
                start = stop
        pieces.append(tuple(stretches))
    return DecodedPack(pack, objective, targets, tuple(pieces))


def build_renderables(decoded: DecodedPack) -> list[Any]:
    """What rich prints: a line that counts, the text with a rule at each edge, the legend of what occurs in it."""
    from rich.rule import Rule
    from rich.text import Text

    pack, objective, count = decoded.pack, decoded.objective, len(decoded.targets.predict_at)
    changed = int((decoded.targets.inputs != pack.tokens).sum())
    total, pieces = len(pack.tokens), len(decoded.pieces)
    shown = [
        Text(f"pack {pack.sample} (epoch {pack.epoch}): {total} tokens of {pieces} document{'s' * (pieces > 1)}", "bold"),
        Text(f"{objective.describe(every=True)}, {objective.attention} attention"),
        Text(f"{count} tokens predicted ({100 * count / total:.1f} %), {changed} not shown to the model"),
    ]
    for number, piece in enumerate(decoded.pieces, 1):
        title = f"document {number} of the pack: tokens {piece[0].start} to {piece[-1].stop - 1}"
        shown.append(Rule(Text(title, _EDGE_STYLE), align="left", style=_EDGE_STYLE))
        shown.append(Text().join(_format_span(stretch) for stretch in piece))
    shown.append(Rule(Text("legend", _EDGE_STYLE), align="left", style=_EDGE_STYLE))
    return [*shown, _build_legend(decoded)]


def _format_span(stretch: TokenSpan) -> Any:
    from rich.text import Text

    inner, shown = stretch.text.translate(_CONTROL_PICTURES), Text()
    if stretch.special:
        shown.append(inner, _SPECIAL_STYLE)
    elif set(stretch.marks) == {AS_IS}:
        shown.append(inner)
    else:
        if inner.startswith(" ") and inner.strip():  # a word's space stays outside its brackets
            shown.append(" ")
            inner = inner[1:]
        inner = inner if inner.strip() else inner.replace(" ", "␣")
        several = f":{stretch.marks}" if len(stretch.marks) > 1 else ""
        mark = {HIDDEN: "", REPLACED: f"{REPLACED}{stretch.reads.translate(_CONTROL_PICTURES)}", KEPT: KEPT}.get(stretch.marks, "")
        style = _STYLES[next(each for each in stretch.marks if each != AS_IS)]
        shown.append(f"[{inner}{several}{mark}]", style)
    if any(label is not None for label in stretch.predicts):
        for label in stretch.predicts:
            named = f"“{label.translate(_CONTROL_PICTURES)}”" if label else ""
            shown.append(NO_PREDICTION if label is None else PREDICTS + named, _PREDICTS_STYLE)
    if "\n" in stretch.text and set(stretch.marks) == {AS_IS}:
        shown.append("\n")
    return shown


def _build_legend(decoded: DecodedPack) -> Any:
    from rich.table import Table
    from rich.text import Text

    stretches = [stretch for piece in decoded.pieces for stretch in piece]
    several = [stretch for stretch in stretches if len(stretch.marks) > 1]
    marks = {mark for stretch in stretches for mark in stretch.marks}
    labels = {label for stretch in stretches for label in stretch.predicts if label is not None}
    wanted = "where the text has `word`" if labels else "and predicts `word` here"
    cut = any(set(stretch.marks) != {AS_IS} for stretch in several)
    special = next((stretch.text for stretch in stretches if stretch.special), "")
    how = "a character of several tokens:"
    entries = [
        (HIDDEN in marks, "[word]", _STYLES[HIDDEN], f"hidden: the model reads the mask token {wanted}"),
        (REPLACED in marks, "[word>dog]", _STYLES[REPLACED], f"replaced: the model reads `dog` {wanted}"),
        (KEPT in marks, "[word=]", _STYLES[KEPT], "left as it is: the model reads `word`, and predicts it here"),
        (cut, "[é:.#]", _STYLES[HIDDEN], f"{how} . read as it is, # hidden, > replaced, = left as it is and predicted"),
        ("" in labels, f"word{PREDICTS}", _PREDICTS_STYLE, "predicts the next token"),
        (any(labels), f"word{PREDICTS}“dog”", _PREDICTS_STYLE, "predicts `dog`"),
        (labels and several, f"é{PREDICTS}{NO_PREDICTION}", _PREDICTS_STYLE, f"{how} {PREDICTS} predicts, {NO_PREDICTION} does not"),
        (special, special, _SPECIAL_STYLE, "special token"),
        (any("\n" in stretch.text for stretch in stretches), "↵", "", "new line in the text"),
        (True, "── tokens", _EDGE_STYLE, "edge of a document: attention does not cross it"),
    ]
    legend = Table.grid(padding=(0, 2))
    for occurs, example, style, meaning in entries:
        if occurs:
            legend.add_row(Text(example, style), meaning)
    return legend
