"""The Makefile, the README and the configurations agree with the commands."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megaenc import cli

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(
    r"^(?:OMP_NUM_THREADS=1 )?(?:megaenc|python tools/|torchrun) ?.*$", re.MULTILINE
)


def joined(text: str) -> str:
    """Return the text with lines joined that a backslash continues."""
    return re.sub(r" *\\\n\s*", " ", text)


def commands_of_quickstart() -> list[str]:
    """Return what `make quickstart` would run where nothing is built."""
    command = ["make", "--dry-run", "--no-print-directory", "quickstart", "DEMO=nothing-here"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line.replace("nothing-here", "demo") for line in COMMAND.findall(joined(ran.stdout))]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_readme_shows_each_step_of_the_quickstart():
    steps = commands_of_quickstart()
    words = [
        "demo",
        "tokenizer",
        "preprocess_data",
        "pretrain_encoder",
        "to-hf",
        "plot",
        "fill-mask",
        "summary",
    ]
    assert len(steps) == len(words) and all(
        word in step for word, step in zip(words, steps, strict=True)
    ), steps
    readme = joined((ROOT / "README.md").read_text())
    for step in steps:
        assert step in readme, step


@pytest.mark.parametrize("path", ["README.md", "docs/README.md"])
def test_the_readme_names_no_command_that_there_is_not(path):
    names = commands_named(path)
    assert names
    for first, second in names:
        assert first in cli.COMMANDS or f"{first} {second}" in cli.COMMANDS, (first, second)


def commands_named(path: str) -> list[tuple[str, str]]:
    """Return the words behind `megaenc` in each command of a document."""
    shown = re.findall(r"```.*?```|`[^`]+`", (ROOT / path).read_text(), re.DOTALL)
    return re.findall(r"megaenc ([a-z][a-z-]*)(?: ([a-z-]+))?", " ".join(shown))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/pretrain").glob("*.yaml")), ids=lambda path: path.stem
)
def test_configurations_can_be_read(path):
    from megaenc.training.config import read_config_file

    read_config_file(str(path)).check(world_size=1)


def test_the_quickstart_keeps_checkpoints_to_go_on_from():
    from megaenc.training.config import read_config_file

    settings = read_config_file(str(ROOT / "configs/pretrain/tiny.yaml"))
    assert settings.output.save_interval and settings.output.save_interval < settings.train_iters
