"""Files of flags and manifests that come with the package, and their names."""

import functools
import os
from pathlib import Path

from megaenc.errors import closest_match

PACKAGED_DIR = (Path(__file__).parent / "configs").resolve()
"""Directory of the packaged files; in a clone it is a link to `configs`."""


@functools.cache
def list_packaged_files() -> dict[str, Path]:
    """Return the packaged files by name, such as `recipes/modernbert`."""
    return {
        path.relative_to(PACKAGED_DIR).with_suffix("").as_posix(): path
        for path in sorted(PACKAGED_DIR.rglob("*.yaml"))
    }


def find_config_file(name: str | Path, directory: Path = Path()) -> Path:
    """Return the path of a file, or of the packaged file with this name.

    A file always wins. Otherwise packaged files have the names `study/mini` and
    `configs/study/mini.yaml`, as in a clone.

    Args:
        name: Absolute path, or path relative to `directory`.
    """
    path = directory / name
    key = str(name)
    if key.startswith("configs/"):
        key = key.removeprefix("configs/").removesuffix(".yaml")
    packaged = list_packaged_files().get(key)
    return path if packaged is None or path.is_file() else packaged


def find_base_file(file: Path, base: str) -> Path:
    """Return the path of the file or packaged file that `file` names as `base`.

    Args:
        file: Resolved path, whose directory `base` is relative to. That of a packaged file may also
            be relative to the current directory, as if `configs` was in there.
    """
    path = find_config_file(base, file.parent)
    if file.is_relative_to(PACKAGED_DIR) and not path.exists():
        return Path(os.path.relpath(path, PACKAGED_DIR.parent))
    return path


def suggest_config_names(name: str | Path) -> str:
    """Return the end of an error about a missing file: similar packaged files.

    Their last words are similar. Without any, it is the command that lists all.
    """
    stem = Path(name).stem
    near = [
        known
        for known in list_packaged_files()
        if closest_match(stem, [Path(known).name], cutoff=0.8)
    ]
    if not near:
        return "; `megaenc --help` lists the packaged files"
    return f"; did you mean {' or '.join(f'`{known}`' for known in near)}?"


def format_config_names() -> str:
    """Return the names of the packaged files, a line for each directory."""
    groups: dict[str, list[str]] = {}
    for name in list_packaged_files():
        directory, _, file = name.rpartition("/")
        groups.setdefault(directory, []).append(file)
    return "\n".join(f"  {directory}/: {', '.join(files)}" for directory, files in groups.items())
