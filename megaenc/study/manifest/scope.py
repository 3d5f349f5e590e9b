"""Scope of a study: models, sizes and grid that its manifest asks for.

With it, a report of a study that is one tenth done picks the same baseline, end of run and mask
ratio as the final report.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megaenc.finetune.results.aggregate import GridSpec
from megaenc.study.manifest.model_key import ModelKey

if TYPE_CHECKING:
    from megaenc.study.manifest.schema import Manifest


@dataclass(frozen=True)
class StudyScope:
    """Checkpoints, sizes, grid and data sets of a manifest; empty without a manifest.

    `model_keys` are of the evaluated checkpoints by name, `sizes` by ascending number of
    parameters. `grid` (GridSpec) has the learning rates and seeds of fine-tuning, or is None.
    `datasets` are (task family, data set) pairs, with "" as family if only the data determines it.
    `retrieval_sets` are the data sets of zero-shot retrieval; `contrastive_seeds` are the seeds of
    contrastive training, after each of which these sets are evaluated again.
    """

    model_keys: Mapping[str, ModelKey] = field(default_factory=dict)
    """evaluated checkpoints by name: ends of models in the manifest's order, then intermediate
    ones"""
    sizes: tuple[str, ...] = ()
    """names of the sizes of all models, by ascending number of parameters"""
    grid: GridSpec | None = None
    """learning rates and seeds of each model on each data set; None if nothing is fine-tuned"""
    datasets: tuple[tuple[str, str], ...] = ()
    """(task family, data set) pairs of fine-tuning; the family is empty if only the data determines
    it"""
    retrieval_sets: tuple[str, ...] = ()
    """data sets of zero-shot retrieval"""
    contrastive_seeds: tuple[int, ...] = ()
    """seeds, from 0, of contrastive training before zero-shot retrieval; empty without it"""


EMPTY_SCOPE = StudyScope()


def build_scope(manifest: "Manifest") -> StudyScope:
    """Return what a manifest evaluates: checkpoints, sizes, grid and data sets.

    Reports compare the results that exist with it. No data are read. The fine-tuning grid is None
    if nothing is fine-tuned.
    """
    counts: dict[str, int] = {}
    for model in manifest.models:
        counts.setdefault(
            model.key.size, model.config.shape.parameter_count(manifest.vocab_size(model))
        )
    grid = manifest.finetune
    return StudyScope(
        model_keys=manifest.model_keys(),
        sizes=tuple(sorted(counts, key=counts.__getitem__)),
        grid=None
        if grid is None
        else GridSpec(tuple(sorted(grid.learning_rates)), tuple(range(grid.seeds))),
        datasets=tuple(
            (task.family, name) for task in manifest.training_sets for name in task.datasets
        ),
        retrieval_sets=manifest.embed.names if manifest.embed else (),
        contrastive_seeds=tuple(manifest.embed.training_seeds) if manifest.embed else (),
    )
