"""Provenance of a study: hardware, dates, commit and libraries.

It is recorded in study.json and shown by the report.
"""

import contextlib
import json
import os
import platform
import subprocess
from collections import Counter
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import megaenc
from megaenc.atomic_io import atomic_write, wait_for_lock
from megaenc.errors import InputError
from megaenc.json_files import read_json_object
from megaenc.machine import accelerator_names, read_processor_name, usable_core_count

PROVENANCE_FILE = "study.json"
"""File in the study directory: an object whose values are texts, or lists of texts in chronological
order.
"""

_LIBRARIES = ("torch", "megatron-core", "transformers")


def record_environment(study: Path) -> None:
    """Add this machine's hardware, date, commit and libraries to STUDY/study.json.

    Only new texts are added; a missing file is created. An unreadable file is left as it is, and
    the report names it. Nothing is added if another process holds the lock for 10 seconds.

    Raises:
        InputError: STUDY cannot be written to.
    """
    file = study / PROVENANCE_FILE
    # Nothing is new for most stages: they need no lock.
    if _extend_provenance(file) is None:
        return
    # Jobs of a cluster start at the same time; one that hangs must not block the others.
    with wait_for_lock(study / ".locks" / "record", seconds=10) as is_locked:
        # Another job may have written the file before the lock was free.
        values = _extend_provenance(file) if is_locked else None
        if values is not None:
            atomic_write(file, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def _extend_provenance(file: Path) -> dict | None:
    """Return the entries of `file` with the current environment added.

    Returns:
        None if nothing is new, or if the file is unreadable.
    """
    try:
        values = read_json_object(file) if file.exists() else {}
    except InputError:
        return None
    extended = dict(values)
    for name, text in current_environment().items():
        texts = _as_list(values.get(name, []))
        if text and text not in texts:
            extended[name] = [*texts, text]
    return extended if extended != values else None


def read_provenance(file: Path) -> dict[str, str]:
    """Return the texts of study.json, the path `file`, by name; {} without the file.

    The texts of a list are joined by ", then "; empty lists are left out.

    Raises:
        InputError: The file is no JSON object.
    """
    if not file.is_file():
        return {}
    values = read_json_object(file, "an object of texts")
    texts = {name: _as_list(value) for name, value in values.items()}
    return {name: ", then ".join(map(str, parts)) for name, parts in texts.items() if parts}


def _as_list(value: Any) -> list:
    """Return an entry of study.json, a text or a list of texts, as a list."""
    return value if isinstance(value, list) else [value]


def current_environment() -> dict[str, str]:
    """Return texts on this machine under hardware, date, commit and libraries.

    The date is today's in UTC. The commit is that of megaenc's checkout, or its version if it is
    installed.
    """
    libraries = [f"Python {platform.python_version()}"]
    for name in _LIBRARIES:
        try:
            libraries.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            libraries.append(f"{name} missing")
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    return {
        "hardware": _describe_hardware(),
        "date": today,
        "commit": _describe_commit(Path(megaenc.__file__).parents[1]),
        "libraries": ", ".join(libraries),
    }


@cache
def _describe_hardware() -> str:
    """Return accelerator names, processor, number of cores and memory."""
    cores = usable_core_count()
    memory = psutil.virtual_memory().total / 2**30
    names: list[str] = []
    with contextlib.suppress(InputError):  # a stage that needs them reports the error
        names = accelerator_names()
    counted_names = [f"{count} x {name}" for name, count in Counter(names).items()]
    return ", ".join(
        [
            *counted_names,
            f"{cores} core{'s' if cores > 1 else ''} of {read_processor_name()}",
            f"{memory:.0f} GiB of memory",
        ]
    )


@cache
def _describe_commit(root: Path) -> str:
    """Return the commit of the checkout at `root`, and whether files differ.

    If `root` is no checkout, as for an installed package, it is the version of megaenc.
    """
    with contextlib.suppress(OSError):  # git is not installed
        if _run_git(root, "rev-parse", "--show-toplevel") == str(root.resolve()):
            changes = _run_git(root, "status", "--porcelain", "--untracked-files=no")
            commit = _run_git(root, "rev-parse", "--short=12", "HEAD")
            return commit + (" with changes" if changes else "")
    return f"megaenc {megaenc.__version__}"


def _run_git(root: Path, *words: str) -> str:
    # In a hook of git, GIT_DIR and others name the repository of the hook.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, env=environment
    ).stdout.strip()
