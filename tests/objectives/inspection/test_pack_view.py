"""A decoded pack shows the masks and edges of a run, and only whole characters."""

from dataclasses import dataclass

import numpy as np
import pytest
from rich.cells import cell_len
from text_helpers import TEXTS, reference_ids, small_tokenizer

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.tokenizer import read_vocabulary
from megaenc.objectives import (
    Attention,
    CausalLanguageModeling,
    MaskedLanguageModeling,
    Objective,
    Targets,
)
from megaenc.objectives.inspection.pack_view import (
    AS_IS,
    HIDDEN,
    KEPT,
    REPLACED,
    build_renderables,
    decode_pack,
)

EOS = 0
MASK = 1


@dataclass(frozen=True)
class Fixed(Objective):
    """Objective that hides positions and predicts them from `shift` positions before."""

    name = "fixed"
    attention = Attention.BIDIRECTIONAL

    def __init__(self, vocabulary, hidden, shift=0):
        object.__setattr__(self, "vocabulary", vocabulary)
        object.__setattr__(self, "hidden", np.array(hidden))
        object.__setattr__(self, "shift", shift)

    @classmethod
    def options(cls):
        return ()

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        inputs = pack.tokens.copy()
        inputs[self.hidden] = MASK
        return Targets(inputs, self.hidden - self.shift, pack.tokens[self.hidden])


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return read_vocabulary(tokenizer)


def pack_of(tokenizer, *texts: str, sample: int = 0, epoch: int = 0) -> Pack:
    """Return a pack with a document for each text, ended by EOS."""
    rows = [[*reference_ids(tokenizer, text), EOS] for text in texts]
    edges = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return Pack(sample, epoch, np.array([token for row in rows for token in row]), edges)


def render(decoded, width: int = 80) -> str:
    """Return the text that a file would get."""
    import io

    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False)
    for part in build_renderables(decoded):
        console.print(part)
    return out.getvalue()


def test_marks_are_those_that_the_run_has(tokenizer, vocabulary):
    pack = pack_of(tokenizer, *TEXTS, sample=5, epoch=2)
    objective = MaskedLanguageModeling(vocabulary, mask=0.9, random=0.3, keep=0.3)
    targets = objective.targets(pack, SampleRandomness(seed=9, sample=5, epoch=2))
    expected = [AS_IS] * len(pack.tokens)
    for at in targets.predict_at:
        token = targets.inputs[at]
        if token == pack.tokens[at]:
            expected[at] = KEPT
        else:
            expected[at] = HIDDEN if token == MASK else REPLACED
    assert set(expected) == {AS_IS, HIDDEN, KEPT, REPLACED}
    decoded = decode_pack(pack, objective, 9, tokenizer)
    stretches = [stretch for piece in decoded.pieces for stretch in piece]
    assert "".join(stretch.marks for stretch in stretches) == "".join(expected)
    for stretch in stretches:
        if stretch.marks == REPLACED:
            assert stretch.reads == tokenizer.decode([int(targets.inputs[stretch.start])])


def test_pieces_are_the_documents_and_their_text_is_whole(tokenizer, vocabulary):
    decoded = decode_pack(
        pack_of(tokenizer, *TEXTS), MaskedLanguageModeling(vocabulary), 0, tokenizer
    )
    stop = 0
    for text, piece in zip(TEXTS, decoded.pieces, strict=True):
        assert "".join(stretch.text for stretch in piece) == text + "<|eos|>"
        assert [stretch.special for stretch in piece] == [False] * (len(piece) - 1) + [True]
        for stretch in piece:
            assert stretch.start == stop
            stop = stretch.stop
    lines = render(decoded, width=60).splitlines()
    assert sum(line.startswith("document ") for line in lines) == len(TEXTS)
    assert max(map(cell_len, lines)) <= 60


def test_kept_and_replaced_words_are_told_apart(tokenizer, vocabulary):
    pack = pack_of(tokenizer, "The dog fox dog")
    fox, dog = pack.tokens[[2, 3]]

    class Swapped(Fixed):
        def targets(self, pack, randomness):
            inputs = pack.tokens.copy()
            inputs[1] = fox
            return Targets(inputs, np.array([1, 3]), np.array([dog, dog]))

    output = render(decode_pack(pack, Swapped(vocabulary, [1, 3]), 0, tokenizer))
    assert "The [dog> fox] fox [dog=]<|eos|>" in output
    assert (
        "replaced: the model reads `dog`" in output
        and "unchanged: the model" in output
        and "hidden" not in output
    )


def test_classes_are_shown_next_to_their_tokens(tokenizer, vocabulary):
    pack = pack_of(tokenizer, "The dog fox dog")

    class Classified(Fixed):
        classes = 3

        def targets(self, pack, randomness):
            return Targets(pack.tokens, np.array([1, 2]), np.array([0, 2]))

    output = render(decode_pack(pack, Classified(vocabulary, [1, 2]), 0, tokenizer))
    assert "The dog›“0” fox›“2” dog<|eos|>" in output
    assert "predicts class `1`" in output and "unchanged" not in output


def test_a_character_of_several_tokens_shows_which_are_hidden(tokenizer, vocabulary):
    """日 has three tokens, one for each byte."""
    pack = pack_of(tokenizer, "日日日")
    assert len(pack.tokens) == 10
    output = render(decode_pack(pack, Fixed(vocabulary, [1, 6, 7, 8]), 0, tokenizer))
    assert "[日:.#.]日[日:###]<|eos|>" in output and "[é:.#]" in output
    assert "\ufffd" not in output


def test_clm_marks_every_token_that_has_a_next_one(tokenizer, vocabulary):
    decoded = decode_pack(
        pack_of(tokenizer, "The dog dog", "é"), CausalLanguageModeling(vocabulary), 0, tokenizer
    )
    output = render(decoded)
    assert "The› dog› dog›<|eos|>\n" in output and "é››<|eos|>\n" in output
    assert "predicts the next token" in output and "hidden" not in output
    assert (
        "causal attention" in output
        and "5 tokens predicted (71.4 %), 0 changed in the model's input" in output
    )


@pytest.mark.parametrize(
    ("hidden", "shift", "line"),
    [
        ([1, 3], 0, "The [dog] fox [dog]<|eos|>"),
        ([1, 3], 1, "The› [dog] fox› [dog]<|eos|>"),
        (
            [3],
            2,
            "The dog›“ dog” fox [dog]<|eos|>",
        ),  # a label that is neither here nor next is spelled out
    ],
)
def test_a_hidden_word_is_in_brackets_and_where_it_is_predicted_is_marked(
    tokenizer, vocabulary, hidden, shift, line
):
    output = render(
        decode_pack(
            pack_of(tokenizer, "The dog fox dog"), Fixed(vocabulary, hidden, shift), 0, tokenizer
        )
    )
    assert line in output.splitlines()
    assert "hidden: the model reads the mask token" in output
    count = len(hidden)
    assert (
        f"{count} tokens predicted ({20 * count}.0 %), {count} changed in the model's input"
        in " ".join(output.split())
    )


def test_no_control_character_reaches_the_terminal(tokenizer, vocabulary):
    text = "a\x1b[31mb\tc\nd\x07\x9b1m"
    output = render(decode_pack(pack_of(tokenizer, text), Fixed(vocabulary, [0]), 0, tokenizer))
    assert "[a]␛[31mb⇥c↵\nd␇\\x9b1m<|eos|>" in output
    assert all(character == "\n" or character.isprintable() for character in output)
