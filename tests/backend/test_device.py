"""What the backend finds, and how processes share a machine."""

import os

import pytest
import torch

from megaenc.backend import ParallelConfig, detect_backend
from megaenc.backend.device import cpu_has_bf16, peak_bf16_flops
from megaenc.backend.initialize import divide_cores_among_ranks
from megaenc.errors import InputError


def test_host_is_found_and_measured():
    backend = detect_backend()
    assert (backend.name, backend.process_group, backend.device) == ("cpu", "gloo", torch.device("cpu"))
    assert backend.has_bf16 == cpu_has_bf16()
    assert backend.peak_flops(torch.float32) > 1e8


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A30", 165),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H800", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI210", 181),
        ("AMD Instinct MI250X", 191.5),
        ("AMD INSTINCT MI250 (MCM) OAM AC MBA", 181),
        ("AMD Instinct MI250X/MI250", 191.5),
        ("AMD Instinct MI300A", 980),
        ("AMD Instinct MI300X OAM", 1307),
        ("AMD Instinct MI325X", 1307),
        ("AMD Instinct MI355X", 2500),
        ("NVIDIA A10", 0),
        ("NVIDIA GeForce RTX 4090", 0),
        ("NVIDIA L40", 0),
        ("", 0),
    ],
)
def test_peak_of_a_device_by_its_name(name, teraflops):
    """Dense bf16 of the maker's data sheet; 0 where the table has no such device, so that no utilization is made up."""
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
    ("layout", "processes", "complaint"),
    [
        (
            ParallelConfig(2, 1),
            3,
            "3 processes cannot be laid out as tensor parallel 2 x pipeline parallel 1: expected a multiple of 2",
        ),
        (ParallelConfig(2, 2), 2, "expected a multiple of 4"),
        (ParallelConfig(0, 1), 1, "--tensor-model-parallel-size: found 0, expected 1 or more"),
        (ParallelConfig(1, 1, sequence_parallel=True), 1, "--sequence-parallel: found --tensor-model-parallel-size 1"),
    ],
)
def test_layout_that_does_not_fit(layout, processes, complaint):
    with pytest.raises(InputError, match=complaint):
        layout.check(processes)


def test_one_process_has_all_cores_and_several_share_them(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("megaenc.backend.initialize.usable_core_count", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        divide_cores_among_ranks()
        assert torch.get_num_threads() == 6
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        divide_cores_among_ranks()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_connections_are_limited_before_cuda_starts(monkeypatch):
    """torch.cuda.is_available starts CUDA, which reads the variable only then."""
    from megaenc.backend import device

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # so that the variable is removed at the end
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    values = []
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: values.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")))
    assert device.detect_backend.__wrapped__().is_cpu and values == ["1"]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    device.detect_backend.__wrapped__()
    assert values == ["1", "8"]
