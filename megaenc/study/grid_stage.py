"""The fine-tuning of one model as a stage of a study."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megaenc.finetune import results
from megaenc.finetune.examples import Family
from megaenc.finetune.options import Protocol
from megaenc.study.graph import FineTuning, arguments
from megaenc.study.node import OfStage, changed, megaenc
from megaenc.study.tasks import Training, name_in_results


@dataclass(frozen=True)
class GridNode(OfStage):
    """One model's fine-tuning."""

    stage: FineTuning
    protocol: Protocol
    jobs: int
    """runs at a time; 0: as many as the machine has room for"""
    planned: float | None
    part: str = ""
    """the set that it trains on, where it is a part of the grid"""
    processes: int = 1
    unit: str = "results"

    @property
    def id(self) -> str:
        """That of the stage, or of its part."""
        return f"{self.stage.id}@{self.part}" if self.part else self.stage.id

    @property
    def work(self) -> float:
        """Runs."""
        return float(self.stage.runs)

    def parts(self) -> list["GridNode"]:
        """The same in parts: one for each set that is trained on."""
        return [self._part(training) for training in self.stage.trainings]

    def _part(self, training: Training) -> "GridNode":
        datasets = tuple(text for text in self.stage.flags["datasets"] if name_in_results(text) in training.datasets)
        stage = replace(self.stage, trainings=(training,), flags={**self.stage.flags, "datasets": datasets})
        seconds = self.planned and self.planned / len(self.stage.trainings)
        return replace(self, stage=stage, planned=seconds, part=training.train_on)

    def command(self) -> list[str]:
        """`megaenc finetune grid`, which does what is missing."""
        model, output = self.study / "hf" / self.stage.name, self.study / "results"
        where = ["--model", str(model), "--output", str(output), "--jobs", str(self.jobs)]
        if "demo_folder" not in self.stage.flags:
            where += ["--demo-folder", str(self.study / "demo")]
        return megaenc("finetune", "grid", *where, *arguments(self.stage.flags))

    def done(self) -> bool:
        """Whether every run has a result, or is written down as failed."""
        done, total = self.progress()
        return done == total

    def progress(self) -> tuple[float, float]:
        """Results."""
        return len(self._files()), self.stage.results

    def failed(self) -> int:
        """Runs that are written down as failed: their rate made the loss no number."""
        return sum(file.name == results.FAILED for file in self._files())

    def _files(self) -> list[Path]:
        """The result, or what says that there is none, of each run that has one."""
        found = []
        for training in self.stage.trainings:
            families = [training.family] if training.family else list(Family)
            for dataset in training.datasets:
                for rate in self.stage.flags["learning_rates"]:
                    for seed in range(self.stage.flags["seeds"]):
                        run = (dataset, training.train_on, float(rate), seed)
                        found += self._first([results.run_folder(self._tree, family, *run) for family in families])
        return found

    @property
    def _tree(self) -> Path:
        return self.study / "results" / self.stage.name

    def _first(self, folders: Sequence[Path]) -> list[Path]:
        files = (folder / name for folder in folders for name in (results.RESULTS, results.FAILED))
        return [file for file in files if file.is_file()][:1]

    def check(self) -> None:
        """The protocol that the first result was made with."""
        for file in self._files()[:1]:
            if other := results.other_protocol(file, self.protocol):
                raise changed(self._tree, f"finetune: {other}")
