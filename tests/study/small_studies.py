"""Evidence of a few models, made of numbers that are known, and its verdicts."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from megaenc.study.claims.verdicts import Verdict, judge
from megaenc.study.manifest.model_key import ModelKey, format_model_name, parse_model_name
from megaenc.study.results.evidence import Evidence, Score


def by_claim(evidence: Evidence, **more) -> dict[str, Verdict]:
    """Verdicts by number and part: 1a, 2."""
    return {f"{one.claim}{one.part}": one for one in judge(evidence, **more)}


def verdict_on(claim: str, scores: Sequence[Score]) -> Verdict:
    """The verdict on a claim of evidence that consists of these scores."""
    return by_claim(Evidence(scores))[claim]


TWO = (("SC", "toy_sc"), ("IR", "toy_ir"))


def mini(seeds, pretraining_seeds=(1,), examples=200, families=TWO):
    """Return a study of one size, forty steps and two tasks, as in a manifest."""
    random = np.random.default_rng(1)
    settings = [
        parse_model_name("tiny-mlm15-40"),
        ModelKey("tiny", clm_steps=40),
        parse_model_name("tiny-clm-10-mlm15-40"),
    ]
    scores = []
    for family, dataset in families:
        for setting, gains in zip(settings, (0, 0, 0.05), strict=True):
            for pretraining in pretraining_seeds:
                ran = 0.01 * random.standard_normal() if len(pretraining_seeds) > 1 else 0
                blocks = (
                    0.6
                    + gains
                    + ran
                    + 0.004 * random.standard_normal((seeds, 1))
                    + 0.1 * random.random((1, examples))
                )
                by_seed = dict(enumerate(blocks))
                named = dataclasses.replace(setting, seed=pretraining)
                means = {seed: float(block.mean()) for seed, block in by_seed.items()}
                mean = float(blocks.mean())
                numbers = (mean, 0.01, means, {1e-5: means}, lambda by_seed=by_seed: by_seed)
                scores.append(Score(format_model_name(named), named, family, dataset, *numbers))
    return Evidence(scores)


def sized(size, pretraining_seeds, gap=0.0, runs=0.02, random=2):
    """Return MLM and CLM of a size with five fine-tunings of each pretraining seed.

    `runs` is the standard deviation of their runs.
    """
    random = np.random.default_rng(random)
    scores = []
    for seed in pretraining_seeds:
        for setting, above in (
            (ModelKey(size, mlm_steps=600, mask_ratio=0.4), gap),
            (ModelKey(size, clm_steps=600), 0.0),
        ):
            mean = 0.8 + above + runs * random.standard_normal()
            by_seed = {at: mean + 0.001 * random.standard_normal() for at in range(5)}
            named = dataclasses.replace(setting, seed=seed)
            scores.append(
                Score(format_model_name(named), named, "SC", "sst2", mean, 0.001, by_seed)
            )
    return scores
