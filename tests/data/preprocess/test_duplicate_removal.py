import random
import sys
from itertools import combinations

import numpy as np
import pytest
from small_data import write_file
from text_helpers import contents, corpus_settings, write_jsonl

from megaenc.data.indexed.metadata import read_corpus_metadata
from megaenc.data.preprocess import deduplicate
from megaenc.data.preprocess.command import preprocess
from megaenc.data.preprocess.deduplicate import Deduplication, build_ngrams, find_duplicates
from megaenc.errors import InputError

WORDS = [
    f"{first}{second}"
    for first in "bcdfghjklmnpqrst"
    for second in ("a", "en", "ir", "ost", "um", "yx")
]


@pytest.fixture
def write(tmp_path, tokenizer_directory):
    """Preprocess texts under a name; return the prefix."""

    def write(name, texts, **changes):
        corpus = write_jsonl(tmp_path / f"{name}.jsonl", texts)
        (prefix,) = preprocess(corpus_settings(corpus, tokenizer_directory, name, **changes))
        return prefix

    return write


def planted_corpus():
    """Return texts of 300 words in mixed order, some of them copies.

    Copies are exact, have one word changed, or share a quarter.
    """
    generator = random.Random(3)
    originals = [[generator.choice(WORDS) for _ in range(300)] for _ in range(40)]
    texts = [*originals, *originals[:5]]
    for original in originals[5:20]:
        changed = list(original)
        changed[generator.randrange(300)] = "changed"
        texts.append(changed)
    for original in originals[20:35]:
        texts.append(original[:75] + [generator.choice(WORDS) for _ in range(225)])
    generator.shuffle(texts)
    return [" ".join(words) for words in texts]


def similarities(texts):
    """Return the true Jaccard similarity over 5-grams of words of each pair."""
    words = [text.split() for text in texts]
    ngrams = [
        {tuple(text_words[start : start + 5]) for start in range(len(text_words) - 4)}
        for text_words in words
    ]
    return {
        (a, b): len(ngrams[a] & ngrams[b]) / len(ngrams[a] | ngrams[b])
        for a, b in combinations(range(len(texts)), 2)
    }


def brute_force_duplicates(keys):
    """Return whether each document has a chain of equal band keys to an earlier one.

    `keys` has the shape [bands, words, documents].
    """
    roots = list(range(keys.shape[2]))
    for band in keys:
        for a, b in combinations(range(keys.shape[2]), 2):
            if (band[:, a] == band[:, b]).all() and roots[a] != roots[b]:
                low, high = sorted((roots[a], roots[b]))
                roots = [low if root == high else root for root in roots]
    return [root != index for index, root in enumerate(roots)]


@pytest.mark.parametrize("changes", [{"workers": 3}, {"partitions": 4}], ids=str)
def test_exact_keeps_the_first_of_equal_texts_whatever_the_workers_and_partitions(write, changes):
    generator = random.Random(1)
    texts = [
        f"{generator.choice(WORDS[:12])} {generator.choice(WORDS)[0]}\ud800" for _ in range(300)
    ] + ["", "", "end"]
    kept = list(dict.fromkeys(texts))
    prefix = write("unique", texts, deduplicate="exact", **changes)
    assert contents(prefix) == contents(write("want", kept))
    metadata = read_corpus_metadata(prefix)
    assert metadata.deduplication == {"method": "exact", "removed": 303 - 1 - len(kept)}
    assert (metadata.documents, metadata.empty_documents) == (len(kept) - 1, 2)


def test_minhash_against_true_similarities(write, capsys):
    texts = planted_corpus()
    pairs = similarities(texts)
    assert all(value >= 0.95 or value < 0.3 for value in pairs.values())
    removed = {later for (_, later), value in pairs.items() if value >= 0.95}
    assert len(removed) == 20
    want = contents(
        write("want", [text for index, text in enumerate(texts) if index not in removed])
    )
    first = write("one", texts, deduplicate="minhash")
    assert contents(first) == want
    assert "20 duplicates removed" in capsys.readouterr().out
    metadata = read_corpus_metadata(first).deduplication
    assert metadata["removed"] == 20
    assert (metadata["ngram_size"], metadata["buckets"], metadata["hashes_per_bucket"]) == (
        5,
        14,
        8,
    )
    assert contents(write("four", texts, deduplicate="minhash", partitions=4, workers=2)) == want


