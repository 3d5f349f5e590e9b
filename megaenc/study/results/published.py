"""Published results of the original study: its tables and its raw result files.

published_results.csv, shipped with the package, holds the 800 cells of the appendix tables of
"Should We Still Pretrain Encoders with Masked Language Modeling?" (Gisserot-Boukhlef et al., arXiv
2507.00994): means and intervals in 50 rows of 12 data sets and 4 averages, percent, of 46 models
(two are in three of its tables, with the same numbers).
"""

import csv
import functools
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from megaenc.finetune.results.aggregate import STUDY_DATASETS, IntervalKind
from megaenc.finetune.results.files import Result, read_result_tree
from megaenc.study.manifest.model_key import (
    DEFAULT_BUDGET,
    ModelKey,
    format_model_name,
    parse_model_name,
)
from megaenc.study.results.evidence import AVERAGE, PAPER_SCORE, Evidence, Score, build_evidence
from megaenc.study.results.groups import DATASET_LABELS

SOURCE = "arXiv 2507.00994, tables of the appendix"
TABLES = "published_results.csv"

DATASET_NAMES = {
    label: name for labels in DATASET_LABELS.values() for name, label in labels.items()
} | {"Average": AVERAGE}
"""Data set names of `megaenc finetune` by their labels in the published tables."""


def read_published_rows() -> list[dict[str, str]]:
    """Read the 800 cells of published_results.csv, in table order, averages included.

    Returns:
        A dict of text by column name for each cell: setup, size, clm_steps, mlm_steps,
        cpt_mlm_steps, mask_ratio (a fraction, or empty without masking), task, dataset, mean and
        ci95 (percent).
    """
    with resources.files(__package__).joinpath(TABLES).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def parse_model_key(row: dict[str, str]) -> ModelKey:
    """Return the key of the model that a published row describes.

    A row of setup "efficiency" is an intermediate checkpoint: its key has `decayed` False and the
    budget DEFAULT_BUDGET; other keys have True and 0. All keys have seed 1.

    Args:
        row: Row of `read_published_rows`.

    Raises:
        KeyError: A column is missing.
        ValueError: A number is invalid.
    """
    steps = (int(row[name]) for name in ("clm_steps", "mlm_steps", "cpt_mlm_steps"))
    mask = float(row["mask_ratio"]) if row["mask_ratio"] else None
    is_intermediate = row["setup"] == "efficiency"
    return ModelKey(
        row["size"],
        *steps,
        mask,
        not is_intermediate,
        budget=DEFAULT_BUDGET if is_intermediate else 0,
    )


@functools.cache
def published() -> Evidence:
    """Return the published tables: means and half widths of 46 models, as fractions.

    They have averages too, but no scores by seed, rate or example. The result is cached; do not
    change it.
    """
    scores: dict[tuple[ModelKey, str, str], Score] = {}
    for row in read_published_rows():
        model_key = parse_model_key(row)
        family = row["task"]
        dataset = DATASET_NAMES[row["dataset"]]
        score = Score(
            format_model_name(model_key),
            model_key,
            family,
            dataset,
            float(row["mean"]) / 100,
            float(row["ci95"]) / 100,
        )
        scores.setdefault((model_key, family, dataset), score)
    return Evidence(list(scores.values()))


def is_study_result(result: Result) -> bool:
    """Return whether a result is the published study's, not of `megaenc finetune`.

    It is if its file has only scores, and its model has the study's naming and one of its sizes.
    `megaenc finetune` adds its protocol to the file. The result is True also for a rerun with the
    study's evaluation code under the same names.
    """
    return result.scores_only and _is_study_model(result.model)


@functools.cache
def _is_study_model(name: str) -> bool:
    key = parse_model_name(name)
    return key is not None and key.size in {
        model_key.size for model_key in published().model_keys()
    }


def drop_unprinted_results(results: Iterable[Result]) -> list[Result]:
    """Drop the study's own results on data sets that its tables lack, such as QED.

    Results of `megaenc finetune` are all kept; the order stays.
    """
    printed = {(str(family), name) for family, names in STUDY_DATASETS.items() for name in names}
    return [
        result
        for result in results
        if (result.family, result.dataset) in printed or not is_study_result(result)
    ]


def raw(
    directory: str | Path, metric: str = PAPER_SCORE, kind: IntervalKind = "normal"
) -> Evidence:
    """Read the study's raw result files on the twelve data sets of its tables.

    Averages are added. The keys of models are parsed from their names.

    Args:
        directory: Results directory of the study, as in its repository.
        metric: PAPER_SCORE, or the name of a standard metric.
        kind: 95 % interval over seeds, 1.96 standard errors ("normal") or Student's ("t").

    Raises:
        InputError: There are no results, one is invalid, or none has the standard metric.
    """
    return build_evidence(
        drop_unprinted_results(read_result_tree(directory)), parse_model_name, metric, kind
    )
