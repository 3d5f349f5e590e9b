"""The tables of scores, as in the study's appendix, and all scores as one file in the columns of the published one."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence

from megaenc.study.bars import words
from megaenc.study.evidence import Evidence
from megaenc.study.score import Score
from megaenc.study.setting import Setting
from megaenc.study.setups import (
    FAMILIES,
    METRICS,
    SETUPS,
    STANDARD,
    Setup,
    dataset_label,
    datasets_of,
    grouped,
    objective,
    percent,
)
from megaenc.study.table import Column, Row, Table, Value, score

Key = Callable[[Setting], Value]

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


def score_tables(evidence: Evidence, published: Evidence | None = None) -> list[Table]:
    """A table for each setup, of the paper's score; below a row what was `published` for the same setting."""
    blocks = blocks_of(evidence)
    note = "Percent on test: mean over the seeds (half the interval)."
    return _by_setup(evidence, blocks, "{}", "{}", note, published)


def standard_tables(evidence: Evidence, standard: Sequence[Evidence]) -> list[Table]:
    """The same for the metrics that other papers print, where results have them. Published tables have none."""
    of_metric = {one.metric: one for one in standard}
    blocks = []
    for family in FAMILIES:
        for metric in STANDARD[family]:
            if (found := of_metric.get(metric)) is not None and (names := datasets_of(found.datasets()).get(family)):
                blocks.append((f"{family}, {METRICS[metric]}", found, family, names))
    if not blocks:
        return []
    note = "Percent on test: mean over the seeds (half the interval), rates chosen by the paper's score."
    return _by_setup(evidence, blocks, "{}-standard", "{}: standard metrics", note, None)


Block = tuple[str, Evidence, str, list[str]]
"""A group of columns: its heading, where its scores are from, the family and its data sets."""


def _by_setup(
    evidence: Evidence, blocks: Sequence[Block], key: str, title: str, note: str, published: Evidence | None
) -> list[Table]:
    tables = []
    groups = evidence.grouped()
    unnamed = list(dict.fromkeys(one.model for one in evidence.scores if one.setting is None))
    seeds = len({one.seed for one in evidence.settings()}) > 1
    for setup in SETUPS:
        settings = groups.get(setup, [])
        others = unnamed if setup == "other" else []
        if not settings and not others:
            continue
        keys = list(_KEYS[setup])
        if others:
            keys.insert(0, ("Model", lambda one: _model(evidence, one)))
        if seeds:
            keys.append(("Seed", lambda one: one.seed))
        laid_over = published is not None and any(published.find(one, name) for one in settings for *_, name in places_of(blocks))
        rows: list[Row] = []
        shown: list[Score] = []
        for at, one in enumerate(settings):
            parted = at > 0 and _PARTED[setup](one) != _PARTED[setup](settings[at - 1])
            head = [value(one) for _, value in keys]
            here = [found.find(one, name, family) for found, family, name in places_of(blocks)]
            shown += [each for each in here if each is not None]
            cells = [_score(each) for each in here]
            rows.append(Row((*head, *(["ours"] if laid_over else []), *cells), rule=parted, name=_model(evidence, one)))
            if laid_over and any(theirs := [_score(published.find(one, name, family)) for _, family, name in places_of(blocks)]):
                rows.append(Row((*head, "published", *theirs), light=True, name="published"))
        for model in others:
            here = [_of_model(found, model, family, name) for found, family, name in places_of(blocks)]
            shown += [each for each in here if each is not None]
            cells = [_score(each) for each in here]
            rows.append(Row((model, *[None] * (len(keys) - 1), *(["ours"] if laid_over else []), *cells)))
        columns = (*_heads(keys, laid_over), *columns_of(blocks))
        said = f"{note} Intervals: {words(evidence, published if laid_over else None)}."
        said += collapsed_said(shown) + unfinished_said(shown)
        tables.append(Table(key.format(setup), title.format(SETUPS[setup]), said, columns, tuple(rows)))
    return tables


def _heads(keys: Iterable[tuple[str, Key]], laid_over: bool = False) -> list[Column]:
    text = {"Size", "Objective", "Schedule", "Model"}
    return [Column(name, number=name not in text) for name, _ in keys] + [Column("Source", number=False)] * laid_over


def blocks_of(evidence: Evidence) -> list[Block]:
    """A group of columns for each family."""
    return [(family, evidence, family, names) for family, names in datasets_of(evidence.datasets()).items()]


def columns_of(blocks: Iterable[Block]) -> list[Column]:
    """The columns of these groups."""
    return [Column(dataset_label(family, name), group) for group, _, family, names in blocks for name in names]


