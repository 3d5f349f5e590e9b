"""Provenance of a study: hardware, dates, commit and libraries.

It is recorded in study.json and shown by the report.
"""

import contextlib
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

import psutil

import megaenc
from megaenc.atomic_io import atomic_write, wait_for_lock
from megaenc.errors import InputError
from megaenc.json_files import read_json_object, read_json_or_empty
from megaenc.machine import accelerator_names, read_processor_name, usable_core_count

PROVENANCE_FILE = "study.json"
"""File in the study directory: an object whose values are texts, or lists of texts in chronological
order.
"""

_LIBRARIES = ("torch", "megatron-core", "transformers")


def record_environment(study: Path) -> None:
    """Add this machine's hardware, date, commit and libraries to STUDY/study.json.

    Only new texts are added. An unreadable file is left as it is; the report names it.
    """
    if _add_environment(study / PROVENANCE_FILE):
        # Jobs of a cluster start at the same time; one that hangs must not block the others.
        with wait_for_lock(study / ".locks" / "record", seconds=10) as is_locked:
            if is_locked and (values := _add_environment(study / PROVENANCE_FILE)):
                atomic_write(
                    study / PROVENANCE_FILE, json.dumps(values, indent=1, ensure_ascii=False) + "\n"
                )


def _add_environment(file: Path) -> dict:
    """Return the entries of `file` with the current environment added.

    There are none if nothing is new or the file is unreadable.
    """
    values = read_json_or_empty(file)
    if not values and file.exists():
        return {}
    extended = dict(values)
    for name, text in current_environment().items():
        before = extended.get(name, [])
        before = before if isinstance(before, list) else [before]
        if text and text not in before:
            extended[name] = [*before, text]
    return extended if extended != values else {}


def read_provenance(file: Path) -> dict[str, str]:
    """Return the texts of study.json, the path `file`, by name; {} without the file.

    Lists are joined by `, then `.

    Raises:
        InputError: The file is no JSON object.
    """
    if not file.is_file():
        return {}
    values = read_json_object(file, "an object of texts")
    texts = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    return {name: ", then ".join(map(str, parts)) for name, parts in texts.items() if parts}


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
        "commit": _describe_commit(),
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
    counted_names = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(
        [
            *counted_names,
            f"{cores} core{'s' if cores > 1 else ''} of {read_processor_name()}",
            f"{memory:.0f} GiB of memory",
        ]
    )


@cache
def _describe_commit() -> str:
    """Return the commit of megaenc's checkout, and whether files differ.

    For an installed package, it is the version.
    """
    root = Path(megaenc.__file__).parents[1]

    def git(*words: str) -> str:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("GIT_")
        }
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, env=environment
        ).stdout.strip()

    with contextlib.suppress(OSError):
        if git("rev-parse", "--show-toplevel") == str(root.resolve()):
            changed = (
                " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
            )
            return git("rev-parse", "--short=12", "HEAD") + changed
    return f"megaenc {megaenc.__version__}"
