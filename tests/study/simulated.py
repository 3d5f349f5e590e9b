"""Studies that were never run: the models of the published tables on one data set a family, with what is true of them known.

    python tests/study/simulated.py 2000     how often studies of each WORLD without any difference have a false verdict

An example is right, or scores, by a logistic model: how easy it is, for all models alike; how much this model likes it; what the
seed did to the whole run, for one model or all; and chance. On top, in score: what a run of the pretraining did to its models,
and more noise of seeds for MLM than for CLM.
"""

import functools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.results.aggregate import compute_interval
from megaenc.study.claims.verdicts import Verdict, judge
from megaenc.study.manifest.model_key import ModelKey, format_model_name
from megaenc.study.results.evidence import Evidence, Score
from megaenc.study.results.published import published

SETS = {TaskFamily.SC: "sst2", TaskFamily.TC: "uner_en", TaskFamily.QA: "squad", TaskFamily.IR: "nq"}
RATES = (2e-5, 5e-5, 1e-4)
SEEDS = 5

Shift = Callable[[ModelKey, TaskFamily], float]


def nothing(setting: ModelKey, family: TaskFamily) -> float:
    """No model is better or worse than another one."""
    return 0.0


def study(
    number: int,
    shift: Shift = nothing,
    away: Shift = nothing,
    examples: int = 250,
    quiet: bool = False,
    seeds: int = SEEDS,
    pretrained: Mapping[str, int] | None = None,
    runs: float = 0.0,
    uneven: float = 0.0,
) -> Evidence:
    """The scores of 46 models. `shift` moves a model's mean, in logits; `away` is what each step to a worse rate costs it more.

    Studies differ in how much seeds matter, against examples, and whether the same seed does the same to all models; `quiet` ones
    are of the least noise. `pretrained` is how often by size, `runs` the sd of what a run does (half of it to all models of its
    size, objective and seed, as checkpoints and branches of one run), `uneven` the sd of what seeds do to MLM beyond what they do
    to CLM, and at each worse rate again.
    """
    random, more = np.random.default_rng([number, 7]), np.random.default_rng([number, 8])
    of_seed, shared, liked = random.choice([0.02, 0.1, 0.3]), random.choice([0.0, 0.8]), random.choice([0.3, 1.0])
    of_seed, liked = (0.02, 0.1) if quiet else (of_seed, liked)
    often = pretrained or {}
    settings = [replace(one, seed=1 + at) for one in published().model_keys() for at in range(often.get(one.size, 1))]
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
            found = (1 / (1 + np.exp(-logits - random.standard_normal(logits.shape)))).astype(np.float32)
        started: dict[tuple, float] = defaultdict(lambda: more.standard_normal())
        run = np.array([started[one.size, one.clm_steps > 0, one.seed] for one in settings]) + more.standard_normal(len(settings))
        found += (runs * run / 2**0.5)[:, None, None].astype(np.float32)
        found += uneven * (masked[:, None] * more.standard_normal((len(settings), seeds)))[:, :, None].astype(np.float32)
        means = found.astype(np.float64).mean(2)
        rough = (0.003 + uneven * masked)[:, None, None] * more.standard_normal((len(settings), len(RATES), seeds))
        for at, setting in enumerate(settings):
            lost = [steps * (0.01 + away(setting, family)) for steps in range(len(RATES))]
            rates = {
                rate: dict(enumerate(means[at] - lost[steps] + (rough[at, steps] if steps else 0)))
                for steps, rate in enumerate(RATES)
            }
            made = compute_interval(means[at].tolist())
            of_seeds = dict(enumerate(means[at].tolist()))
            by_seed = dict(enumerate(found[at]))
            examples_of = functools.partial(dict, by_seed)
            numbers = (made.mean, made.half, of_seeds, rates, examples_of)
            scores.append(Score(format_model_name(setting), setting, str(family), dataset, *numbers))
    return Evidence(scores)


WORLDS = {
    "pretrained once, runs do not differ": {},
    "seeds of MLM are noisier": {"uneven": 0.01},
    "pretrained once, runs differ by a point": {"quiet": True, "examples": 1500, "runs": 0.01},
    "pretrained 3 times, runs differ by a point": {"quiet": True, "runs": 0.01, "pretrained": {"210M": 3, "610M": 3, "1B": 3}},
    "3, 2 and 1 times, by size": {"quiet": True, "runs": 0.01, "pretrained": {"210M": 3, "610M": 2, "1B": 1}},
    "the smallest 5 times, others once": {"quiet": True, "runs": 0.01, "pretrained": {"210M": 5}},
    "610M 3 times, others once, MLM noisier": {"quiet": True, "runs": 0.01, "pretrained": {"610M": 3}, "uneven": 0.01},
}
"""What is otherwise in studies that have no difference to find."""


def verdicts(number: int, **effects) -> list[Verdict]:
    """Of one study."""
    return judge(study(number, **effects), draws=0)


def false_alarm(verdict: Verdict) -> bool:
    """Whether a verdict on a study without differences is wrong: only that models are equal may be said."""
    return verdict.verdict != "not resolved" and (verdict.claim, verdict.part, verdict.verdict) != (1, "c", "holds")


def about_recipes(verdict: Verdict) -> bool:
    """Whether a verdict says nothing of being about the trained models alone, of which runs that differ make some better."""
    return "for these trained models" not in verdict.reason


def main(studies: int) -> None:
    """Print for each world the share of studies with a false verdict, of which claims, and of tests with p < 5 %."""
    for name, world in WORLDS.items():
        began, wrong, plain, alone, equal = time.process_time(), 0, 0, Counter(), 0
        single, whole = [], []
        for number in range(studies):
            found = verdicts(number, **world)
            alarms = [one for one in found if false_alarm(one)]
            wrong += bool(alarms)
            plain += any(map(about_recipes, alarms))
            alone.update(f"{one.claim}{one.part}" for one in alarms)
            equal += found[2].verdict == "holds"
            every = [verdict for verdict in found if (verdict.claim, verdict.part) != (1, "c")]
            single += [one.p < 0.05 for verdict in every for one in verdict.comparisons]
            whole += [verdict.overall.p < 0.05 for verdict in every if verdict.overall is not None]
        print(
            f"{name}: {wrong} of {studies} studies ({wrong / studies:.3f}) have a false verdict, "
            f"{plain} of them without saying that it holds for these trained models: {dict(alone)}; equal on TC: "
            f"{equal / studies:.3f}; p < 0.05 before correction: {np.mean(single):.4f} of {len(single)} comparisons, "
            f"{np.mean(whole):.4f} of {len(whole)} pooled; {time.process_time() - began:.0f} seconds of one core",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
