"""Several processes with one command and work directory; one dies, one pauses."""

import dataclasses
import os
import re
import signal
import subprocess
import sys

import pytest
from text_helpers import TEXTS, contents, corpus_settings, write_jsonl
from waiting import wait_until

from megaenc.data.preprocess import command, partitions
from megaenc.data.preprocess.claims import ClaimDirectory
from megaenc.data.preprocess.command import preprocess
from megaenc.data.preprocess.work_directory import WorkDirectory
from megaenc.data.sources import resolve
from megaenc.errors import InputError

# Forks of a process that run the same preprocessing command with slow input. The process prints
# their ids, then the exit codes.
# Each takes itself to be alone on its machine, so that only silence tells the others of its death.
NODES = """
import contextlib, os, sys, time
from megaenc.data.preprocess import claims, command, partitions
from megaenc.data.preprocess.work_directory import WorkDirectory
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
@contextlib.contextmanager
def new_partition(directory, index, real=WorkDirectory.new_partition):
    print("writing", index, flush=True)
    with real(directory, index) as partition:
        yield partition
    print("wrote", index, flush=True)
WorkDirectory.new_partition = new_partition
for index in range(count):
    pids.append(os.fork())
    if not pids[-1]:
        os.dup2(os.open(f"log{index}", os.O_CREAT | os.O_WRONLY, 0o644), 1)
        os.dup2(1, 2)
        command.main(sys.argv[1:])
        sys.exit()
print(*pids, flush=True)
print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


@pytest.fixture
def settings(tmp_path, tokenizer_directory):
    """Return the settings for a hundred documents, some equal, in twelve partitions."""
    corpus = write_jsonl(
        tmp_path / "corpus.jsonl",
        [f"{index % 7} {text}" for index in range(20) for text in TEXTS],
    )
    return corpus_settings(corpus, tokenizer_directory, partitions=12, deduplicate="exact")


@pytest.fixture
def nodes(tmp_path, settings):
    """Start processes of one command; return their ids and a function to await exits."""
    flags = [
        "--input",
        *settings.input,
        "--output-prefix",
        settings.output_prefix,
        "--tokenizer",
        settings.tokenizer,
    ]
    flags += ["--append-eod", "--workers", "1", "--partitions", "12", "--deduplicate", "exact"]
    started = []
    pids = []

    def start(count):
        for index in range(count):
            (tmp_path / f"log{index}").touch()
        words = [sys.executable, "-c", NODES, *flags, str(count)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path))
        pids.extend(map(int, started[0].stdout.readline().split()))
        return pids, lambda: list(map(int, started[0].communicate(timeout=120)[0].split()))

    yield start
    for pid in pids if started[0].poll() is None else []:
        os.kill(pid, signal.SIGKILL)
    started[0].kill()
    started[0].wait()


def read_log(directory, index):
    return (directory / f"log{index}").read_text()


def is_writing(directory, index):
    """Return whether a process is writing a partition, and how many it has written."""
    log = read_log(directory, index)
    return log.count("writing") > log.count("wrote") and log.count("wrote") > 0


@pytest.mark.slow
def test_processes_share_the_partitions_and_one_that_is_killed_loses_nothing(
    tmp_path, settings, expected_contents, nodes
):
    pids, exit_codes = nodes(3)
    wait_until(lambda: is_writing(tmp_path, 2))
    os.kill(pids[2], signal.SIGKILL)
    assert exit_codes() == [0, 0, -9], read_log(tmp_path, 0) + read_log(tmp_path, 1)
    logs = [read_log(tmp_path, index) for index in range(3)]
    written = [int(index) for log in logs for index in re.findall(r"wrote (\d+)", log)]
    assert sorted(written) == list(range(12))  # none twice
    assert all(log.count("wrote") > 1 for log in logs[:2])
    assert sorted("merging the partitions  100 %" in log for log in logs) == [False, False, True]
    assert (
        sum("out_parts: another process has merged the partitions" in log for log in logs[:2]) == 1
    )
    assert all(
        "out_text_document: 35 documents, " in log and "65 duplicates removed" in log
        for log in logs[:2]
    )
    assert re.search(r"tokenizing  100 %  partitions 12/12  MB/s \d", logs[0] + logs[1])
    assert contents(tmp_path / "out_text_document") == expected_contents
    assert not [
        path for path in tmp_path.iterdir() if "_parts" in path.name or path.name.endswith(".tmp")
    ]


@pytest.mark.slow
def test_a_process_that_was_paused_too_long_corrupts_nothing(
    tmp_path, settings, expected_contents, nodes
):
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


def test_other_flags_are_refused_before_the_first_partition(tmp_path, settings):
    job = command.prepare_job(settings)
    directory = WorkDirectory(job.settings.work_directory, job.build_plan(), ["text"], "uint16", 12)
    directory.open()
    with directory.acquire(0):
        with pytest.raises(
            InputError,
            match=r"plan\.json: field `special_tokens`: found {.*eod.*}, expected {.*none.*}; "
            "give the first",
        ):
            preprocess(dataclasses.replace(settings, append_eod=False))
        directory.leave()
        assert not directory.is_gone()
    directory.leave()  # nobody works there any more
    assert directory.is_gone() and not directory.path.exists()


@pytest.mark.parametrize("step", ["merge", "record_merge"])
def test_a_merge_that_was_overtaken_during_a_pause_ends_well(
    tmp_path, settings, expected_contents, monkeypatch, capsys, step
):
    real = getattr(WorkDirectory, step)
    overtaking = []

    def pause(directory, *more):
        if not overtaking:
            overtaking.append(True)
            with monkeypatch.context() as patch:
                patch.setattr(ClaimDirectory, "_is_abandoned", lambda *_: True)
                preprocess(settings)
        return real(directory, *more)

    monkeypatch.setattr(WorkDirectory, step, pause)
    (prefix,) = preprocess(settings)
    assert contents(prefix) == expected_contents
    assert "another process has merged the partitions" in capsys.readouterr().out
    assert not [
        path for path in tmp_path.iterdir() if "parts" in path.name or path.name.endswith(".tmp")
    ]


def test_two_processes_with_the_same_partition_write_the_same(
    settings, expected_contents, monkeypatch
):
    real = resolve.read_blocks
    stolen = []

    def stop(*_):
        raise KeyboardInterrupt

    def read_blocks(inputs, ranges):
        yield from real(inputs, ranges)
        # Another process takes all work over and stops when it has written some partitions.
        if not stolen:
            stolen.append(True)
            with monkeypatch.context() as patch:
                patch.setattr(ClaimDirectory, "_is_abandoned", lambda *_: True)
                patch.setattr(partitions, "merge_partitions", stop)
                with pytest.raises(KeyboardInterrupt):
                    preprocess(settings)

    monkeypatch.setattr(resolve, "read_blocks", read_blocks)
    (prefix,) = preprocess(settings)
    assert contents(prefix) == expected_contents and stolen


def test_a_directory_that_another_process_removes_is_made_again(
    settings, expected_contents, monkeypatch
):
    real = WorkDirectory.new_partition
    removed = []

    def new_partition(directory, index):
        if index == 3 and not removed:
            removed.append(True)
            directory.remove()
        return real(directory, index)

    monkeypatch.setattr(WorkDirectory, "new_partition", new_partition)
    (prefix,) = preprocess(settings)
    assert contents(prefix) == expected_contents and removed


def test_a_directory_that_another_command_takes_over_is_its_own(tmp_path, settings, monkeypatch):
    real = WorkDirectory.new_partition
    theirs = []

    def new_partition(directory, index):
        if index == 3:
            directory.remove()
            theirs.append(WorkDirectory(directory.path, {"input": "theirs"}, ["text"], "uint16", 1))
            theirs[0].open()
        return real(directory, index)

    monkeypatch.setattr(WorkDirectory, "new_partition", new_partition)
    with pytest.raises(InputError, match=r'plan\.json: field `input`: found "theirs", expected'):
        preprocess(settings)
    assert not theirs[0].is_gone() and [path.name for path in theirs[0].path.iterdir()] == [
        "plan.json"
    ]
