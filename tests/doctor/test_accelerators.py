"""Reports of the drivers' programs, from hand-written output."""

from types import SimpleNamespace

import pytest
import torch

from megaenc.doctor import accelerators
from megaenc.doctor.result import CheckContext

ROWS = "{number}, NVIDIA H100 80GB HBM3, 81559, {used}, 570.86.15, {errors}"
ROCM_DEVICES = """\
============================ ROCm System Management Interface ============================
================================= Version of System Component ==================================
Driver version: 6.10.5
====================================== Product Info ======================================
GPU[0]\t\t: Card Series: \t\tAMD Instinct MI250X
GPU[0]\t\t: GFX Version: \t\tgfx90a
GPU[1]\t\t: Card Series: \t\tAMD Instinct MI250X
GPU[1]\t\t: GFX Version: \t\tgfx90a
==================================== Memory Usage (Bytes) ====================================
GPU[0]\t\t: VRAM Total Memory (B): 68702699520
GPU[0]\t\t: VRAM Total Used Memory (B): 11149312
GPU[1]\t\t: VRAM Total Memory (B): 68702699520
GPU[1]\t\t: VRAM Total Used Memory (B): 42949672960
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that puts a program at the front of a minimal PATH."""

    def put(name: str, script: str) -> None:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{file.parent}:/usr/bin:/bin")

    return put


def summary(findings) -> dict:
    return {each.name: (each.level, each.result) for each in findings}


def checked(**context) -> dict:
    return summary(accelerators.check_driver(CheckContext(timeout=10, **context)))


def test_devices_are_counted_by_name_and_those_in_use_or_with_errors_are_named():
    rows = [
        ROWS.format(number=number, used="3", errors=errors)
        for number, errors in enumerate(("0", "[N/A]"))
    ]
    expected = {
        "devices": ("ok", "2 x NVIDIA H100 80GB HBM3, 80 GiB"),
        "driver": ("ok", "570.86.15"),
    }
    assert summary(accelerators.parse_nvidia_smi("\n".join(rows))) == expected
    rows.append(ROWS.format(number=2, used="40960", errors="2"))
    assert summary(accelerators.parse_nvidia_smi("\n".join(rows))) == {
        "devices": ("ok", "3 x NVIDIA H100 80GB HBM3, 80 GiB"),
        "driver": ("ok", "570.86.15"),
        "memory in use": ("note", "2: 40.0 GiB"),
        "memory errors": ("problem", "uncorrected, 2: 2"),
    }


@pytest.mark.parametrize(
    ("name", "script", "words"),
    [
        (
            "nvidia-smi",
            "echo looking; echo 'Unable to determine the device' >&2; exit 255",
            "exit code 255: Unable",
        ),
        (
            "rocm-smi",
            "echo 'ERROR: Driver not initialized (amdgpu not found)'; exit 1",
            "exit code 1: ERROR: Driver",
        ),
        ("nvidia-smi", "exit 1", "exit code 1: no output"),
        ("nvidia-smi", "exec sleep 600", "no answer in 4 s"),
        ("nvidia-smi", "echo 'No devices were found'", "lists no device"),
    ],
)
def test_a_driver_that_has_lost_its_devices_is_a_problem(name, script, words, program):
    program(name, script)
    [(where, (level, result))] = checked().items()
    assert (where, level) == (name, "problem")
    assert result.startswith(words)


@pytest.mark.parametrize("ends", ["", "exit 2"])
def test_rocm_s_program_is_asked_where_it_is_there_and_may_fail_in_one_thing_of_many(program, ends):
    program(
        "rocm-smi", f"case $1 in --showproductname) cat << 'END'\n{ROCM_DEVICES}END\nesac\n{ends}"
    )
    assert checked() == {
        "devices": ("ok", "2 x AMD Instinct MI250X"),
        "architecture": ("ok", "2 x gfx90a"),
        "driver": ("ok", "6.10.5"),
        "memory in use": ("note", "1: 40.0 GiB"),
    }


def test_without_programs_the_kernel_s_own_word_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerators, "find_program", lambda name: "")
    assert checked(root=tmp_path) == {
        "driver": ("ok", "none: neither nvidia-smi nor rocm-smi is installed")
    }
    for path, text in (("dev/kfd", ""), ("sys/module/amdgpu/version", "6.10.5\n")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert checked(root=tmp_path) == {
        "driver": ("note", "amdgpu 6.10.5; neither nvidia-smi nor rocm-smi is installed")
    }


@pytest.fixture
def seen(monkeypatch):
    """Return the finding for `count` accelerators seen by a torch built for `build`."""

    def check(build, count, **context):
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA H100")
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda number: SimpleNamespace(total_memory=80 * 2**30),
        )
        [finding] = accelerators.check_torch_devices(CheckContext(**context))
        return finding

    return check


@pytest.mark.parametrize(
    ("build", "is_there", "environment", "level", "words"),
    [
        (None, False, {}, "ok", ""),
        (None, True, {}, "problem", "CPU build"),
        ("13.0", True, {}, "problem", "driver and torch do not match"),
        ("13.0", True, {"CUDA_VISIBLE_DEVICES": ""}, "note", "none, by CUDA_VISIBLE_DEVICES="),
    ],
)
def test_accelerators_that_torch_does_not_see_are_a_problem(
    build, is_there, environment, level, words, tmp_path, seen
):
    if is_there:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidia0").touch()
    finding = seen(build, 0, root=tmp_path, environment=environment)
    assert finding.level == level
    assert words in finding.result + finding.advice


@pytest.mark.parametrize(
    ("processes", "level", "end", "advice"),
    [
        ("1", "ok", "; 1 checked here, check all with torchrun --nproc-per-node 4", ""),
        ("4", "ok", "", ""),
        ("8", "problem", ", for 8 processes", "one process each: --nproc-per-node 4"),
    ],
)
def test_more_processes_than_devices_are_a_problem(
    processes, level, end, advice, monkeypatch, seen
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    finding = seen("13.0", 4)
    assert (finding.level, finding.result, finding.advice) == (
        level,
        f"4 x NVIDIA H100, 80 GiB{end}",
        advice,
    )
