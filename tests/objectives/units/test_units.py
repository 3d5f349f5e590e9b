"""Words and collocations hidden as a whole: what may be given for them, and that they keep the identity of a run."""

import dataclasses
import io
import re
import zipfile

import numpy as np
import pytest
from objectives.objective_helpers import PHRASES, VOCABULARY, WORDS, random_pack, write_phrases

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
from megaenc.doctor.objective.check import CheckConfig, run_checks
from megaenc.errors import InputError
from megaenc.objectives import MaskedLanguageModeling, Schedule
from megaenc.objectives.inspection import inspect
from megaenc.objectives.units.collocations import main as collocations


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_phrases(tmp_path_factory.mktemp("units") / "phrases.npz")


def test_units_of_one_token_are_hidden_as_tokens(tmp_path):
    """Without a word or phrase of several tokens the masks are those of unit=token."""
    single = dataclasses.replace(VOCABULARY, code_words=np.full(50, 0x7F, dtype="<u2").tobytes)
    absent = write_phrases(tmp_path / "absent.npz", [(48, 48, 48, 48)])
    for sample in range(10):
        pack = random_pack(sample)
        randomness = SampleRandomness(0, sample, 0)
        expected = MaskedLanguageModeling(VOCABULARY, mask=0.3, random=0.1, keep=0.1).targets(pack, randomness)
        for vocabulary, unit in ((single, "word"), (VOCABULARY, absent)):
            other = MaskedLanguageModeling(vocabulary, mask=0.3, random=0.1, keep=0.1, unit=unit).targets(pack, randomness)
            assert all(map(np.array_equal, expected[:3], other[:3]))


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


def test_the_check_of_objectives_passes(file):
    _, results = run_checks(CheckConfig(f"mlm(mask=0.3,unit={file})"))
    assert [result.name for result in results if result.passed is False] == []


def test_words_and_collocations_of_real_text_are_hidden_whole(small_corpus, tmp_path, capsys):
    tokenizer = load_tokenizer(str(small_corpus.tokenizer))
    file = str(tmp_path / "pmi.npz")
    flags = [str(small_corpus.prefix), "--tokenizer", str(small_corpus.tokenizer)]
    collocations(["--data-path", *flags, "--output", file, "--min-count", "3"])
    capsys.readouterr()
    inspect.main([*flags, "--objective", f"mlm(unit={file})"])
    output = capsys.readouterr().out
    assert "hidden: the model reads the mask token" in output and f"unit={file})" in "".join(output.split())
    objective = MaskedLanguageModeling(read_vocabulary(tokenizer), mask=0.4, unit="word")
    text = "Tokenization of extraordinarily uncommon words, transcendentally speaking: hippopotamuses don't."
    encoding = tokenizer(text, add_special_tokens=False)
    ids = np.array(encoding["input_ids"])
    words = np.array(encoding.word_ids())
    pack = Pack(0, 0, ids, np.array([0, len(ids)], dtype=np.int32))
    for seed in range(20):
        hidden = objective.targets(pack, SampleRandomness(seed, 0, 0)).predict_at
        assert hidden.tolist() == np.flatnonzero(np.isin(words, words[hidden])).tolist()
