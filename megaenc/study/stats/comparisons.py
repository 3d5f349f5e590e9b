"""One model, or several, against another: which numbers of the evidence that takes, and how a claim's comparisons are corrected.

A line is a question such as "MLM less CLM, 610M, on SC": scores times weights, by seed of the pretraining. Lines are tested one
by one and pooled, all of a claim together: see megaenc.study.stats.pooling.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

from megaenc.finetune.results.aggregate import STUDY_DATASETS
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.results.evidence import AVERAGE, Evidence, Score
from megaenc.study.results.groups import is_average, format_percent
from megaenc.study.stats import inference
from megaenc.study.stats.inference import LEVEL, TestResult

Outcome = Literal["holds", "reversed", "not resolved", "no data"]
Terms = Sequence[tuple[float, Score]]
ModelPairs = dict[int, tuple[ModelKey, ModelKey]]
"""By seed of the pretraining, a setting of each side."""


class ModelSelector:
    """The settings of the evidence without a schedule, looked at in the ways that the claims ask.

    What stands for MLM, and which models are at their end, is asked of all that the study has planned, where a manifest says it.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.settings = [setting for setting in evidence.settings() if not setting.schedule]
        self.planned = [setting for setting in evidence.planned() if not setting.schedule]
        self.ratio = evidence.mask_ratio
        self.mlm, self.clm = f"MLM {format_percent(self.ratio)}" if self.ratio else "MLM", "CLM"

    def pairs(
        self,
        left: Callable[[ModelKey], bool],
        right: Callable[[ModelKey], bool],
        same: Callable[[ModelKey], tuple] = attrgetter("size", "steps"),
        among: Iterable[ModelKey] | None = None,
    ) -> dict[tuple, ModelPairs]:
        """Return the first setting that is `left` and the first `right`, by what `same` says of both, by pretraining seed."""
        found: dict[tuple, dict[int, list[ModelKey | None]]] = defaultdict(lambda: defaultdict(lambda: [None, None]))
        for setting in self.settings if among is None else among:
            place = found[same(setting)][setting.seed]
            for side, wanted in enumerate((left, right)):
                if place[side] is None and wanted(setting):
                    place[side] = setting
        kept = {key: {seed: (a, b) for seed, (a, b) in by_seed.items() if a and b} for key, by_seed in found.items()}
        return {key: by_seed for key, by_seed in kept.items() if by_seed}

    def final(self) -> dict[str, ModelPairs]:
        """Return by size, smallest first, MLM and CLM alone to their decayed end, at the most steps that both (will) have."""
        ends = (lambda one: one.decayed and self.only_mlm(one), lambda one: one.decayed and is_clm_only(one))
        longest = dict(sorted(self.pairs(*ends, among=self.planned)))  # by size, the last is the longest
        pairs = self.pairs(*ends)
        order = self.evidence.sizes_of(self.settings)
        return {size: pairs[size, longest[size]] for size in order if (size, longest.get(size)) in pairs}

    def only_mlm(self, one: ModelKey) -> bool:
        """Return whether a model saw nothing but MLM at the ratio that stands for it."""
        return not one.clm_steps and not one.cpt_mlm_steps and one.mask_ratio == self.ratio and one.mlm_steps > 0


def is_clm_only(one: ModelKey) -> bool:
    """Return whether a model saw nothing but CLM."""
    return not one.mlm_steps and not one.cpt_mlm_steps and one.clm_steps > 0


