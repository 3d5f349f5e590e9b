"""From a manifest to the stages of the work: corpus, pretraining runs, exports, fine-tunings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaenc.study.cost import amount
from megaenc.study.grid_stage import GridNode, LabelledData
from megaenc.study.manifest import Manifest
from megaenc.study.node import CorpusNode, ExportNode, Node
from megaenc.study.pretrain_stage import PretrainNode
from megaenc.study.sharing import maker, starts_of


@dataclass(frozen=True)
class Graph:
    """The stages of a study by name, each kind in an order in which everything comes after what it needs."""

    manifest: Manifest
    corpus: CorpusNode | None
    runs: dict[str, PretrainNode]
    exports: dict[str, ExportNode]
    grids: dict[str, GridNode]

    @property
    def nodes(self) -> dict[str, Node]:
        """All of them by id, each after what it needs."""
        corpus = [self.corpus] if self.corpus else []
        return {node.id: node for node in (*corpus, *self.runs.values(), *self.exports.values(), *self.grids.values())}


def build_graph(
    manifest: Manifest,
    study: Path | None = None,
    *,
    processes: int = 0,
    grid_jobs: int = 1,
    text: Mapping[str, Any] | None = None,
) -> Graph:
    """Work the stages out: what branches where, which checkpoints are kept, what is exported and fine-tuned.

    `study` is the folder that it is made in: the runs there keep the start that they have had, and are branched where they can
    be. `processes` of one pretraining run; 0: the manifest's devices. `grid_jobs`: fine-tuning runs at a time in one grid; 0: as
    many as the machine has room for. `text`: data_path and tokenizer of pretraining in place of the manifest's.
    """
    starts = starts_of(manifest.models, study)
    study, hardware = study or Path(), manifest.hardware
    models = {model.name: model for model in manifest.models}
    corpus = None
    if manifest.corpus.made:
        paths = tuple(manifest.data / path for path in manifest.corpus.text)
        corpus = CorpusNode(study=study, demo=manifest.corpus.demo, text=paths, vocab_size=manifest.corpus.vocab_size)
        text = corpus.flags
    keep: dict[str, set[int]] = {name: set() for name in starts}
    exports = {}
    for name, setting, model, step in manifest.checkpoints():
        run = maker(starts, model.name, step)
        exports[name] = ExportNode(study=study, name=name, setting=setting, run=run, step=step)
        if not setting.decayed:
            keep[run].add(step)
    for _, parent, at in starts.values():
        if at:
            keep[parent].add(at)
    runs = {
        name: PretrainNode(
            study=study,
            name=name,
            model=models[name],
            start=start,
            parent=parent,
            at=at,
            keep=tuple(sorted(keep[name])),
            corpus=manifest.corpus.made,
            amount=amount(manifest, models[name], at, models[name].steps),
            processes=processes or hardware.devices,
            text=text or {},
        )
        for name, (start, parent, at) in starts.items()
    }
    grids = {}
    if manifest.finetune:
        flags = manifest.finetune_flags
        places = {"train_on": flags.get("train_on", ""), "demo_folder": flags.get("demo_folder", str(study / "demo"))}
        grid = GridNode(
            study=study,
            name="",
            trainings=manifest.trainings,
            flags=flags,
            protocol=manifest.finetune.protocol,
            data=LabelledData(flags["datasets"], replace(manifest.finetune.data, **places)),
            jobs=grid_jobs,
            seconds=hardware.finetune_seconds,
        )
        grids = {name: replace(grid, name=name) for name in exports}
    return Graph(manifest, corpus, runs, exports, grids)
