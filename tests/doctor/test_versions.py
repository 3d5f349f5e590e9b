"""Packages that are missing, half installed or of the wrong version."""

import sys
from importlib import metadata

import pytest

from megaenc.backend import megatron
from megaenc.doctor import versions
from megaenc.doctor.result import Finding, Probe, ProbeContext


def test_every_package_is_a_probe_of_its_own():
    """An import may take its process with it."""
    found = versions.check_versions(ProbeContext())
    probes = {each.name: each.function for each in found if isinstance(each, Probe)}
    assert {"torch", "megatron-core", "transformers", "tokenizers"} <= set(probes)
    said = {each.name: each.result for each in found if isinstance(each, Finding)}
    assert "flash-attn" in probes or "flash-attn" in said["not installed"]


def test_what_is_installed_here_is_right():
    for name in ("torch", "megatron-core", "tokenizers"):
        [found] = versions.check_package(ProbeContext(), name)
        assert (found.level, found.result) == ("ok", metadata.version(name))
    assert versions.check_requirements().level == "ok"
    assert {each.name for each in versions.check_libraries(ProbeContext())} >= {"torch is built for"}


@pytest.fixture
def half_installed(tmp_path, monkeypatch):
    """A package with metadata, whose module raises when it is imported."""
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEa')")
    (tmp_path / "flash_attn-2.8.3.dist-info").mkdir()
    (tmp_path / "flash_attn-2.8.3.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


def test_a_package_for_another_torch_is_a_note_where_nothing_needs_it(half_installed):
    [found] = versions.check_package(ProbeContext(), "flash-attn")
    assert found.level == "note" and found.result.startswith("2.8.3, cannot be imported: ImportError: undefined symbol")
    assert "pip uninstall flash-attn" in found.advice


def test_and_a_problem_where_everything_does(half_installed, monkeypatch):
    monkeypatch.setattr(versions, "_REQUIRED", ("flash-attn", "no-such-package"))
    [found] = versions.check_package(ProbeContext(), "flash-attn")
    assert found.level == "problem"
    [found] = versions.check_package(ProbeContext(), "no-such-package")
    assert (found.level, found.result) == ("problem", "not installed")


def test_a_megatron_core_that_the_adapters_do_not_know_is_a_problem(monkeypatch):
    monkeypatch.setattr(megatron, "KNOWN_VERSIONS", ("0.15.0",))
    [found] = versions.check_package(ProbeContext(), "megatron-core")
    assert found.level == "problem" and "expected 0.15.0" in found.result and "megatron-core==0.15.0" in found.advice


@pytest.mark.parametrize(
    ("there", "wanted", "said"),
    [
        ({"triton": "3.6.0"}, "triton==3.6.0; platform_system == 'Linux'", ""),
        ({"triton": "3.7.1"}, "triton==3.6.0; platform_system == 'Linux'", "triton 3.7.1; this torch requires triton==3.6.0"),
        ({"triton": "3.7.1"}, "triton==3.6.0; platform_system == 'Windows'", ""),
        ({"triton": "3.7.1"}, "sympy>=1.13", ""),
        ({"triton": "3.6.0"}, "pytorch-triton-rocm==3.6.0", "triton 3.6.0; this torch requires pytorch-triton-rocm==3.6.0"),
        (
            {"triton": "3.7.1", "pytorch-triton-rocm": "3.6.0"},
            "pytorch-triton-rocm==3.6.0",
            "triton 3.7.1 and pytorch-triton-rocm 3.6.0",
        ),
    ],
)
def test_a_triton_that_torch_did_not_ask_for_is_a_note(there, wanted, said, monkeypatch):
    monkeypatch.setattr(versions, "_installed_version", lambda name: there.get(name, ""))
    monkeypatch.setattr(versions, "_import_package", lambda name: None)
    monkeypatch.setattr(metadata, "requires", lambda name: [wanted, "filelock"])
    [found] = versions.check_package(ProbeContext(), "triton")
    assert (found.level, found.result) == (("note", said) if said else ("ok", there["triton"]))
    assert bool(found.advice) == bool(said)


def test_what_megaenc_s_own_list_asks_for_is_looked_up(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=99", "psutil", "nowhere>=1", "ruff>=99; extra == 'dev'"])
    found = versions.check_requirements()
    assert found.level == "problem"
    assert "torch" in found.result and ">=99" in found.result and "nowhere is missing" in found.result
    assert "psutil" not in found.result and "ruff" not in found.result
