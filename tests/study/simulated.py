"""Simulated studies: the models of the published tables, with a known truth.

    python tests/study/simulated.py 2000
    python tests/study/simulated.py power 500

The first prints how often studies of each WORLD without any difference have a false verdict, the
second how often studies like the paper's find each claim.

Families have one data set. An example is right, or scores, by a logistic model: how easy it is, for
all models alike; how much this model likes it; what the seed did to the whole run, for one model or
all; and chance. On top, in score: what a run of the pretraining did to its models, and more noise
of seeds for MLM than for CLM.
"""

import functools
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from megaenc.finetune.examples import STUDY_FAMILIES, TaskFamily
from megaenc.finetune.results.aggregate import STUDY_DATASETS, compute_interval
from megaenc.study.claims.verdicts import Verdict, judge
from megaenc.study.manifest.model_key import ModelKey, format_model_name
from megaenc.study.results.evidence import AVERAGE, Evidence, Score
from megaenc.study.results.published import published
from megaenc.study.stats.comparisons import ModelSelector
from megaenc.study.stats.run_noise import estimate_run_noise

SETS = {
    TaskFamily.SC: "sst2",
    TaskFamily.TC: "uner_en",
    TaskFamily.QA: "squad",
    TaskFamily.IR: "nq",
}
RATES = (2e-5, 5e-5, 1e-4)
SEEDS = 5

Shift = Callable[[ModelKey, TaskFamily], float]


def nothing(setting: ModelKey, family: TaskFamily) -> float:
    """No model is better or worse than another one."""
    return 0.0


