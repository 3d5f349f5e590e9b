"""Groups and labels of a study's models and data sets."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from megaenc.finetune.examples import TaskFamily
from megaenc.study.manifest.model_key import ModelKey

AVERAGE = "average"
ZERO_SHOT = "ZS"
"""Code of zero-shot retrieval in claims, where it stands in place of a task family."""

Setup = Literal["base", "efficiency", "pfs", "cpt", "other"]
Groups = dict[Setup, list[ModelKey]]

SETUP_TITLES: dict[Setup, str] = {
    "base": "Base models by size and mask ratio",
    "efficiency": "Data efficiency: checkpoints on the way",
    "pfs": "Pretraining from scratch: budgets and CLM shares",
    "cpt": "Continued pretraining by length",
    "other": "Other schedules",
}
FAMILY_LABELS = {
    "SC": "Sequence classification",
    "TC": "Token classification",
    "QA": "Question answering",
    "IR": "Retrieval",
}
DATASET_LABELS = {
    "SC": {"sst2": "SST-2", "qqp": "QQP", "mnli_m": "MNLI"},
    "TC": {"ontonotes": "OntoNotes", "conll2003_en": "CoNLL", "uner_en": "UNER"},
    "QA": {"squad": "SQuAD", "squad_v2": "SQuAD-v2", "record": "ReCoRD"},
    "IR": {"nq": "NQ", "msmarco": "MS MARCO", "mldr_en": "MLDR"},
}
"""The study's data sets under the names of its tables, in their order."""
STANDARD_METRICS = {
    "SC": ("accuracy",),
    "TC": ("span_f1",),
    "QA": ("f1", "exact_match"),
    "IR": ("ndcg@10",),
}
"""Standard metrics of each family of the study; of the others, all metrics are."""
METRIC_LABELS = {
    "accuracy": "accuracy",
    "span_f1": "span F1",
    "f1": "token F1",
    "exact_match": "exact match",
    "ndcg@10": "NDCG@10",
}


def objective_name(model_key: ModelKey) -> str:
    """Return "CLM", "MLM" or "CLM + MLM", or the text of a model's objective schedule.

    "CLM + MLM" is CLM up to a step, then MLM, in one run; mixtures and alternations are schedules.
    For continued pretraining it is the schedule of the continued run or, without one, the objective
    of the parent.
    """
    if model_key.schedule:
        return model_key.schedule
    if model_key.clm_steps and model_key.mlm_steps:
        return "CLM + MLM"
    return "CLM" if model_key.clm_steps else "MLM"


def recipe_label(model_key: ModelKey) -> str:
    """Return a model's objective or schedule as text for tables and legends.

    Examples are `MLM` and `25 % CLM, then MLM`; for continued pretraining on a CLM model they are
    `MLM on CLM` and `SCHEDULE on CLM`. Size, steps, mask ratio and seed are not in it.
    """
    name = objective_name(model_key)
    if name == "CLM + MLM":
        name = f"{format_percent(model_key.clm_share)} CLM, then MLM"
    if not model_key.cpt_mlm_steps:
        return name
    if model_key.schedule:
        return f"{name} on {objective_name(replace(model_key, schedule=''))}"
    return f"MLM on {name}"


def group_by_recipe(model_keys: Iterable[ModelKey]) -> dict[ModelKey, list[ModelKey]]:
    """Return the keys of models that differ in the pretraining seed only, in lists.

    Each list is under its recipe: the key with seed 1, which no model need have. Recipes and their
    keys are in order of appearance.
    """
    recipes: dict[ModelKey, list[ModelKey]] = {}
    for model_key in model_keys:
        recipes.setdefault(replace(model_key, seed=1), []).append(model_key)
    return recipes


def select_schedule_peers(
    model_keys: Iterable[ModelKey], mask_ratio: float | None
) -> list[ModelKey]:
    """Return the peers of models with an objective schedule, then these models.

    All are finished. Peers have no schedule (CLM, MLM, CLM then MLM, also continued ones), and the
    size and all steps of a model with a schedule. If an MLM model of these steps is missing, peers
    of this size with any number of steps are added, except continued ones. The list is empty if no
    finished model has a schedule.

    Args:
        mask_ratio: Fraction of tokens that peers with MLM mask; None for peers without masking
            only.
    """
    finished = [model_key for model_key in model_keys if model_key.decayed]
    plain = [
        model_key
        for model_key in finished
        if not model_key.schedule and model_key.mask_ratio in (None, mask_ratio)
    ]
    others = [model_key for model_key in finished if model_key.schedule]
    budgets = {(model_key.size, model_key.steps) for model_key in others}
    mlm_budgets = {
        (model_key.size, model_key.steps)
        for model_key in plain
        if objective_name(model_key) == "MLM"
    }
    open_sizes = {size for size, steps in budgets - mlm_budgets}
    peers = [
        model_key
        for model_key in plain
        if (model_key.size, model_key.steps) in budgets
        or (model_key.size in open_sizes and not model_key.cpt_mlm_steps)
    ]
    return [*peers, *others]


