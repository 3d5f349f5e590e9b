"""Which models of the evidence a claim is about: by size, steps, objective and ratio, whatever their names and scale."""

from collections import Counter, defaultdict
from collections.abc import Callable

from megaenc.study.evidence import Evidence
from megaenc.study.setting import Setting
from megaenc.study.setups import percent

Pair = dict[int, tuple[Setting, Setting]]
"""By seed of the pretraining, a setting of each side."""


class Models:
    """The settings of the evidence, looked at in the ways that the claims ask."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.settings = [setting for setting in evidence.settings() if not setting.schedule]
        ratios = Counter(setting.mask_ratio for setting in self.settings if setting.mask_ratio is not None)
        self.ratio = max(ratios, key=lambda ratio: (ratios[ratio], -abs(ratio - 0.4)), default=None)
        """The one that most models have stands for MLM; of equals the one nearest to 40 %."""
        self.mlm, self.clm = f"MLM {percent(self.ratio)}" if self.ratio else "MLM", "CLM"

    def pairs(
        self, left: Callable[[Setting], bool], right: Callable[[Setting], bool], same: Callable[[Setting], tuple]
    ) -> dict[tuple, Pair]:
        """By what `same` says of both, by seed of the pretraining: the first setting that is `left` and the first `right`."""
        found: dict[tuple, dict[int, list[Setting | None]]] = defaultdict(lambda: defaultdict(lambda: [None, None]))
        for setting in self.settings:
            for side, wanted in enumerate((left, right)):
                place = found[same(setting)][setting.seed]
                if wanted(setting) and place[side] is None:
                    place[side] = setting
        kept = {key: {seed: (a, b) for seed, (a, b) in by_seed.items() if a and b} for key, by_seed in found.items()}
        return {key: by_seed for key, by_seed in kept.items() if by_seed}

    def final(self) -> dict[str, Pair]:
        """By size, smallest first, MLM and CLM alone to their decayed end, at the most steps that both have."""
        pairs = self.pairs(
            lambda one: one.decayed and self.only_mlm(one),
            lambda one: one.decayed and only_clm(one),
            lambda one: (one.size, one.steps),
        )
        longest: dict[str, int] = {}
        for size, steps in pairs:
            longest[size] = max(steps, longest.get(size, 0))
        return {size: pairs[size, longest[size]] for size in sorted(longest, key=self._size)}

    def only_mlm(self, one: Setting) -> bool:
        """Nothing but MLM at the ratio that stands for it."""
        return not one.clm_steps and not one.cpt_mlm_steps and one.mask_ratio == self.ratio and one.mlm_steps > 0

    def _size(self, size: str) -> tuple[float, int]:
        """A number of parameters as one, 210M before 1B; other names in the order in which they come up."""
        order = list(dict.fromkeys(setting.size for setting in self.settings)).index(size)
        try:
            return float(size[:-1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[size[-1].upper()], order
        except (ValueError, KeyError, IndexError):
            return 0.0, order


def only_clm(one: Setting) -> bool:
    """Nothing but CLM."""
    return not one.mlm_steps and not one.cpt_mlm_steps and one.clm_steps > 0
