"""False alarms at 5 % of each way to test a difference, for study-claims.md.

    python tests/study/levels.py 1000

Two models without a difference answer the same examples right or wrong in S fine-tunings each.
Random are how easy an example is, how much a model likes it (others of the same kind it would like
otherwise), what a seed does to a whole run, and chance.
"""

import sys

import numpy as np
from scipy import stats

from megaenc.study.stats import inference

# Seeds, examples, sd of what a seed does in logits, sd of what a model likes, share that all models
# have of a seed
WORLDS = {
    "5 seeds, seeds matter": (5, 300, 0.3, 0.5, 0.0),
    "5 seeds, examples matter": (5, 300, 0.05, 2.0, 0.0),
    "3 seeds, both matter": (3, 300, 0.1, 1.5, 0.0),
    "2 seeds, seeds matter": (2, 300, 0.2, 0.5, 0.0),
    "5 seeds, seeds matter, shared": (5, 300, 0.3, 0.5, 0.8),
}


def differences(
    random: np.random.Generator,
    count: int,
    examples: int,
    of_seed: float,
    liked: float,
    shared: float,
) -> np.ndarray:
    """float[S, N]: of two models that are equally good, one less the other."""
    ease = 1.5 + 1.5 * random.standard_normal(examples)
    own = random.standard_normal((2, count, 1))
    common = random.standard_normal((count, 1))
    logits = (
        ease
        + liked * random.standard_normal((2, 1, examples))
        + of_seed * ((1 - shared**2) ** 0.5 * own + shared * common)
    )
    right = random.random(logits.shape) < 1 / (1 + np.exp(-logits))
    return right[0].astype(float) - right[1]


def ways(block: np.ndarray) -> dict[str, bool]:
    """Whether each way says that there is a difference."""
    scores = block.mean(1)
    parts = inference.variance_components(scores, [block])
    degrees = np.inf
    if parts.seed_variance:
        degrees = parts.total**2 / (parts.seed_variance**2 / (len(block) - 1))
    return {
        "t over seeds alone": inference.contrast_t_test(scores).p < 0.05,
        "t over both": abs(scores.mean()) > stats.t.ppf(0.975, degrees) * parts.total**0.5 > 0,
        "the less certain": inference.contrast_t_test(scores, [block]).p < 0.05,
    }


def main(studies: int) -> None:
    """Print a row for each world."""
    for name, world in WORLDS.items():
        random = np.random.default_rng(1)
        found = [ways(differences(random, *world)) for _ in range(studies)]
        shares = [f"{100 * np.mean([one[way] for one in found]):.1f}" for way in found[0]]
        print(f"| {name} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
