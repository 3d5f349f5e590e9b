"""Damaged, forged and unfinished checkpoints."""

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.checkpoint_dir import json_digest


def flip_a_bit(file: Path) -> None:
    """Flip a bit in the middle of the file, whose size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forge(file: Path, content: bytes) -> None:
    """Put `content` into a file of a checkpoint and its checksum into state.json."""
    file.write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change_state(file.parent, lambda state: state["files"].update({file.name: entry}))


def change_state(directory: Path, change: Callable[[dict], object]) -> None:
    """Apply `change` to the fields of a checkpoint's state.json; update its digest."""
    state = json.loads((directory / "state.json").read_text())
    state.pop("sha256", None)
    change(state)
    state["sha256"] = json_digest(state)
    (directory / "state.json").write_text(json.dumps(state))


def whole_checkpoint(directory: Path, step: int) -> None:
    """Write a checkpoint that looks whole: a false shard and the state.json to match."""
    directory.mkdir()
    (directory / "state.json").write_text(json.dumps({"step": step, "identity": {}, "files": {}}))
    forge(directory / "__0_0.distcp", b"weights of step %d" % step)


def errors(result: subprocess.CompletedProcess) -> list[str]:
    """Return the lines on standard error that begin with "error:"."""
    return [line for line in result.stderr.splitlines() if line.startswith("error:")]


def assert_only_step_4(directory: Path) -> None:
    """Assert that the checkpoint of step 4 is whole and nothing is left of another."""
    checkpoints = CheckpointLoader(directory / "checkpoints")
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == [
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
    ]
    assert checkpoints.tracked_step() == 4
    assert checkpoints.read_state(4)["step"] == 4
