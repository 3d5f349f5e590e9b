import numpy as np
import pytest

from megaenc import counter_rng

RECORDED_WORDS = [4828913470595837631, 3462368833318434761, 8292579981473784798]
RECORDED_UNIFORMS = [0.7248031023066969, 0.9054130136190416]
RECORDED_PERMUTATION = [1, 3, 7, 4, 6, 0, 2, 5]
RECORDED_NORMALS = [-0.6716915965080261, 0.7982447147369385, 2.0430784225463867]


def test_numbers_are_the_same_for_ever():
    """Compare with recorded values: old runs must keep their masks and weights."""
    assert counter_rng.random_words(1, "mask", 3).tolist() == RECORDED_WORDS
    assert counter_rng.uniforms(1, "mask", 2, counters=(5, 0)).tolist() == RECORDED_UNIFORMS
    assert counter_rng.permutation(1, "order", 8).tolist() == RECORDED_PERMUTATION
    assert counter_rng.normal_rows(1, "embedding", range(2, 3), 3).tolist() == [RECORDED_NORMALS]


@pytest.mark.parametrize(
    "other",
    [
        (8, "mask", (3, 1)),
        (7, "order", (3, 1)),
        (7, "mask", (4, 1)),
        (7, "mask", (3, 2)),
        (7, "mask", (31,)),
        (7, "mask", ()),
    ],
)
def test_seed_purpose_and_counters_all_matter(other):
    words = counter_rng.random_words(7, "mask", 64, counters=(3, 1))
    seed, purpose, counters = other
    other_words = counter_rng.random_words(seed, purpose, 64, counters=counters)
    assert not np.intersect1d(words, other_words).size


def test_a_longer_draw_begins_with_the_shorter_and_blocks_skip_words():
    long = counter_rng.random_words(1, "mask", 100)
    assert (counter_rng.random_words(1, "mask", 30) == long[:30]).all()
    assert (counter_rng.random_words(1, "mask", 60, block=10) == long[40:]).all()


def test_uniforms_are_uniform():
    sample = counter_rng.uniforms(3, "mask", 200_000)
    assert sample.min() >= 0 and sample.max() < 1
    histogram = np.histogram(sample, bins=20, range=(0, 1))[0]
    chi_squared = ((histogram - 10_000) ** 2 / 10_000).sum()
    assert chi_squared < 44  # 19 degrees of freedom: exceeded once in 1,000
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("probability", [0.0, 1e-300, 2.0**-53, 0.15, 0.4, 0.5, 1 - 2.0**-53, 1.0])
def test_chances_are_uniforms_below_a_probability(probability):
    drawn = counter_rng.uniforms(3, "mask", 100_000, counters=(2, 0))
    for least in (
        probability,
        float(drawn[7]),
        float(np.nextafter(drawn[7], 1)),
    ):  # a draw itself is not below itself
        assert (
            counter_rng.bernoulli(3, "mask", 100_000, least, counters=(2, 0)) == (drawn < least)
        ).all()


@pytest.mark.parametrize("columns", [1, 7, 8, 513])
def test_a_row_of_normals_depends_on_its_number_alone(columns):
    matrix = counter_rng.normal_rows(5, "layer.weight", range(50), columns)
    assert matrix.shape == (50, columns) and matrix.dtype == np.float32
    parts = [
        counter_rng.normal_rows(5, "layer.weight", rows, columns)
        for rows in (range(13), range(13, 14), range(14, 50))
    ]
    assert (np.concatenate(parts) == matrix).all()
    assert len(np.unique(matrix, axis=0)) == 50
    assert (matrix != counter_rng.normal_rows(5, "other.weight", range(50), columns)).any()


def test_rows_do_not_depend_on_how_many_are_drawn_at_a_time():
    columns = 40_000  # fewer than 30 rows fit into one round of drawing
    matrix = counter_rng.normal_rows(5, "wide", range(60), columns)
    assert (counter_rng.normal_rows(5, "wide", range(57, 60), columns) == matrix[57:]).all()


def test_normals_are_normal():
    sample = counter_rng.normal_rows(5, "layer.weight", range(1000), 400).astype(np.float64).ravel()
    assert abs(sample.mean()) < 0.006
    assert abs(sample.var() - 1) < 0.01
    assert abs((sample**3).mean()) < 0.03
    assert abs((sample**4).mean() - 3) < 0.06
    assert np.isfinite(sample).all() and 4 < np.abs(sample).max() < 7
    rows = sample.reshape(1000, 400)
    assert abs(np.corrcoef(rows[:, 0], rows[:, 1])[0, 1]) < 0.15  # the two of one Box-Muller pair


