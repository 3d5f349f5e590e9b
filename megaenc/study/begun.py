"""What a study's folder holds already, as far as the plan depends on it: how runs began, and which checkpoints they have kept."""

from dataclasses import dataclass
from pathlib import Path

from megaenc.study.json_file import read_json
from megaenc.training.checkpoint_folder import CheckpointFolder
from megaenc.training.run_folder import FACTS
from megaenc.training.start import Start


@dataclass(frozen=True)
class Begun:
    """The runs of a study that is made in the folder `study`."""

    study: Path

    def start(self, name: str) -> tuple[str, str, int] | None:
        """How a run began: new, branch or weights, the name of the run it began with, the step; None for one that has not begun.

        The step is 0 but for a branch, as in the plan.
        """
        facts = read_json(self.study / "runs" / name / FACTS)
        if not isinstance(facts.get("identity"), dict):
            return None
        try:
            start = Start.read(dict(facts))
        except (TypeError, AttributeError):
            return None
        return start.kind, Path(start.run).name, start.step

    def branch_point(self, name: str, step: int) -> int:
        """The last step up to `step` to branch a run at: `step` while it is not there yet, then one that it has kept, or 0."""
        checkpoints = CheckpointFolder(self.study / "runs" / name / "checkpoints")
        latest = checkpoints.latest()
        if latest is None or latest < step:
            return step
        return max((kept for kept in checkpoints.steps() if kept <= step and checkpoints.is_whole(kept)), default=0)
