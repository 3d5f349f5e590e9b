"""Selection of the models that claims compare, and contrasts of their scores.

A contrast is a question such as "MLM less CLM, 610M, on SC": scores with weights, by pretraining
seed. Contrasts are tested one by one and pooled over a claim in megaenc.study.stats.pooling. Holm's
correction within a claim is here.
"""

import copy
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

import numpy as np

from megaenc.finetune.results.aggregate import STUDY_DATASETS
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.results.evidence import AVERAGE, Evidence, Score
from megaenc.study.results.groups import format_percent, is_average
from megaenc.study.stats import inference
from megaenc.study.stats.inference import LEVEL, TestResult

Outcome = Literal["holds", "reversed", "mixed", "not resolved", "no data"]
Unit = Literal["points", "SD", "share"]
"""Unit of a difference: points of the score, standard deviations over the study's models, or a
share of both variances."""
Terms = Sequence[tuple[float, Score]]
ModelPairs = dict[int, tuple[ModelKey, ModelKey]]
"""The left and the right model by pretraining seed."""


class ModelSelector:
    """Selector of the pairs of evaluated models that claims compare.

    It is built from an Evidence, all scores of a study, which is its `evidence`; in a copy by
    `without`, `evidence` lacks the scores of `left_out`. Models with an objective schedule of their
    own are not in it: `model_keys` are the others with a score, `planned_model_keys` the others of
    the manifest, and those with a score whose size the manifest lacks. `ratio` is the reference
    mask ratio of the planned models (0 to 1; None without MLM). `mlm`, such as "MLM 40 %" or,
    without a ratio, "MLM", and `clm` are the names of the sides.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.left_out: Collection[tuple[ModelKey, str]] = frozenset()
        self.model_keys = [key for key in evidence.model_keys() if not key.schedule]
        self.planned_model_keys = [key for key in evidence.planned_model_keys() if not key.schedule]
        self.ratio = evidence.reference_mask_ratio
        self.mlm = f"MLM {format_percent(self.ratio)}" if self.ratio else "MLM"
        self.clm = "CLM"

    def without(self, left_out: Collection[tuple[ModelKey, str]]) -> "ModelSelector":
        """Return a selector without the scores of some models in some task families.

        Its models stay the same, and so do pairs, longest budgets, reference ratio and
        `dataset_stds`.

        Args:
            left_out: (model key, code of the task family) of the scores to leave out.
        """
        models = copy.copy(self)
        models.evidence = replace(
            self.evidence,
            scores=[
                score
                for score in self.evidence.scores
                if (score.model_key, score.family) not in left_out
            ],
        )
        models.left_out = frozenset(left_out)
        models.dataset_stds = self.dataset_stds
        return models

    def match_pairs(
        self,
        is_left: Callable[[ModelKey], bool],
        is_right: Callable[[ModelKey], bool],
        shared_key: Callable[[ModelKey], tuple] = attrgetter("size", "steps"),
        model_keys: Iterable[ModelKey] | None = None,
    ) -> dict[tuple, ModelPairs]:
        """Return the pairs of models that have the same shared key and pretraining seed.

        (left, right) is by shared key, then by pretraining seed; of several candidates for a side,
        the first counts. Keys and seeds without a pair are left out.

        Args:
            is_left: Function that tells whether a model belongs to the left side.
            is_right: The same for the right side.
            shared_key: Function to a model's properties that both sides share; by default (size,
                steps).
            model_keys: Candidates; by default all evaluated models without a schedule.
        """
        candidates: dict[tuple, dict[int, list[ModelKey | None]]] = defaultdict(
            lambda: defaultdict(lambda: [None, None])
        )
        for model_key in self.model_keys if model_keys is None else model_keys:
            slots = candidates[shared_key(model_key)][model_key.seed]
            for side, is_side in enumerate((is_left, is_right)):
                if slots[side] is None and is_side(model_key):
                    slots[side] = model_key
        complete = {
            key: {seed: (a, b) for seed, (a, b) in by_seed.items() if a and b}
            for key, by_seed in candidates.items()
        }
        return {key: by_seed for key, by_seed in complete.items() if by_seed}

    def final_pairs(self) -> dict[str, ModelPairs]:
        """Return the (MLM, CLM) pairs of finished models, by size and pretraining seed.

        Finished means that the learning rate has decayed. Each size, smallest first, has the
        longest planned number of steps that both sides share; it is left out if no such pair has
        scores.
        """
        ends = (
            lambda key: key.decayed and self.is_mlm_only(key),
            lambda key: key.decayed and is_clm_only(key),
        )
        # the last of each size is the longest
        longest = dict(sorted(self.match_pairs(*ends, model_keys=self.planned_model_keys)))
        pairs = self.match_pairs(*ends)
        order = self.evidence.sort_sizes(self.model_keys)
        return {
            size: pairs[size, longest[size]] for size in order if (size, longest.get(size)) in pairs
        }

    @functools.cached_property
    def dataset_stds(self) -> dict[tuple[str, str], float]:
        """Return the standard deviation over models of scores, by (task family, data set).

        It is the sample standard deviation, as a fraction, of the mean scores of decayed models
        that have not collapsed. There is no entry below three of them, or if their scores are
        equal.
        """
        spreads = {}
        for family, name in self.evidence.datasets():
            scores = [
                self.evidence.find(key, name, family) for key in self.model_keys if key.decayed
            ]
            means = [score.mean for score in scores if score is not None and not score.is_collapsed]
            if len(means) > 2 and np.std(means) > 0:
                spreads[str(family), name] = float(np.std(means, ddof=1))
        return spreads

    def standardise(self, contrast: "Contrast") -> "Contrast | None":
        """Return the contrast with each score over its data set's standard deviation.

        That is the one over models, `dataset_stds`. An average is replaced by the scores of its
        data sets.

        Returns:
            A new contrast, to be compared in the unit "SD"; None if a standard deviation is
            unknown, or a data set of an average has no score.
        """
        terms = {}
        for seed, seed_terms in contrast.terms.items():
            terms[seed] = []
            for weight, score in seed_terms:
                members = score.members or (score,)
                if members == (score,) and score.dataset == AVERAGE:  # a published average
                    names = STUDY_DATASETS[score.family]
                    members = tuple(
                        self.evidence.find(score.model_key, name, score.family) for name in names
                    )
                places = [(score.family, member.dataset) if member else None for member in members]
                if not set(places) <= set(self.dataset_stds):
                    return None
                for member, place in zip(members, places, strict=True):
                    terms[seed].append((weight / len(members) / self.dataset_stds[place], member))
        return replace(contrast, terms=terms, source=contrast.source or contrast.terms)

    def is_mlm_only(self, key: ModelKey) -> bool:
        """Return whether a model was trained with MLM only, at the reference mask ratio.

        A model of continued pretraining was not; an intermediate checkpoint may be.
        """
        return (
            not key.clm_steps
            and not key.cpt_mlm_steps
            and key.mask_ratio == self.ratio
            and key.mlm_steps > 0
        )


def is_clm_only(key: ModelKey) -> bool:
    """Return whether a model was trained with CLM only.

    A model of continued pretraining with MLM was not; an intermediate checkpoint may be.
    """
    return not key.mlm_steps and not key.cpt_mlm_steps and key.clm_steps > 0


@dataclass(frozen=True)
class Comparison:
    """Tested score difference, left less right, on one data set or pooled.

    `compare_contrasts` builds it. `left` and `right` name the sides, `where` what they share;
    `family` is "" and `dataset` "all" if several are pooled. `difference` and its 95 % interval,
    `low` to `high`, are in `unit` ("points", "SD" or "share"), `test` (TestResult) is in fractions
    (or in `unit`, if that is not points), and `effect` is Hedges' g or NaN. `p` is two-sided and
    uncorrected, NaN if the chance variation is unknown. `p_adjusted` equals it and `verdict` is
    "not resolved" until they are set by `adjust_comparisons`. `collapsed` names sides with
    worthless predictions, `pretraining_runs` is the number of runs per side, and
    `has_borrowed_variance` whether the variance between runs is that of other contrasts.
    """

    left: str
    right: str
    where: str
    """properties that both sides share: size, steps, ..."""
    family: str
    """empty if several are pooled"""
    dataset: str
    """data set, `average` of a family, or "all" if several are pooled"""
    test: TestResult
    """test in fractions, with degrees of freedom and variance components"""
    p: float
    """NaN if the chance variation is unknown: one seed, or identical scores"""
    p_adjusted: float
    """Holm's p over the comparisons of the claim; for the pooled comparison, over the claims"""
    effect: float
    """Hedges' g; NaN if unknown"""
    verdict: Outcome = "not resolved"
    """outcome for the claim: `holds` if the difference has the claimed direction"""
    pretraining_runs: int = 1
    """pretraining runs of each side; the fewest if several contrasts are pooled"""
    has_borrowed_variance: bool = False
    """whether the variance between pretraining runs comes from other contrasts of the claim"""
    collapsed: tuple[str, ...] = ()
    """sides with collapsed predictions"""
    unit: Unit = "points"

    @property
    def scale(self) -> int:
        """Return the factor from `test` to `unit`: 100 for points, else 1."""
        return 100 if self.unit == "points" else 1

    @property
    def difference(self) -> float:
        """Return the difference, left less right, in `unit`.

        Points are 100 times the fraction.
        """
        return self.scale * self.test.difference

    @property
    def low(self) -> float:
        """Return the lower end of the 95 % interval in `unit`; NaN if unknown.

        With one seed it covers the examples only, and without example scores it is NaN.
        """
        return self.scale * self.test.low

    @property
    def high(self) -> float:
        """Return the upper end of the 95 % interval in `unit`; NaN if unknown.

        With one seed it covers the examples only, and without example scores it is NaN.
        """
        return self.scale * self.test.high

    @functools.cached_property
    def seeds_needed(self) -> float | None:
        """Return the number of seeds with which the same test has a power of 80 %.

        It assumes that this difference is the true one. Seeds are pretraining seeds if models have
        several, else fine-tuning seeds. The number is infinite above 10,000, and None with one
        seed, without p, and for published scores and pools of parts with different seeds.
        """
        if self.test.seed_count < 2 or math.isnan(self.test.p):
            return None
        needed = inference.required_seeds(
            self.test.difference, self.test.components, self.test.seed_count
        )
        return math.inf if needed is None else needed


