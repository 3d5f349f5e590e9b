"""What the backend finds, and how processes share a machine."""

import pytest
import torch

from megaenc.backend import Layout, detect
from megaenc.backend.device import host_has_bf16
from megaenc.backend.process import share_cores
from megaenc.errors import InputError


def test_host_is_found_and_measured():
    backend = detect()
    assert (backend.name, backend.process_group, backend.device) == ("cpu", "gloo", torch.device("cpu"))
    assert backend.has_bf16 == host_has_bf16()
    assert backend.peak_flops(torch.float32) > 1e8


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
    assert host_has_bf16(str(tmp_path / "cpuinfo")) == expected
    assert not host_has_bf16(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("layout", "processes", "complaint"),
    [
        (Layout(2, 1), 3, "3 processes cannot be laid out as tensor parallel 2 x pipeline parallel 1: expected a multiple of 2"),
        (Layout(2, 2), 2, "expected a multiple of 4"),
        (Layout(0, 1), 1, "--tensor-model-parallel-size: found 0, expected 1 or more"),
        (Layout(1, 1, sequence_parallel=True), 1, "--sequence-parallel: found --tensor-model-parallel-size 1"),
    ],
)
def test_layout_that_does_not_fit(layout, processes, complaint):
    with pytest.raises(InputError, match=complaint):
        layout.check(processes)


def test_one_process_has_all_cores_and_several_share_them(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("megaenc.backend.process.usable_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        share_cores()
        assert torch.get_num_threads() == 6
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        share_cores()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
