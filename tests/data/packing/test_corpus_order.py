"""Orders of corpora: stable order, shares of thousands of corpora, and limits."""

from fractions import Fraction

import numpy as np
import pytest

from megaenc.data.packing.corpus_order import (
    PERIOD,
    DueOrder,
    PeriodicOrder,
    find_period_counts,
    interleave_corpora,
)

BLENDS = {
    "two": ["0.3", "0.7"],
    "tokens": ["123456789", "987654321", "55555"],
    "one large": ["65535", "1"],
    "hundred": [7 * n * n + 3 for n in range(20, 120)],
}


def plain_order(counts, samples):
    """Return Tijdeman's order, computed in exact fractions.

    Of the corpora that are far enough behind, the one comes next that is soonest a whole sample
    behind.
    """
    least = Fraction(1, 2 * len(counts) - 2)
    fractions = [Fraction(count, sum(counts)) for count in counts]
    behind = [Fraction(0)] * len(counts)
    order = []
    for _ in range(samples):
        behind = [debt + fraction for debt, fraction in zip(behind, fractions, strict=True)]
        choices = [corpus for corpus, debt in enumerate(behind) if debt >= least]
        chosen = min(choices, key=lambda corpus: (1 - least - behind[corpus]) / fractions[corpus])
        behind[chosen] -= 1
        order.append(chosen)
    return order


@pytest.mark.parametrize("weights", BLENDS.values(), ids=BLENDS.keys())
def test_the_order_of_a_period_is_the_plain_rule(weights):
    counts = find_period_counts([Fraction(weight) for weight in weights])
    order = interleave_corpora(counts)
    assert np.bincount(order).tolist() == counts
    samples = min(len(order), 1000)
    assert order[:samples].tolist() == plain_order(counts, samples)


def test_counts_of_a_period_are_exact_where_they_can_be():
    assert find_period_counts([Fraction("0.3"), Fraction("0.7")]) == [3, 7]
    counts = find_period_counts([Fraction("0.1234567"), Fraction("0.8765433")])
    assert sum(counts) == PERIOD and abs(counts[0] / PERIOD - 0.1234567) < 1 / PERIOD
    assert find_period_counts([Fraction("0.000001"), Fraction("0.999999")]) is None


def test_thousands_of_corpora_have_their_shares():
    """Every prefix is within a few packs of the shares of 1,000 to 30 billion tokens."""
    tokens = np.exp(np.random.default_rng(0).uniform(np.log(1e3), np.log(3e10), 1833))
    weights = tokens / tokens.sum()
    order = DueOrder([Fraction(weight) for weight in weights])
    corpora = order.arrange_block(0)[0]
    counts = np.bincount(corpora, minlength=len(weights))
    assert np.array_equal(counts, order.packs_before(len(corpora)))
    assert np.abs(counts - len(corpora) * weights).max() < 5
    for corpus in np.argsort(weights)[[0, 900, 1800, 1832]]:
        assert (
            np.abs(
                np.cumsum(corpora == corpus) - np.arange(1, len(corpora) + 1) * weights[corpus]
            ).max()
            < 12
        )
    assert np.abs(order.packs_before(10**9) - 1e9 * weights).max() < 12


@pytest.mark.parametrize(
    "limits", [None, [3, 70_000, 500, 20_000, 1]], ids=["endless", "with ends"]
)
def test_packs_come_in_the_order_in_which_they_are_due(limits):
    """Each position is found directly and agrees with all packs sorted by due time."""
    weights = [0.5, 0.3, 0.15, 0.04, 0.01]
    ends = limits or [100_000, 60_000, 30_000, 8_000, 2_000]
    packs = []
    for corpus, (weight, end) in enumerate(zip(weights, ends, strict=True)):
        phase = (corpus + 1) * (5**0.5 - 1) / 2 % 1
        packs += [((pack + phase) / weight, corpus, pack) for pack in range(end)]
    expected = [(corpus, pack) for _, corpus, pack in sorted(packs)]
    order = DueOrder([Fraction(str(weight)) for weight in weights], limits and np.array(limits))
    last = 149_999 if limits is None else len(expected) - 1
    for place in (last, 0, 65_536, 65_535, 12, *range(60_000, 61_000)):
        assert order.locate(place) == expected[place]
    assert order.samples == (None if limits is None else sum(limits))
    if limits is not None:
        assert order.packs_before(sum(limits)).tolist() == limits


@pytest.mark.parametrize(
    "order",
    [
        PeriodicOrder([3, 7]),
        DueOrder([Fraction(3), Fraction(7)]),
        DueOrder([Fraction(3), Fraction(7)], np.array([70_000, 9])),
    ],
    ids=["period", "due", "with ends"],
)
def test_the_first_of_given_packs_is_located(order):
    for packs in ([0, 0], [5, 900], [60_000, 8], [8, 140_000], [80_000, 9]):
        first = order.find_first(np.array(packs))
        if order.samples is not None and packs == [80_000, 9]:
            assert first == order.samples  # both corpora end before
            continue
        corpus, pack = order.locate(first)
        assert pack == packs[corpus]
        assert (order.packs_before(first) <= packs).all()


def test_corpora_that_have_ended_before_a_phase_are_not_in_it():
    order = DueOrder([Fraction(1), Fraction(1)], np.array([10, 20])).skip_packs(np.array([12, 5]))
    assert order.samples == 15 and [order.locate(sample) for sample in range(15)] == [
        (1, pack) for pack in range(15)
    ]


def test_weights_below_all_numbers_are_never_read():
    order = DueOrder([Fraction("1e-999"), Fraction(1)])
    assert order.packs_before(10**12).tolist() == [0, 10**12]