def test_a_sample_has_numbers_of_its_own():
    randomness = counter_rng.SampleRandomness(seed=1, sample=5, epoch=0)
    assert (
        randomness.uniforms("mask", 4) == counter_rng.uniforms(1, "mask", 4, counters=(5, 0))
    ).all()
    assert (
        randomness.uniforms("mask", 4)
        != counter_rng.SampleRandomness(seed=1, sample=5, epoch=1).uniforms("mask", 4)
    ).all()


@pytest.mark.parametrize("count", [0, 1, 2, 5, 999, 1000, 1001, 70_000])
@pytest.mark.parametrize("kinds", [None, 1, 2, 300])
@pytest.mark.parametrize("chunk", [1000, 1 << 24])
def test_a_permutation_is_the_stable_order_of_its_words(monkeypatch, count, kinds, chunk):
    """It equals `np.argsort(words, kind="stable")`, also if words share high bits."""
    monkeypatch.setattr(counter_rng, "_CHUNK", chunk)
    words = counter_rng.random_words(3, "order", count, counters=(4,))
    if kinds:
        few = np.random.default_rng(0).integers(0, kinds, count, dtype=np.uint64)
        words = few << np.uint64(40) | (words & np.uint64(3))
    drawn = {(3, "order", count, (4,)): words}
    monkeypatch.setattr(
        counter_rng, "random_words", lambda *asked, counters: drawn[(*asked, counters)]
    )
    found = counter_rng.permutation(3, "order", count, counters=(4,))
    assert found.dtype == np.int64
    assert np.array_equal(found, np.argsort(words, kind="stable"))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 31, 1023, 1024, 1025, 100_000])
def test_a_keyed_permutation_holds_every_number_once(count):
    permutation = counter_rng.KeyedPermutation(7, "packs", count, counters=(2,))
    values = permutation.apply(np.arange(count))
    assert values.dtype == np.int64 and len(permutation) == count
    assert np.array_equal(np.sort(values), np.arange(count))
    for place in {0, count // 2, count - 1}:
        assert permutation[place] == values[place]
    for place in (-1, count):
        with pytest.raises(IndexError, match=f"found {place}"):
            permutation[place]


def test_a_keyed_permutation_of_a_huge_range_is_read_anywhere():
    """20,000 of 2**40 + 7 numbers are distinct, and each is at its own position."""
    count = (1 << 40) + 7
    permutation = counter_rng.KeyedPermutation(1, "packs", count)
    places = np.unique(np.random.default_rng(0).integers(0, count, 20_000))
    values = permutation.apply(places)
    assert len(np.unique(values)) == len(places) and values.min() >= 0 and values.max() < count
    assert [permutation[place] for place in places[:3].tolist()] == values[:3].tolist()
    assert permutation.apply(np.arange(3)).tolist() == [1033814572889, 879123664114, 406839846283]


def test_places_of_a_keyed_permutation_are_uniform_and_independent():
    """Test (position, number) and the distances of neighbours with chi-square."""
    count = 5003  # 8,192 is the next power of two: a third of the values are walked
    keys = 400
    bins = 20
    values = np.stack(
        [
            counter_rng.KeyedPermutation(key, "packs", count).apply(np.arange(count))
            for key in range(keys)
        ]
    )
    binned = np.stack(
        [np.bincount(column, minlength=bins) for column in (values * bins // count)[:, :50].T]
    )
    expected = keys / bins
    assert ((binned - expected) ** 2 / expected).sum() < 950 + 4 * np.sqrt(
        2 * 950
    )  # 50 places of 19 degrees of freedom
    distances = np.bincount(
        (np.diff(values, axis=1) % count * bins // count).ravel(), minlength=bins
    )
    expected = distances.sum() / bins
    assert (
        (distances - expected) ** 2 / expected
    ).sum() < 43.8  # 19 degrees of freedom: by chance once in a thousand
    fixed = (values == np.arange(count)).sum()
    assert abs(fixed - keys) < 4 * np.sqrt(keys)  # one in each permutation


@pytest.mark.parametrize("count", [0, (1 << 62) + 1])
def test_a_range_that_cannot_be_permuted_is_refused(count):
    with pytest.raises(ValueError, match="expected 1 to"):
        counter_rng.KeyedPermutation(1, "packs", count)
