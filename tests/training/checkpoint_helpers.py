"""Checkpoints changed by hand, as a bad disk or a bad person would, and what is left where one could not be written."""

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.checkpoint_dir import json_digest


def flip_a_bit(file: Path) -> None:
    """In the middle of the file: its size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forge(file: Path, content: bytes) -> None:
    """Put `content` into a file of a checkpoint, with the size and checksum in state.json to match."""
    file.write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change_state(file.parent, lambda state: state["files"].update({file.name: entry}))


def change_state(folder: Path, change: Callable[[dict], object]) -> None:
    """Let `change` change the fields of a checkpoint's state.json, which gets the digest to match."""
    state = json.loads((folder / "state.json").read_text())
    state.pop("sha256", None)
    change(state)
    state["sha256"] = json_digest(state)
    (folder / "state.json").write_text(json.dumps(state))


def whole_checkpoint(folder: Path, step: int) -> None:
    """What looks whole without a look into it: one shard that is no shard, and the state.json to match."""
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"step": step, "identity": {}, "files": {}}))
    forge(folder / "__0_0.distcp", b"weights of step %d" % step)


def errors(result: subprocess.CompletedProcess) -> list[str]:
    """The lines on standard error that begin so."""
    return [line for line in result.stderr.splitlines() if line.startswith("error:")]


def assert_only_step_4(folder: Path) -> None:
    """Its checkpoint is whole, and nothing is there of another."""
    checkpoints = CheckpointLoader(folder / "checkpoints")
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
    ]
    assert checkpoints.tracked_step() == 4
    assert checkpoints.read_state(4)["step"] == 4