def is_from_scratch(model_key: ModelKey) -> bool:
    """Return whether a finished model was trained with CLM, MLM or both, in one run.

    It is finished if the learning rate has decayed. Models with a schedule are excluded.
    """
    return model_key.decayed and not model_key.cpt_mlm_steps and not model_key.schedule


def is_continued(model_key: ModelKey) -> bool:
    """Return whether a model is a finished one of continued pretraining.

    Models with a schedule are excluded.
    """
    return model_key.decayed and model_key.cpt_mlm_steps > 0 and not model_key.schedule


def is_mlm_from_scratch(model_key: ModelKey) -> bool:
    """Return whether a finished model was trained from scratch with MLM only.

    The key must have no `schedule`, which is not checked: that of MNTP, or of MLM with a changing
    mask ratio, gives True too.
    """
    steps_of_others = model_key.clm_steps + model_key.cpt_mlm_steps
    return model_key.decayed and bool(model_key.mask_ratio) and not steps_of_others


def _is_single_objective(model_key: ModelKey) -> bool:
    """Return whether a finished model was trained in one run, only CLM or only MLM."""
    return is_from_scratch(model_key) and objective_name(model_key) != "CLM + MLM"


def group_by_setup(
    model_keys: Iterable[ModelKey], planned: Iterable[ModelKey] = (), size_order: Sequence[str] = ()
) -> Groups:
    """Return model keys by kind of pretraining; a key may be in several kinds.

    Kinds without models are left out. "base" are models of one objective with the longest budget
    that CLM and MLM share at their size or, if they share none, that either has, "efficiency"
    intermediate checkpoints, "pfs" (from scratch) two-stage models, their CLM and MLM peers of the
    same budget, and models of one objective with other budgets, "cpt" continued models and their
    parents, "other" models with a schedule. Keys are sorted by size, then by recipe and seed.

    Args:
        planned: Keys of all planned models, which decide on budgets and parents too, but are not
            added.
        size_order: All sizes, smallest first; without it they are sorted by numbers such as 210M.
    """
    unique_keys = list(dict.fromkeys(model_keys))
    planned = list(planned)
    known_keys = [*planned, *unique_keys]
    sizes = sort_sizes(unique_keys, size_order)
    longest = {**_longest_budgets(unique_keys), **_longest_budgets(planned)}
    masks = {
        (model_key.size, model_key.steps, mask)
        for model_key in known_keys
        if is_from_scratch(model_key) and objective_name(model_key) == "CLM + MLM"
        for mask in (None, model_key.mask_ratio)
    }
    parents = {parent_key(model_key) for model_key in known_keys if is_continued(model_key)}
    members_by_setup: dict[Setup, list[tuple[tuple, ModelKey]]] = {
        setup: [] for setup in SETUP_TITLES
    }
    for model_key in unique_keys:
        mask = math.inf if model_key.mask_ratio is None else model_key.mask_ratio
        kind = objective_name(model_key)
        base = _is_single_objective(model_key) and model_key.steps == longest[model_key.size]
        scratch = is_from_scratch(model_key) and (
            (model_key.size, model_key.steps, model_key.mask_ratio) in masks
            or (_is_single_objective(model_key) and not base)
        )
        places: dict[Setup, tuple[bool, tuple]] = {
            "base": (base, (model_key.clm_steps, mask)),
            "efficiency": (
                not model_key.decayed and not model_key.schedule,
                (kind != "MLM", kind, mask, model_key.steps),
            ),
            "pfs": (scratch, (model_key.steps, mask, model_key.clm_steps)),
            "cpt": (
                is_continued(model_key) or model_key in parents,
                (model_key.clm_steps, model_key.mlm_steps, model_key.cpt_mlm_steps, mask),
            ),
            "other": (bool(model_key.schedule), (model_key.schedule, model_key.steps, mask)),
        }
        for setup, (is_member, place) in places.items():
            if is_member:
                members_by_setup[setup].append(
                    ((sizes.index(model_key.size), *place, model_key.seed), model_key)
                )
    return {
        setup: [model_key for _, model_key in sorted(members, key=lambda member: member[0])]
        for setup, members in members_by_setup.items()
        if members
    }


def parent_key(model_key: ModelKey) -> ModelKey:
    """Return the key of the model from which continued pretraining started.

    The parent is decayed, with 0 as budget and as steps of continued pretraining. Schedule and seed
    are copied from `model_key`, and the mask ratio too if the parent has MLM steps; else it is
    None. It is not checked that `model_key` has continued steps.
    """
    mask = model_key.mask_ratio if model_key.mlm_steps else None
    return replace(model_key, cpt_mlm_steps=0, mask_ratio=mask, decayed=True, budget=0)


