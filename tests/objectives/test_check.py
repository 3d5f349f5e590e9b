"""The command that checks an objective: ours and the example pass; leaks, hidden state and broken contracts are refused."""

import shutil

import numpy as np
import pytest
import runs

from megaenc.objectives import known
from megaenc.objectives.check import CheckConfig, main, make_packs, run_checks

HEAD = """
import random
import numpy as np
from dataclasses import dataclass
from megaenc.objectives import Attention, Objective, Targets, option

@dataclass(frozen=True)
class Made(Objective):
    name = "made"
    attention = Attention.BIDIRECTIONAL
    {shift}
    share: float = option(0.3, "share of the tokens", above=0, high=1)

    def targets(self, pack, randomness):
        at = np.flatnonzero(randomness.uniforms("made", len(pack.tokens)) < self.share)
        inputs = pack.tokens.copy()
        {body}
"""
HIDDEN = "inputs[at] = self.vocabulary.mask_id; return Targets(inputs, at, pack.tokens[at])"
NEXT = "at = np.setdiff1d(np.arange(len(inputs)), pack.edges[1:] - 1); return Targets(inputs, at, pack.tokens[at + 1])"
CASES = {
    "targets_that_are_read": ("", "return Targets(inputs, at, pack.tokens[at])", "leaks: 100.00 % of the targets are read"),
    "the_next_token_read_bidirectionally": ("shift = 1", NEXT, "leaks: 100.00 % of the targets are read"),
    "the_clock_of_python": ("", f"at = at[: random.Random(hash('x')).randrange(9, 99)]; {HIDDEN}", "differ in another process"),
    "a_changed_pack": ("", "pack.tokens[at] = 1; return Targets(pack.tokens, at, pack.tokens[at])", "contract: objective `made`"),
    "no_predictions": ("", "return Targets(inputs, at[:0], at[:0])", "predictions: 0.00 %"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", sorted({*known()} - {"distill"}))  # which needs a teacher: test_distillation.py
def test_own_objectives_pass(name):
    _, results = run_checks(CheckConfig(name))
    assert [result.name for result in results if result.passed is False] == []
    rows = {result.name: result.text for result in results}
    assert rows["leaks"].startswith("0.00 %") and "1,048,576 tokens" in rows["predictions"]


@pytest.mark.parametrize("case", CASES)
def test_what_a_plug_in_does_wrong_is_refused(case, folder, refusal):
    shift, body, words = CASES[case]
    (folder / f"{case}.py").write_text(HEAD.format(shift=shift, body=body))
    line = refusal(main, [f"{case}:Made"])
    assert line.startswith(f"error: {case}:Made: ") and words in line


def test_the_example_and_a_right_plug_in_pass(folder, capsys):
    shutil.copy(runs.ROOT / "examples/objective_plugin/word_order.py", folder)
    main(["word_order:WordOrder", "--options", "share=0.5", "length=4"])
    assert "word_order(share=0.5,length=4)" in capsys.readouterr().out
    (folder / "right.py").write_text(HEAD.format(shift="", body=HIDDEN))
    main(["right:Made", "--options", "share=0.25"])
    output = capsys.readouterr().out
    assert "failed" not in output and "25.0" in output


def test_packs_have_what_objectives_meet_seldom():
    packs = list(make_packs(16))
    assert all(pack.edges[0] == 0 and pack.edges[-1] == len(pack.tokens) == 2048 for pack in packs)
    assert np.diff(packs[7].edges).max() <= 2 and (packs[6].tokens[:1024] < 3).all()
