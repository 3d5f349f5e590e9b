"""Words and collocations hidden as a whole: against a walk along the tokens, and in numbers."""

import dataclasses
import io
import itertools
import math
import re
import zipfile

import numpy as np
import pytest
from objectives.objective_helpers import MASK, SPECIAL, VOCABULARY, places_in_document, random_pack, within

from megaenc.counter_rng import SampleRandomness, uniforms
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
from megaenc.doctor.objective.check import CheckConfig, run_checks
from megaenc.errors import InputError
from megaenc.objectives import MaskedLanguageModeling, MaskedNextTokenPrediction, Schedule
from megaenc.objectives.inspection import inspect
from megaenc.objectives.units.collocations import main as collocations
from megaenc.objectives.units.matching import Collocations

BOTH = (MaskedLanguageModeling, MaskedNextTokenPrediction)
# A word begins with every even id, and with every id after one above 40.
CODES = np.array([(0 if token % 2 else 0x7F) | (7 if token > 40 else 0) << 8 for token in range(50)], dtype="<u2").tobytes()
WORDS = dataclasses.replace(VOCABULARY, code_words=lambda: CODES)
# Of the ids 10 to 19; prefixes and overlaps of each other.
PHRASES = [(10, 11), (10, 11, 12), (11, 12, 13, 14), (12, 13), (14, 15, 16, 17, 18), (15, 15), (16, 17), (10, 11, 12, 13, 10)]
LONGEST_FIRST = sorted(PHRASES, key=len, reverse=True)


