"""The tables of what the study's tables do not say: learning rates, collapsed runs, seeds beside examples, seeds needed."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megaenc.finetune import intervals
from megaenc.finetune.intervals import Sensitivity
from megaenc.finetune.jobs import rate_name
from megaenc.study.evidence import Evidence
from megaenc.study.score import Grid, Score, examples_of, trainings
from megaenc.study.setups import dataset_label, datasets_of
from megaenc.study.statistics import Components, collapse_rate, components, seeds_needed
from megaenc.study.table import Column, Row, Table, Value, score
from megaenc.study.tables import columns_of, models_of, places_of, unfinished, unfinished_said


def spread_tables(evidence: Evidence) -> list[Table]:
    """Those of the tables below that there are numbers for."""
    made = (rate_table(evidence), collapse_table(evidence), variance_table(evidence))
    return [table for table in made if table is not None]


def rate_table(evidence: Evidence) -> Table | None:
    """What the learning rate changes: best less worst mean, and how many rates are near the best. None where no model had two."""

    def cell(found: Score) -> Value:
        if (made := sensitivity(found)) is None:
            return f"({len(found.rates_failed)} failed)" if found.rates_failed else None
        rates = made.means.keys() | found.rates_failed.keys()
        failed = f", {len(found.rates_failed)} failed" if found.rates_failed else ""
        collapsed = f" †{found.collapsed}/{found.runs}" if found.collapsed else ""
        return f"{100 * made.spread:.2f} ({made.near_best()}/{len(rates)}{failed}){collapsed}{unfinished(found)}"

    note = (
        "Best less worst mean score over the learning rates, in points (how many of the rates are within one point of the best). "
        "An average takes one rate for all its sets."
    )
    if any(one.rates_failed for one in evidence.scores):
        note += (
            " `failed`: at so many of the rates the loss of a run became no number; such a run counts as the score that needs no "
            "model (majority class, never an answer) where results say that, else its rate is in no spread."
        )
    if any(one.collapsed for one in evidence.scores):
        note += (
            " †k/n: k of the n trainings at all rates collapsed to worthless predictions or failed; what always collapses looks "
            "as if no rate mattered."
        )
    places = places_of(evidence)
    made = {(one.model, one.family, one.dataset): cell(one) for one in evidence.scores}
    rows = []
    for model in models_of(evidence):
        cells = [made.get((model, family, name)) for *_, family, name in places]
        if any(value is not None for value in cells):
            rows.append(Row((model, *cells)))
    columns = (Column("Model", number=False), *columns_of(places))
    note += unfinished_said(evidence.scores)
    return Table("learning-rates", "Sensitivity to the learning rate", note, columns, tuple(rows)) if rows else None


def sensitivity(found: Score) -> Sensitivity | None:
    """The mean at each rate that has every seed, failed runs at the floor; None for fewer than two rates."""
    made = intervals.sensitivity(found.counted, found.seeds)
    return made if made is not None and len(made.means) > 1 else None


def collapse_table(evidence: Evidence) -> Table | None:
    """How many runs collapsed, by data set and by rate, of every model with a run. None where only means are known."""
    if not evidence.grids:
        return None
    sets = datasets_of((one.family, one.dataset) for one in evidence.grids)
    places = [(family, name) for family, names in sets.items() for name in names]
    rates = sorted({rate for one in evidence.grids for rate, _ in one.ended})

    def row(name: str, of: Sequence[Grid], rule: bool = False) -> Row:
        by_place = [[one for one in of if (one.family, one.dataset) == place] for place in places]
        cells = [_share([collapsed for one in here for collapsed in one.ended.values()]) for here in by_place]
        ended = trainings(((one.model, one.family, one.train_on), one.ended) for one in of)
        cells += [_share([collapsed for (_, at, _), collapsed in ended.items() if at == rate]) for rate in rates]
        share, low, high = collapse_rate(sum(ended.values()), len(ended))
        interval = f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        return Row((name, *cells, _share(list(ended.values())), interval), rule=rule)

    rows = [row(model, [one for one in evidence.grids if one.model == model]) for model in models_of(evidence)]
    if len(rows) > 1:
        rows.append(row("all models", evidence.grids, rule=True))
    columns = (
        Column("Model", number=False),
        *(Column(dataset_label(family, name), family) for family, name in places),
        *(Column(rate_name(rate), "By learning rate") for rate in rates),
        Column("collapsed", "All"),
        Column("share", "All"),
    )
    note = (
        "Runs whose predictions are worthless (the same for every example, never an answer) or whose loss became no number, of "
        "all that have ended, at any rate. By learning rate and under All a training counts once, on however many sets it was "
        "evaluated. The share has Wilson's 95 % interval, which takes trainings for independent; collapses go by rate, so it is "
        "narrower than it should be."
    )
    return Table("collapse", "Collapsed runs", note, columns, tuple(rows))


def _share(ended: Sequence[bool]) -> Value:
    return f"{sum(ended)}/{len(ended)}" if ended else None


WANTED = (0.002, 0.005, 0.01, 0.02)
"""Differences, as fractions, that the table of seeds asks about."""


def variance_table(evidence: Evidence) -> Table | None:
    """Return where the uncertainty comes from, by data set, and the seeds that a difference needs. None without seeds.

    Spreads are root mean squares over the models, seeds needed are for the difference of two neighbours of the tables, which have
    seeds and examples in common.
    """
    columns = (
        *(Column(name, number=False) for name in ("Family", "Data set")),
        *(Column(name) for name in ("Models", "Seeds")),
        *(Column(name, "Standard deviation") for name in ("of a run", "of a mean: seeds", "of a mean: examples")),
        *(Column(f"{100 * wanted:g}", "Seeds for a difference of") for wanted in WANTED),
    )
    rows = []
    order = {model: at for at, model in enumerate(models_of(evidence))}
    for family, names in datasets_of(evidence.datasets()).items():
        for name in names:
            scores = [one for one in evidence.scores if (one.family, one.dataset) == (family, name) and len(one.seeds) > 1]
            members = sorted(scores, key=lambda one: order[one.model])
            if not members:
                continue
            single = [_components(one.seeds, _blocks(one, sorted(one.seeds))) for one in members]
            runs = [len(one.seeds) * parts.seeds for one, parts in zip(members, single, strict=True)]
            spreads = (_root(runs), _root(parts.seeds for parts in single), _root(parts.examples for parts in single))
            head = (family, dataset_label(family, name), len(members), max(len(one.seeds) for one in members))
            rows.append(Row((*head, *map(score, spreads), *_needed(members)), rule=name == names[0]))
    note = (
        "Points; root mean squares over the models. Standard deviations: of a run's score over the seeds; of a mean, as other "
        "fine-tuning seeds would move it, and as other test examples of the same kind would. Seeds for a difference of so many "
        "points: with them a true difference of two models that share seeds and examples is seen in four of five studies; never: "
        "no number of seeds makes up for so few examples. Few seeds say little of their own spread: take these as orders of size."
    )
    return Table("variance", "Seeds and examples: where uncertainty comes from", note, columns, tuple(rows)) if rows else None


def _mean(values: Iterable[float]) -> float:
    """Return the mean of those that are known; nan for none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _root(variances: Iterable[float]) -> float:
    return math.sqrt(_mean(variances))