@dataclass(frozen=True)
class Comparison:
    """Two sides on a data set, or over several. Differences are in points (percent), left less right."""

    left: str
    right: str
    where: str
    """size, steps, ...: what both sides share"""
    family: str
    """empty if several are pooled"""
    dataset: str
    """`average` of a family, or "all" of several"""
    test: TestResult
    """in fractions, with degrees of freedom and where the uncertainty comes from"""
    p: float
    """nan where nothing says how far chance goes: one seed, or seeds that agree to the last digit"""
    p_adjusted: float
    """Holm's, over the comparisons of the claim; of a pooled one over the claims"""
    effect: float
    """Hedges' g: the difference over the sd of the seeds; nan where that is not known"""
    verdict: Outcome = "not resolved"
    """with respect to the claim: `holds` if it goes the claimed way"""
    bootstrap: tuple[tuple[float, float], tuple[float, float]] | None = None
    """percentile and studentised intervals of seeds and examples resampled, for a look; no verdict rests on them"""
    pretrained: int = 1
    """runs of the pretraining of each side; of pooled lines the fewest"""
    lent: bool = False
    """whether lines of one run have the variance between runs from other lines of the claim"""
    collapsed: tuple[str, ...] = ()
    """the sides that are no more than what a model says that learned nothing: not to be compared"""

    @property
    def difference(self) -> float:
        return 100 * self.test.difference

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval; nan where there is none; if seeds say nothing, over the examples alone."""
        return 100 * self.test.low

    @property
    def high(self) -> float:
        return 100 * self.test.high

    @functools.cached_property
    def seeds_needed(self) -> float | None:
        """Seeds that see a true difference of this size in 80 % of studies; inf: the examples are too few; None: not known."""
        if self.test.seeds < 2 or math.isnan(self.test.p):
            return None
        needed = inference.required_seeds(self.test.difference, self.test.components, self.test.seeds)
        return math.inf if needed is None else needed


@dataclass(frozen=True)
class Contrast:
    """A question to the evidence, before it is tested."""

    names: tuple[str, str]
    where: str
    family: str
    dataset: str
    size: str
    terms: Mapping[int, Terms]
    """by seed of the pretraining: scores times weights, the left side's weights positive"""
    source: Mapping[int, Terms] = field(default_factory=dict)
    """the evidence's scores, if `terms` hold numbers made of them"""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the pretraining."""
        return tuple(sorted(self.terms))

    @property
    def members(self) -> list[list[tuple[float, Score]]]:
        """By run of the pretraining, the evidence's scores with their weights, averages as the sets they are formed over."""
        every = (self.source or self.terms).values()
        return [[(weight, member) for weight, score in terms for member in score.members or (score,)] for terms in every]

    @functools.cached_property
    def collapsed(self) -> tuple[str, ...]:
        """The sides with worthless predictions in at least half of the runs at the chosen rate, on one of the data sets."""
        counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for weight, member in (pair for of_run in self.members for pair in of_run):
            count = counts[self.names[weight < 0], member.dataset]
            count[0] += member.collapsed_at_rate
            count[1] += len(member.seeds)
        sides = {name for (name, _), (worthless, runs) in counts.items() if worthless and 2 * worthless >= runs}
        return tuple(name for name in self.names if name in sides)


def family_terms(
    evidence: Evidence, family: str, settings: Sequence[ModelKey]
) -> tuple[str, list[list[tuple[float, Score]]]] | None:
    """Return what stands for a family: its average if all have one over the same sets, else the mean over the sets all have.

    That is its name and, for each setting, scores with weights that add up to one; None if they have nothing in common.
    """
    if not settings:
        return None
    averages = [evidence.find(setting, AVERAGE, family) for setting in settings]
    if None not in averages and len({tuple(member.dataset for member in average.members) for average in averages}) == 1:
        return AVERAGE, [[(1.0, average)] for average in averages]
    names = [name for of, name in evidence.datasets() if of == family and not is_average(name)]
    common = [name for name in names if all(evidence.find(setting, name, family) is not None for setting in settings)]
    of_study = [name for name in STUDY_DATASETS[family] if name in common]
    common = of_study if len(of_study) == 3 else common
    if not common:
        return None
    label = common[0] if len(common) == 1 else f"{AVERAGE} of {', '.join(common)}"
    return label, [[(1 / len(common), evidence.find(setting, name, family)) for name in common] for setting in settings]


def build_contrasts(
    evidence: Evidence, names: tuple[str, str], places: Iterable[tuple[str, ModelPairs]], families: Sequence[str] = tuple(STUDY_DATASETS)
) -> list[Contrast]:
    """Return a line for each place (size, steps, ...) and family in which its sides were evaluated on the same sets."""
    found = []
    for (where, sides), family in itertools.product(places, families):
        having = {seed: pair for seed, pair in sides.items() if family_terms(evidence, family, pair) is not None}
        if (standing := family_terms(evidence, family, [one for pair in having.values() for one in pair])) is None:
            continue
        label, parts = standing  # the same sets for every seed of the pretraining
        terms = {
            seed: [*left, *((-weight, score) for weight, score in right)]
            for seed, left, right in zip(having, parts[::2], parts[1::2], strict=True)
        }
        found.append(Contrast(names, where, str(family), label, next(iter(having.values()))[0].size, terms))
    return found


def adjust_comparisons(found: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons of one claim with Holm's p and the verdict of each: holds above 0, reversed below."""
    corrected = inference.holm_adjust([one.p for one in found])
    ways = (("holds" if one.difference > 0 else "reversed") for one in found)
    return [
        replace(one, p_adjusted=p, verdict=way if p < LEVEL else "not resolved")
        for one, p, way in zip(found, corrected, ways, strict=True)
    ]


def put_better_first(one: Comparison) -> Comparison:
    """Return the same with the better side on the left."""
    if not one.difference < 0:
        return one
    turned = replace(one.test, difference=-one.test.difference, low=-one.test.high, high=-one.test.low)
    verdict = "holds" if one.verdict == "reversed" else one.verdict
    return replace(one, left=one.right, right=one.left, effect=-one.effect, verdict=verdict, test=turned)
