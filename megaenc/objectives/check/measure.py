"""Measurements of an objective on made-up packs.

They are visible labels, statistics of a million tokens, and speed next to `mlm`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.objectives.base import Attention, Objective, Targets
from megaenc.objectives.masking import MaskedLanguageModeling, text_token_ids

# Two in three tokens begin a word.
_WORD_CODES = np.where(np.arange(1000) % 3, 0x7F, 0).astype("<u2").tobytes()
VOCABULARY = Vocabulary(
    1000, eos_id=0, mask_id=1, special_ids=(0, 1, 2), fingerprint="", code_words=lambda: _WORD_CODES
)
# Together a million tokens.
_LENGTH = 2048
_PACKS = 512

# Largest shares of the labels that may change the input at their own place, and at any other one.
# BERT keeps a tenth of the tokens, half of all shuffled pairs stay in place and a quarter moves to
# the right; a mistake shows most labels.
_MOST_KEPT = 0.6
_MOST_READABLE = 0.4


class CheckResult(NamedTuple):
    """Result of a check of `megaenc objective check`.

    name: name of the check; passed: whether it passed, None if it is only a figure or was not
    tested; text: the figure or the complaint, for the console, without a full stop.
    """

    name: str
    passed: bool | None
    text: str


def make_packs(count: int, length: int = _LENGTH, odd: bool = True) -> Iterable[Pack]:
    """Yield `count` packs of documents of 1 to 300 random tokens that end in EOS.

    They are the same in each call, with `sample` from 0. The last document is cut at the end of the
    pack and ends in EOS, too. Token ids are those of VOCABULARY.

    Args:
        length: Tokens of a pack.
        odd: Whether of eight packs one has documents of one or two tokens, and one has only special
            tokens in its first half.
    """
    for sample in range(count):
        rng = np.random.default_rng(sample)
        tokens = rng.integers(3, VOCABULARY.size, size=length)
        longest = 2 if odd and sample % 8 == 7 else 300
        ends = np.cumsum(rng.integers(1, longest + 1, size=length))
        edges = np.array([0, *ends[ends < length], length], dtype=np.int32)
        tokens[edges[1:] - 1] = VOCABULARY.eos_id
        if odd and sample % 8 == 6:
            tokens[: length // 2] = 2  # only special tokens
        yield Pack(sample, sample % 3, tokens, edges)


def compute_targets(objective: Objective, pack: Pack) -> Targets:
    """Return the Targets of a pack under the seed of the checks, 1.

    Raises:
        InputError: The objective raises an error.
    """
    try:
        return objective.targets(pack, SampleRandomness(1, pack.sample, pack.epoch))
    except Exception as error:  # foreign code may raise anything
        raise InputError(
            f"objective `{objective.describe()}`, pack {pack.sample}: "
            f"raises {type(error).__name__}: {error}"
        ) from None


def measure(objective: Objective) -> list[CheckResult]:
    """Return the checks of leaks, statistics and speed over a million made-up tokens.

    A leak is a label that the input shows. Only leaks and missing predictions can fail.

    Raises:
        InputError: The objective raises an error.
    """
    leaks = _LeakCounts(objective)
    statistics = _Statistics(objective)
    seconds = []
    baseline_seconds = []
    pairs = [(objective, seconds), (MaskedLanguageModeling(VOCABULARY), baseline_seconds)]
    for pack in make_packs(_PACKS, odd=False):
        for timed, durations in pairs:
            start = perf_counter()
            targets = compute_targets(timed, pack)
            durations.append(perf_counter() - start)
            if durations is seconds:
                statistics.add(pack, targets)
                leaks.add(pack, targets)
        pairs.reverse()  # each is first in half of the packs
    duration = float(np.median(seconds))
    expected = float(np.median(baseline_seconds))
    speed = (
        f"{_LENGTH / duration:,.0f} tokens/s on one core, {expected / duration:.2f} times the "
        "speed of mlm"
    )
    return [leaks.build_result(), *statistics.build_results(), CheckResult("speed", None, speed)]


@dataclass
class _LeakCounts:
    """Counts of labels that change inputs.

    A predicted token of each document is replaced, and the targets computed again. Each input that
    changes and that the prediction sees depends on the label. A model can read it if it knows the
    place, which is counted in `places` by distance from the token, from the document's ends and so
    on. The place of a shuffled token varies.
    """

    objective: Objective
    labels: int = 0
    """Number of tested labels."""
    visible: int = 0
    """Number of those that change an input."""
    kept: int = 0
    """Number of those that change the input at their own place."""
    places: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Number of labels that change the input at another place, by its kind and value."""

    def add(self, pack: Pack, targets: Targets) -> None:
        """Replace one predicted token of each document, and count inputs that change.

        The token is a random one of those predicted, and is replaced by another text token in a
        copy of the pack. Nothing is counted if labels are classes.
        """
        if self.objective.classes:
            return
        rng = np.random.default_rng([1, pack.sample])
        shift = self.objective.shift
        lengths = np.diff(pack.cu_seqlens)
        starts = pack.cu_seqlens[:-1].astype(np.int64)
        first, last = np.searchsorted(
            targets.predict_at, [pack.cu_seqlens[:-1], pack.cu_seqlens[1:]]
        )
        (documents,) = np.nonzero(last > first)
        # Rank of a random prediction among those of its document.
        ranks = (rng.random(len(documents)) * (last - first)[documents]).astype(np.int64)
        predict_at = targets.predict_at[first[documents] + ranks]
        tokens = pack.tokens.copy()
        text = text_token_ids(self.objective.vocabulary)
        steps = rng.integers(1, len(text), size=len(documents))
        places = predict_at + shift
        tokens[places] = text[(np.searchsorted(text, tokens[places]) + steps) % len(text)]
        changed = compute_targets(
            self.objective, Pack(pack.sample, pack.epoch, tokens, pack.cu_seqlens)
        )
        queries = np.full(len(lengths), -1)
        queries[documents] = predict_at
        queries = np.repeat(queries, lengths)
        before = _find_visible(self.objective, pack, targets, queries)
        after = _find_visible(self.objective, pack, changed, queries)
        differs = (before | after) & ((targets.inputs != changed.inputs) | (before != after))
        # If the choice of predictions depends on the tokens, the new token may be an input instead
        # of a label.
        is_predicted = np.isin(predict_at, changed.predict_at)
        self.labels += int(is_predicted.sum())
        has_change = np.logical_or.reduceat(differs, starts)[documents]
        for row in np.flatnonzero(is_predicted & has_change):
            document = documents[row]
            place = places[row]
            rank = ranks[row]
            start, end = pack.cu_seqlens[document : document + 2].tolist()
            self.visible += 1
            (offsets,) = np.nonzero(differs[start:end])
            self.kept += place - start in offsets
            offsets = offsets[offsets != place - start]
            predicted = targets.predict_at[first[document] : last[document]] + shift - start
            order = np.searchsorted(predicted, offsets[np.isin(offsets, predicted)])
            kinds = {
                "distance": offsets + start - place,
                "token": offsets,
                "token from the end": end - start - 1 - offsets,
                "distance in the reversed document": offsets + place + 1 - end,
                "number of the prediction": offsets - rank,
                "place of another prediction": order - rank,
            }
            self.places.update(
                (kind, int(value)) for kind, values in kinds.items() for value in values
            )

    def build_result(self) -> CheckResult:
        """Return the check of leaks, with `passed` None if there is nothing to test.

        It fails if more than 60 % of the labels change the input at their own place, or more than
        40 % at one same place elsewhere.
        """
        if self.objective.classes:
            return CheckResult(
                "leaks", None, "not tested: labels are classes, not tokens that an input may hold"
            )
        if not self.labels:
            return CheckResult("leaks", None, "not tested: no replaced token is still predicted")
        (kind, value), count = max(
            self.places.items(), key=lambda item: item[1], default=(("", 0), 0)
        )
        visible = self.visible / self.labels
        kept = self.kept / self.labels
        readable = count / self.labels
        text = f"{100 * visible:.1f} % of {self.labels:,} labels change a visible input"
        text += f", {100 * kept:.1f} % at their own place" * (kept > 0)
        text += f", {100 * readable:.1f} % at one other ({kind} {value})" * (readable > 0)
        limits = (
            f"{100 * _MOST_KEPT:.0f} % at their own place and {100 * _MOST_READABLE:.0f} % at one "
            "other"
        )
        passed = kept <= _MOST_KEPT and readable <= _MOST_READABLE
        return CheckResult(
            "leaks",
            passed,
            text if passed else f"{text}; expected at most {limits}: hide labels in `inputs`",
        )


