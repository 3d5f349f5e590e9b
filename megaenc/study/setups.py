"""How the study's models are grouped and named in what is shown: its four setups, objectives, families, data sets."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from megaenc.study.setting import Setting

AVERAGE = "average"

Setup = Literal["base", "efficiency", "pfs", "cpt", "other"]

SETUPS: dict[Setup, str] = {
    "base": "Base models by size and mask ratio",
    "efficiency": "Data efficiency: checkpoints on the way",
    "pfs": "Pretraining from scratch: budgets and CLM shares",
    "cpt": "Continued pretraining by length",
    "other": "Other schedules",
}
FAMILIES = {"SC": "Sequence classification", "TC": "Token classification", "QA": "Question answering", "IR": "Retrieval"}
DATASETS = {
    "SC": {"sst2": "SST-2", "qqp": "QQP", "mnli_m": "MNLI"},
    "TC": {"ontonotes": "OntoNotes", "conll2003_en": "CoNLL", "uner_en": "UNER"},
    "QA": {"squad": "SQuAD", "squad_v2": "SQuAD-v2", "record": "ReCoRD"},
    "IR": {"nq": "NQ", "msmarco": "MS MARCO", "mldr_en": "MLDR"},
}
"""The study's data sets under the names of its tables, in their order."""
STANDARD = {"SC": ("accuracy",), "TC": ("span_f1",), "QA": ("f1", "exact_match"), "IR": ("ndcg@10",)}
"""The metrics that other papers print, for each family."""
METRICS = {"accuracy": "accuracy", "span_f1": "span F1", "f1": "token F1", "exact_match": "exact match", "ndcg@10": "NDCG@10"}


def objective(setting: Setting) -> str:
    """What trained the first run of a model: CLM, MLM, CLM + MLM, or a schedule as it was written."""
    if setting.schedule:
        return setting.schedule
    if setting.clm_steps and setting.mlm_steps:
        return "CLM + MLM"
    return "CLM" if setting.clm_steps else "MLM"


def pure(setting: Setting) -> bool:
    """Whether one objective made the model, from its beginning to its decayed end."""
    return setting.decayed and not setting.cpt_mlm_steps and objective(setting) in ("CLM", "MLM")


def grouped(
    settings: Iterable[Setting], planned: Iterable[Setting] = (), order: Sequence[str] = ()
) -> dict[Setup, list[Setting]]:
    """The settings of each setup, in the order of their tables; a setting may be in several, setups without any are left out.

    Base models are those of one objective and the longest budget of their size that both objectives have. Beside two-stage models
    stand the MLM models of their mask ratios and budget and the CLM model; beside continued models those that they went on from.
    All this is asked of the `planned` models where there are any, so that a model stands in the same tables whatever else is done
    yet. `order`: of sizes.
    """
    every, planned = list(dict.fromkeys(settings)), list(planned)
    whole = [one for one in dict.fromkeys([*planned, *every]) if one.decayed and not one.schedule]
    sizes = sizes_of(every, order)
    longest = {**longest_of(every), **longest_of(planned)}
    masks: dict[tuple[str, int], set[float | None]] = {}
    for one in whole:
        if not one.cpt_mlm_steps and objective(one) == "CLM + MLM":
            masks.setdefault((one.size, one.steps), {None}).add(one.mask_ratio)
    parents = {parent_of(one) for one in whole if one.cpt_mlm_steps}

    def member(setup: Setup, one: Setting) -> bool:
        if one.schedule or not one.decayed:
            return setup == ("other" if one.schedule else "efficiency")
        base = pure(one) and one.steps == longest[one.size]
        of_two_stages = one.mask_ratio in masks.get((one.size, one.steps), ())
        return {
            "base": base,
            "pfs": not one.cpt_mlm_steps and (of_two_stages or (pure(one) and not base)),
            "cpt": bool(one.cpt_mlm_steps) or one in parents,
        }.get(setup, False)

    def mask(one: Setting) -> float:
        return math.inf if one.mask_ratio is None else one.mask_ratio

    orders = {
        "base": lambda one: (one.clm_steps, mask(one)),
        "efficiency": lambda one: (objective(one) != "MLM", objective(one), mask(one), one.steps),
        "pfs": lambda one: (one.steps, mask(one), one.clm_steps),
        "cpt": lambda one: (one.clm_steps, one.mlm_steps, one.cpt_mlm_steps, mask(one)),
        "other": lambda one: (one.schedule, one.steps, mask(one)),
    }
    found = {
        setup: sorted(
            (one for one in every if member(setup, one)),
            key=lambda one, order=order: (sizes.index(one.size), *order(one), one.seed),
        )
        for setup, order in orders.items()
    }
    return {setup: members for setup, members in found.items() if members}