@dataclass(frozen=True)
class Contrast:
    """Weighted scores, left less right side, by pretraining seed.

    `build_contrasts` builds it. `terms` has the (weight, score) pairs of each seed, positive for
    the left side, whose sum is tested. `names` are those of the left and the right side, `where`
    what they share, such as "610M, 42,000 steps", `size` the model size, `family` the code of the
    task family, and `dataset` a data set or a label of several. `source` has the original scores if
    those of `terms` are derived from them, else it is empty.
    """

    names: tuple[str, str]
    where: str
    family: str
    dataset: str
    size: str
    terms: Mapping[int, Terms]
    """(weight, score) by pretraining seed; weights of the left side are positive"""
    source: Mapping[int, Terms] = field(default_factory=dict)
    """original scores, if `terms` hold values derived from them"""

    @property
    def pretraining_seeds(self) -> tuple[int, ...]:
        """Return the pretraining seeds at which both sides have scores, sorted.

        There is at least one.
        """
        return tuple(sorted(self.terms))

    @property
    def weighted_scores(self) -> list[list[tuple[float, Score]]]:
        """Return the original scores: (weight, score) pairs per pretraining seed.

        They are for looking at runs, not for sums: an average is replaced by its data sets, each
        with the whole weight of the average, whose sign tells the side. The pairs are those of
        `source` if it is not empty, else of `terms`; the order of seeds is that of `terms`.
        """
        terms_by_run = (self.source or self.terms).values()
        return [
            [(weight, member) for weight, score in terms for member in score.members or (score,)]
            for terms in terms_by_run
        ]

    @functools.cached_property
    def collapsed(self) -> tuple[str, ...]:
        """Return the names of the sides with a collapsed model, left first; empty if none.

        A model has collapsed if half or more of its runs give worthless predictions.
        """
        weighted = [pair for run_scores in self.weighted_scores for pair in run_scores]
        sides = {
            self.names[weight < 0] for weight, score in weighted if weight and score.is_collapsed
        }
        return tuple(name for name in self.names if name in sides)


