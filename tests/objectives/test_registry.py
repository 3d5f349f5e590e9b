"""Objectives of other packages, which are found by their entry points."""

import sys
import textwrap
from dataclasses import dataclass

import pytest
from objective_helpers import VOCABULARY

from megaenc.errors import InputError
from megaenc.objectives import (
    Attention,
    CausalLanguageModeling,
    Objective,
    Schedule,
    find,
    known,
    register,
)

COPYING = """
    from dataclasses import dataclass
    import numpy as np
    from megaenc.objectives import Attention, Objective, Targets, option

    @dataclass(frozen=True)
    class Copying(Objective):
        name = "copying"
        attention = Attention.BIDIRECTIONAL
        every: int = option(1, "predict every so many tokens", low=1)

        def targets(self, pack, randomness):
            predict_at = np.arange(0, len(pack.tokens), self.every)
            return Targets(pack.tokens, predict_at, pack.tokens[predict_at])
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package of one module with entry points, as pip would."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(package, module, source, **offers):
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in offers.items()]
        (info / "entry_points.txt").write_text("\n".join(["[megaenc.objectives]", *lines, ""]))

    before = set(sys.modules)
    yield install
    for module in set(sys.modules) - before:
        del sys.modules[module]


def test_package_is_loaded_when_its_objective_is_asked_for(install):
    install("copy-objectives", "copying_module", COPYING, copying="copying_module:Copying")
    assert "copying" in known()
    find("mlm")
    assert "copying_module" not in sys.modules
    schedule = Schedule.build("clm:0.5,copying(every=3):0.5", 10, VOCABULARY)
    assert schedule.objective(6).every == 3
    assert schedule.canonical == "clm:5,copying(every=3):5"
    with pytest.raises(
        InputError,
        match=r"at character 15 of .*option `every`: found 0, expected a whole number, 1 or more",
    ):
        Schedule.build("copying(every=0)", 10, VOCABULARY)


def test_two_packages_offer_one_name(install):
    install("copy-objectives", "copying_module", COPYING, copying="copying_module:Copying")
    install("more-objectives", "more_module", COPYING, copying="more_module:Copying")
    with pytest.raises(
        InputError,
        match=r"objective `copying`: offered by package `\S+` and by package `\S+`, expected one",
    ) as caught:
        find("copying")
    assert "copy-objectives" in str(caught.value)
    assert "more-objectives" in str(caught.value)


def test_package_offers_a_built_in_name(install):
    install("copy-objectives", "copying_module", COPYING, mlm="copying_module:Copying")
    with pytest.raises(
        InputError,
        match=(
            r"objective `mlm`: package `copy-objectives` offers it, but "
            r"megaenc.objectives.masking:.* has that name"
        ),
    ):
        find("mlm")


@pytest.mark.parametrize(
    ("source", "value", "complaint"),
    [
        (
            "import no_such_module",
            "broken:Thing",
            "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("", "broken:Thing", "cannot be loaded: AttributeError"),
        (
            "Thing = 3",
            "broken:Thing",
            "offers broken:Thing, which is no subclass of megaenc.objectives.Objective",
        ),
        (COPYING, "broken:Objective", "offers broken:Objective, which has no method `targets`"),
        (
            "from megaenc.objectives import Masking",
            "broken:Masking",
            "offers broken:Masking, which has no method `eligible`",
        ),
        (COPYING, "broken:Copying", "offers broken:Copying, which is called `copying`"),
        (
            COPYING.replace('"copying"', '"mix"'),
            "broken:Copying",
            "which is called `mix`, which is a mixture in a schedule",
        ),
        (
            COPYING.replace('name = "copying"', ""),
            "broken:Copying",
            "which lacks a `name` or an `attention`",
        ),
    ],
)
def test_broken_package_is_named(install, source, value, complaint):
    install("broken-objectives", "broken", source, thing=value)
    with pytest.raises(InputError) as caught:
        find("thing")
    assert str(caught.value).startswith("objective `thing`: package `broken-objectives` ")
    assert complaint in str(caught.value)


def test_registering_twice_or_something_else():
    with pytest.raises(ValueError, match="objective `clm` is registered twice"):
        register(dataclass(frozen=True)(type("Other", (CausalLanguageModeling,), {})))
    with pytest.raises(ValueError, match="is no subclass"):
        register(int)
    with pytest.raises(ValueError, match="has no method `targets`"):
        register(type("Half", (Objective,), {"name": "half", "attention": Attention.CAUSAL}))
