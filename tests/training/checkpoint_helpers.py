"""Checkpoints changed by hand, as a bad disk or a bad person would."""

import hashlib
import json
from pathlib import Path


def flip_a_bit(file: Path) -> None:
    """In the middle of the file: its size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forge(file: Path, content: bytes) -> None:
    """Put `content` into a file of a checkpoint, with the size and checksum in state.json to match."""
    file.write_bytes(content)
    state = json.loads((file.parent / "state.json").read_text())
    state["files"][file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (file.parent / "state.json").write_text(json.dumps(state))


def whole_checkpoint(folder: Path, step: int) -> None:
    """What looks whole without a look into it: one shard that is no shard, and the state.json to match."""
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"step": step, "identity": {}, "files": {}}))
    forge(folder / "__0_0.distcp", b"weights of step %d" % step)
