"""The tables of scores, as in the study's appendix, and all scores as one file in the columns of the published one."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence

from megaenc.study.evidence import Evidence
from megaenc.study.made import words
from megaenc.study.score import Score
from megaenc.study.setting import Setting
from megaenc.study.setups import FAMILIES, METRICS, SETUPS, STANDARD, Setup, dataset_label, datasets_of, objective, percent
from megaenc.study.table import Column, Row, Table, Value, score

Key = Callable[[Setting], Value]

_TEXT = ("Size", "Objective", "Schedule", "Model")
_SIZE: tuple[str, Key] = ("Size", lambda one: one.size)
_MASK: tuple[str, Key] = ("Mask", lambda one: percent(one.mask_ratio))
_OBJECTIVE: tuple[str, Key] = ("Objective", objective)
_CLM: tuple[str, Key] = ("CLM steps", lambda one: one.clm_steps)
_MLM: tuple[str, Key] = ("MLM steps", lambda one: one.mlm_steps)
_CPT: tuple[str, Key] = ("CPT steps", lambda one: one.cpt_mlm_steps)
_STEP: tuple[str, Key] = ("Step", lambda one: one.steps)
_KEYS: dict[Setup, tuple[tuple[str, Key], ...]] = {
    "base": (_SIZE, _OBJECTIVE, _MASK),
    "efficiency": (_SIZE, _OBJECTIVE, _MASK, _STEP),
    "pfs": (_SIZE, ("Steps", lambda one: one.steps), _CLM, _MLM, _MASK),
    "cpt": (_SIZE, _CLM, _MLM, _CPT, _MASK),
    "other": (_SIZE, ("Schedule", objective), _STEP, _CPT, _MASK),
}
_PARTED: dict[Setup, Callable[[Setting], object]] = {
    "base": lambda one: one.size,
    "efficiency": lambda one: (one.size, objective(one), one.mask_ratio),
    "pfs": lambda one: (one.size, one.steps),
    "cpt": lambda one: (one.size, one.clm_steps, one.mlm_steps),
    "other": lambda one: one.size,
}
"""Rows of one such value stand together, with a line between them and the next."""

Place = tuple[str, Evidence, str, str]
"""A column of scores: the heading of its group, where the scores are from, the family and the data set."""


def places_of(evidence: Evidence) -> list[Place]:
    """Return a column for each data set, in a group for each family."""
    return [(family, evidence, family, name) for family, names in datasets_of(evidence.datasets()).items() for name in names]


def columns_of(places: Iterable[Place]) -> list[Column]:
    """Return the heads of these columns."""
    return [Column(dataset_label(family, name), group) for group, _, family, name in places]


def score_tables(evidence: Evidence, published: Evidence | None = None) -> list[Table]:
    """Return a table for each setup, of the paper's score; below a row what was `published` for the same setting."""
    note = "Percent on test: mean over the seeds (half the interval)."
    return _by_setup(evidence, places_of(evidence), "{}", "{}", note, published)


def standard_tables(evidence: Evidence, standard: Sequence[Evidence]) -> list[Table]:
    """Return the same for the metrics that other papers print, where results have them. Published tables have none."""
    of_metric = {one.metric: one for one in standard}
    places = [
        (f"{family}, {METRICS[metric]}", of_metric[metric], family, name)
        for family in FAMILIES
        for metric in STANDARD[family]
        if metric in of_metric
        for name in datasets_of(of_metric[metric].datasets()).get(family, ())
    ]
    note = "Percent on test: mean over the seeds (half the interval), rates chosen by the paper's score."
    return _by_setup(evidence, places, "{}-standard", "{}: standard metrics", note, None) if places else []


def _by_setup(
    evidence: Evidence, places: Sequence[Place], key: str, title: str, note: str, published: Evidence | None
) -> list[Table]:
    tables = []
    groups = evidence.grouped()
    names = evidence.names()
    unnamed = list(dict.fromkeys(one.model for one in evidence.scores if one.setting is None))
    seeds = [("Seed", lambda one: one.seed)] if len({one.seed for one in names}) > 1 else []
    for setup in SETUPS:
        settings, others = groups.get(setup, []), unnamed if setup == "other" else []
        if not settings and not others:
            continue
        models = [("Model", names.get)] if others else []
        keys = [*models, *_KEYS[setup], *seeds]
        laid_over = published is not None and any(published.find(one, name, of) for one in settings for *_, of, name in places)
        rows: list[Row] = []
        shown: list[Score] = []
        for at, one in enumerate([*settings, *others]):
            head = [one, *[None] * (len(keys) - 1)] if one in others else [value(one) for _, value in keys]
            here = [source.find(one, name, family) for _, source, family, name in places]
            shown += [each for each in here if each is not None]
            parted = 0 < at < len(settings) and _PARTED[setup](one) != _PARTED[setup](settings[at - 1])
            source = ["ours"] if laid_over else []
            rows.append(Row((*head, *source, *map(_score, here)), rule=parted, name=names.get(one, "")))
            if laid_over and one not in others:
                theirs = [_score(published.find(one, name, family)) for *_, family, name in places]
                if any(theirs):
                    rows.append(Row((*head, "published", *theirs), light=True, name="published"))
        heads = [Column(name, number=name not in _TEXT) for name, _ in keys] + [Column("Source", number=False)] * laid_over
        said = f"{note} Intervals: {words(evidence, published if laid_over else None)}."
        said += collapsed_said(shown) + unfinished_said(shown)
        tables.append(Table(key.format(setup), title.format(SETUPS[setup]), said, (*heads, *columns_of(places)), tuple(rows)))
    return tables


