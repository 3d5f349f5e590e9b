"""Which models of the evidence a claim is about: by size, steps, objective and ratio, whatever their names and scale."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import attrgetter

from megaenc.study.evidence import Evidence
from megaenc.study.setting import Setting
from megaenc.study.setups import percent

Pair = dict[int, tuple[Setting, Setting]]
"""By seed of the pretraining, a setting of each side."""
Is = Callable[[Setting], bool]


class Models:
    """The settings of the evidence, looked at in the ways that the claims ask.

    What stands for MLM, and which models are at their end, is asked of all that the study has planned, where a manifest says it.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.settings = [setting for setting in evidence.settings() if not setting.schedule]
        self.planned = [setting for setting in evidence.planned() if not setting.schedule]
        self.ratio = evidence.mask_ratio
        self.mlm, self.clm = f"MLM {percent(self.ratio)}" if self.ratio else "MLM", "CLM"

    def pairs(
        self,
        left: Is,
        right: Is,
        same: Callable[[Setting], tuple] = attrgetter("size", "steps"),
        among: Iterable[Setting] | None = None,
    ) -> dict[tuple, Pair]:
        """Return the first setting that is `left` and the first `right`, by what `same` says of both, by pretraining seed."""
        found: dict[tuple, dict[int, list[Setting | None]]] = defaultdict(lambda: defaultdict(lambda: [None, None]))
        for setting in self.settings if among is None else among:
            for side, wanted in enumerate((left, right)):
                place = found[same(setting)][setting.seed]
                if wanted(setting) and place[side] is None:
                    place[side] = setting
        kept = {key: {seed: (a, b) for seed, (a, b) in by_seed.items() if a and b} for key, by_seed in found.items()}
        return {key: by_seed for key, by_seed in kept.items() if by_seed}

    def final(self) -> dict[str, Pair]:
        """Return by size, smallest first, MLM and CLM alone to their decayed end, at the most steps that both (will) have."""
        ends = (lambda one: one.decayed and self.only_mlm(one), lambda one: one.decayed and only_clm(one))
        longest = dict(sorted(self.pairs(*ends, among=self.planned)))  # by size, the last is the longest
        pairs = self.pairs(*ends)
        order = self.evidence.sizes_of(self.settings)
        return {size: pairs[size, longest[size]] for size in order if (size, longest.get(size)) in pairs}

    def ends(self) -> dict[str, int]:
        """Return by size the steps of the longest run from scratch, of those too that have only checkpoints on the way yet."""
        found: dict[str, int] = defaultdict(int)
        for one in self.planned:
            if not one.cpt_mlm_steps:
                found[one.size] = max(found[one.size], one.steps, 0 if one.decayed else one.budget)
        return found

    def only_mlm(self, one: Setting) -> bool:
        """Return whether a model saw nothing but MLM at the ratio that stands for it."""
        return not one.clm_steps and not one.cpt_mlm_steps and one.mask_ratio == self.ratio and one.mlm_steps > 0


def only_clm(one: Setting) -> bool:
    """Return whether a model saw nothing but CLM."""
    return not one.mlm_steps and not one.cpt_mlm_steps and one.clm_steps > 0
