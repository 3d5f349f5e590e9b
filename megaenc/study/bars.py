"""What the intervals of tables and figures are, in words: which kind, over how many seeds, and how often such a one is right."""

from scipy.special import stdtr

from megaenc.study.evidence import Evidence

PUBLISHED_SEEDS = 5


def coverage(seeds: int) -> float:
    """How often 1.96 standard errors either way hold the true mean, as a share, where scores of so many seeds are normal.

    0.70 for two, 0.88 for five, 0.95 for very many.
    """
    return float(1 - 2 * stdtr(seeds - 1, -1.96))


def words(evidence: Evidence, published: Evidence | None = None) -> str:
    """`1.96 standard errors over 2 seeds, which hold the true mean 70 times in 100`; `published` stand beside these."""
    counts = sorted({len(one.seeds) or PUBLISHED_SEEDS for one in evidence.scores if one.half is not None})
    if not counts:
        said = "none, as there is one fine-tuning seed"
    elif evidence.kind == "t":
        said = f"95 % by Student's t over {_listed(counts)} fine-tuning seeds"
    else:
        said = _normal(counts)
    if published is None or (evidence.kind == "normal" and counts == [PUBLISHED_SEEDS]):
        return said
    return f"{said}; published ones are {_normal([PUBLISHED_SEEDS])}"


def _normal(counts: list[int]) -> str:
    ends = list(dict.fromkeys(f"{100 * coverage(count):.0f}" for count in (counts[0], counts[-1])))
    often = " to ".join(ends)
    return f"1.96 standard errors over {_listed(counts)} fine-tuning seeds, which hold the true mean {often} times in 100"


def _listed(counts: list[int]) -> str:
    return " or ".join(map(str, counts)) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"