def study(
    number: int,
    shift: Shift = nothing,
    examples: int = 250,
    quiet: bool = False,
    seeds: int = SEEDS,
    pretrained: Mapping[str, int] | None = None,
    runs: float = 0.0,
    uneven: float = 0.0,
) -> Evidence:
    """Return the scores of 46 models of a simulated study.

    Studies differ in how much seeds matter, against examples, and whether the same seed does the
    same to all models.

    Args:
        shift: Moves a model's mean, in logits.
        quiet: Use the least noise.
        pretrained: Runs of the pretraining by size.
        runs: Standard deviation of a run's effect, half of it on all models of its trunk: size,
            first objective or mask ratio, and seed, as checkpoints and branches of one run.
        uneven: Standard deviation of the effect of seeds on MLM beyond that on CLM, and at each
            worse rate again.
    """
    random = np.random.default_rng([number, 7])
    more = np.random.default_rng([number, 8])
    of_seed = random.choice([0.02, 0.1, 0.3])
    shared = random.choice([0.0, 0.8])
    liked = random.choice([0.3, 1.0])
    of_seed, liked = (0.02, 0.1) if quiet else (of_seed, liked)
    often = pretrained or {}
    settings = [
        replace(one, seed=1 + at)
        for one in published().model_keys()
        for at in range(often.get(one.size, 1))
    ]
    masked = np.array([one.mlm_steps > 0 for one in settings])
    scores = []
    for family, dataset in SETS.items():
        ease = 1.0 + 1.5 * random.standard_normal(examples)
        own = of_seed * random.standard_normal((len(settings), seeds, 1))
        common = of_seed * random.standard_normal((seeds, 1))
        shifts = np.array([shift(setting, family) for setting in settings])[:, None, None]
        logits = ease + liked * random.standard_normal((len(settings), 1, examples)) + shifts
        logits = logits + (1 - shared**2) ** 0.5 * own + shared * common
        if family == TaskFamily.SC:
            found = (random.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        else:
            found = (1 / (1 + np.exp(-logits - random.standard_normal(logits.shape)))).astype(
                np.float32
            )
        started: dict[tuple, float] = defaultdict(lambda: more.standard_normal())
        trunks = [(one.size, one.clm_steps > 0 or one.mask_ratio, one.seed) for one in settings]
        run = np.array([started[trunk] for trunk in trunks]) + more.standard_normal(len(settings))
        found += (runs * run / 2**0.5)[:, None, None].astype(np.float32)
        found += uneven * (masked[:, None] * more.standard_normal((len(settings), seeds)))[
            :, :, None
        ].astype(np.float32)
        means = found.astype(np.float64).mean(2)
        rough = (0.003 + uneven * masked)[:, None, None] * more.standard_normal(
            (len(settings), len(RATES), seeds)
        )
        for at, setting in enumerate(settings):
            rates = {}
            for steps, rate in enumerate(RATES):
                lost = 0.01 * steps - (rough[at, steps] if steps else 0)
                rates[rate] = dict(enumerate(means[at] - lost))
            made = compute_interval(means[at].tolist())
            examples_of = functools.partial(dict, dict(enumerate(found[at])))
            numbers = (made.mean, made.half, rates[RATES[0]], rates, examples_of)
            scores.append(
                Score(format_model_name(setting), setting, str(family), dataset, *numbers)
            )
    return Evidence(scores)


def paper_study(number: int, effect: float = 1.0) -> Evidence:
    """Return a study of the paper's design, with noise as large as published.

    It has the models and the twelve data sets, and noise of fine-tuning and of pretraining runs.
    True scores are the published ones, but on a smooth curve over the mask ratios; `effect` scales
    the difference of a model from MLM 40 % of its size and steps (of a continued model from the one
    that began as MLM), so that 0 makes all claims on differences false. A run's noise is the same
    on all data sets of a family, in their standard deviations around those curves.
    """
    random = np.random.default_rng([number, 9])
    printed = published()
    noise = estimate_run_noise(ModelSelector(printed))
    names = printed.model_names()
    true = {(score.model_key, score.family, score.dataset): score.mean for score in printed.scores}
    for place, size in itertools.product(noise.residuals, ("210M", "610M", "1B")):
        curve = [
            key
            for key in names
            if key.size == size and key.decayed and not key.clm_steps + key.cpt_mlm_steps
        ]
        curve = [key for key in curve if key.steps == 42_000]
        ratios = [key.mask_ratio for key in curve]
        means = [true[key, *place] for key in curve]
        true |= {
            (key, *place): mean
            for key, mean in zip(
                curve, np.polyval(np.polyfit(ratios, means, 2), ratios), strict=True
            )
        }
    scores = []
    count = len(STUDY_FAMILIES)
    trunks: dict[tuple, np.ndarray] = defaultdict(lambda: random.standard_normal(count))
    for key, name in names.items():
        base = replace(key, clm_steps=0, mlm_steps=key.clm_steps + key.mlm_steps, mask_ratio=0.4)
        trunk = trunks[key.size, key.clm_steps > 0 or key.mask_ratio]
        of_run = dict(
            zip(STUDY_FAMILIES, (trunk + random.standard_normal(count)) / 2**0.5, strict=True)
        )
        for family, datasets in STUDY_DATASETS.items():
            members = []
            for dataset in datasets:
                place = (str(family), dataset)
                score = printed.find(key, dataset, family)
                origin = true.get((base, *place), true[key, *place])
                variance, finetuning = noise.variance({place: 1.0})
                mean = (
                    origin
                    + effect * (true[key, *place] - origin)
                    + of_run[family] * (variance - finetuning) ** 0.5
                )
                sd = max(score.half_width, 0.00005) / 1.96 * SEEDS**0.5
                by_seed = dict(enumerate((mean + sd * random.standard_normal(SEEDS)).tolist()))
                made = compute_interval(list(by_seed.values()))
                members.append(Score(name, key, *place, made.mean, made.half, by_seed))
            by_seed = {
                seed: float(np.mean([one.seed_scores[seed] for one in members]))
                for seed in range(SEEDS)
            }
            made = compute_interval(list(by_seed.values()))
            scores += [
                *members,
                Score(
                    name,
                    key,
                    str(family),
                    AVERAGE,
                    made.mean,
                    made.half,
                    by_seed,
                    members=tuple(members),
                ),
            ]
    return Evidence(scores)


def power(studies: int) -> None:
    """Print how many studies of the paper's design find each claim.

    Claims are on their models and on another run.
    """
    for effect in (1.0, 0.0):
        counts: Counter = Counter()
        for number in range(studies):
            for one in judge(paper_study(number, effect)):
                name = f"{one.claim}{one.part}"
                counts.update([f"{name}: {one.verdict}", f"{name}: {one.another_run}, another run"])
        for outcome, count in sorted(counts.items()):
            print(f"effect x {effect:g}, {outcome} {count / studies:.3f}", flush=True)


WORLDS = {
    "once, runs do not differ": {},
    "once": {"quiet": True, "runs": 0.01},
    "once, 1,500 examples": {"quiet": True, "examples": 1500, "runs": 0.01},
    "3 times": {"quiet": True, "runs": 0.01, "pretrained": {"210M": 3, "610M": 3, "1B": 3}},
    "210M 3, 610M 2, 1B 1": {
        "quiet": True,
        "runs": 0.01,
        "pretrained": {"210M": 3, "610M": 2, "1B": 1},
    },
    "210M 5, others 1": {"quiet": True, "runs": 0.01, "pretrained": {"210M": 5}},
}
"""How often models are pretrained in studies that have no difference to find, and what else is so
there."""


def verdicts(number: int, **effects) -> list[Verdict]:
    """Of one study."""
    return judge(study(number, **effects))


OF_EQUALITY = {"1c", "4b", "5b"}


def false_alarm(verdict: Verdict, another_run: bool = False) -> bool:
    """Return whether a verdict on a study without differences is wrong.

    It is on the study's models or on `another_run`; only equality is right.
    """
    outcome = verdict.another_run if another_run else verdict.verdict
    name = f"{verdict.claim}{verdict.part}"
    return outcome not in ("not resolved", "no data") and not (
        outcome == "holds" and name in OF_EQUALITY
    )


def main(studies: int) -> None:
    """Print the share of studies with a false verdict for each world.

    Verdicts are on their models and on another run.
    """
    for name, world in WORLDS.items():
        wrong = np.zeros(2)
        for number in range(studies):
            found = verdicts(number, **world)
            for another_run in (False, True):
                wrong[int(another_run)] += any(false_alarm(one, another_run) for one in found)
        print(
            f"| {name} | {studies} | {wrong[0] / studies:.1%} | {wrong[1] / studies:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1] == "power":
        power(int(sys.argv[2]))
    else:
        main(int(sys.argv[1]))
