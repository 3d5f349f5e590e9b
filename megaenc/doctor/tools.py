"""What tells of a machine: files of the kernel, and programs such as nvidia-smi, which may be missing, fail, or never end."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


class ToolError(Exception):
    """A program did not tell what it was asked, in one line; `told` is what it printed before it failed."""

    def __init__(self, why: str, told: str = ""):
        super().__init__(why)
        self.told = told


_BESIDES = "/opt/rocm/bin"  # which is rarely on the PATH


def text_of(file: Path) -> str:
    """What stands in a file of the kernel, without space around it; empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def installed(program: str) -> str:
    """Where the program is, looked for on the PATH and where ROCm puts its own; empty where it is not."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{_BESIDES}") or ""


def told_by(command: Sequence[str], seconds: float) -> str:
    """What `command` prints. ToolError where it fails or has not ended after `seconds`.

    It is killed then and not waited for: what hangs in a driver does not even die.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise ToolError(f"no answer in {seconds:.3g} s") from None
    if process.returncode:
        last = (told.strip().splitlines() or ["without a word"])[-1]
        raise ToolError(f"exit code {process.returncode}: {last[:200]}", told)
    return told
