"""Starts in surroundings that are not quite right: one line names what is wrong, or the run goes on."""

import os
import stat
import subprocess
import sys

import pytest
import runs

from megaenc import dist_env, processes
from megaenc.atomic_io import FileLock
from megaenc.errors import InputError


def run_command(arguments, environment, **options) -> subprocess.CompletedProcess:
    """A program of one process in this environment, from which launcher variables are removed."""
    kept = {name: value for name, value in os.environ.items() if name not in (*dist_env.LAUNCHER_VARIABLES, "MASTER_ADDR")}
    kept |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(runs.ROOT)} | environment
    return subprocess.run([sys.executable, *map(str, arguments)], env=kept, text=True, timeout=120, **options)


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"RANK": "zero", "WORLD_SIZE": "1"}, "RANK: found 'zero' in the environment, expected a whole number; torchrun sets it"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: found 'http' in the environment"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR: missing in the environment, which has RANK: start with torchrun"),
        ({"RANK": "0", "MASTER_ADDR": "localhost"}, "MASTER_PORT: missing in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: found 2 in the environment, expected less than WORLD_SIZE, 2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE: found 2 in the environment without RANK, expected both"),
    ],
)
def test_variables_that_no_launcher_sets_are_one_line(environment, complaint, monkeypatch):
    from megaenc.backend.initialize import check_launcher_variables

    for name in (*dist_env.LAUNCHER_VARIABLES, "MASTER_ADDR", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    check_launcher_variables()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as error:
        check_launcher_variables()
    assert complaint in str(error.value)


def test_empty_variables_count_as_unset(small_corpus, tmp_path):
    """RANK= in a job file is no rank; Slurm's tasks without it are told."""
    empty = dict.fromkeys((*dist_env.LAUNCHER_VARIABLES, "MASTER_ADDR"), "")
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--train-iters", "20", "--exit-interval", "1"]
    ended = run_command([runs.PRETRAIN, *flags], empty | {"SLURM_NTASKS": "8"}, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    assert "SLURM_NTASKS is 8, but RANK is not set: this is a run of one process" in ended.stdout


def test_a_wrong_variable_ends_the_command_with_one_line(small_corpus):
    flags = [*small_corpus.flags, *runs.SHORT_RUN]
    ended = run_command([runs.PRETRAIN, *flags], {"RANK": "0", "WORLD_SIZE": "1"}, capture_output=True)
    assert ended.returncode == 2 and ended.stderr.startswith("error: MASTER_ADDR: missing") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("limits", [(100, 100_000), (9000, 100_000), (100, 1000)])
def test_the_limit_of_open_files_is_raised_or_named(limits, monkeypatch):
    """For the first of 4,096 ranks."""
    set_limits = [limits]
    monkeypatch.setattr(processes.resource, "getrlimit", lambda kind: set_limits[-1])
    monkeypatch.setattr(processes.resource, "setrlimit", lambda kind, values: set_limits.append(values))
    if limits[1] == 1000:
        with pytest.raises(InputError, match=r"ulimit -Hn: found a limit of 1,000 open files, expected 8,\d+ or more for 4,096"):
            processes.allow_open_files(8192, "4,096 ranks")
        return
    processes.allow_open_files(8192, "4,096 ranks")
    assert set_limits[-1] == (100_000, 100_000)


@pytest.mark.parametrize("mask", [0o002, 0o022])
def test_a_lock_follows_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        lock = FileLock(tmp_path / "lock")
        assert lock.acquire()
        lock.release()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o666 & ~mask


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write any file")
def test_a_lock_that_may_not_be_written_is_named(tmp_path):
    from megaenc.training.run_lock import RunLock

    (tmp_path / ".lock").touch(0o444)
    with pytest.raises(InputError, match=r"\.lock: Permission denied; expected a file that you may write"):
        RunLock(tmp_path)


CLOSED = """
import os, subprocess, sys
for descriptor in map(int, sys.argv[1].split(",")):
    os.close(descriptor)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.parametrize("closed", ["1", "0,1,2"])
@pytest.mark.parametrize("command", [["--version"], ["estimate", "--gpu", "h100"], ["summary", "RUN"]])
def test_closed_standard_streams_are_as_devnull(closed, command, saved_run, tmp_path):
    """As services and cron have them."""
    words = [str(saved_run) if word == "RUN" else word for word in command]
    ended = run_command(["-c", CLOSED, closed, "-m", "megaenc", *words], {}, stderr=subprocess.PIPE, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_folder_whose_name_is_not_utf_8_is_one_line(small_corpus, tmp_path, refusal):
    from megaenc.training.command import main

    name = os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")
    assert "--save " in (line := refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--save", name]))
    assert "not UTF-8; expected another name" in line


@pytest.mark.parametrize("ranks", [8, 64, 256, 504, 512])
@pytest.mark.parametrize("config", sorted((runs.ROOT / "configs" / "layout").glob("*.yaml")), ids=lambda path: path.stem)
def test_layouts_of_clusters_are_planned_on_a_login_node(config, ranks, small_corpus, monkeypatch, capsys):
    """What only the machine of the run has is a line, not a refusal; what the ranks cannot be laid out as is refused."""
    from megaenc.training.command import main

    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    flags = ["--config", str(config), "--data-path", str(small_corpus.prefix), "--tokenizer", str(small_corpus.tokenizer)]
    flags += ["--split", "90,10,0", "--train-iters", "10000", "--dry-run"]
    main(flags)
    assert "on this machine it would be refused: --overlap-grad-reduce: needs an accelerator" in capsys.readouterr().out
    main([*flags, "--gpu", config.stem.split("-")[0]])
    said = capsys.readouterr().out
    assert f"{ranks} processes on {config.stem.split('-')[0]}" in said
    assert "refused" not in said


def test_a_dry_run_says_what_its_device_lacks(small_corpus, capsys):
    from megaenc.training.command import main

    flags = [*small_corpus.flags, "--seq-length", "64", "--train-iters", "200", "--fp8-format", "hybrid", "--dry-run", "--gpu"]
    main([*flags, "mi250x"])
    assert "on mi250x it would be refused: --fp8-format hybrid: mi250x has no float8" in capsys.readouterr().out
    main([*flags, "H100-PCIe"])
    assert "refused" not in capsys.readouterr().out
