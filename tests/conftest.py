"""What several groups of tests need: one small corpus with its tokenizer, and a world of one process."""

import fcntl
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import runs

# Tests of these take longest: begun last, one would be waited for while the other workers have nothing left.
_LONG = ("faults", "docker", "training", "convert")


def pytest_configure(config: pytest.Config) -> None:
    """What tests start can be told to stop, also where nohup or a shell's `&` has the suite itself ignore that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, where workers share the tests."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(
            key=lambda item: (
                item.path.parent.name not in _LONG and item.path.stem != "test_mistakes"
            )
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let only tests that are marked `multiprocess` start several ranks."""
    runs.ranks_allowed = item.get_closest_marker("multiprocess") is not None


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """Return a function that makes a folder once for all workers: `shared_folder(name, make)`, where `make(folder)` fills it.

    The folder must not be changed afterwards.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "shared"
    root.mkdir(exist_ok=True)

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / f"{name}.whole").exists():
                shutil.rmtree(root / name, ignore_errors=True)  # of a `make` that failed
                (root / name).mkdir()
                make(root / name)
                (root / f"{name}.whole").touch()
        return root / name

    return folder


@dataclass(frozen=True)
class SmallCorpus:
    """A tokenised corpus of 300 documents and its tokenizer of 400 ids."""

    text: Path
    tokenizer: Path
    prefix: Path

    @property
    def flags(self) -> list[str]:
        """For the pretraining command. A tenth of the documents is held out."""
        return [
            "--data-path",
            str(self.prefix),
            "--tokenizer",
            str(self.tokenizer),
            "--split",
            "90,10,0",
        ]


@pytest.fixture(scope="session")
def small_corpus(shared_folder) -> SmallCorpus:
    folder = shared_folder("corpus", runs.make_corpus)
    return SmallCorpus(folder / "text.jsonl", folder / "tokenizer", folder / "small_text_document")


@pytest.fixture
def refusal(capfd):
    """Call a command's `main`: it must end with exit code 2 and one line on stderr, which is returned."""

    def refused(main, flags) -> str:
        with pytest.raises(SystemExit) as stop:
            main([str(flag) for flag in flags])
        assert stop.value.code == 2
        lines = capfd.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    return refused


@pytest.fixture
def one_process():
    """megatron-core in this very process, as a world of one."""
    from megaenc import backend

    yield backend.init_distributed(backend.ParallelConfig(), seed=0)
    backend.destroy_distributed()
