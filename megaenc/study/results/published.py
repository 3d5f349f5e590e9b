"""What the study published: the means and intervals of its tables, shipped with the package, and its result files.

published_results.csv holds the 800 cells of the appendix tables of "Should We Still Pretrain Encoders with Masked Language
Modeling?" (Gisserot-Boukhlef et al., arXiv 2507.00994): 50 rows of 12 data sets and 4 averages, percent. Two models stand in
three of its tables, with the same numbers, so there are 46.
"""

import csv
import functools
from importlib import resources
from pathlib import Path

from megaenc.finetune.results.aggregate import STUDY_DATASETS, IntervalKind
from megaenc.finetune.results.files import read_result_tree
from megaenc.study.manifest.model_key import DEFAULT_BUDGET, ModelKey, format_model_name, parse_model_name
from megaenc.study.results.evidence import AVERAGE, PAPER_SCORE, Evidence, Score, build_evidence
from megaenc.study.results.groups import DATASET_LABELS

SOURCE = "arXiv 2507.00994, tables of the appendix"
TABLES = "published_results.csv"

DATASET_NAMES = {label: name for labels in DATASET_LABELS.values() for name, label in labels.items()} | {"Average": AVERAGE}
"""The names of data sets by those that the tables give them."""


def read_published_rows() -> list[dict[str, str]]:
    """Return the 800 cells as printed, in the order of the tables, by the columns of the file."""
    with resources.files(__package__).joinpath(TABLES).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def parse_model_key(row: dict[str, str]) -> ModelKey:
    """Return the model of a row. Those of the table of data efficiency are on the way; all others have decayed."""
    steps = (int(row[name]) for name in ("clm_steps", "mlm_steps", "cpt_mlm_steps"))
    mask, on_the_way = float(row["mask_ratio"]) if row["mask_ratio"] else None, row["setup"] == "efficiency"
    return ModelKey(row["size"], *steps, mask, not on_the_way, budget=DEFAULT_BUDGET if on_the_way else 0)


@functools.cache
def published() -> Evidence:
    """Return the printed means and intervals, without seeds, rates or examples; every model once, in the order of the tables."""
    found: dict[tuple[ModelKey, str, str], Score] = {}
    for row in read_published_rows():
        setting, family, dataset = parse_model_key(row), row["task"], DATASET_NAMES[row["dataset"]]
        score = Score(format_model_name(setting), setting, family, dataset, float(row["mean"]) / 100, float(row["ci95"]) / 100)
        found.setdefault((setting, family, dataset), score)
    return Evidence(list(found.values()))


def raw(folder: str | Path, metric: str = PAPER_SCORE, kind: IntervalKind = "normal") -> Evidence:
    """Read the study's own result files: `folder` is the `results` of hgissbkh/EncodEval. Raises InputError if there are none."""
    of_study = {(str(family), name) for family, names in STUDY_DATASETS.items() for name in names}
    found = read_result_tree(folder)
    return build_evidence([result for result in found if (result.family, result.dataset) in of_study], parse_model_name, metric, kind)