def _blocks(found: Score, seeds: Sequence[int]) -> list[np.ndarray]:
    """Return float32[S, N] of each data set behind a score, as it counts in it; none at all where some has no examples."""
    members = found.members or (found,)
    blocks = [examples_of(member, seeds) for member in members]
    return [] if any(block is None for block in blocks) else [block / len(members) for block in blocks]


def _components(by_seed: Mapping[int, float], blocks: Sequence[np.ndarray]) -> Components:
    return components(np.array([by_seed[seed] for seed in sorted(by_seed)]), blocks)


def _needed(members: Sequence[Score]) -> list[Value]:
    """Return cells of WANTED from the mean components of the differences of neighbours that have seeds in common."""
    found: dict[int, list[Components]] = defaultdict(list)
    for one, other in itertools.pairwise(members):
        seeds = sorted(one.seeds.keys() & other.seeds.keys())
        if len(seeds) > 1:
            blocks, others = _blocks(one, seeds), _blocks(other, seeds)
            alike = [block.shape for block in blocks] == [block.shape for block in others]
            paired = [a - b for a, b in zip(blocks, others, strict=True)] if alike else ()
            found[len(seeds)].append(_components({seed: one.seeds[seed] - other.seeds[seed] for seed in seeds}, paired))
    if not found:
        return [None] * len(WANTED)
    parts = found[max(found)]
    mean = Components(_mean(part.seeds for part in parts), _mean(part.examples for part in parts))
    needed = [seeds_needed(wanted, mean, max(found)) for wanted in WANTED]
    return ["never" if seeds is None else seeds for seeds in needed]
