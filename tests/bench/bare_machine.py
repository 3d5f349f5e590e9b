"""A machine that has only what `benchmarks/gpu.sh --help` names."""

import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from megaenc.bench.gpu.__main__ import NEEDED


def with_what_they_need(*names: str) -> set[str]:
    """Distributions and all that they require."""
    complete: set[str] = set()
    while missing := set(names) - complete:
        complete |= missing
        requirements = [Requirement(text) for name in missing for text in metadata.requires(name) or ()]
        names = [each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
    return complete


def bare_python(folder: Path, *others: str) -> Path:
    """An interpreter with torch, numpy, what `others` need, and all else that the benchmark names, installed alone."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    alone = {text.split()[0].split("==")[0] for text in NEEDED.values()}
    for name in with_what_they_need("torch", "numpy", *others) | alone:
        distribution = metadata.distribution(name)
        for entry in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / entry).exists():
                (site / entry).symlink_to(distribution.locate_file(entry))
    return folder / "bin" / "python"
