"""Counts and PMI of n-grams against plain loops, and the command that writes them."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from corpus_helpers import VOCABULARY, write_corpus

from megaenc.data.indexed.corpus import Corpus
from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
from megaenc.objectives.units import collocations
from megaenc.objectives.units.collocations import (
    compute_pmi,
    count_ngrams,
    main,
    read_tokens,
    select_collocations,
)
from megaenc.objectives.units.matching import load_collocations


def plain_counts(runs, min_count):
    """Return counts of frequent n-grams and the number of all, for each length."""
    counts = []
    totals = []
    for length in range(1, 6):
        ngrams = [
            tuple(run[at : at + length]) for run in runs for at in range(len(run) - length + 1)
        ]
        counts.append(
            {ngram: count for ngram, count in Counter(ngrams).items() if count >= min_count}
        )
        totals.append(len(ngrams))
    return counts, totals


def plain_pmi(ngram, counts, totals):
    """Return PMI_n of the paper, over all ways to cut the n-gram."""

    def log_p(part):
        return math.log(counts[len(part) - 1][part] / totals[len(part) - 1])

    values = []
    for number in range(1, len(ngram)):
        for cuts in itertools.combinations(range(1, len(ngram)), number):
            edges = [0, *cuts, len(ngram)]
            values.append(
                log_p(ngram)
                - sum(log_p(ngram[start:stop]) for start, stop in itertools.pairwise(edges))
            )
    return min(values)


def ngrams_of(tables, level):
    """Return the token ids of each n-gram of a table, from its first and last parts."""
    if level == 0:
        return [(int(token),) for token in tables[0].prefixes]
    shorter = ngrams_of(tables, level - 1)
    table = tables[level]
    both = zip(table.prefixes.tolist(), table.suffixes.tolist(), strict=True)
    return [(*shorter[prefix], shorter[suffix][-1]) for prefix, suffix in both]


def random_runs(seed=0, count=300):
    """Return runs of tokens in which phrases repeat."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, 12, size=length).tolist() for length in (1, 1, 1, 2, 3, 4, 5, 6)]
    choices = [rng.integers(0, 8, size=rng.integers(0, 12)) for _ in range(count)]
    return [[*itertools.chain(*(phrases[at] for at in chosen))] for chosen in choices]


def ids_of(runs):
    return np.array([token for run in runs for token in (*run, -1)], dtype=np.int32)


@pytest.mark.parametrize(("min_count", "most_sorted"), [(1, 1 << 24), (1, 100), (5, 100)])
def test_counts_and_pmi_against_plain_loops(min_count, most_sorted, monkeypatch):
    """Chunks and parts are also so small that there are many."""
    if most_sorted == 100:
        monkeypatch.setattr(collocations, "_CHUNK", 64)
    runs = random_runs()
    counts, totals = plain_counts(runs, min_count)
    tables = count_ngrams(ids_of(runs), min_count, most_sorted=most_sorted)
    assert [table.total for table in tables] == totals
    for level, table in enumerate(tables):
        assert (
            dict(zip(ngrams_of(tables, level), table.counts.tolist(), strict=True)) == counts[level]
        )
    assert len(counts[4]) > 3
    for level, pmi in enumerate(compute_pmi(tables), 1):
        expected = [plain_pmi(ngram, counts, totals) for ngram in ngrams_of(tables, level)]
        np.testing.assert_allclose(pmi, expected, rtol=0, atol=1e-9)


def test_pmi_worked_out_by_hand():
    """Runs `a b c` and `a b d`, each twice: 12 tokens, 8 bigrams, 4 trigrams."""
    a, b, c, d = range(4)
    tables = count_ngrams(ids_of(2 * [[a, b, c], [a, b, d]]), 1)
    bigrams, trigrams, *_ = compute_pmi(tables)
    pmi = dict(zip(ngrams_of(tables, 1), bigrams, strict=True)) | dict(
        zip(ngrams_of(tables, 2), trigrams, strict=True)
    )
    assert pmi[a, b] == pytest.approx(math.log((4 / 8) / (4 / 12 * 4 / 12)))  # log 4.5
    assert pmi[b, c] == pytest.approx(math.log((2 / 8) / (4 / 12 * 2 / 12)))  # log 4.5
    # (a b) (c): 1/2 * 1/6 = 1/12; (a) (b c): 1/3 * 1/4 = 1/12; (a) (b) (c): 1/54. The largest
    # counts.
    assert pmi[a, b, c] == pytest.approx(math.log((2 / 4) / (1 / 12)))  # log 6
    assert (c, a) not in pmi  # only over the edge of two runs


def test_the_best_are_selected_by_length():
    runs = random_runs(1)
    counts, totals = plain_counts(runs, 5)
    selected = select_collocations(count_ngrams(ids_of(runs), 5), 80, {})
    rows = [tuple(token for token in row if token >= 0) for row in selected.tokens.tolist()]
    assert len(set(rows)) == len(rows)
    for length, wanted in ((2, 40), (3, 20), (4, 10), (5, 10)):
        values = {ngram: plain_pmi(ngram, counts, totals) for ngram in counts[length - 1]}
        best = sorted((value for value in values.values() if value > 1e-9), reverse=True)[:wanted]
        mine = [at for at, row in enumerate(rows) if len(row) == length]
        assert selected.pmi[mine].tolist() == pytest.approx(best, abs=1e-5)
        assert best == pytest.approx([values[rows[at]] for at in mine], abs=1e-5)
        assert selected.counts[mine].tolist() == [counts[length - 1][rows[at]] for at in mine]


def test_tokens_are_read_with_breaks_at_documents_and_special_tokens(tmp_path, monkeypatch):
    documents = [[[5, 6], [7, 0]], [], [[10, 1, 11]], [[20]]]
    corpus = Corpus.open(write_corpus(tmp_path / "words", documents))
    expected = [5, 6, 7, -1, -1, 10, -1, 11, -1, 20, -1]
    assert read_tokens(corpus, VOCABULARY, 100).tolist() == expected
    assert read_tokens(corpus, VOCABULARY, 6).tolist() == [*expected[:7], -1]
    monkeypatch.setattr(collocations, "_CHUNK", 2)
    assert read_tokens(corpus, VOCABULARY, 100).tolist() == expected


def test_the_command_counts_a_corpus(small_corpus, tmp_path, capsys):
    flags = [
        "--data-path",
        str(small_corpus.prefix),
        "--tokenizer",
        str(small_corpus.tokenizer),
        "--min-count",
        "5",
    ]
    for name in ("new/pmi.npz", "again.npz"):
        main([*flags, "--output", str(tmp_path / name), "--count", "400"])
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "new/pmi.npz").read_bytes()
    corpus = Corpus.open(small_corpus.prefix)
    vocabulary = read_vocabulary(load_tokenizer(str(small_corpus.tokenizer)))
    tokens = read_tokens(corpus, vocabulary, 1 << 30)
    total = int((tokens >= 0).sum())
    expected = select_collocations(count_ngrams(tokens, 5), 400, {})
    made = load_collocations(str(tmp_path / "new/pmi.npz"))
    assert made.facts["tokenizer"] == vocabulary.fingerprint
    assert made.facts["tokens"] == total
    assert f"collocations of {total:,} tokens" in capsys.readouterr().out
    assert np.array_equal(made.tokens, expected.tokens) and np.array_equal(
        made.counts, expected.counts
    )
    assert np.bincount(made.lengths, minlength=6)[2] == 200