def _longest_budgets(model_keys: Iterable[ModelKey]) -> dict[str, int]:
    """Return the longest budget in steps of each size's CLM-only and MLM-only models.

    It is one that both have, or else one of either.
    """
    budgets: dict[str, dict[str, set[int]]] = {}
    for model_key in model_keys:
        if _is_single_objective(model_key):
            budgets.setdefault(model_key.size, {"CLM": set(), "MLM": set()})[
                objective_name(model_key)
            ].add(model_key.steps)
    return {
        size: max(steps["CLM"] & steps["MLM"] or steps["CLM"] | steps["MLM"])
        for size, steps in budgets.items()
    }


def sort_sizes(model_keys: Iterable[ModelKey], size_order: Sequence[str] = ()) -> list[str]:
    """Return the distinct size names of models, smallest first.

    They are sorted by `size_order` if it has all, else by numbers such as 210M or 1B (K, M or B);
    other names are then last, in order of appearance.

    Args:
        size_order: All sizes, smallest first.
    """
    names = list(dict.fromkeys(model_key.size for model_key in model_keys))
    return sorted(
        names,
        key=list(size_order).index if set(names) <= set(size_order) else _parse_parameter_count,
    )


def is_size_order_known(model_keys: Iterable[ModelKey], size_order: Sequence[str] = ()) -> bool:
    """Return whether the order of the models' sizes is known.

    It is if there is at most one size, if `size_order` has all, or if all names are numbers such as
    210M or 1B (K, M or B).
    """
    names = {model_key.size for model_key in model_keys}
    return (
        len(names) < 2
        or names <= set(size_order)
        or not any(math.isinf(_parse_parameter_count(name)) for name in names)
    )


def _parse_parameter_count(size: str) -> float:
    """Return the number of parameters that a size name such as 210M states.

    It is infinity for other names.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB])", size.upper())
    return float(match[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[match[2]] if match else math.inf


def reference_mask_ratio(model_keys: Iterable[ModelKey]) -> float | None:
    """Return the most frequent mask ratio, 0 to 1, of models without a schedule.

    On ties it is the one nearest 0.4; without any ratio it is None.
    """
    counts = Counter(
        model_key.mask_ratio
        for model_key in model_keys
        if model_key.mask_ratio is not None and not model_key.schedule
    )
    return max(counts, key=lambda ratio: (counts[ratio], -abs(ratio - 0.4)), default=None)


def dataset_label(family: str, dataset: str) -> str:
    """Return a data set's label in the tables, such as SST-2 for sst2.

    Unknown names are unchanged. "average" is `Average`; in "SET after TRAINSET", both get their
    label.

    Args:
        family: Code of the task family, such as SC.
    """
    known, after, trained = dataset.partition(" after ")
    labels = {AVERAGE: "Average"} | DATASET_LABELS.get(family, {})
    return f"{labels.get(known, known)}{after}{labels.get(trained, trained)}"


def datasets_by_family(
    pairs: Iterable[tuple[str, str]], order: Mapping[str, Iterable[str]] = DATASET_LABELS
) -> dict[str, list[str]]:
    """Return the distinct data sets of (family, data set) pairs by family.

    Families are in the order of TaskFamily, then others. In each, the data sets in `order` come
    first, then others by appearance, then averages.

    Args:
        order: Data sets by family, in order; by default that of the study's tables.
    """
    by_family: dict[str, list[str]] = {str(family): [] for family in TaskFamily}
    for family, dataset in dict.fromkeys(pairs):
        by_family.setdefault(family, []).append(dataset)
    for family, names in by_family.items():
        known = list(order.get(family, ()))
        names.sort(
            key=lambda name: (is_average(name), known.index(name) if name in known else len(known))
        )
    return {family: names for family, names in by_family.items() if names}


def is_average(dataset: str) -> bool:
    """Return whether a data set name stands for a mean over a task family.

    Such names are "average" and "average after TRAINSET".
    """
    return dataset.partition(" after ")[0] == AVERAGE


def format_percent(fraction: float | None) -> str:
    """Format a fraction (0 to 1) as a percentage, such as `40 %`; "" for None.

    It has up to three significant digits.
    """
    return "" if fraction is None else f"{100 * fraction:.3g} %"


def format_steps(count: int) -> str:
    """Format a number of steps, such as `42k` for 42000 and `1,024` for 1024.

    Only multiples of 1,000 get a k; 0 is `0`.
    """
    return f"{count // 1000}k" if count and count % 1000 == 0 else f"{count:,}"