def test_parameters_of_minhash_have_an_effect(write):
    texts = planted_corpus()

    def documents(name, **changes):
        return read_corpus_metadata(write(name, texts, deduplicate="minhash", **changes)).documents

    assert documents("loose", minhash_ngram_size=1, minhash_hashes_per_bucket=1) < 5
    assert documents("strict", minhash_hashes_per_bucket=100, minhash_buckets=1) > len(texts) - 20


def test_ngrams_of_words():
    assert build_ngrams("The quick, BROWN fox", 2) == ["the quick", "quick brown", "brown fox"]
    assert build_ngrams("Two words", 5) == ["two words"]
    assert build_ngrams("?!", 5) == ["?!"] and build_ngrams("\u65e5\u672c abc", 2) == [
        "\u65e5 \u672c",
        "\u672c abc",
    ]


def test_short_and_wordless_texts_are_duplicates_only_if_equal(write):
    texts = ["?", "!", "?!", "a", "b", "a", "A", "dog fox", "fox dog", "?"]
    prefix = write("short", texts, deduplicate="minhash")
    assert contents(prefix) == contents(
        write("want", ["?", "!", "?!", "a", "b", "dog fox", "fox dog"])
    )


@pytest.mark.parametrize("slice_documents", [7, 1000])
def test_duplicates_are_those_of_brute_force(monkeypatch, slice_documents):
    monkeypatch.setattr(deduplicate, "_SLICE_DOCUMENTS", slice_documents)
    generator = np.random.default_rng(0)
    for words in (1, 2):
        keys = generator.integers(0, 8, (3, words, 60), dtype=np.uint64) << np.uint64(61)
        keys[:, :, 20:] += generator.integers(0, 9, (3, words, 40), dtype=np.uint64)
        chunks = np.split(keys, [0, 11, 40], axis=2)
        found = find_duplicates(
            60, 3, lambda band, chunks=chunks: (chunk[band] for chunk in chunks)
        )
        assert found.tolist() == brute_force_duplicates(keys)
        assert 5 < found.sum() < 60
    assert find_duplicates(0, 3, lambda band: iter([])).tolist() == []


def test_keys_depend_on_nothing_but_the_text():
    texts = planted_corpus()[:7]
    for method in (Deduplication("exact"), Deduplication("minhash")):
        together = method(texts)
        assert together.shape == (method.bands, method.words, 7) and together.dtype == np.uint64
        assert np.array_equal(together, np.concatenate([method([text]) for text in texts], axis=2))
        assert method([]).shape == (method.bands, method.words, 0)


def test_each_key_is_deduplicated_by_itself_and_sentences_go_with_their_document(
    tmp_path, tokenizer_directory
):
    corpus = tmp_path / "pairs.jsonl"
    rows = [("One.", "Same. Text."), ("Two.", "Same. Text."), ("One.", ""), ("", "Other.")]
    write_file(corpus, [{"title": title, "text": text} for title, text in rows])
    changes = {
        "deduplicate": "exact",
        "split_sentences": True,
        "partitions": 2,
        "append_eod": False,
    }
    settings = corpus_settings(corpus, tokenizer_directory, json_keys=("title", "text"), **changes)
    titles, texts = map(read_corpus_metadata, preprocess(settings))
    assert (
        titles.documents,
        titles.empty_documents,
        titles.deduplication["removed"],
        titles.sequences,
    ) == (2, 1, 1, 2)
    assert (
        texts.documents,
        texts.empty_documents,
        texts.deduplication["removed"],
        texts.sequences,
    ) == (2, 1, 1, 3)


def test_a_missing_package_is_named(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(
        InputError,
        match=r"--deduplicate minhash needs the package rensa: `pip install 'rensa>=0\.5,<0\.6'`",
    ):
        write("out", ["a"], deduplicate="minhash")
    write("exact", ["a"], deduplicate="exact")
