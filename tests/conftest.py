"""What several groups of tests need: one small corpus with its tokenizer, and a world of one process."""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import runs

# A file of these takes minutes: begun last, as `--dist loadfile` begins files of few tests, it would be waited for alone.
_LONG = ("faults", "convert", "training")


def pytest_configure(config: pytest.Config) -> None:
    """What tests start can be told to stop, also where nohup or a shell's `&` has the suite itself ignore that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first."""
    items.sort(key=lambda item: item.path.parent.name not in _LONG)


@dataclass(frozen=True)
class SmallCorpus:
    """A tokenised corpus of 300 documents and its tokenizer of 400 ids."""

    text: Path
    tokenizer: Path
    prefix: Path

    @property
    def flags(self) -> list[str]:
        """For the pretraining command. A tenth of the documents is held out."""
        return ["--data-path", str(self.prefix), "--tokenizer", str(self.tokenizer), "--split", "90,10,0"]


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory) -> SmallCorpus:
    from megaenc.data import preprocess, tokenizer_command

    folder = tmp_path_factory.mktemp("corpus")
    text = runs.write_text(folder / "text.jsonl")
    tokenizer_command.main(["--input", str(text), "--vocab-size", "400", "--output", str(folder / "tokenizer")])
    preprocess.main(
        ["--input", str(text), "--output-prefix", str(folder / "small"), "--tokenizer", str(folder / "tokenizer"), "--append-eod"]
    )
    return SmallCorpus(text, folder / "tokenizer", folder / "small_text_document")


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

    yield backend.start(backend.Layout(), seed=0)
    backend.stop()
