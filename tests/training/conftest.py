"""A run with several checkpoints, for the tests that damage or forge them, and a disk that is soon full."""

import subprocess

import pytest
import runs


@pytest.fixture(scope="session")
def saved_run(small_corpus, tmp_path_factory):
    """Twelve of twenty float32 steps, with checkpoints of steps 4, 8 and 12. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    every = ["--save-interval", "4", "--exit-interval", "12"]
    runs.script(runs.PRETRAIN, [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder), *every])
    return folder


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3.5 MB: room for one checkpoint of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3500k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