def _find_visible(
    objective: Objective, pack: Pack, targets: Targets, queries: np.ndarray
) -> np.ndarray:
    """Return whether each token is seen from a position of its document, bool[T].

    `queries`, int[T], has that position for each token, -1 for none.
    """
    positions = np.arange(len(queries))
    if objective.attention == Attention.BIDIRECTIONAL:
        return queries >= 0
    is_before = positions <= queries
    if objective.attention == Attention.CAUSAL:
        return is_before
    ends = np.repeat(pack.cu_seqlens[:-1] + targets.prefixes, np.diff(pack.cu_seqlens))
    return is_before | ((queries >= 0) & (queries < ends) & (positions < ends))


@dataclass
class _Statistics:
    """Statistics of targets, added pack by pack.

    They are those of predictions, their positions, runs and inputs, and weights.
    """

    objective: Objective
    tokens: int = 0
    fractions: list[float] = field(default_factory=list)
    """Share of the tokens of each pack that are predicted."""
    by_position: np.ndarray = field(default_factory=lambda: np.zeros((2, 3)))
    """Predicted tokens, and all tokens, in the first, middle and last tenth of documents."""
    runs: int = 0
    inputs: np.ndarray = field(default_factory=lambda: np.zeros(3))
    """Predicted tokens whose input is the mask token, another token, or the token itself."""
    other_changes: int = 0
    """Changed inputs of tokens that are not predicted."""
    weight: float = 0.0
    divisor: int = 0

    def add(self, pack: Pack, targets: Targets) -> None:
        """Add the targets of a pack."""
        places = targets.predict_at + self.objective.shift
        is_predicted = np.zeros(len(pack.tokens), dtype=bool)
        is_predicted[places] = True
        self.tokens += len(pack.tokens)
        self.fractions.append(len(places) / len(pack.tokens))
        progress = (pack.positions + 0.5) / np.repeat(
            np.diff(pack.cu_seqlens), np.diff(pack.cu_seqlens)
        )
        for tenth, center in enumerate((0.05, 0.5, 0.95)):
            is_inside = np.abs(progress - center) <= 0.05
            self.by_position[:, tenth] += (is_inside & is_predicted).sum(), is_inside.sum()
        follows = np.diff(places, prepend=-2) == 1
        self.runs += int((~follows | np.isin(places, pack.cu_seqlens)).sum())
        is_changed = targets.inputs != pack.tokens
        is_mask = targets.inputs == self.objective.vocabulary.mask_id
        masked = (is_mask & is_changed)[places].sum()
        changed = is_changed[places].sum()
        self.inputs += masked, changed - masked, len(places) - changed
        self.other_changes += int((is_changed & ~is_predicted).sum())
        self.weight += (
            len(places) if targets.weights is None else float(targets.weights.sum(dtype=np.float64))
        )
        self.divisor += targets.loss_count

    def build_results(self) -> list[CheckResult]:
        """Return the rows of the statistics, of at least two packs.

        They are `predictions`, `by position`, `predicted runs`, `inputs` and `weights`, or without
        predictions only the first, which then fails; the others have `passed` None.
        """
        fraction = float(np.mean(self.fractions))
        predicted = int(self.inputs.sum())
        error = 1.96 * float(np.std(self.fractions, ddof=1)) / len(self.fractions) ** 0.5
        interval = f"95 % interval {100 * (fraction - error):.2f} to {100 * (fraction + error):.2f}"
        predictions = CheckResult(
            "predictions",
            predicted > 0,
            f"{100 * fraction:.2f} % of {self.tokens:,} tokens ({interval})",
        )
        if not predicted:
            return [predictions]
        tenths = (
            "{:.1f} % of the first tenth of documents, {:.1f} % of the middle one, "
            "{:.1f} % of the last"
        )
        masked, replaced, kept = 100 * self.inputs / predicted
        other_percentage = 100 * self.other_changes / max(self.tokens - predicted, 1)
        rows = {
            "by position": tenths.format(*(100 * self.by_position[0] / self.by_position[1])),
            "predicted runs": f"{predicted / self.runs:.2f} tokens on average",
            "inputs": f"predicted tokens: {masked:.1f} % mask, {replaced:.1f} % another token, "
            f"{kept:.1f} % unchanged; "
            f"others: {other_percentage:.1f} % changed",
            "weights": f"{self.weight / predicted:.4f} on average, sum / divisor "
            f"{self.weight / self.divisor:.4f}",
        }
        return [predictions, *(CheckResult(name, None, text) for name, text in rows.items())]
