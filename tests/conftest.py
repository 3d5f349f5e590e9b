"""Fixtures that several groups of tests share: a small corpus and a world of one."""

import fcntl
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import runs

# The longest tests: started last, one would run while the other workers have nothing left.
_LONG = ("faults", "docker", "training", "convert")


def pytest_configure(config: pytest.Config) -> None:
    """Restore the handlers of SIGINT and SIGHUP, which nohup and a shell's `&` ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long files first if workers share the tests."""
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
def shared_directory(tmp_path_factory):
    """Return `shared_directory(name, make)`, which fills one once for all workers.

    `make(directory)` fills it. The directory must not be changed afterwards.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "shared"
    root.mkdir(exist_ok=True)

    def directory(name: str, make: Callable[[Path], object]) -> Path:
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / f"{name}.whole").exists():
                shutil.rmtree(root / name, ignore_errors=True)  # of a `make` that failed
                (root / name).mkdir()
                make(root / name)
                (root / f"{name}.whole").touch()
        return root / name

    return directory


@dataclass(frozen=True)
class SmallCorpus:
    """A tokenised corpus of 300 documents and its tokenizer of 400 ids."""

    text: Path
    tokenizer: Path
    prefix: Path

    @property
    def flags(self) -> list[str]:
        """Return flags of the pretraining command that hold out a tenth of the documents."""
        return [
            "--data-path",
            str(self.prefix),
            "--tokenizer",
            str(self.tokenizer),
            "--split",
            "90,10,0",
        ]


@pytest.fixture(scope="session")
def small_corpus(shared_directory) -> SmallCorpus:
    directory = shared_directory("corpus", runs.make_corpus)
    return SmallCorpus(
        directory / "text.jsonl", directory / "tokenizer", directory / "small_text_document"
    )


@pytest.fixture
def refusal(capfd):
    """Return a caller of `main` that expects exit code 2 and returns the stderr line."""

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
    """Initialize megatron-core in this process, as a world of one."""
    from megaenc import backend

    yield backend.init_distributed(backend.ParallelConfig(), seed=0)
    backend.destroy_distributed()
