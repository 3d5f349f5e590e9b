"""What the drivers' programs say, from words of theirs written down by hand, and programs that hang."""

import time

import pytest

from megaenc.doctor import accelerators
from megaenc.doctor.result import ProbeContext

ROWS = "{number}, NVIDIA H100 80GB HBM3, 81559, {used}, 570.86.15, {errors}"
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\tPIX\t0-51\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV18\tSYS\t52-103\t1\t\tN/A
GPU3\tSYS\tSYS\tNV18\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
ROCM_TOPOLOGY = """============================ ROCm System Management Interface ============================
================================ Link Type between two GPUs ================================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         XGMI
GPU1   XGMI         0            XGMI
GPU2   XGMI         XGMI         0
================================== End of ROCm SMI Log ===================================
"""

ROCM_DEVICES = """============================ ROCm System Management Interface ============================
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
    """Put a program in front of the PATH, which is otherwise that of the shell's own tools."""

    def put(name: str, script: str) -> None:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{file.parent}:/usr/bin:/bin")

    return put


def devices(count=4, used="3", errors="0") -> str:
    return "\n".join(ROWS.format(number=number, used=used, errors=errors) for number in range(count))


def test_devices_are_counted_by_name():
    findings = {each.name: each.result for each in accelerators.parse_nvidia_smi(devices())}
    assert findings == {"devices": "4 x NVIDIA H100 80GB HBM3, 80 GiB", "driver": "570.86.15"}


def test_memory_in_use_and_uncorrected_errors_are_named():
    findings = {
        each.name: each
        for each in accelerators.parse_nvidia_smi(devices(1) + "\n" + ROWS.format(number=1, used="40960", errors="2"))
    }
    assert (findings["memory in use"].level, findings["memory in use"].result) == ("note", "1: 40.0 GiB")
    assert (findings["memory errors"].level, findings["memory errors"].result) == ("problem", "uncorrected, 1: 2")


def test_a_device_without_error_counts_is_fine():
    assert {each.level for each in accelerators.parse_nvidia_smi(devices(1, errors="[N/A]"))} == {"ok"}


def test_links_decide_the_layout(program):
    def found(topology: str) -> list:
        program("nvidia-smi", f"cat << 'END'\n{topology}END")
        return accelerators.check_links(["nvidia-smi", "topo", "-m"], 20)

    pairs = {(0, 1): "NV18", (2, 3): "NV18", **dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 3)], "SYS")}
    assert accelerators.parse_topology(TOPOLOGY) == pairs
    [weak] = found(TOPOLOGY)
    assert (weak.level, weak.result) == ("note", "4 pairs SYS, 2 pairs NV18") and "tensor parallelism" in weak.advice
    [strong] = found(ROCM_TOPOLOGY)
    assert (strong.level, strong.result) == ("ok", "all XGMI")
    assert found(ROCM_TOPOLOGY.replace("XGMI", "PCIE"))[0].level == "ok", "there are none that are linked better"
    assert found("") == []


def test_a_driver_that_hangs_is_a_problem_and_is_left(program):
    program("nvidia-smi", "sleep 60")
    begin = time.monotonic()
    findings = accelerators.check_driver(ProbeContext(timeout=0.5))
    assert time.monotonic() - begin < 10
    assert (findings[0].level, findings[0].name, findings[0].result) == ("problem", "nvidia-smi", "no answer in 0.2 s")


def test_a_driver_that_has_lost_its_devices_is_a_problem(program):
    program("nvidia-smi", "echo 'Unable to determine the device handle: Unknown Error'; exit 255")
    finding = accelerators.check_driver(ProbeContext(timeout=20))[0]
    assert finding.level == "problem" and finding.result.startswith("exit code 255: Unable to determine the device handle")


def test_rocm_s_program_is_asked_where_it_is_there(program):
    program("rocm-smi", f"case $1 in --showproductname) cat << 'END'\n{ROCM_DEVICES}END\nesac")
    findings = {each.name: each.result for each in accelerators.check_driver(ProbeContext(timeout=20))}
    assert findings == {
        "devices": "2 x AMD Instinct MI250X",
        "architecture": "2 x gfx90a",
        "driver": "6.10.5",
        "memory in use": "1: 40.0 GiB",
    }


def test_rocm_s_program_may_fail_in_one_thing_of_many(program):
    program("rocm-smi", f"case $1 in --showproductname) cat << 'END'\n{ROCM_DEVICES}END\nesac\nexit 2")
    finding = {each.name: each.level for each in accelerators.check_driver(ProbeContext(timeout=20))}
    assert finding["devices"] == "ok" and "rocm-smi" not in finding
    program("rocm-smi", "echo 'ERROR: Driver not initialized (amdgpu not found in modules)'; exit 1")
    [finding, *_] = accelerators.check_driver(ProbeContext(timeout=20))
    assert (finding.name, finding.level) == ("rocm-smi", "problem") and "amdgpu not found" in finding.result


def test_without_programs_the_kernel_s_own_word_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerators, "find_program", lambda name: "")
    assert accelerators.check_driver(ProbeContext(root=tmp_path))[0].level == "ok"
    for path, text in (("dev/kfd", ""), ("sys/module/amdgpu/version", "6.10.5\n")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    [finding] = accelerators.check_driver(ProbeContext(root=tmp_path))
    assert (finding.level, finding.result) == ("note", "amdgpu 6.10.5; neither nvidia-smi nor rocm-smi is installed")


def test_accelerators_that_torch_does_not_see_are_a_problem(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert accelerators.check_torch_devices(ProbeContext(root=tmp_path))[0].level == "ok"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    [finding] = accelerators.check_torch_devices(ProbeContext(root=tmp_path))
    assert finding.level == "problem" and "CPU build" in finding.advice
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    [finding] = accelerators.check_torch_devices(ProbeContext(root=tmp_path))
    assert finding.level == "problem" and "driver and torch do not match" in finding.advice
    [finding] = accelerators.check_torch_devices(ProbeContext(root=tmp_path, environment={"CUDA_VISIBLE_DEVICES": ""}))
    assert (finding.level, finding.result) == ("note", "none, by CUDA_VISIBLE_DEVICES=")


def test_more_processes_than_devices_are_a_problem(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: type("Of", (), {"total_memory": 80 * 2**30}))
    text = "4 x NVIDIA H100, 80 GiB; 1 checked here, check all with torchrun --nproc-per-node 4"
    assert accelerators.check_torch_devices(ProbeContext())[0].result == text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert accelerators.check_torch_devices(ProbeContext())[0].result == "4 x NVIDIA H100, 80 GiB"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    [finding] = accelerators.check_torch_devices(ProbeContext())
    assert finding.level == "problem" and "--nproc-per-node 4" in finding.advice
