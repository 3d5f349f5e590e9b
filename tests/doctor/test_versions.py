"""Packages that are missing, half installed or of the wrong version."""

import sys
from importlib import metadata

import pytest
from findings import by_name

from megaenc.backend import megatron
from megaenc.doctor import versions
from megaenc.doctor.result import CheckContext


def test_what_is_installed_here_is_right():
    for name in ("torch", "megatron-core", "tokenizers"):
        [finding] = versions.check_package(CheckContext(), name)
        assert (finding.level, finding.result) == ("ok", metadata.version(name))
    findings = by_name(versions.check_versions(CheckContext()))
    assert {each.level for each in findings.values()} == {
        "ok"
    } and "requirements are installed" in findings["packages"].result
    assert (
        "flash-attn-4" in findings["not installed"].result
        and versions.check_package(CheckContext(), "flash-attn-4") == []
    )
    assert {each.name for each in versions.check_libraries(CheckContext())} >= {
        "torch is built for"
    }


@pytest.fixture
def half_installed(tmp_path, monkeypatch):
    """Install a package with metadata whose module raises when imported."""
    (tmp_path / "flash_attn.py").write_text(
        "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEa')"
    )
    (tmp_path / "flash_attn-2.8.3.dist-info").mkdir()
    (tmp_path / "flash_attn-2.8.3.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


def test_a_package_for_another_torch_is_a_note_where_nothing_needs_it(half_installed):
    [finding] = versions.check_package(CheckContext(), "flash-attn")
    assert finding.level == "note" and finding.result.startswith(
        "2.8.3, cannot be imported: ImportError: undefined symbol"
    )
    assert "pip uninstall flash-attn" in finding.advice


def test_and_a_problem_where_everything_does(half_installed, monkeypatch):
    monkeypatch.setattr(versions, "REQUIRED_PACKAGES", ("flash-attn", "no-such-package"))
    [finding] = versions.check_package(CheckContext(), "flash-attn")
    assert finding.level == "problem"
    [finding] = versions.check_package(CheckContext(), "no-such-package")
    assert (finding.level, finding.result) == ("problem", "not installed")


def test_a_megatron_core_that_the_adapters_do_not_know_is_a_problem(monkeypatch):
    monkeypatch.setattr(megatron, "KNOWN_VERSIONS", ("0.15.0",))
    [finding] = versions.check_package(CheckContext(), "megatron-core")
    assert (
        finding.level == "problem"
        and "expected 0.15.0" in finding.result
        and "megatron-core==0.15.0" in finding.advice
    )


def test_what_megaenc_s_own_list_asks_for_is_looked_up(monkeypatch):
    monkeypatch.setattr(
        metadata,
        "requires",
        lambda name: ["torch>=99", "psutil", "nowhere>=1", "ruff>=99; extra == 'dev'"],
    )
    finding = versions.check_requirements()
    assert finding.level == "problem"
    assert (
        "torch" in finding.result
        and ">=99" in finding.result
        and "nowhere is missing" in finding.result
    )
    assert "psutil" not in finding.result and "ruff" not in finding.result