def family_terms(
    evidence: Evidence, family: str, model_keys: Sequence[ModelKey]
) -> tuple[str, list[list[tuple[float, Score]]]] | None:
    """Return weighted scores that add up to each model's mean on a task family.

    The mean is the family's average if all models have it over the same data sets, else that over
    the data sets that all models have: only the study's own three if all are among them.

    Args:
        family: Code of the task family, such as SC.

    Returns:
        A label of the data sets, and a list of (weight, score) for each model, in the order of
        `model_keys`; weights of a model add up to 1. None without models or a common data set.
    """
    if not model_keys:
        return None
    averages = [evidence.find(model_key, AVERAGE, family) for model_key in model_keys]
    if (
        None not in averages
        and len({tuple(member.dataset for member in average.members) for average in averages}) == 1
    ):
        return AVERAGE, [[(1.0, average)] for average in averages]
    common = [
        name
        for family_name, name in evidence.datasets()
        if family_name == family
        and not is_average(name)
        and all(evidence.find(model_key, name, family) is not None for model_key in model_keys)
    ]
    study_names = [name for name in STUDY_DATASETS.get(family, ()) if name in common]
    common = study_names if len(study_names) == 3 else common
    if not common:
        return None
    label = common[0] if len(common) == 1 else f"{AVERAGE} of {', '.join(common)}"
    return label, [
        [(1 / len(common), evidence.find(model_key, name, family)) for name in common]
        for model_key in model_keys
    ]


