"""Starts with a wrong environment: an error of one line, or the run goes on."""

import os
import stat
import sys

import pytest
import runs

from megaenc import dist_env, machine
from megaenc.atomic_io import FileLock
from megaenc.errors import InputError
from megaenc.training.command import main


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (
            {"RANK": "zero", "WORLD_SIZE": "1"},
            "RANK: found 'zero' in the environment, expected a whole number; torchrun sets it",
        ),
        ({"RANK": "0", "MASTER_ADDR": "localhost"}, "MASTER_PORT: missing in the environment"),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK: found 2 in the environment, expected less than WORLD_SIZE, 2",
        ),
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


def test_empty_variables_count_as_unset_and_a_wrong_one_ends_the_command_with_one_line(short_run):
    """An empty RANK in a job file is no rank; Slurm tasks without it get an error."""
    empty = dict.fromkeys((*dist_env.LAUNCHER_VARIABLES, "MASTER_ADDR"), "")
    flags = [*short_run, "--exit-interval", "1"]
    ended = runs.script(runs.PRETRAIN, flags, environment=empty | {"SLURM_NTASKS": "8"})
    assert "SLURM_NTASKS is 8, but RANK is not set: this is a run of one process" in ended.stdout
    ended = runs.script(
        runs.PRETRAIN, flags, environment=empty | {"RANK": "0", "WORLD_SIZE": "1"}, expect=2
    )
    assert ended.stderr.startswith("error: MASTER_ADDR: missing")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("soft", [100, 9000])
def test_the_limit_of_open_files_is_raised_or_named(soft, monkeypatch):
    """The process is the first of 4,096 ranks."""
    limits = [(soft, 100_000)]
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(machine.resource, "setrlimit", lambda kind, values: limits.append(values))
    machine.allow_open_files(8192, "4,096 ranks")
    assert limits[-1] == (100_000, 100_000)
    limits.append((100, 1000))
    with pytest.raises(
        InputError,
        match=r"ulimit -Hn: found a limit of 1,000 open files, expected \d+,\d+ or more for 4,096",
    ):
        machine.allow_open_files(8192, "4,096 ranks")


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


CLOSED = """
import os, sys
for descriptor in (0, 1, 2):
    os.close(descriptor)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize("command", [["--version"], ["summary", "RUN"]])
def test_closed_standard_streams_are_as_devnull(command, saved_run):
    """Services and cron close them."""
    words = [str(saved_run) if word == "RUN" else word for word in command]
    assert runs.run([sys.executable, "-c", CLOSED, "-m", "megaenc", *words]).stderr == ""


def test_a_directory_whose_name_is_not_utf_8_is_one_line(small_corpus, tmp_path, refusal):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")
    line = refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--save", name])
    assert "--save " in line
    assert "not UTF-8; expected another name" in line


@pytest.mark.parametrize("ranks", [8, 504])
@pytest.mark.parametrize(
    "config", sorted((runs.ROOT / "configs" / "layout").glob("*.yaml")), ids=lambda path: path.stem
)
def test_layouts_of_clusters_are_planned_on_a_login_node(
    config, ranks, small_corpus, monkeypatch, capsys
):
    """What only the run's machine has is a note; an impossible layout is refused."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    flags = ["--config", str(config), *small_corpus.flags, "--train-iters", "10000", "--dry-run"]
    main(flags)
    assert (
        "on this machine it would be refused: --overlap-grad-reduce: needs an accelerator"
        in capsys.readouterr().out
    )
    gpu = config.stem.split("-")[0]
    main([*flags, "--gpu", gpu])
    said = capsys.readouterr().out
    assert f"{ranks} processes on {gpu}" in said
    assert "refused" not in said


def test_a_dry_run_says_what_its_device_lacks(small_corpus, capsys):
    flags = [
        *small_corpus.flags,
        "--seq-length",
        "64",
        "--train-iters",
        "200",
        "--fp8-format",
        "hybrid",
        "--dry-run",
        "--gpu",
    ]
    main([*flags, "mi250x"])
    assert (
        "on mi250x it would be refused: --fp8-format hybrid: mi250x has no float8"
        in capsys.readouterr().out
    )
    main([*flags, "H100-PCIe"])
    assert "refused" not in capsys.readouterr().out
