"""Tables, figure and facts of the report on zero-shot retrieval."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from megaenc.finetune.results.aggregate import IntervalKind, compute_interval
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.figures.base import (
    MUTED_COLOUR,
    OBJECTIVE_STYLES,
    FigureLine,
    FigurePanel,
    FigurePoint,
    FigureSpec,
)
from megaenc.study.report.table import CellValue, Column, Table, TableRow, format_score
from megaenc.study.results.groups import (
    format_percent,
    objective_name,
    recipe_label,
    reference_mask_ratio,
    sort_sizes,
)
from megaenc.study.results.zero_shot import BASELINES, METRIC, RECALL, QueryScores, ZeroShotResults
from megaenc.viz.style import STYLES

_LABELS = {METRIC: "NDCG@10", RECALL: "recall@100"}
_BEFORE = "as pretrained"
_AFTER = "after contrastive training"
_BASELINE_LABELS = {"BM25": "BM25", "random": "random ranking"}


def build_zero_shot_tables(results: ZeroShotResults, kind: IntervalKind) -> list[Table]:
    """Build the tables of NDCG@10 and, folded, of recall@100 of all models.

    Columns are each data set before and, if any model has such scores, after contrastive training,
    in percent; a missing score is an empty cell. Scores before have intervals over queries. BM25
    and a random ranking, if they were evaluated, are in the last rows.

    Args:
        kind: Interval over the seeds of contrastive training: 1.96 standard errors ("normal") or
            Student's ("t").
    """
    return [
        _build_table(results, kind, METRIC, "zero-shot"),
        _build_table(results, kind, RECALL, "zero-shot-recall"),
    ]


def _build_table(results: ZeroShotResults, kind: IntervalKind, metric: str, key: str) -> Table:
    """Build the table of one measure.

    There is a row per model, then the baselines; columns are before and after by data set.
    """
    states = [_BEFORE, _AFTER] if results.is_trained else [_BEFORE]
    has_seeds = len({model_key.seed for model_key in results.model_keys.values()}) > 1
    rows = []
    previous = None
    for model in sort_models(results):
        model_key = results.model_keys.get(model)
        known = [None] * 4
        if model_key is not None:
            known = [
                model_key.size,
                recipe_label(model_key),
                format_percent(model_key.mask_ratio),
                model_key.steps,
            ]
        head = [model, *known, *[model_key.seed if model_key else None] * has_seeds]
        cells: list[CellValue] = []
        for dataset in results.datasets:
            place = (model, dataset, metric)
            cells.append(_format_query_scores(results.pretrained.get(place)))
            if results.is_trained:
                cells.append(_format_seed_scores(results, results.trained.get(place, {}), kind))
        size = model_key.size if model_key else ""
        rows.append(TableRow((*head, *cells), rule=previous not in (None, size), name=model))
        previous = size
    for name in BASELINES:
        scores = [results.baselines.get((name, dataset, metric)) for dataset in results.datasets]
        if any(scores):
            cells = [
                cell
                for query_scores in scores
                for cell in (_format_query_scores(query_scores), None)[: len(states)]
            ]
            label = _BASELINE_LABELS[name]
            rows.append(
                TableRow(
                    (label, *[None] * (4 + has_seeds), *cells),
                    rule=name == BASELINES[0],
                    name=label,
                )
            )
    heads = [Column(name, numeric=False) for name in ("Model", "Size", "Objective")] + [
        Column("Mask"),
        Column("Steps"),
    ]
    heads += [Column("Seed")] * has_seeds
    columns = (
        *heads,
        *(Column(state, dataset) for dataset in results.datasets for state in states),
    )
    note = (
        f"{_LABELS[metric]} in percent, over the whole corpus of each set. As pretrained: mean "
        "pooling. In brackets: bootstrap 95 % intervals over queries."
    )
    if results.is_trained:
        note += (
            " After contrastive training: mean over the seeds "
            f"{', '.join(map(str, results.seeds))} (half the interval over seeds); [k/n]: only k "
            "of n seeds have ended."
        )
    title = "Zero-shot retrieval" if metric == METRIC else f"Zero-shot retrieval: {_LABELS[metric]}"
    return Table(key, title, note, columns, tuple(rows), folded=metric != METRIC)


def sort_models(results: ZeroShotResults) -> list[str]:
    """Return the names of the models by size, objective, mask ratio, steps and name.

    Models of continued pretraining follow the others of their objective. Those without a known
    recipe are last, by name.
    """
    sizes = sort_sizes(results.model_keys.values(), results.scope.sizes)

    def order(model: str) -> tuple:
        """Return the sort key of a model."""
        model_key = results.model_keys.get(model)
        if model_key is None:
            return (len(sizes), model)
        mask = math.inf if model_key.mask_ratio is None else model_key.mask_ratio
        objective = objective_name(model_key)
        kinds = list(OBJECTIVE_STYLES)
        place = kinds.index(objective) if objective in kinds else len(kinds)
        return (
            sizes.index(model_key.size),
            place,
            objective,
            bool(model_key.cpt_mlm_steps),
            mask,
            model_key.steps,
            model,
        )

    return sorted(results.models, key=order)


def _format_query_scores(scores: QueryScores | None) -> CellValue:
    """Format a mean with its interval over queries, such as `67.72 [62.9, 72.5]`.

    The result is None without scores.
    """
    if scores is None:
        return None
    text = format_score(scores.mean)
    if scores.interval is None:
        return text
    low, high = scores.interval
    return f"{text} [{100 * low:.1f}, {100 * high:.1f}]"


def _format_seed_scores(
    results: ZeroShotResults, by_seed: Mapping[int, QueryScores], kind: IntervalKind
) -> CellValue:
    """Format the mean over the seeds with half its interval; None without scores.

    [k/n] is added if seeds are missing.
    """
    if not by_seed:
        return None
    interval = compute_interval([query_scores.mean for query_scores in by_seed.values()], kind)
    text = format_score(interval.mean, interval.half)
    if len(by_seed) < len(results.seeds):
        return f"{text} [{len(by_seed)}/{len(results.seeds)}]"
    return text


def build_zero_shot_figure(results: ZeroShotResults, kind: IntervalKind) -> FigureSpec:
    """Build the figure of mean NDCG@10 over pretraining steps, a line per objective.

    Scores are in percent, in panels before and after contrastive training. Models are decayed ones
    with a known recipe; those with MLM have the most frequent mask ratio. A panel has the models
    with scores on every data set of `results`, in the second panel for every seed, and BM25 as a
    horizontal line. A panel without models is left out; without any, the caption reports it.

    Args:
        kind: Interval over seeds after contrastive training: 1.96 standard errors ("normal") or
            Student's ("t"); that before it is 1.96 standard errors over queries.
    """
    key = "zero-shot"
    title = "Zero-shot retrieval"
    ratio = reference_mask_ratio(results.scope.model_keys.values() or results.model_keys.values())
    models = {
        model: model_key
        for model in sort_models(results)
        if (model_key := results.model_keys.get(model)) is not None
        and model_key.decayed
        and model_key.mask_ratio in (None, ratio)
    }
    panels = []
    for state in (_BEFORE, _AFTER):
        points = {
            model: point
            for model, model_key in models.items()
            if (point := _build_point(results, model, model_key, state, kind))
        }
        if points:
            lines = (
                *_build_lines(models, points),
                *_build_bm25_line(results, [point.x for point in points.values()]),
            )
            panels.append(
                FigurePanel(
                    state[0].upper() + state[1:],
                    lines,
                    "pretraining steps",
                    "NDCG@10 (%)",
                    unit="steps",
                )
            )
    if not panels:
        return FigureSpec(
            key, title, "No decayed model has zero-shot scores on every data set yet."
        )
    over = results.datasets[0]
    if len(results.datasets) > 1:
        over = f"the mean over {', '.join(results.datasets)}"
    hidden = f" MLM hides {format_percent(ratio)} of the tokens." if ratio else ""
    after = ", over the seeds after contrastive training" if results.is_trained else ""
    bars = f"Bars: 95 % intervals over queries as pretrained{after}."
    caption = (
        f"Models at the end of pretraining by their number of steps, on {over}.{hidden} {bars}"
    )
    return FigureSpec(key, title, caption, tuple(panels))


def _build_point(
    results: ZeroShotResults, model: str, model_key: ModelKey, state: str, kind: IntervalKind
) -> FigurePoint | None:
    """Build the point of a model, the mean over all data sets.

    Returns:
        The point; None if a set or a seed is missing.
    """
    places = [(model, dataset, METRIC) for dataset in results.datasets]
    if state == _BEFORE:
        scores = [results.pretrained.get(place) for place in places]
        if None in scores:
            return None
        variances = [
            np.var(dataset_scores.values, ddof=1) / len(dataset_scores.values)
            for dataset_scores in scores
            if len(dataset_scores.values) > 1
        ]
        half = None
        if len(variances) == len(scores):
            half = 100 * (1.96 * math.sqrt(math.fsum(variances)) / len(scores))
        mean = math.fsum(dataset_scores.mean for dataset_scores in scores) / len(scores)
        return FigurePoint(model_key.steps, 100 * mean, half)
    by_set = [results.trained.get(place, {}) for place in places]
    if not results.seeds or any(by_seed.keys() < set(results.seeds) for by_seed in by_set):
        return None
    means = [
        math.fsum(by_seed[seed].mean for by_seed in by_set) / len(by_set) for seed in results.seeds
    ]
    interval = compute_interval(means, kind)
    return FigurePoint(
        model_key.steps,
        100 * interval.mean,
        None if math.isnan(interval.half) else 100 * interval.half,
    )


def _build_lines(
    models: Mapping[str, ModelKey], points: Mapping[str, FigurePoint]
) -> Iterable[FigureLine]:
    """Yield a line per objective (and size, if several) with a style of its own.

    Further pretraining seeds are points. Styles are chosen over all models.
    """
    several = len({model_key.size for model_key in models.values()}) > 1
    names = {
        model: recipe_label(model_key) + (f", {model_key.size}" if several else "")
        for model, model_key in models.items()
    }
    distinct = list(dict.fromkeys(names.values()))
    spare = [style for style in STYLES if style not in OBJECTIVE_STYLES.values()]
    others = [name for name in distinct if name not in OBJECTIVE_STYLES]
    styles = OBJECTIVE_STYLES | {
        name: spare[index % len(spare)] for index, name in enumerate(others)
    }
    for name in distinct:
        by_seed: dict[int, list[FigurePoint]] = {}
        for model, point in points.items():
            if names[model] == name:
                by_seed.setdefault(models[model].seed, []).append(point)
        for index, (_, members) in enumerate(sorted(by_seed.items())):
            ordered = tuple(sorted(members, key=lambda point: point.x))
            yield FigureLine(
                name,
                *styles[name],
                ordered,
                joined=not index,
                light=bool(index),
                labelled=not index,
            )


def _build_bm25_line(results: ZeroShotResults, places: list[float]) -> list[FigureLine]:
    """Return the horizontal line of BM25's mean over all data sets, in a list.

    The list is empty if a set lacks it.
    """
    scores = [
        results.baselines.get((BASELINES[0], dataset, METRIC)) for dataset in results.datasets
    ]
    if None in scores:
        return []
    mean = 100 * math.fsum(dataset_scores.mean for dataset_scores in scores) / len(scores)
    margin = 0.05 * (max(places) - min(places)) or 0.1 * max(places)
    ends = tuple(FigurePoint(x, mean) for x in (min(places) - margin, max(places) + margin))
    return [FigureLine("BM25", MUTED_COLOUR, "", ends)]


def zero_shot_facts(results: ZeroShotResults) -> list[tuple[str, str]]:
    """Return one fact, a (name, text) pair, on zero-shot retrieval, in a list.

    Its text has the number of models, the data sets, the seeds, and the claims that the scores
    test.
    """
    counts = f"{len(results.models)} models on {', '.join(results.datasets)}, as pretrained"
    if results.is_trained:
        counts += (
            f" and after contrastive training with the seeds {', '.join(map(str, results.seeds))}"
        )
        tested = "after contrastive training, paired over its seeds and over queries"
    else:
        tested = (
            "as pretrained, paired over queries; with one evaluation a model, p needs several "
            "pretraining seeds"
        )
    others = (
        "The other claims do not use it: they have margins, learning rates or task families of "
        "fine-tuning, and pooled with those, a test keeps only the seeds that all have"
    )
    return [
        ("Zero-shot retrieval", f"{counts}. Claims 1f, 4c and 5c test NDCG@10 {tested}. {others}.")
    ]