def build_contrasts(
    evidence: Evidence,
    names: tuple[str, str],
    places: Iterable[tuple[str, ModelPairs]],
    families: Sequence[str] = tuple(STUDY_DATASETS),
) -> list[Contrast]:
    """Build a contrast for each place and each task family that both sides have.

    They are in the order of places, then of families. Pretraining seeds at which the sides share no
    data set are left out; of the others, only data sets that both have at every seed count.

    Args:
        names: Names of the left and the right side.
        places: Label, such as a size, and (left, right) models by pretraining seed, of each place.
        families: Codes of task families; by default SC, TC, QA and IR.
    """
    contrasts = []
    for (where, sides), family in itertools.product(places, families):
        evaluated = {
            seed: pair
            for seed, pair in sides.items()
            if family_terms(evidence, family, pair) is not None
        }
        model_keys = [model_key for pair in evaluated.values() for model_key in pair]
        common = family_terms(evidence, family, model_keys)
        if common is None:
            continue
        label, parts = common  # the same data sets for every pretraining seed
        terms = {
            seed: [*left_terms, *((-weight, score) for weight, score in right)]
            for seed, left_terms, right in zip(evaluated, parts[::2], parts[1::2], strict=True)
        }
        contrasts.append(
            Contrast(
                names, where, str(family), label, next(iter(evaluated.values()))[0].size, terms
            )
        )
    return contrasts


def adjust_comparisons(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons of a claim with Holm's p and their verdicts.

    They are copies with `p_adjusted`, from `p` over all of them, and `verdict`: a difference with
    `p_adjusted` below 0.05 `holds` above 0 and is `reversed` below it; others, and those with p
    NaN, are `not resolved`.
    """
    corrected = inference.holm_adjust([comparison.p for comparison in comparisons])
    outcomes = (
        ("holds" if comparison.difference > 0 else "reversed") for comparison in comparisons
    )
    return [
        replace(comparison, p_adjusted=p, verdict=outcome if p < LEVEL else "not resolved")
        for comparison, p, outcome in zip(comparisons, corrected, outcomes, strict=True)
    ]


def put_better_first(comparison: Comparison) -> Comparison:
    """Return the comparison with the sides swapped if its difference is negative.

    The signs of difference, interval and effect are then flipped, and the verdict `reversed` turns
    into `holds`; p stays. Others, also with a difference of NaN, are returned unchanged.
    """
    if not comparison.difference < 0:
        return comparison
    mirrored = replace(comparison.test, difference=-comparison.test.difference)
    verdict = "holds" if comparison.verdict == "reversed" else comparison.verdict
    return replace(
        comparison,
        left=comparison.right,
        right=comparison.left,
        effect=-comparison.effect,
        verdict=verdict,
        test=mirrored,
    )
