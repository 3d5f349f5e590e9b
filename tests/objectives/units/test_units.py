"""Words and collocations hidden as a whole: accepted files and identity of a run."""

import dataclasses

import numpy as np
import pytest
from objectives.objective_helpers import PHRASES, VOCABULARY, WORDS, random_pack, write_phrases

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
from megaenc.errors import InputError
from megaenc.objectives import MaskedLanguageModeling, Schedule
from megaenc.objectives.inspection import inspect
from megaenc.objectives.units.collocations import main as collocations


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_phrases(tmp_path_factory.mktemp("units") / "phrases.npz")


def test_the_unit_is_a_part_of_the_identity():
    text = "mlm(mask=0.4,random=0.0,keep=0.0,span=0.0,unit"
    assert Schedule.build("mlm", 10, VOCABULARY).canonical == f"{text}=token):10"
    words = Schedule.build("mlm(unit=word)", 10, WORDS)
    assert words.canonical == f"{text}=word):10"
    assert Schedule.build(words.canonical, 10, WORDS).canonical == words.canonical
    assert words.packages() == Schedule.build("mlm", 10, VOCABULARY).packages() == {}


def test_the_contents_of_the_file_are_a_part_of_the_identity(file, tmp_path):
    other = write_phrases(tmp_path / "phrases.npz", PHRASES[1:])
    needs = [
        Schedule.build(f"mlm(mask=0.4->0.2,unit={path})", 10, VOCABULARY).packages()["mlm"]
        for path in (file, other)
    ]
    assert all(text.startswith("phrases.npz (") for text in needs) and needs[0] != needs[1]


def test_units_that_cannot_be(file, tmp_path):
    foreign = write_phrases(tmp_path / "foreign.npz", fingerprint="a" * 64)
    gap = write_phrases(tmp_path / "gap.npz", [(10, -1, 11)])
    single = write_phrases(tmp_path / "single.npz", [(10,)])
    np.savez(tmp_path / "other.npz", tokens=np.zeros(3))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "gap.npz").read_bytes()[:400])
    refusals = {
        "word": "found word, but the tokens of this tokenizer do not show where words begin",
        "wrod": "found wrod, expected token, word or a file; did you mean `word`?",
        str(
            tmp_path / "none.npz"
        ): "none.npz: no such file; expected a file of `megaenc objective collocations`",
        foreign: (
            "collocations of another tokenizer (aaaaaaaaaaaa), expected the one of the run "
            "(ffffffffffff)"
        ),
        str(tmp_path / "other.npz"): "other.npz: no collocations, or damaged",
        str(tmp_path / "cut.npz"): "cut.npz: no collocations, or damaged",
        gap: "gap.npz: holds no token n-grams of 2 to 5 tokens",
        single: "single.npz: holds no token n-grams of 2 to 5 tokens",
    }
    for unit, complaint in refusals.items():
        with pytest.raises(InputError) as caught:
            MaskedLanguageModeling(VOCABULARY, unit=unit)
        assert str(caught.value).startswith("mlm: option `unit`: ") and complaint in str(
            caught.value
        )
        assert "\n" not in str(caught.value)
    with pytest.raises(
        InputError, match=r"mlm: option `unit`: .* with span=3, expected token, or no span"
    ):
        MaskedLanguageModeling(VOCABULARY, unit=file, span=3)


def test_arrays_larger_than_their_file_are_refused_before_they_are_read(tmp_path, monkeypatch):
    path = tmp_path / "packed.npz"
    np.savez_compressed(path, tokens=np.zeros((10**6, 5), np.int32), pmi=0, counts=0, facts="")
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(
        InputError,
        match=r"array `tokens` of shape \[1000000, 5\] takes 20,000,000 bytes, .* of the",
    ):
        MaskedLanguageModeling(VOCABULARY, unit=str(path))


def test_units_of_a_made_up_vocabulary_are_accepted():
    """Estimates and plans have no other vocabulary and train on random tokens."""
    made_up = dataclasses.replace(VOCABULARY, fingerprint="")
    pack = random_pack(0)
    rows = [
        MaskedLanguageModeling(made_up, unit=unit)
        .targets(pack, SampleRandomness(0, 0, 0))
        .predict_at.tolist()
        for unit in ("word", "token")
    ]
    assert rows[0] == rows[1]


def test_words_and_collocations_of_real_text_are_hidden_whole(small_corpus, tmp_path, capsys):
    tokenizer = load_tokenizer(str(small_corpus.tokenizer))
    file = str(tmp_path / "pmi.npz")
    flags = [str(small_corpus.prefix), "--tokenizer", str(small_corpus.tokenizer)]
    collocations(["--data-path", *flags, "--output", file, "--min-count", "3"])
    capsys.readouterr()
    inspect.main([*flags, "--objective", f"mlm(unit={file})"])
    output = capsys.readouterr().out
    assert "hidden: the model reads the mask token" in output and f"unit={file})" in "".join(
        output.split()
    )
    objective = MaskedLanguageModeling(read_vocabulary(tokenizer), mask=0.4, unit="word")
    text = (
        "Tokenization of extraordinarily uncommon words, transcendentally speaking: "
        "hippopotamuses don't."
    )
    encoding = tokenizer(text, add_special_tokens=False)
    ids = np.array(encoding["input_ids"])
    words = np.array(encoding.word_ids())
    pack = Pack(0, 0, ids, np.array([0, len(ids)], dtype=np.int32))
    for seed in range(20):
        hidden = objective.targets(pack, SampleRandomness(seed, 0, 0)).predict_at
        assert hidden.tolist() == np.flatnonzero(np.isin(words, words[hidden])).tolist()
