"""Corpora of --data-path, and the weight of each in the blend."""

import glob
import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

from megaenc.errors import InputError

_SIZE_BITS = 40  # of float64's 53, the last of which differ between machines


def parse_data_path(words: Sequence[str]) -> list[tuple[Fraction | None, str]]:
    """Return the (weight, prefix or pattern) pairs of --data-path, in order.

    `words`, the values of the flag, are `0.3 A 0.7 B`, or `A B`, whose weights are None; no words
    give no pairs. Patterns are not expanded, and no corpus is looked for.

    Raises:
        InputError: The words have another form, one is empty, a weight is not positive, or a path
            is given twice.
    """
    place = f"--data-path {' '.join(words)}"
    weights = [parse_weight(word) for word in words[::2]]
    if None not in weights and len(words) % 2 == 0:
        pairs = list(zip(weights, words[1::2], strict=True))
    elif all(parse_weight(word) is None for word in words):
        pairs = [(None, word) for word in words]
    else:
        raise InputError(
            f"{place}: expected one prefix, prefixes, or a weight before each: 0.3 A 0.7 B"
        )
    paths = set()
    for index, (weight, prefix) in enumerate(pairs):
        if not prefix:
            raise InputError(
                "--data-path: found an empty text, expected the prefix of a .bin and an .idx file"
            )
        if weight is not None and weight <= 0:
            raise InputError(f"{place}: found weight {words[2 * index]}, expected more than 0")
        path = os.path.realpath(prefix)
        if path in paths:
            raise InputError(f"{place}: {prefix} is given twice, expected each corpus once")
        paths.add(path)
    return pairs


def parse_weight(word: str) -> Fraction | None:
    """Return a word of --data-path as a number, or None if it is not one.

    Numbers are as in `0.3`, `1e-3`, `1/3` and `-1`; other words are prefixes of corpora.
    """
    if re.search(r"[eE][+-]?\d{4}", word):
        return None  # a number with this exponent would fill the memory
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def has_wildcard(word: str) -> bool:
    """Return whether a word has a `*`, `?` or `[`."""
    return any(character in word for character in "*?[")


def is_pattern(word: str) -> bool:
    """Return whether a word of --data-path is a pattern of prefixes.

    A pattern has a wildcard, and is not itself the prefix of a corpus.
    """
    return has_wildcard(word) and not os.path.isfile(f"{word}.idx")


def may_share_weights(words: Sequence[str]) -> bool:
    """Return whether corpora of --data-path may share a weight.

    They are those of a pattern, which may match only one, or of several words without weights.
    `words` and errors are those of `parse_data_path`.
    """
    pairs = parse_data_path(words)
    without_weights = len(pairs) > 1 and pairs[0][0] is None
    return without_weights or any(is_pattern(word) for _, word in pairs)


@dataclass(frozen=True)
class CorpusSource:
    """Word of --data-path: the prefix of a corpus, or a pattern of prefixes.

    `find_corpora` returns it. `word` is as given, `prefixes` are those of the corpora for which it
    stands, and `weight` is that of all of them together, a Fraction; None if no word has one.
    """

    weight: Fraction | None
    """Weight of all its corpora together; None if no word has one."""
    word: str
    """Word as it is given."""
    prefixes: tuple[str, ...]
    """Prefixes of the corpora for which the word stands."""


def find_corpora(words: Sequence[str]) -> list[CorpusSource]:
    """Return a CorpusSource for each prefix or pattern of --data-path.

    They are in the order of `words`, the values of the flag. The source of a pattern has all
    corpora that match, in alphabetical order, and one weight for them together, which
    `weigh_corpora` divides. The corpus of a prefix need not exist.

    Raises:
        InputError: A pattern matches no .idx file, two words name the same corpus, or
            `parse_data_path` refuses the words.
    """
    sources = []
    words_by_path: dict[str, str] = {}
    for weight, word in parse_data_path(words):
        prefixes = [word]
        if is_pattern(word):
            prefixes = sorted(path.removesuffix(".idx") for path in glob.glob(f"{word}.idx"))
            if not prefixes:
                raise InputError(
                    f"--data-path {word}: no .idx file matches this pattern, expected the prefixes "
                    "of corpora of `megaenc preprocess`, such as 'data/*_text_document'"
                )
        for prefix in prefixes:
            other_word = words_by_path.setdefault(os.path.realpath(prefix), word)
            if other_word != word:
                raise InputError(
                    f"--data-path: {word} and {other_word} both name {prefix}, "
                    "expected each corpus once"
                )
        sources.append(CorpusSource(weight, word, tuple(prefixes)))
    return sources


