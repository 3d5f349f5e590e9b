"""Studies that were never run: the models of the published tables on one data set a family, with what is true of them known.

    python tests/study/simulated.py 2000     how often each claim gets a verdict in so many studies without any difference

An example is right, or scores, by a logistic model: how easy it is, for all models alike; how much this model likes it; what the
seed did to the whole run, for one model or all; and chance.
"""

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from megaenc.finetune.examples import Family
from megaenc.finetune.intervals import interval
from megaenc.study.claims import Verdict, judge
from megaenc.study.evidence import Evidence, Score
from megaenc.study.published import published
from megaenc.study.setting import Setting, name_of

SETS = {Family.SC: "sst2", Family.TC: "uner_en", Family.QA: "squad", Family.IR: "nq"}
RATES = (2e-5, 5e-5, 1e-4)
SEEDS = 5

Shift = Callable[[Setting, Family], float]


def nothing(setting: Setting, family: Family) -> float:
    """No model is better or worse than another one."""
    return 0.0


def study(
    number: int, shift: Shift = nothing, away: Shift = nothing, examples: int = 250, quiet: bool = False, seeds: int = SEEDS
) -> Evidence:
    """The scores of 46 models. `shift` moves a model's mean, in logits; `away` is what each step to a worse rate costs it more.

    Studies differ in how much seeds matter, against examples, and whether the same seed does the same to all models; `quiet` ones
    are of the least noise.
    """
    random = np.random.default_rng([number, 7])
    of_seed, shared, liked = random.choice([0.02, 0.1, 0.3]), random.choice([0.0, 0.8]), random.choice([0.3, 1.0])
    of_seed, liked = (0.02, 0.1) if quiet else (of_seed, liked)
    settings = published().settings()
    scores = []
    for family, dataset in SETS.items():
        ease = 1.0 + 1.5 * random.standard_normal(examples)
        own = of_seed * random.standard_normal((len(settings), seeds, 1))
        common = of_seed * random.standard_normal((seeds, 1))
        shifts = np.array([shift(setting, family) for setting in settings])[:, None, None]
        logits = ease + liked * random.standard_normal((len(settings), 1, examples)) + shifts
        logits = logits + (1 - shared**2) ** 0.5 * own + shared * common
        if family == Family.SC:
            found = (random.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        else:
            found = (1 / (1 + np.exp(-logits - random.standard_normal(logits.shape)))).astype(np.float32)
        means = found.astype(np.float64).mean(2)
        lost = 0.02 * random.random((len(settings), seeds))
        for at, setting in enumerate(settings):
            rates = {
                rate: dict(enumerate(means[at] - steps * (lost[at] + away(setting, family)))) for steps, rate in enumerate(RATES)
            }
            made = interval(means[at].tolist())
            of_seeds = dict(enumerate(means[at].tolist()))
            by_seed = dict(enumerate(found[at]))
            examples_of = functools.partial(dict, by_seed)
            numbers = (made.mean, made.half, of_seeds, rates, examples_of)
            scores.append(Score(name_of(setting), setting, str(family), dataset, *numbers))
    return Evidence(scores)


def verdicts(number: int, **effects) -> list[Verdict]:
    """Of one study."""
    return judge(study(number, **effects), draws=0)


def false_alarm(verdict: Verdict) -> bool:
    """Whether a verdict on a study without differences is wrong: only that models are equal may be said."""
    return verdict.verdict != "not resolved" and (verdict.claim, verdict.part, verdict.verdict) != (1, "c", "holds")


def main(studies: int) -> None:
    """Print the shares of studies with a false verdict, and of claims."""
    began, wrong, alone, equal = time.process_time(), 0, Counter(), 0
    single, tests = 0, 0
    for number in range(studies):
        found = verdicts(number)
        alarms = [one for one in found if false_alarm(one)]
        wrong += bool(alarms)
        alone.update(f"{one.claim}{one.part}" for one in alarms)
        equal += found[2].verdict == "holds"
        every = [one for verdict in found if verdict.claim != 1 or verdict.part != "c" for one in verdict.comparisons]
        single, tests = single + sum(one.p < 0.05 for one in every), tests + len(every)
    print(f"{wrong} of {studies} studies ({wrong / studies:.3f}) have a false verdict: {dict(alone)}")
    print(f"equal on TC: {equal / studies:.3f}; comparisons with p < 0.05 before correction: {single / tests:.4f} of {tests}")
    print(f"{time.process_time() - began:.0f} seconds of one core")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
