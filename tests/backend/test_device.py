"""The backend of a machine, and processes that share it."""

import os

import pytest
import torch

from megaenc.backend import detect_backend, initialize
from megaenc.backend.device import cpu_has_bf16, peak_bf16_flops


def test_host_is_found_and_measured():
    backend = detect_backend()
    assert (backend.name, backend.process_group, backend.device) == (
        "cpu",
        "gloo",
        torch.device("cpu"),
    )
    assert backend.has_bf16 == cpu_has_bf16()
    assert backend.peak_flops(torch.float32) > 1e8


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2500),
        ("AMD INSTINCT MI250 (MCM) OAM AC MBA", 181),
        ("AMD Instinct MI250X/MI250", 191.5),
        ("AMD Instinct MI355X", 2500),
        ("NVIDIA A10", 0),
        ("NVIDIA L40", 0),
        ("", 0),
    ],
)
def test_peak_of_a_device_by_its_name(name, teraflops):
    """It is the maker's dense bf16 peak; unknown devices have 0 and no utilization."""
    assert peak_bf16_flops(name) == teraflops * 1e12


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu avx2 f16c", False),
        ("Features\t: fp asimd bf16", True),
        ("", False),
    ],
)
def test_bf16_is_the_default_where_the_processor_has_it(line, expected, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert cpu_has_bf16(str(tmp_path / "cpuinfo")) == expected
    assert not cpu_has_bf16(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("on_this_node", "in_all", "threads"), [(1, 1, 8), (1, 2, 8), (4, 8, 2), (3, 3, 2)]
)
def test_the_cores_of_a_node_are_shared_by_the_processes_on_it(
    on_this_node, in_all, threads, monkeypatch
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_this_node))
    monkeypatch.setenv("WORLD_SIZE", str(in_all))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(initialize, "usable_core_count", lambda: 8)
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    initialize.divide_cores_among_ranks()
    assert taken == [threads]


def test_connections_are_limited_before_cuda_starts(monkeypatch):
    """torch.cuda.is_available starts CUDA, which reads the variable only then."""
    from megaenc.backend import device

    # monkeypatch removes the variable at the end.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    values = []
    monkeypatch.setattr(
        device.torch.cuda,
        "is_available",
        lambda: values.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")),
    )
    assert device.detect_backend.__wrapped__().is_cpu and values == ["1"]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    device.detect_backend.__wrapped__()
    assert values == ["1", "8"]
