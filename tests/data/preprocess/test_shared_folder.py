"""Several processes with the same command and work folder, as on several nodes; one is killed, one paused."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from text_helpers import TEXTS, contents, write_jsonl

from megaenc.data.preprocess import command
from megaenc.data.preprocess.claims import ClaimFolder
from megaenc.data.preprocess.command import PreprocessConfig, preprocess
from megaenc.data.preprocess.resumable import PartitionStore
from megaenc.errors import InputError

# Forks of a process that run the same preprocessing command with slow input; it prints their process ids, then the exit codes.
# Each takes itself to be alone on its machine, so that only silence tells the others of its death.
NODES = """
import os, sys, time
from megaenc.data.preprocess import claims, command, partitions
from megaenc.data.preprocess.resumable import PartitionStore
from megaenc.data.sources import resolve, text_files
from transformers import AutoTokenizer
count, pids = int(sys.argv.pop()), []
claims.BEAT_SECONDS, claims.DEAD_SECONDS, partitions.POLL_SECONDS = 0.05, 2.0, 0.05
claims._identify_machine = lambda: str(os.getpid())
text_files.LINES_BYTES = 300
def read_blocks(inputs, ranges, real=resolve.read_blocks):
    for block in real(inputs, ranges):
        time.sleep(0.1)
        yield block
resolve.read_blocks = read_blocks
def write(store, number, *more, real=PartitionStore.write):
    print("writing", number, flush=True)
    real(store, number, *more)
    print("wrote", number, flush=True)
PartitionStore.write = write
for number in range(count):
    pids.append(os.fork())
    if not pids[-1]:
        os.dup2(os.open(f"log{number}", os.O_CREAT | os.O_WRONLY, 0o644), 1)
        os.dup2(1, 2)
        command.main(sys.argv[1:])
        sys.exit()
print(*pids, flush=True)
print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