def write_phrases(path, phrases=PHRASES, fingerprint=VOCABULARY.fingerprint) -> str:
    tokens = np.array([(*phrase, *(5 - len(phrase)) * [-1]) for phrase in phrases], dtype=np.int32)
    counts = np.ones(len(phrases), dtype=np.int64)
    Collocations(tokens, counts.astype(np.float32), counts, {"tokenizer": fingerprint}).save(path)
    return str(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_phrases(tmp_path_factory.mktemp("units") / "phrases.npz")


def dense_pack(sample, length=64):
    """A pack of phrases, parts of phrases and single tokens."""
    pack = random_pack(sample, length)
    rng = np.random.default_rng(sample)
    phrases = [PHRASES[at][: rng.integers(1, 6)] for at in rng.integers(0, len(PHRASES), size=length)]
    tokens = np.array([*itertools.chain(*phrases)])[:length]
    return dataclasses.replace(pack, tokens=np.where(rng.random(length) < 0.08, pack.tokens, tokens))


def units_of(pack, first_is_eligible, unit) -> list[list[int]]:
    """The places of each unit, from left to right; tokens that are never chosen are in none."""
    tokens, places, units, at = pack.tokens.tolist(), places_in_document(pack), [], 0
    eligible = [token not in SPECIAL and (first_is_eligible or place) for token, place in zip(tokens, places, strict=True)]

    def is_joined(one):
        return one < len(tokens) and eligible[one] and eligible[one - 1] and places[one] > 0

    while at < len(tokens):
        end = at + 1
        if unit == "word":
            while is_joined(end) and tokens[end] % 2 and tokens[end - 1] <= 40:
                end += 1
        else:
            for phrase in LONGEST_FIRST:
                if tuple(tokens[at : at + len(phrase)]) == phrase and all(map(is_joined, range(at + 1, at + len(phrase)))):
                    end = at + len(phrase)
                    break
        if eligible[at]:
            units.append([*range(at, end)])
        at = end
    return units


def objective_of(kind, unit, file, **options):
    return kind(WORDS, unit=unit if unit == "word" else file, **options)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("unit", ["word", "file"])
@pytest.mark.parametrize("mask", [0.15, 0.5, 1.0])
def test_hidden_places_against_a_walk(kind, unit, mask, file):
    objective, several = objective_of(kind, unit, file, mask=mask), 0
    for sample in range(80):
        pack = dense_pack(sample) if sample % 2 else random_pack(sample)
        draws = uniforms(3, "mask", 64, counters=(sample, 2))
        units = units_of(pack, kind is MaskedLanguageModeling, unit)
        expected = [place for places in units if draws[places[0]] < mask for place in places]
        actual = objective.targets(pack, SampleRandomness(3, sample, 2))
        assert (actual.predict_at + objective.shift).tolist() == expected
        assert actual.labels.tolist() == pack.tokens[expected].tolist()
        assert np.flatnonzero(actual.inputs != pack.tokens).tolist() == expected
        several += sum(len(places) > 1 for places in units)
    assert several > 200


@pytest.mark.parametrize("kind", BOTH)
def test_units_of_one_token_are_hidden_as_tokens(kind, tmp_path):
    """Without a word or phrase of several tokens the masks are those of unit=token."""
    single = dataclasses.replace(VOCABULARY, code_words=np.full(50, 0x7F, dtype="<u2").tobytes)
    absent = write_phrases(tmp_path / "absent.npz", [(48, 48, 48, 48)])
    for sample in range(10):
        pack = dense_pack(sample)
        rows = [
            kind(vocabulary, mask=0.3, random=0.1, keep=0.1, unit=unit).targets(pack, SampleRandomness(0, sample, 0))
            for vocabulary, unit in ((VOCABULARY, "token"), (single, "word"), (VOCABULARY, absent))
        ]
        for other in rows[1:]:
            assert all(map(np.array_equal, rows[0][:3], other[:3]))


@pytest.mark.parametrize("unit", ["word", "file"])
def test_statistics_over_a_million_tokens(unit, file):
    """The share of tokens and of units of each length; the fates of tokens are independent."""
    objective = objective_of(MaskedLanguageModeling, unit, file, mask=0.15, random=0.2, keep=0.3)
    chosen, lengths, hidden, kept, predicted, mixed = [], [], 0, 0, 0, 0
    for sample in range(256):
        pack = dense_pack(sample, 4096)
        actual = objective.targets(pack, SampleRandomness(0, sample, 0))
        is_chosen = np.zeros(4096, dtype=bool)
        is_chosen[actual.predict_at] = True
        at_chosen = actual.inputs[actual.predict_at]
        hidden += int((at_chosen == MASK).sum())
        kept += int((at_chosen == actual.labels).sum())
        predicted += len(actual.labels)
        if sample >= 32:  # the walk is slow
            continue
        is_hidden = actual.inputs == MASK
        for places in units_of(pack, True, unit):
            one = is_chosen[places]
            assert one.all() or not one.any()
            chosen.append(bool(one[0]))
            lengths.append(len(places))
            mixed += bool(one[0] and len(set(is_hidden[places].tolist())) == 2)
    chosen, lengths = np.array(chosen), np.array(lengths)
    assert set(lengths) >= {1, 2, 3, 4, 5} and mixed > 100
    for length in range(1, 6):
        assert within(chosen[lengths == length].sum(), (lengths == length).sum(), 0.15), length
    spread = math.sqrt((lengths**2).sum() * 0.15 * 0.85)
    assert abs((chosen * lengths).sum() - lengths.sum() * 0.15) < 4.5 * spread
    assert within(hidden, predicted, 0.5)
    assert within(kept, predicted, 0.3 + 0.2 / 47)  # one random token in 47 is the one that was there


def test_runs_of_before_keep_their_identity():
    """The option is a part of a run's identity only if it is used."""
    text = "mlm(mask=0.4,random=0.0,keep=0.0,span=0.0)"
    assert Schedule.build("mlm", 10, VOCABULARY).canonical == f"{text}:10"
    assert Schedule.build("mlm(unit=token)", 10, VOCABULARY).canonical == f"{text}:10"
    words = Schedule.build("mlm(unit=word)", 10, WORDS)
    assert words.canonical == f"{text[:-1]},unit=word):10"
    assert Schedule.build(words.canonical, 10, WORDS).canonical == words.canonical
    assert words.packages() == Schedule.build("mlm", 10, VOCABULARY).packages() == {}


def test_the_contents_of_the_file_are_a_part_of_the_identity(file, tmp_path):
    other = write_phrases(tmp_path / "phrases.npz", PHRASES[1:])
    needs = [Schedule.build(f"mlm(mask=0.4->0.2,unit={path})", 10, VOCABULARY).packages()["mlm"] for path in (file, other)]
    assert all(text.startswith("phrases.npz (") for text in needs) and needs[0] != needs[1]


def test_units_that_cannot_be(file, tmp_path):
    foreign = write_phrases(tmp_path / "foreign.npz", fingerprint="a" * 64)
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", tokens=np.zeros(3))
    np.save(tmp_path / "array.npy", np.zeros(3))
    gap = write_phrases(tmp_path / "gap.npz", [(10, -1, 11)])
    single = write_phrases(tmp_path / "single.npz", [(10,)])
    cut = tmp_path / "cut.npz"
    cut.write_bytes((tmp_path / "gap.npz").read_bytes()[:400])
    for options, complaint in (
        ({"unit": "word"}, "found word, but the tokens of this tokenizer do not show where words begin"),
        ({"unit": "wrod"}, "found wrod, expected token, word or a file; did you mean `word`?"),
        ({"unit": str(tmp_path / "none.npz")}, "none.npz: no such file; expected a file of `megaenc objective collocations`"),
        ({"unit": str(tmp_path)}, "no such file"),
        ({"unit": foreign}, "collocations of another tokenizer (aaaaaaaaaaaa), expected the one of the run (ffffffffffff)"),
        ({"unit": str(tmp_path / "text.npz")}, "text.npz: no collocations, or damaged"),
        ({"unit": str(tmp_path / "other.npz")}, "other.npz: no collocations, or damaged"),
        ({"unit": str(tmp_path / "array.npy")}, "array.npy: no collocations, or damaged"),
        ({"unit": str(cut)}, "cut.npz: no collocations, or damaged"),
        ({"unit": gap}, "gap.npz: holds no token n-grams of 2 to 5 tokens"),
        ({"unit": single}, "single.npz: holds no token n-grams of 2 to 5 tokens"),
        ({"unit": file, "span": 3}, "with span=3, expected token, or no span"),
        ({"unit": "word", "span": 3}, "found word with span=3, expected token, or no span"),
    ):
        with pytest.raises(InputError) as caught:
            MaskedLanguageModeling(VOCABULARY, **options)
        assert str(caught.value).startswith("mlm: option `unit`: ") and complaint in str(caught.value)
        assert "\n" not in str(caught.value)


def write_claim(path, source, shape) -> str:
    """Write the collocations of `source` with another shape in the header of `tokens`."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w") as changed:
        for name in archive.namelist():
            data = archive.read(name)
            if name == "tokens.npy":
                stream = io.BytesIO()
                np.lib.format.write_array_header_1_0(stream, {"descr": "<i4", "fortran_order": False, "shape": shape})
                data = stream.getvalue() + data[-20:]
            changed.writestr(name, data)
    return str(path)


def test_arrays_larger_than_their_file_are_refused_before_they_are_read(file, tmp_path, monkeypatch):
    claimed = write_claim(tmp_path / "claimed.npz", file, (2**32, 5))
    np.savez_compressed(tmp_path / "packed.npz", tokens=np.zeros((10**6, 5), np.int32), pmi=0, counts=0, facts="")
    monkeypatch.setattr(np, "load", None)
    for path, shape, size in (
        (claimed, "[4294967296, 5]", "85,899,345,920"),
        (str(tmp_path / "packed.npz"), "[1000000, 5]", "20,000,000"),
    ):
        with pytest.raises(InputError, match=rf"array `tokens` of shape {re.escape(shape)} takes {size} bytes, .* of the"):
            MaskedLanguageModeling(VOCABULARY, unit=path)


def test_units_of_a_made_up_vocabulary_are_accepted():
    """Estimates and plans have none but this, and train on random tokens."""
    made_up = dataclasses.replace(VOCABULARY, fingerprint="")
    pack = random_pack(0)
    rows = [
        MaskedLanguageModeling(made_up, unit=unit).targets(pack, SampleRandomness(0, 0, 0)).predict_at.tolist()
        for unit in ("word", "token")
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("unit", ["word", "file"])
def test_the_check_of_objectives_passes(unit, file):
    _, results = run_checks(CheckConfig(f"mlm(mask=0.3,unit={'word' if unit == 'word' else file})"))
    assert [result.name for result in results if result.passed is False] == []


def test_inspect_shows_whole_words_and_collocations(small_corpus, tmp_path, capsys):
    """Real text: each hidden word is in one pair of brackets next to another, none in part."""
    corpus = ["--data-path", str(small_corpus.prefix), "--tokenizer", str(small_corpus.tokenizer)]
    collocations([*corpus, "--output", str(tmp_path / "pmi.npz"), "--min-count", "3"])
    tokenizer = load_tokenizer(str(small_corpus.tokenizer))
    for unit in ("word", str(tmp_path / "pmi.npz")):
        capsys.readouterr()
        flags = [str(small_corpus.prefix), "--tokenizer", str(small_corpus.tokenizer), "--objective", f"mlm(unit={unit})"]
        inspect.main(flags)
        output = capsys.readouterr().out
        assert "hidden: the model reads the mask token" in output and "".join(unit.split()) in "".join(output.split())
    objective = MaskedLanguageModeling(read_vocabulary(tokenizer), mask=0.4, unit="word")
    text = "Tokenization of extraordinarily uncommon words, transcendentally speaking: hippopotamuses don't."
    encoding = tokenizer(text, add_special_tokens=False)
    ids, words = np.array(encoding["input_ids"]), np.array(encoding.word_ids())
    pack = Pack(0, 0, ids, np.array([0, len(ids)], dtype=np.int32))
    for seed in range(20):
        targets = objective.targets(pack, SampleRandomness(seed, 0, 0))
        hidden = set(words[targets.predict_at].tolist())
        assert targets.predict_at.tolist() == [place for place, word in enumerate(words.tolist()) if word in hidden]
