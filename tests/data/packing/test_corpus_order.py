"""Orders of corpora: what was accepted before keeps its order, thousands of corpora have their shares, and corpora end."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest

from megaenc.data.packing.corpus_order import PERIOD, DueOrder, PeriodicOrder, compute_sample_counts, interleave_corpora

CORPORA = 1833
BLENDS = {
    "two": ["0.3", "0.7"],
    "tokens": ["123456789", "987654321", "55555"],
    "equal": ["1"] * 7,
    "one large": ["65535", "1"],
}
# Digests of orders that the first version, which compared all corpora at each sample, has made.
RECORDED = {
    "hundred": ([7 * n * n + 3 for n in range(20, 120)], "51cc8b018725536a"),
    "two thousand": ([900 + n * n % 977 for n in range(2000)], "6fe6686a780dd1e0"),
}


def plain_counts(weights):
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    exact = next((period for period in range(1, 1001) if all((share * period).denominator == 1 for share in shares)), None)
    if exact:
        return [int(share * exact) for share in shares]
    counts = [int(share * PERIOD) for share in shares]
    for corpus in sorted(range(len(shares)), key=lambda corpus: counts[corpus] - shares[corpus] * PERIOD):
        if sum(counts) < PERIOD:
            counts[corpus] += 1
    return counts


def plain_order(counts, samples):
    """Tijdeman's rule in exact fractions: of the corpora far enough behind, that which is soonest a whole sample behind."""
    period, least = sum(counts), Fraction(1, 2 * len(counts) - 2)
    shares = [Fraction(count, period) for count in counts]
    behind, order = [Fraction(0)] * len(counts), []
    for _ in range(samples):
        behind = [debt + share for debt, share in zip(behind, shares, strict=True)]
        choices = [corpus for corpus, debt in enumerate(behind) if debt >= least]
        chosen = min(choices, key=lambda corpus: (1 - least - behind[corpus]) / shares[corpus])
        behind[chosen] -= 1
        order.append(chosen)
    return order


@pytest.mark.parametrize("weights", BLENDS.values(), ids=BLENDS.keys())
def test_the_order_of_a_period_is_the_plain_rule(weights):
    counts = compute_sample_counts([Fraction(weight) for weight in weights])
    order = interleave_corpora(counts)
    assert counts == plain_counts(weights)
    samples = min(len(order), 2000)
    assert order[:samples].tolist() == plain_order(counts, samples)


@pytest.mark.parametrize(("weights", "digest"), RECORDED.values(), ids=RECORDED.keys())
def test_orders_of_many_corpora_are_those_of_the_first_version(weights, digest):
    order = interleave_corpora(compute_sample_counts([Fraction(weight) for weight in weights]))
    assert hashlib.sha256(order.astype("<i4").tobytes()).hexdigest()[:16] == digest


def languages(temperature):
    """Weights of 1,833 corpora of 1,000 to 30 billion tokens, which share 0.602, and of three others."""
    tokens = np.exp(np.random.default_rng(0).uniform(np.log(1e3), np.log(3e10), CORPORA))
    shares = tokens**temperature / (tokens**temperature).sum()
    return np.concatenate([0.602 * shares, [0.302, 0.051, 0.045]])


@pytest.mark.parametrize("temperature", [1, 0.3])
def test_thousands_of_corpora_have_their_shares(temperature):
    """Within a few packs at every prefix, whatever the share, and after a billion samples."""
    weights = languages(temperature)
    order = DueOrder([Fraction(weight) for weight in weights])
    corpora = np.concatenate([order.arrange_block(block)[0] for block in (0, 1)])[:100_000]
    counts = np.bincount(corpora, minlength=len(weights))
    assert np.array_equal(counts, order.packs_before(100_000))
    assert np.abs(counts - 100_000 * weights).max() < 5
    for corpus in (CORPORA, CORPORA + 1, *np.argsort(weights)[[0, 900, 1800]]):
        assert np.abs(np.cumsum(corpora == corpus) - np.arange(1, 100_001) * weights[corpus]).max() < 12
    assert np.abs(order.packs_before(10**9) - 1e9 * weights).max() < 12
    assert (counts[100_000 * weights >= 1] > 0).all()


@pytest.mark.parametrize("limits", [None, [3, 70_000, 500, 20_000, 1]], ids=["endless", "with ends"])
def test_packs_come_in_the_order_in_which_they_are_due(limits):
    """Over several blocks, against all packs sorted at once; each place is found without those before it."""
    weights = [0.5, 0.3, 0.15, 0.04, 0.01]
    ranks = np.argsort(np.argsort(-np.array(weights))) + 1
    phases = ranks * (5**0.5 - 1) / 2 % 1
    ends = limits or [200_000] * 5
    packs = [
        ((number + phase) / weight, corpus, number)
        for corpus, (weight, phase, end) in enumerate(zip(weights, phases, ends, strict=True))
        for number in range(end)
    ]
    expected = [(corpus, number) for _, corpus, number in sorted(packs)][: 150_000 if limits is None else None]
    order = DueOrder([Fraction(str(weight)) for weight in weights], limits and np.array(limits))
    places = [149_999, 0, 65_535, 65_536, 131_072, 70_000, 12] if limits is None else [len(expected) - 1, 0, 65_536, 65_535, 3]
    for place in places:
        assert order.locate(place) == expected[place]
    assert [order.locate(place) for place in range(60_000, 70_000)] == expected[60_000:70_000]
    assert order.samples == (None if limits is None else sum(limits))
    if limits is not None:
        assert order.packs_before(sum(limits)).tolist() == limits


def test_others_take_the_share_of_a_corpus_that_ends():
    """From the sample of its last pack on, in proportion to their own shares."""
    order = DueOrder([Fraction(5), Fraction(3), Fraction(2)], np.array([1000, 10**6, 10**6]))
    last = next(sample for sample in range(10_000) if order.locate(sample) == (0, 999))
    assert abs(last - 2000) <= 2
    later = order.packs_before(last + 1 + 5000) - order.packs_before(last + 1)
    assert later[0] == 0 and np.abs(later - [0, 3000, 2000]).max() <= 2
    longer = DueOrder([Fraction(5), Fraction(3), Fraction(2)], np.array([9000, 10**6, 10**6]))
    assert [longer.locate(sample) for sample in range(last)] == [order.locate(sample) for sample in range(last)]


@pytest.mark.parametrize(
    "order",
    [PeriodicOrder([3, 7]), DueOrder([Fraction(3), Fraction(7)]), DueOrder([Fraction(3), Fraction(7)], np.array([70_000, 9]))],
    ids=["period", "due", "with ends"],
)
def test_the_first_of_given_packs_is_located(order):
    for packs in ([0, 0], [5, 900], [60_000, 8], [8, 140_000], [80_000, 9]):
        first = order.find_first(np.array(packs))
        if order.samples is not None and packs == [80_000, 9]:
            assert first == order.samples  # both corpora end before
            continue
        corpus, number = order.locate(first)
        assert number == packs[corpus]
        assert (order.packs_before(first) <= packs).all()


def test_corpora_that_have_ended_before_a_phase_are_not_in_it():
    order = DueOrder([Fraction(1), Fraction(1)], np.array([10, 20])).starting_at(np.array([12, 5]))
    assert order.samples == 15 and [order.locate(sample) for sample in range(15)] == [(1, number) for number in range(15)]


def test_weights_below_all_numbers_are_never_read():
    order = DueOrder([Fraction("1e-999"), Fraction(1)])
    assert order.packs_before(10**12).tolist() == [0, 10**12]