@pytest.fixture
def settings(tmp_path, tokenizer_folder):
    """A hundred documents, some equal, in twelve partitions."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [f"{number % 7} {text}" for number in range(20) for text in TEXTS])
    return PreprocessConfig((str(corpus),), str(tmp_path / "out"), tokenizer_folder, append_eod=True, workers=1, partitions=12)


@pytest.fixture
def expected_contents(tmp_path, settings):
    """What one process without partitions makes of the same input."""
    (prefix,) = preprocess(dataclasses.replace(settings, output_prefix=str(tmp_path / "whole"), deduplicate="exact"))
    return contents(prefix)


@pytest.fixture
def nodes(tmp_path, settings):
    """Start processes of the same command; return their process ids and a function that waits for their exit codes."""
    flags = ["--input", *settings.input, "--output-prefix", settings.output_prefix, "--tokenizer", settings.tokenizer]
    flags += ["--append-eod", "--workers", "1", "--partitions", "12", "--deduplicate", "exact"]
    started, pids = [], []

    def start(count):
        for number in range(count):
            (tmp_path / f"log{number}").touch()
        words = [sys.executable, "-c", NODES, *flags, str(count)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path))
        pids.extend(map(int, started[0].stdout.readline().split()))
        return pids, lambda: list(map(int, started[0].communicate(timeout=120)[0].split()))

    yield start
    for pid in pids if started[0].poll() is None else []:
        os.kill(pid, signal.SIGKILL)
    started[0].kill()
    started[0].wait()


def read_log(folder, number):
    return (folder / f"log{number}").read_text()


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def is_writing(folder, number):
    """Whether a process is in the middle of a partition, and how many it has written."""
    log = read_log(folder, number)
    return log.count("writing") > log.count("wrote") and log.count("wrote") > 0


@pytest.mark.slow
def test_processes_share_the_partitions_and_one_that_is_killed_loses_nothing(tmp_path, settings, expected_contents, nodes):
    pids, exit_codes = nodes(3)
    wait_until(lambda: is_writing(tmp_path, 2))
    os.kill(pids[2], signal.SIGKILL)
    assert exit_codes() == [0, 0, -9], read_log(tmp_path, 0) + read_log(tmp_path, 1)
    logs = [read_log(tmp_path, number) for number in range(3)]
    written = [int(number) for log in logs for number in re.findall(r"wrote (\d+)", log)]
    assert sorted(written) == list(range(12))  # none twice
    assert all(log.count("wrote") > 1 for log in logs[:2])
    assert sorted("merging the partitions  100 %" in log for log in logs) == [False, False, True]
    assert sum("out_parts: another process has merged the partitions" in log for log in logs[:2]) == 1
    assert all("out_text_document: 35 documents, " in log and "65 duplicates removed" in log for log in logs[:2])
    assert re.search(r"tokenizing  \d+ %  partitions 12/12  processes \d", logs[0] + logs[1])
    assert contents(tmp_path / "out_text_document") == expected_contents
    assert not [path for path in tmp_path.iterdir() if "_parts" in path.name or path.name.endswith(".tmp")]


@pytest.mark.slow
def test_a_process_that_was_paused_too_long_corrupts_nothing(tmp_path, settings, expected_contents, nodes):
    pids, exit_codes = nodes(2)
    wait_until(lambda: is_writing(tmp_path, 1))
    os.kill(pids[1], signal.SIGSTOP)
    wait_until(lambda: "duplicates removed" in read_log(tmp_path, 0))
    assert contents(tmp_path / "out_text_document") == expected_contents
    os.kill(pids[1], signal.SIGCONT)
    assert exit_codes() == [0, 0], read_log(tmp_path, 0) + read_log(tmp_path, 1)
    assert "another process has merged the partitions" in read_log(tmp_path, 1)
    assert contents(tmp_path / "out_text_document") == expected_contents
    assert not (tmp_path / "out_parts").exists()


def test_other_flags_are_refused_while_a_process_works_before_its_first_partition(tmp_path, settings):
    other = command.prepare_job(settings)
    store = PartitionStore(tmp_path / "out_parts", other.build_plan(), ["text"], "uint16", 12)
    store.open()
    with store.acquire(0):
        with pytest.raises(
            InputError, match=r"plan\.json: field `append_eod`: found true, expected false; give the first command's"
        ):
            preprocess(dataclasses.replace(settings, append_eod=False))
        assert not store.is_gone()
    preprocess(dataclasses.replace(settings, append_eod=False))  # nobody works there any more
    assert store.is_gone() and not store.folder.exists()


def test_a_merge_that_was_overtaken_during_a_pause_ends_well(tmp_path, settings, monkeypatch, capsys):
    (whole,) = preprocess(dataclasses.replace(settings, output_prefix=str(tmp_path / "whole"), partitions=1))
    real, overtaking = PartitionStore.record_merge, []

    def record_merge(store, hashes):
        if not overtaking:
            overtaking.append(True)
            with monkeypatch.context() as patch:
                patch.setattr(ClaimFolder, "_is_live", lambda *_: False)
                patch.setattr(ClaimFolder, "_remove_temporary_files", lambda *_: None)
                preprocess(settings)
        real(store, hashes)

    monkeypatch.setattr(PartitionStore, "record_merge", record_merge)
    (prefix,) = preprocess(settings)
    assert contents(prefix) == contents(whole)
    assert "another process has merged the partitions" in capsys.readouterr().out
    assert not [path for path in tmp_path.iterdir() if "parts" in path.name or path.name.endswith(".tmp")]


def test_a_folder_that_another_process_removes_is_made_again(tmp_path, settings, monkeypatch):
    (whole,) = preprocess(dataclasses.replace(settings, output_prefix=str(tmp_path / "whole"), partitions=1))
    real, removed = PartitionStore.write, []

    def write(store, number, *more):
        if number == 3 and not removed:
            removed.append(True)
            store.remove()
        real(store, number, *more)

    monkeypatch.setattr(PartitionStore, "write", write)
    (prefix,) = preprocess(settings)
    assert contents(prefix) == contents(whole) and removed
