"""The list of installed packages, their licences and the SBOM."""

import runpy
import sys
from importlib import metadata

import pytest
import runs
from small_data import read_json

SCRIPT = runs.ROOT / "tools" / "sbom.py"


def test_every_package_has_a_row_with_its_licence(tmp_path):
    fields = {
        "b": "License-Expression: MIT\nLicense: BSD",
        "A": "License: Apache 2.0\nClassifier: License :: OSI Approved :: Apache Software License",
        "c": "Classifier: License :: OSI Approved :: BSD License\nLicense: The text\n  of it",
        "d": "License: The text\n  of it",
        "e": "Summary: nothing",
    }
    for name, text in fields.items():
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{text}\n"
        (info / "METADATA").write_text(text)
    packages = metadata.distributions(path=[str(tmp_path), str(tmp_path)])
    table = runpy.run_path(str(SCRIPT))["format_licences"](packages)
    assert table.splitlines()[2:] == [
        "| A | 1 | Apache 2.0 |",
        "| b | 1 | MIT |",
        "| c | 1 | BSD License |",
        "| d | 1 | The text |",
        "| e | 1 | not stated |",
    ]


@pytest.mark.slow
@pytest.mark.system
def test_the_sbom_has_each_installed_package(tmp_path):
    file = tmp_path / "sbom.json"
    ended = runs.run([sys.executable, str(SCRIPT), "--output", str(file)], expect=None, timeout=900)
    if ended.returncode and " -m pip " in ended.stderr:
        pytest.skip(f"pip cannot install the writer: {ended.stderr.strip().splitlines()[-1]}")
    assert ended.returncode == 0, ended.stderr
    written = {package["name"] for package in read_json(file)["components"]}
    assert {"megaenc", "torch", "megatron-core"} <= written
    rows = [line.split("|") for line in ended.stdout.splitlines()[2:]]
    assert {name.strip() for _, name, *_ in rows} == written
