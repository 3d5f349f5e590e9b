"""What a study set out to measure: its models, its sizes in their order, the grid of its fine-tunings.

With it the same models are the base, the end of a run and the usual mask ratio when a tenth of the study is done as when all is.
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
    """Empty where no manifest says any of it: then what is there has to do."""

    model_keys: Mapping[str, ModelKey] = field(default_factory=dict)
    """every evaluated checkpoint by its name, in the manifest's order"""
    sizes: tuple[str, ...] = ()
    """the smallest number of parameters first"""
    grid: GridSpec | None = None
    """rates and seeds of each model on each data set"""
    datasets: tuple[tuple[str, str], ...] = ()
    """(family, data set), the family empty where only the data says it"""


EMPTY_SCOPE = StudyScope()


def build_scope(manifest: "Manifest") -> StudyScope:
    """What a manifest says of it."""
    counts: dict[str, int] = {}
    for model in manifest.models:
        counts.setdefault(model.key.size, model.run.shape.parameter_count(manifest.vocab_size(model)))
    grid = manifest.finetune
    return StudyScope(
        model_keys=manifest.model_keys(),
        sizes=tuple(sorted(counts, key=counts.__getitem__)),
        grid=None if grid is None else GridSpec(tuple(sorted(grid.learning_rates)), tuple(range(grid.seeds))),
        datasets=tuple((one.family, name) for one in manifest.training_sets for name in one.datasets),
    )
