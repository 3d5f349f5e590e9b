import os
import subprocess
import sys

import nltk
import pytest
from nltk.tokenize.punkt import PunktParameters
from text_helpers import TEXTS

from megaenc.data.preprocess import sentence_splitter
from megaenc.data.preprocess.sentence_splitter import (
    PunktModel,
    build_sentence_splitter,
    load_installed_punkt,
    train_punkt,
)
from megaenc.errors import InputError

PROSE = [
    'Mr. Fox met Dr. Dog at 3.14 p.m. in the yard. They spoke.  "Is it so?" asked Mr. Fox.\n\n'
    "It was so! (It was.) Was it?",
    "The report by Mr. Crane names Dr. Bell and Mr. Reed. Dr. Bell was not there... "
    "Mr. Reed was!  He said so. ",
]
NOTHING = PunktModel("none", PunktParameters())
ENGLISH = PunktModel("by hand", PunktParameters())
ENGLISH.parameters.abbrev_types = {"mr", "dr", "p.m"}
ENGLISH.parameters.sent_starters = {"they", "it"}
ENGLISH.parameters.ortho_context.update(they=6, it=6)


def test_sentences_end_where_punkt_says():
    split = build_sentence_splitter(ENGLISH)
    assert split(PROSE[0]) == [
        "Mr. Fox met Dr. Dog at 3.14 p.m. in the yard.",
        " They spoke.",
        '  "Is it so?"',
        " asked Mr. Fox.",
        "\n\nIt was so!",
        " (It was.)",
        " Was it?",
    ]
    assert split("No end") == ["No end"]
    assert split("\n One. \n\n") == ["\n One. \n\n"]
    assert split("") == [""]


HOSTILE = [
    "",
    " \n\t ",
    "....",
    "?!?! ?!",
    "a. " * 300,
    "x" * 5000,
    " " * 3000 + "." + " " * 3000,
    "One.\x00Two.\u2028 Three.\ufeff \U0001f469\u200d\U0001f469. "
    "\ufffd. Four.\r\n\r\nFive.\x85Six.",
    '"A." (B.) [C.] \u201cD.\u201d E.)  F',
    "日本語の文。次の文。",
    "- - - . . . -- ... ;-) :.",
    *TEXTS,
    *PROSE,
]


@pytest.mark.parametrize("window", [7, 100, sentence_splitter._WINDOW])
def test_no_character_is_lost(monkeypatch, window):
    monkeypatch.setattr(sentence_splitter, "_WINDOW", window)
    monkeypatch.setattr(sentence_splitter, "_CONTEXT", window // 4)
    for split in (build_sentence_splitter(NOTHING), build_sentence_splitter(ENGLISH)):
        for text in [*HOSTILE, "".join(HOSTILE), " ".join(HOSTILE * 3)]:
            pieces = split(text)
            assert "".join(pieces) == text
            assert all(pieces) or not text
            assert all(piece.strip() for piece in pieces) or not text.strip()


def test_a_long_text_without_an_end_is_one_sentence():
    assert len(build_sentence_splitter(ENGLISH)("word " * 200_000)) == 1


def test_punkt_is_learnt_from_the_beginning_alone(monkeypatch):
    monkeypatch.setattr(sentence_splitter, "TRAINING_CHARACTERS", sum(map(len, PROSE)) * 20 + 10)
    learnt = train_punkt(PROSE * 20 + ["0123456789 and what follows is not read. Xyz. "] * 50)
    assert {"mr", "dr"} <= learnt.parameters.abbrev_types
    assert learnt.describe() == train_punkt(PROSE * 20 + ["0123456789"]).describe()
    assert build_sentence_splitter(learnt)("It was Mr. Fox. It was not.") == [
        "It was Mr. Fox.",
        " It was not.",
    ]
    assert learnt.describe() != train_punkt(PROSE).describe()


def test_the_same_text_teaches_the_same_in_every_process():
    # Sets of words come in another order in every process; what is learnt must not.
    code = (
        "from megaenc.data.preprocess.sentence_splitter import train_punkt; "
        f"print(train_punkt({PROSE * 20}).describe())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    ).stdout
    assert said == f"{train_punkt(PROSE * 20).describe()}\n".encode()


def test_an_installed_model_is_found_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(nltk, "download", lambda *rest, **options: pytest.fail("a download"))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    assert load_installed_punkt("english") is None
    directory = tmp_path / "tokenizers" / "punkt_tab" / "english"
    directory.mkdir(parents=True)
    (directory / "abbrev_types.txt").write_text("mr\ndr")
    (directory / "collocations.tab").write_text("s\tbach")
    (directory / "sent_starters.txt").write_text("they")
    (directory / "ortho_context.tab").write_text("they\t6\nfox\t0")
    actual = load_installed_punkt("english")
    known = actual.parameters
    assert (known.abbrev_types, known.collocations, known.sent_starters) == (
        {"dr", "mr"},
        {("s", "bach")},
        {"they"},
    )
    assert build_sentence_splitter(actual)("It was Mr. Fox. It was not.") == [
        "It was Mr. Fox.",
        " It was not.",
    ]
    assert actual.describe()["language"] == "english"
    assert load_installed_punkt("german") is None
    with pytest.raises(
        InputError, match=r"--punkt-language \.\./\.\.: expected the name of a language"
    ):
        load_installed_punkt("../..")
