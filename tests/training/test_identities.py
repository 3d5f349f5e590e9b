"""Identities of runs of an earlier version, compared with those of plans today."""

import hashlib
import json
import shlex
import sys
from pathlib import Path

import pytest
import runs
from corpus_helpers import write_whole_corpus
from training_helpers import plan_of

from megaenc.training.command import main
from megaenc.training.run_dir import describe_difference
from megaenc.training.run_init import identity_digest

DIRECTORY = Path(__file__).parent / "identities"
PACKAGE = runs.ROOT / "examples" / "objective_plugin"


def read_command(file: Path) -> list[str]:
    """Return the flags in a file."""
    return shlex.split(" ".join(json.loads(file.read_text())["command"]))


@pytest.fixture(scope="module")
def parent(small_corpus, tmp_path_factory):
    """The identity of the run `plain`, in a directory with all that the commands name."""
    directory = tmp_path_factory.mktemp("identities")
    for name, count in (("a", 200), ("b", 60)):
        write_whole_corpus(
            directory / name, [[*range(5, 30 + number % 90), 0] for number in range(count)]
        )
        (directory / f"{name}.json").unlink()  # of another tokenizer
    (directory / "tokenizer").symlink_to(small_corpus.tokenizer)
    info = directory / "word_order-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: word-order\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[megaenc.objectives]\nword_order = word_order:WordOrder\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.syspath_prepend(directory)
        patch.syspath_prepend(PACKAGE)
        main([*read_command(DIRECTORY / "plain.json"), "--save", "plain"])
        yield json.loads(Path("plain/run.json").read_text())["identity"]
    sys.modules.pop("word_order", None)


@pytest.mark.parametrize("file", sorted(DIRECTORY.glob("*.json")), ids=lambda file: file.stem)
def test_runs_of_an_earlier_version_can_be_resumed(file, parent):
    identity = plan_of(*read_command(file)).identity
    facts = {
        "TOKENIZER": identity["tokenizer"],
        "PARENT": identity_digest(parent),
        "SOURCE": hashlib.sha256((PACKAGE / "word_order.py").read_bytes()).hexdigest()[:12],
    }
    text = file.read_text()
    for name, value in facts.items():
        text = text.replace(name, value)
    recorded = json.loads(text)["identity"]
    assert identity == recorded, (
        f"{describe_difference(recorded, identity)}. "
        "Runs that users have begun would be refused to resume: keep a field out of "
        "the identity (FREE) or its default as it was, or raise RUN_FORMAT"
    )