def list_prefixes(sources: Sequence[CorpusSource]) -> list[str]:
    """Return the prefixes of the corpora of all `sources`, in order."""
    return [prefix for source in sources for prefix in source.prefixes]


def weigh_corpora(
    sources: Sequence[CorpusSource], tokens: Sequence[int], temperature: float
) -> list[Fraction]:
    """Return the weight of each corpus of `sources`, in their order.

    The corpora of a source share its weight in proportion to tokens ** temperature. If no weight is
    given, all corpora share a weight of 1. Weights are in the unit of the given ones.

    Args:
        sources: At least one source.
        tokens: Training tokens of each corpus of all sources, in order, more than 0.
        temperature: 1 for weights in proportion to tokens, 0 for equal weights.
    """
    if sources[0].weight is None:
        groups = [(Fraction(1), len(tokens))]
    else:
        groups = [(source.weight, len(source.prefixes)) for source in sources]
    sizes = iter([_temper_size(count, temperature) for count in tokens])
    weights: list[Fraction] = []
    for weight, corpora in groups:
        group_sizes = list(islice(sizes, corpora))
        total = sum(group_sizes)
        weights += [weight * size / total for size in group_sizes]
    return weights


def _temper_size(tokens: int, temperature: float) -> Fraction:
    """Return tokens ** temperature, rounded so that all machines give the same result."""
    if temperature == 1:
        return Fraction(tokens)
    mantissa, exponent = math.frexp(tokens**temperature)
    return round(mantissa * 2**_SIZE_BITS) * Fraction(2) ** (exponent - _SIZE_BITS)


def shares_weights_by_size(sources: Sequence[CorpusSource]) -> bool:
    """Return whether corpora share a weight in proportion to their sizes.

    Those of a source of several corpora do, and several corpora without weights.
    --blend-temperature changes the proportion.
    """
    corpora = sum(len(source.prefixes) for source in sources)
    return corpora > len(sources) or (corpora > 1 and sources[0].weight is None)


def is_tempered_blend(sources: Sequence[CorpusSource], temperature: float) -> bool:
    """Return whether corpora share a weight by size and `temperature` is not 1."""
    return temperature != 1 and shares_weights_by_size(sources)


def describe_blend(
    fractions: Sequence[Fraction],
    fingerprints: Sequence[str],
    *,
    is_periodic: bool,
    max_epochs: int | None,
) -> str:
    """Return a text that is equal for the same corpora in the same order.

    It is the content hash of a single corpus, or the content hashes of several with their
    fractions. If the order of several has no period, it is a digest of these and `max_epochs`.

    Args:
        fractions: Fraction of the packs that each corpus has in the blend; they add up to 1.
        fingerprints: `Corpus.fingerprint` of each corpus.
        is_periodic: See `BlendedDataset.is_periodic`.
        max_epochs: --blend-max-epochs; None: no limit.
    """
    if len(fingerprints) == 1:
        return fingerprints[0]
    content = ", ".join(
        f"{fraction} {fingerprint}"
        for fraction, fingerprint in zip(fractions, fingerprints, strict=True)
    )
    if is_periodic:
        return content
    end = "" if max_epochs is None else f" of at most {max_epochs} epochs"
    # The digest first, as model cards have the beginning; short, as refusals have 60 characters.
    digest = hashlib.sha256(content.encode()).hexdigest()[:24]
    return f"{digest} of {len(fingerprints)} corpora{end}"
