"""`megaenc embed pairs`: paragraphs, spans, the draw of --count, and refusals."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megaenc.embed.pairs import load_pairs
from megaenc.embed.text_pairs import TextPairsConfig, iterate_pairs, pairs_main, split_into_units


@pytest.fixture
def make(capsys):
    """Return a function that calls `embed pairs` on texts in the working directory.

    It returns the pairs and the last line of the summary.
    """

    def make(texts: list[str], *flags: str) -> tuple[list[tuple[str, str]], str]:
        Path("corpus.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
        pairs_main(
            ["--input", "corpus.jsonl", "--output", "new/pairs.jsonl", "--overwrite", *flags]
        )
        pairs = [(pair.query, pair.document) for pair in load_pairs(["new/pairs.jsonl"]).pairs]
        return pairs, capsys.readouterr().out.splitlines()[-2]

    return make


def sentence(name: str, words: int = 10) -> str:
    return " ".join([name.capitalize(), *(f"{name}{at}" for at in range(1, words))]) + "."


def test_neighbouring_paragraphs_with_headings_joined_to_their_text(make):
    a, b, c, d = map(sentence, "abcd")
    text = (
        f"Title\n\n{a}\n \n{b}\r\n\r\nHeading of two\n\nmore\n\n"
        f"{c}\nwith a second line.\n\n\n\n{d}\n\nThe end.\n"
    )
    pairs, line = make([text], "--method", "adjacent")
    units = [
        f"Title\n\n{a}",
        b,
        f"Heading of two\n\nmore\n\n{c}\nwith a second line.",
        f"{d}\n\nThe end.",
    ]
    assert pairs == [(units[0], units[1]), (units[1], units[2]), (units[2], units[3])]
    assert line == "new/pairs.jsonl: 3 pairs from 1 documents"


def test_long_paragraphs_are_cut_at_the_sentence_ends_nearest_to_the_middle():
    sentences = [sentence(name, 12) for name in "abcdefgh"]
    long = " ".join(sentences)
    assert split_into_units(long, 8, 32) == [
        " ".join(sentences[at : at + 2]) for at in range(0, 8, 2)
    ]
    assert split_into_units(long, 8, 96) == [
        " ".join(sentences[:4]),
        " ".join(sentences[4:]),
    ]  # one paragraph: halves
    no_sentences = " ".join(f"w{at}" for at in range(100))
    parts = split_into_units(no_sentences, 8, 32)
    assert " ".join(parts) == no_sentences and [len(part.split()) for part in parts] == [25] * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "He met Dr. Brown of the U.S. Army. Then he left at once.",
            "He met Dr. Brown of the U.S. Army.",
        ),
        (
            "He saw J. Smith there, etc. and asked “why?” Nobody knew it then.",
            "He saw J. Smith there, etc. and asked “why?”",
        ),
        ("one two three four. five six seven eight nine ten", None),  # a small letter follows
        (
            "One two. Three four five six seven eight nine ten",
            None,
        ),  # the first part would be too short
        ("这 是 一 个 句子。 这 是 第二 个 句子。", "这 是 一 个 句子。"),
    ],
)
def test_sentence_ends(text, expected):
    parts = split_into_units(text, 4, 16)
    assert parts == ([] if expected is None else [expected, text[len(expected) + 1 :]])


def test_all_units_have_their_number_of_words_and_together_all_of_the_text():
    for paragraphs in range(3, 40):
        words = [
            [sentence("w", 1 + (7 * at * size) % 61) for at in range(size % 5 + 1)]
            for size in range(1, paragraphs)
        ]
        text = "\n\n".join(" ".join(paragraph) for paragraph in words)
        units = split_into_units(text, 8, 40)
        assert " ".join(units).split() == text.split()
        assert all(8 <= len(unit.split()) <= 40 for unit in units)


def test_spans_are_runs_of_words_near_each_other(make):
    texts = [" ".join(f"d{number}w{at}" for at in range(40 + 100 * number)) for number in range(8)]
    pairs, _ = make(
        texts, "--method", "spans", "--min-words", "5", "--max-words", "20", "--seed", "7"
    )
    counts = Counter()
    lengths = set()
    for pair in pairs:
        numbers = []
        starts = []
        for span in pair:
            words = [tuple(map(int, re.findall(r"\d+", word))) for word in span.split()]
            number, start = words[0]
            # A run of words of one document.
            assert words == [(number, start + at) for at in range(len(words))]
            lengths.add(len(words))
            numbers.append(number)
            starts.append(start)
        assert numbers[0] == numbers[1] and abs(starts[0] - starts[1]) < 60
        counts[number] += 1
    assert counts == {
        number: round((40 + 100 * number) / 40 + 1e-9) for number in range(8)
    }  # a pair for each 2 * 20 words
    assert lengths == set(range(5, 21))


def test_short_documents_have_short_spans_or_none():
    settings = TextPairsConfig(("x",), output="", method="spans", min_words=8, max_words=128)
    text = " ".join(f"w{at}" for at in range(20))
    pairs = [pair for number in range(200) for pair in iterate_pairs(text, number, settings)]
    assert {len(span.split()) for pair in pairs for span in pair} == {8, 9, 10}
    assert 150 < len(pairs) < 200 and all(
        query != document for query, document in pairs
    )  # the same span twice is no pair
    assert list(iterate_pairs(" ".join(text.split()[:15]), 0, settings)) == []


def test_the_seed_and_the_document_determine_the_spans(make):
    texts = [" ".join(f"w{at}" for at in range(60))] * 3
    first, _ = make(texts, "--method", "spans", "--seed", "1")
    second, _ = make(texts, "--method", "spans", "--seed", "1")
    other, _ = make(texts, "--method", "spans", "--seed", "2")
    assert first == second != other and len(set(first)) == 3


def test_count_draws_evenly_from_all_documents_in_order(make):
    texts = [
        "\n\n".join(sentence(f"d{number}p{part}p") for part in range(11)) for number in range(60)
    ]
    everything, _ = make(texts, "--method", "adjacent")
    draws = [
        make(texts, "--method", "adjacent", "--count", "150", "--seed", str(seed))
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] and draws[0][0] != draws[2][0]
    for pairs, line in draws:
        assert line == "new/pairs.jsonl: 150 pairs of 600 from 60 documents"
        positions = [everything.index(pair) for pair in pairs]
        assert len(positions) == 150 and positions == sorted(set(positions))
        thirds = np.histogram(positions, bins=3, range=(0, 600))[0]
        assert min(thirds) > 35  # 50 are expected, with a standard deviation of 5
    more, line = make(texts, "--method", "adjacent", "--count", "601")
    assert (
        more == everything
        and line == "new/pairs.jsonl: 600 pairs from 60 documents; 1 fewer than --count asks for"
    )


def test_short_documents_and_refrains_are_left_out_and_the_rest_can_be_read(make):
    refrain = sentence("a")
    texts = [
        "",
        "Too short.",
        f"{refrain}\n\n{refrain}",
        f"{sentence('b')}\n\nÉté \ud800 {sentence('c')}\n\n{sentence('d')}",
    ]
    pairs, line = make(texts, "--method", "adjacent")
    assert line == "new/pairs.jsonl: 2 pairs from 4 documents; 3 documents too short for a pair"
    assert pairs[0][1].startswith("Été \ufffd ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--method spans --output a.jsonl",
            "--output a.jsonl: is the input a.jsonl, expected another name",
        ),
        ("--method spans --min-words 0", "--min-words: found 0, expected 1 or more"),
        ("--method spans --max-words 31", "--max-words: found 31, expected at least 32"),
        ("--method adjacent", "a.jsonl: found no document with a pair, expected two"),
    ],
)
def test_mistakes_leave_nothing(tmp_path, refusal, flags, message):
    Path("a.jsonl").write_text('{"text": "Too short."}\n')
    assert message in refusal(
        pairs_main, ["--input", "a.jsonl", "--output", "new/x.jsonl", *flags.split()]
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["a.jsonl"]