def parent_of(setting: Setting) -> Setting:
    """The decayed model that continued pretraining began with."""
    mask = setting.mask_ratio if setting.mlm_steps else None
    return replace(setting, cpt_mlm_steps=0, mask_ratio=mask, decayed=True, budget=0)


def longest_of(settings: Iterable[Setting]) -> dict[str, int]:
    """By size, the longest budget that CLM and MLM alone both have, as claims compare these; else the longest of one."""
    budgets: dict[str, dict[str, set[int]]] = {}
    for one in settings:
        if pure(one):
            budgets.setdefault(one.size, {"CLM": set(), "MLM": set()})[objective(one)].add(one.steps)
    return {size: max(of["CLM"] & of["MLM"] or of["CLM"] | of["MLM"]) for size, of in budgets.items()}


def sizes_of(settings: Iterable[Setting], order: Sequence[str] = ()) -> list[str]:
    """The sizes, smallest first: in the `order` of a manifest, else by the number that a name is; others as they come."""
    names = list(dict.fromkeys(one.size for one in settings))
    if set(names) <= set(order):
        return sorted(names, key=list(order).index)
    return sorted(names, key=_parameters)


def sizes_known(settings: Iterable[Setting], order: Sequence[str] = ()) -> bool:
    """Whether `sizes_of` has them from the smallest to the largest, as one or a manifest or numbers of parameters say it."""
    names = {one.size for one in settings}
    return len(names) < 2 or names <= set(order) or not any(math.isinf(_parameters(name)) for name in names)


def _parameters(size: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB])", size.upper())
    return float(match[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[match[2]] if match else math.inf


def reference_mask(settings: Iterable[Setting]) -> float | None:
    """The mask ratio that stands for MLM: the one that most models have, of equals the one nearest to the study's 40 %."""
    counted = Counter(one.mask_ratio for one in settings if one.mask_ratio is not None and not one.schedule)
    return max(counted, key=lambda ratio: (counted[ratio], -abs(ratio - 0.4)), default=None)


def dataset_label(family: str, dataset: str) -> str:
    """A data set or an average under the name that the study's tables give it, where they do."""
    known, after, trained = dataset.partition(" after ")
    name = "Average" if known == AVERAGE else DATASETS.get(family, {}).get(known, known)
    return f"{name}{after}{DATASETS.get(family, {}).get(trained, trained)}"


def datasets_of(found: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the data sets of each family: the study's first, as in its tables, averages last."""
    shown: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for family, dataset in dict.fromkeys(found):
        shown.setdefault(family, []).append(dataset)
    for family, names in shown.items():
        known = list(DATASETS.get(family, ()))
        names.sort(key=lambda name: (is_average(name), known.index(name) if name in known else len(known)))
    return {family: names for family, names in shown.items() if names}


def is_average(dataset: str) -> bool:
    """Whether this names the average of a family."""
    return dataset == AVERAGE or dataset.startswith(f"{AVERAGE} after ")


def percent(share: float | None) -> str:
    """0.4 as `40 %`, a mean of several as `38.8 %`, nothing as an empty cell."""
    return "" if share is None else f"{100 * share:.3g} %"


def steps_of(count: int) -> str:
    """42000 as `42k`, 1024 as `1,024`."""
    return f"{count // 1000}k" if count and count % 1000 == 0 else f"{count:,}"