def _score(found: Score | None) -> Value:
    return None if found is None else f"{score(found.mean, found.half)}{_collapsed(found)}{unfinished(found)}"


def _collapsed(found: Score) -> str:
    """Behind a mean that worthless predictions are in: how many of the runs that it is of."""
    behind = sum(len(one.seeds) for one in found.members or (found,))
    return f" †{found.at_rate_collapsed}/{behind}" if found.at_rate_collapsed else ""


def unfinished(found: Score) -> str:
    """Return what stands behind a number of a grid that is not done: how many of its trainings have ended."""
    return f" [{found.runs}/{found.planned}]" if found.runs < found.planned else ""


def collapsed_said(shown: Iterable[Score]) -> str:
    """Return what that mark means, to go on a note; "" where none is there."""
    if not any(one.at_rate_collapsed for one in shown):
        return ""
    return (
        " †k/n: of the n runs behind a cell, k have collapsed to worthless predictions (the same for every example, never an "
        "answer); where all have, mean and interval say nothing of the model."
    )


def unfinished_said(shown: Iterable[Score]) -> str:
    """Return the same for a grid that is not done."""
    if not any(one.runs < one.planned for one in shown):
        return ""
    return (
        " [k/n]: only k of n fine-tunings (rates times seeds) have ended, so the learning rate is the best of fewer: not to be "
        "compared with whole cells."
    )


TIDY = ("setup", "size", "clm_steps", "mlm_steps", "cpt_mlm_steps", "mask_ratio", "task", "dataset", "mean", "ci95")
"""The columns of the published file."""
_MORE = ("model", "pretraining_seed", "finetuning_seeds", "metric", "collapsed_runs", "ended_trainings", "planned_trainings")


def tidy(evidence: Sequence[Evidence]) -> str:
    """Return all scores as CSV, a line each, in the columns of the published file and, behind them, of what model and runs.

    `collapsed_runs` are those at the chosen rate, `ended_trainings` of `planned_trainings` those of all rates.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*TIDY, *_MORE])
    for each in evidence:
        setups: list[tuple[str, Setting | None]] = [(setup, one) for setup, of in each.grouped().items() for one in of]
        for setup, setting in [*setups, ("other", None)]:
            scores = [one for one in each.scores if one.setting == setting]
            for family, names in datasets_of((one.family, one.dataset) for one in scores).items():
                for name in names:
                    found = [one for one in scores if (one.family, one.dataset) == (family, name)]
                    writer.writerows(_line(setup, one, each.metric) for one in found)
    return stream.getvalue()


def _line(setup: str, one: Score, metric: str) -> list[object]:
    of, half = one.setting, "" if one.half is None else f"{100 * one.half:.2f}"
    model, seed = [""] * 5, ""
    if of is not None:
        mask = "" if of.mask_ratio is None else f"{of.mask_ratio:g}"
        model, seed = [of.size, of.clm_steps, of.mlm_steps, of.cpt_mlm_steps, mask], of.seed
    runs = (one.at_rate_collapsed, one.runs, one.planned) if one.planned else ("", "", "")
    numbers = [one.family, dataset_label(one.family, one.dataset), f"{100 * one.mean:.2f}", half]
    return [setup, *model, *numbers, one.model, seed, len(one.seeds) or "", metric, *runs]


def models_of(evidence: Evidence) -> list[str]:
    """Return every model with a run once, in the order of the tables."""
    every = [*evidence.scores, *evidence.grids]
    names: dict[Setting, str] = {}
    for one in every:
        if one.setting is not None:
            names.setdefault(one.setting, one.model)
    settings = [one for members in evidence.grouped(names).values() for one in members]
    unnamed = [one.model for one in every if one.setting is None]
    return list(dict.fromkeys([*(names[one] for one in settings), *unnamed]))
