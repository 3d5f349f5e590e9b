"""The tables of what the study's tables do not say: learning rates, collapsed runs, seeds beside examples, seeds needed."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megaenc.finetune.intervals import Sensitivity
from megaenc.study.evidence import Evidence, Score
from megaenc.study.setups import dataset_label, datasets_of, is_average
from megaenc.study.statistics import Components, collapse_rate, components, seeds_needed
from megaenc.study.table import Column, Row, Table, Value, score
from megaenc.study.tables import blocks_of, columns_of, models_of, places_of


def spread_tables(evidence: Evidence) -> list[Table]:
    """Those of the tables below that there are numbers for."""
    made = (rate_table(evidence), collapse_table(evidence), variance_table(evidence))
    return [table for table in made if table is not None]


def rate_table(evidence: Evidence) -> Table | None:
    """What the learning rate changes: best less worst mean, and how many rates are near the best. None where no model had two."""

    def cell(found: Score) -> Value:
        if (made := sensitivity(found)) is None:
            return None
        return f"{100 * made.spread:.2f} ({made.near_best()}/{len(made.means)})"

    note = (
        "Best less worst mean score over the learning rates, in points (how many of the rates are within one point of the best). "
        "An average takes one rate for all its sets."
    )
    return _by_model(evidence, "learning-rates", "Sensitivity to the learning rate", note, cell)


def sensitivity(found: Score) -> Sensitivity | None:
    """The mean at each rate that has every seed; None for fewer than two rates."""
    seeds = max((len(by_seed) for by_seed in found.rates.values()), default=0)
    means = {rate: math.fsum(by_seed.values()) / seeds for rate, by_seed in found.rates.items() if len(by_seed) == seeds}
    return Sensitivity(means) if len(means) > 1 else None


def collapse_table(evidence: Evidence) -> Table | None:
    """How many runs collapsed, of how many, at all rates. None where only means are known."""

    def cell(found: Score) -> Value:
        if not found.runs:
            return None
        if not is_average(found.dataset):
            return f"{found.collapsed}/{found.runs}"
        share, low, high = collapse_rate(found.collapsed, found.runs)
        return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

    note = (
        "Runs at any rate whose predictions are worthless (the same for every example) or whose loss became no number, of all "
        "runs; under Average the share of the family's runs with Wilson's 95 % interval."
    )
    return _by_model(evidence, "collapse", "Collapsed runs", note, cell)


def _by_model(evidence: Evidence, key: str, title: str, note: str, cell: Callable[[Score], Value]) -> Table | None:
    """A row for every model that has a cell."""
    blocks = blocks_of(evidence)
    made = {(one.model, one.family, one.dataset): cell(one) for one in evidence.scores}
    rows = []
    for model in models_of(evidence):
        cells = [made.get((model, family, name)) for _, family, name in places_of(blocks)]
        if any(value is not None for value in cells):
            rows.append(Row((model, *cells)))
    return Table(key, title, note, (Column("Model", number=False), *columns_of(blocks)), tuple(rows)) if rows else None


WANTED = (0.002, 0.005, 0.01, 0.02)
"""Differences, as fractions, that the table of seeds asks about."""


def variance_table(evidence: Evidence) -> Table | None:
    """Where the uncertainty comes from, by data set, and the seeds that a difference needs. None without seeds.

    Spreads are root mean squares over the models, seeds needed are for the difference of two neighbours of the tables, which have
    seeds and examples in common.
    """
    columns = (
        Column("Family", number=False),
        Column("Data set", number=False),
        Column("Models"),
        Column("Seeds"),
        *(Column(name, "Standard deviation") for name in ("of a run", "of a mean: seeds", "of a mean: examples")),
        *(Column(f"{100 * wanted:g}", "Seeds for a difference of") for wanted in WANTED),
    )
    rows = []
    order = {model: at for at, model in enumerate(models_of(evidence))}
    for family, names in datasets_of(evidence.datasets()).items():
        for name in names:
            members = sorted(
                (one for one in evidence.scores if (one.family, one.dataset) == (family, name) and len(one.seeds) > 1),
                key=lambda one: order[one.model],
            )
            if not members:
                continue
            single = [_components(one) for one in members]
            runs = math.sqrt(np.mean([len(one.seeds) * parts.seeds for one, parts in zip(members, single, strict=True)]))
            from_examples = [parts.examples for parts in single if not math.isnan(parts.examples)]
            head = (family, dataset_label(family, name), len(members), max(len(one.seeds) for one in members))
            spreads = (runs, _root(parts.seeds for parts in single), _root(from_examples))
            rows.append(Row((*head, *(score(spread) for spread in spreads), *_needed(members)), rule=name == names[0]))
    note = (
        "Points; root mean squares over the models. Standard deviations: of a run's score over the seeds; of a mean, as other "
        "fine-tuning seeds would move it, and as other test examples of the same kind would. Seeds for a difference of so many "
        "points: with them a true difference of two models that share seeds and examples is seen in four of five studies; never: "
        "no number of seeds makes up for so few examples. Few seeds say little of their own spread: take these as orders of size."
    )
    return Table("variance", "Seeds and examples: where uncertainty comes from", note, columns, tuple(rows)) if rows else None


def _root(variances: Iterable[float]) -> float | None:
    known = list(variances)
    return math.sqrt(float(np.mean(known))) if known else None


def _blocks(found: Score, seeds: Sequence[int]) -> list[np.ndarray] | None:
    """float32[S, N] of each data set behind a score, as it counts in it; None where some has no examples."""
    members = found.members or (found,)
    blocks = []
    for member in members:
        of_seed = member.examples()
        if any(seed not in of_seed for seed in seeds) or len({len(of_seed[seed]) for seed in seeds}) != 1:
            return None
        blocks.append(np.stack([of_seed[seed] for seed in seeds]) / len(members))
    return blocks


def _components(found: Score) -> Components:
    seeds = sorted(found.seeds)
    return components(np.array([found.seeds[seed] for seed in seeds]), _blocks(found, seeds) or ())


def _needed(members: Sequence[Score]) -> list[Value]:
    """Cells of WANTED from the mean components of the differences of neighbours that have seeds in common."""
    found: list[tuple[Components, int]] = []
    for one, other in itertools.pairwise(members):
        seeds = sorted(one.seeds.keys() & other.seeds.keys())
        if len(seeds) < 2:
            continue
        blocks, others = _blocks(one, seeds), _blocks(other, seeds)
        alike = blocks and others and [block.shape for block in blocks] == [block.shape for block in others]
        paired = [a - b for a, b in zip(blocks, others, strict=True)] if alike else ()
        found.append((components(np.array([one.seeds[seed] - other.seeds[seed] for seed in seeds]), paired), len(seeds)))
    if not found:
        return [None] * len(WANTED)
    counts = {count for _, count in found}
    count = max(counts)
    parts = [part for part, seeds in found if seeds == count]
    of_examples = [part.examples for part in parts if not math.isnan(part.examples)]
    mean = Components(float(np.mean([part.seeds for part in parts])), float(np.mean(of_examples)) if of_examples else math.nan)
    needed = [seeds_needed(wanted, mean, count) for wanted in WANTED]
    return ["never" if seeds is None else seeds for seeds in needed]
