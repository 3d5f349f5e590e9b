"""Corpora of --data-path and their weights."""

from fractions import Fraction

import numpy as np
import pytest

from megaenc.data.packing.data_path import (
    CorpusSource,
    find_corpora,
    may_share_weights,
    parse_data_path,
    weigh_corpora,
)
from megaenc.errors import InputError


def test_the_three_spellings_of_data_path():
    assert parse_data_path(["a"]) == [(None, "a")]
    assert parse_data_path(["a", "b"]) == [(None, "a"), (None, "b")]
    assert parse_data_path(["0.3", "a", "7e-1", "b"]) == [
        (Fraction(3, 10), "a"),
        (Fraction(7, 10), "b"),
    ]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Create corpora in the working directory, to be found by name."""
    for name in ("b-deu", "b-ell", "b-fra", "code", "odd[1]"):
        (tmp_path / f"{name}.idx").touch()
    monkeypatch.chdir(tmp_path)


def test_a_pattern_names_the_corpora_that_match_it(directory):
    sources = find_corpora(["0.6", "b-*", "0.3", "code", "0.1", "odd[1]"])
    assert [source.prefixes for source in sources] == [
        ("b-deu", "b-ell", "b-fra"),
        ("code",),
        ("odd[1]",),
    ]
    assert [source.weight for source in sources] == [
        Fraction(6, 10),
        Fraction(3, 10),
        Fraction(1, 10),
    ]
    assert [source.prefixes for source in find_corpora(["b-[df]*", "code"])] == [
        ("b-deu", "b-fra"),
        ("code",),
    ]
    assert [
        may_share_weights(words)
        for words in (["b-*"], ["b-deu", "code"], ["1", "b-deu", "1", "odd[1]"])
    ] == [True, True, False]


def test_a_pattern_without_corpora_of_its_own_is_refused(directory):
    with pytest.raises(InputError, match=r"--data-path c-\*: no .idx file matches this pattern"):
        find_corpora(["0.5", "c-*", "0.5", "code"])
    with pytest.raises(
        InputError, match=r"b-fra and b-\* both name b-fra, expected each corpus once"
    ):
        find_corpora(["0.5", "b-*", "0.5", "b-fra"])


@pytest.mark.parametrize("temperature", [1, 0.5, 0])
def test_corpora_of_a_group_share_its_weight_by_powers_of_their_sizes(temperature):
    tokens = np.exp(np.random.default_rng(0).uniform(5, 25, 1833)).astype(np.int64)
    powers = tokens.astype(float) ** temperature

    def weigh(group, code):
        sources = [CorpusSource(group, "b-*", ("",) * 1833), CorpusSource(code, "code", ("",))]
        return list(map(float, weigh_corpora(sources, [*tokens.tolist(), 77], temperature)))

    *group, code = weigh(Fraction("0.602"), Fraction("0.398"))
    np.testing.assert_allclose(group, 0.602 * powers / powers.sum(), rtol=1e-11)
    assert code == 0.398
    powers = np.append(powers, 77.0**temperature)
    np.testing.assert_allclose(weigh(None, None), powers / powers.sum(), rtol=1e-11)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["0.3", "a", "b"], "expected one prefix, prefixes, or a weight before each"),
        (["0.3"], "expected one prefix, prefixes, or a weight before each"),
        (["0", "a", "1", "b"], "found weight 0, expected more than 0"),
        (["0.5", "a", "0.5", "./a"], "./a is given twice"),
    ],
)
def test_a_data_path_that_makes_no_sense_is_refused(words, complaint):
    with pytest.raises(InputError) as error:
        parse_data_path(words)
    assert complaint in str(error.value) and " ".join(words) in str(error.value)
