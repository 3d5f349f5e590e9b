"""What a study's folder holds already, as far as the plan depends on it: how runs began, and which checkpoints they have kept."""

from dataclasses import dataclass
from pathlib import Path

from megaenc.errors import InputError
from megaenc.study.metrics import read_run_json
from megaenc.training.checkpoint_folder import CheckpointFolder
from megaenc.training.run_folder import FACTS
from megaenc.training.start import Start


def read_start(run: Path) -> Start | None:
    """Return how a run began, by its run.json; None for a run that has not begun. Raises InputError for a damaged file."""
    if not (run / FACTS).exists():
        return None
    facts = read_run_json(run)
    try:
        start = Start.read(facts)
    except (TypeError, AttributeError):
        raise InputError(f"{run / FACTS}: field `start`: found an unknown form; expected what a run wrote there") from None
    if start.kind not in ("new", "branch", "weights") or type(start.at) is not int or not isinstance(start.parent, str):
        raise InputError(f"{run / FACTS}: field `start`: found values of other kinds; expected what a run wrote there")
    if not facts["identity"]:
        raise InputError(f"{run / FACTS}: field `identity`: missing; expected what a run wrote there")
    return start


@dataclass(frozen=True)
class Begun:
    """The runs of a study that is made in the folder `study`."""

    study: Path

    def start(self, name: str) -> tuple[str, str, int] | None:
        """Return new, branch or weights, the name of the run it began with, and the step, which is 0 but for a branch.

        None for a run that has not begun, and for one with a damaged run.json, which the check of its stage names.
        """
        try:
            start = read_start(self.study / "runs" / name)
        except InputError:
            return None
        return start and (start.kind, Path(start.run).name, start.step)

    def branch_point(self, name: str, step: int) -> int:
        """The last step up to `step` to branch a run at: `step` while it is not there yet, then one that it has kept, or 0."""
        checkpoints = CheckpointFolder(self.study / "runs" / name / "checkpoints")
        latest = checkpoints.latest()
        if latest is None or latest < step:
            return step
        return max((kept for kept in checkpoints.steps() if kept <= step and checkpoints.is_whole(kept)), default=0)