def places_of(blocks: Iterable[Block]) -> list[tuple[Evidence, str, str]]:
    """For each of those columns where its scores are from, the family and the data set."""
    return [(found, family, name) for _, found, family, names in blocks for name in names]


def _score(found: Score | None) -> Value:
    return None if found is None else f"{score(found.mean, found.half)}{_collapsed(found)}{unfinished(found)}"


def _collapsed(found: Score) -> str:
    """Behind a mean that worthless predictions are in: how many of the runs that it is of."""
    behind = sum(len(one.seeds) for one in found.members or (found,))
    return f" †{found.at_rate_collapsed}/{behind}" if found.at_rate_collapsed else ""


def unfinished(found: Score) -> str:
    """Behind a number of a grid that is not done: how many of its trainings have ended."""
    return f" [{found.runs}/{found.planned}]" if found.runs < found.planned else ""


def collapsed_said(shown: Iterable[Score]) -> str:
    """What that mark means, to go on a note; "" where none is there."""
    if not any(one.at_rate_collapsed for one in shown):
        return ""
    return (
        " †k/n: of the n runs behind a cell, k have collapsed to worthless predictions (the same for every example, never an "
        "answer); where all have, mean and interval say nothing of the model."
    )


def unfinished_said(shown: Iterable[Score]) -> str:
    """The same for a grid that is not done."""
    if not any(one.runs < one.planned for one in shown):
        return ""
    return (
        " [k/n]: only k of n fine-tunings (rates times seeds) have ended, so the learning rate is the best of fewer: not to be "
        "compared with whole cells."
    )


def _model(evidence: Evidence, setting: Setting) -> str:
    return next(one.model for one in evidence.scores if one.setting == setting)


def _of_model(evidence: Evidence, model: str, family: str, dataset: str) -> Score | None:
    matches = (one for one in evidence.scores if (one.model, one.family, one.dataset) == (model, family, dataset))
    return next(matches, None)


def models_of(evidence: Evidence) -> list[str]:
    """Every model with a run once, in the order of the tables."""
    every = [*evidence.scores, *evidence.grids]
    names = {one.setting: one.model for one in reversed(every) if one.setting is not None}
    groups = grouped([one.setting for one in every if one.setting is not None], evidence.planned(), evidence.scope.sizes)
    settings = [one for members in groups.values() for one in members]
    unnamed = [one.model for one in every if one.setting is None]
    return list(dict.fromkeys([*(names[one] for one in settings), *unnamed]))


TIDY = ("setup", "size", "clm_steps", "mlm_steps", "cpt_mlm_steps", "mask_ratio", "task", "dataset", "mean", "ci95")
"""The columns of the published file."""
_RUNS = ("collapsed_runs", "ended_trainings", "planned_trainings")


def tidy(evidence: Sequence[Evidence]) -> str:
    """All scores as CSV, a line each, in the columns of the published file and, behind them, what model and runs they are of.

    `collapsed_runs` are those at the chosen rate, `ended_trainings` of `planned_trainings` those of all rates.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*TIDY, "model", "pretraining_seed", "finetuning_seeds", "metric", *_RUNS])
    for each in evidence:
        setups = each.grouped()
        by_setting: dict[Setting | None, list[Score]] = {}
        for one in each.scores:
            by_setting.setdefault(one.setting, []).append(one)
        listed = [(setup, setting) for setup, members in setups.items() for setting in members]
        for setup, setting in [*listed, *([("other", None)] if None in by_setting else [])]:
            for family, names in datasets_of((one.family, one.dataset) for one in by_setting[setting]).items():
                for name in names:
                    found = [one for one in by_setting[setting] if (one.family, one.dataset) == (family, name)]
                    for one in found:
                        counts = (one.at_rate_collapsed, one.runs, one.planned) if one.planned else ("", "", "")
                        writer.writerow([*_identity(setup, setting), *_numbers(one), each.metric, *counts])
    return stream.getvalue()


def _identity(setup: str, setting: Setting | None) -> list[object]:
    if setting is None:
        return [setup, "", "", "", "", ""]
    mask = "" if setting.mask_ratio is None else f"{setting.mask_ratio:g}"
    return [setup, setting.size, setting.clm_steps, setting.mlm_steps, setting.cpt_mlm_steps, mask]


def _numbers(one: Score) -> list[object]:
    half = "" if one.half is None else f"{100 * one.half:.2f}"
    seed = "" if one.setting is None else one.setting.seed
    seeds = len(one.seeds) or ""
    return [one.family, dataset_label(one.family, one.dataset), f"{100 * one.mean:.2f}", half, one.model, seed, seeds]
