"""The objective check: ours and the example pass, broken contracts are refused."""

import contextlib
import json
import re
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
import runs

from megaenc.data.worker_pool import WorkerProcessDied
from megaenc.objectives.check import layouts, measure
from megaenc.objectives.check.command import CheckConfig, main, run_checks
from megaenc.objectives.registry import OBJECTIVES

HEAD = """
import os
import random
import threading
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
SHOWN = "return Targets(inputs, at, pack.tokens[at])"
HIDDEN = "inputs[at] = self.vocabulary.mask_id; return Targets(inputs, at, pack.tokens[at])"
NEXT = (
    "at = np.setdiff1d(np.arange(len(inputs)), pack.cu_seqlens[1:] - 1); "
    "return Targets(inputs, at, pack.tokens[at + 1])"
)
PREFIX = "attention = Attention.PREFIX; shift = 1"
# Labels that the model can read: (class attributes, body of `targets`, part of the message).
LEAKS = {
    "at_the_token": ("", SHOWN, "100.0 % at their own place"),
    "at_the_next_token": (
        "",
        f"inputs[at] = 1; inputs[np.minimum(at + 1, len(inputs) - 1)] = pack.tokens[at]; {SHOWN}",
        "(distance 1); expected at most",
    ),
    "by_causal_attention": (
        "attention = Attention.CAUSAL; shift = 1",
        f"inputs = np.roll(inputs, -1); {NEXT}",
        "(distance -1); expected at most",
    ),
    "by_a_prefix_of_the_whole_document": (
        PREFIX,
        NEXT.replace("+ 1])", "+ 1], np.diff(pack.cu_seqlens).astype(np.int64))"),
        "100.0 % at their own place",
    ),
    "in_the_prefix": (
        PREFIX,
        """
        prefixes = np.diff(pack.cu_seqlens).astype(np.int64) // 2
        ends = pack.cu_seqlens[1:] - 1
        spans = [np.arange(end - prefix, end) for end, prefix in zip(ends, prefixes)]
        for start, span in zip(pack.cu_seqlens.tolist(), spans):
            inputs[start : start + len(span)] = pack.tokens[span + 1]
        at = np.concatenate(spans)
        return Targets(inputs, at, pack.tokens[at + 1], prefixes)
        """,
        "(number of the prediction 0); expected at most",
    ),
    "in_the_reversed_document": (
        "",
        """
        for start, end in zip(pack.cu_seqlens.tolist(), pack.cu_seqlens[1:].tolist()):
            inputs[start:end] = inputs[start:end][::-1].copy()
        return Targets(inputs, at, pack.tokens[at])
        """,
        "(distance in the reversed document 0); expected at most",
    ),
    "as_a_sum_in_the_first_token": (
        "",
        f"""
        first = pack.cu_seqlens[:-1]
        inputs[first] = 3 + np.add.reduceat(pack.tokens, first) % 997
        {HIDDEN}
        """,
        "(token 0); expected at most",
    ),
    "of_every_other_document": (
        "",
        f"""
        inputs[at] = 1
        document = np.searchsorted(pack.cu_seqlens, at, "right")
        chosen = np.setdiff1d(at[document % 2 == 1] + 1, pack.cu_seqlens)
        inputs[chosen] = pack.tokens[chosen - 1]
        {SHOWN}
        """,
        "(distance 1); expected at most",
    ),
    "at_other_predictions": (
        "",
        f"inputs[at] = np.roll(pack.tokens[at], 1); {SHOWN}",
        "(place of another prediction 1); expected at most",
    ),
}
CASES = {f"labels_{name}": (*code, words) for name, (*code, words) in LEAKS.items()} | {
    "the_seed_of_hashes": (
        "",
        f"""
        chosen = random.Random(hash("x")).sample(at.tolist(), len(at) // 2)
        at = np.array(sorted(chosen), np.int64)
        {HIDDEN}
        """,
        "differ in another process",
    ),
    "the_thread": (
        "",
        f"at = at[threading.current_thread() is threading.main_thread() :]; {HIDDEN}",
        "inputs: in a prefetching thread",
    ),
    "weights_of_some_packs": (
        "",
        HIDDEN.replace(
            "[at])", "[at], weights=np.ones(len(at), np.float32) if pack.sample % 2 else None)"
        ),
        "micro-batches: weights, which some packs have and others lack: in one row",
    ),
    "a_changed_pack": (
        "",
        "pack.tokens[at] = 1; return Targets(pack.tokens, at, pack.tokens[at])",
        "contract: objective `made`",
    ),
    "no_predictions": ("", "return Targets(inputs, at[:0], at[:0])", "predictions: 0.00 %"),
}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Change to a temporary directory, for checks of a quarter of a million tokens."""
    monkeypatch.setattr(measure, "_PACKS", 128)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", sorted({*OBJECTIVES._registered} - {"distill"})
)  # which needs a teacher: test_distillation.py
def test_own_objectives_pass(name, directory):
    _, results = run_checks(CheckConfig(name))
    assert [result.name for result in results if result.passed is False] == []
    rows = {result.name: result.text for result in results}
    assert rows["leaks"].startswith("0.0 %")
    assert "262,144 tokens" in rows["predictions"]


def test_statistics_are_those_of_the_options():
    """BERT's masks in runs of mean 3 never take EOS, the last token of a document."""
    _, results = run_checks(CheckConfig("mlm(mask=0.15,random=0.1,keep=0.1,span=3)"))
    rows = {
        result.name: [float(number) for number in re.findall(r"\d+\.\d+", result.text)]
        for result in results
    }
    assert rows["leaks"] == pytest.approx([10, 10], abs=1.5)
    _, low, high = rows["predictions"]
    packs = list(measure.make_packs(512, odd=False))
    documents = sum(len(pack.cu_seqlens) - 1 for pack in packs)
    tokens = sum(len(pack.tokens) for pack in packs)
    assert low < 15 * (1 - documents / tokens) < high
    assert 0.1 < high - low < 0.5
    assert rows["inputs"] == pytest.approx([80, 10, 10, 0], abs=0.5)
    assert rows["predicted runs"] == pytest.approx([3], abs=0.1)
    first, middle, last = rows["by position"]
    assert [first, middle] == pytest.approx([15, 15], abs=0.5)
    assert last < 14.5


def test_weights_and_their_divisor_are_told(directory):
    _, results = run_checks(CheckConfig("diffusion(low=0.5,high=0.5)"))
    rows = {result.name: result.text for result in results}
    assert rows["weights"].startswith("2.0000 on average, sum / divisor 1.00")


def test_a_name_that_another_objective_has_is_refused(directory, refusal):
    (directory / "same_name.py").write_text(
        HEAD.format(shift="", body=HIDDEN).replace('name = "made"', 'name = "clm"')
    )
    assert "same_name:Made: is called `clm`, found another objective of this name" in refusal(
        main, ["same_name:Made"]
    )


def test_labels_that_are_kept_too_often_are_refused(refusal):
    line = refusal(main, ["mlm(keep=1)"])
    assert (
        "labels change a visible input, 100.0 % at their own place; expected at most 60 %" in line
    )


@pytest.mark.parametrize("case", CASES)
def test_what_a_plug_in_does_wrong_is_refused(case, directory, refusal):
    shift, body, words = CASES[case]
    (directory / f"{case}.py").write_text(HEAD.format(shift=shift, body=body))
    line = refusal(main, [f"{case}:Made"])
    assert line.startswith(f"error: {case}:Made: ") and words in line


def test_the_example_and_a_right_plug_in_pass(directory, capsys):
    shutil.copy(runs.ROOT / "examples/objective_plugin/word_order.py", directory)
    shutil.copy(runs.ROOT / "examples/objective_plugin/replaced_tokens.py", directory)
    main(["replaced_tokens:ReplacedTokenDetection", "--options", "share=0.25"])
    output = " ".join(capsys.readouterr().out.split())
    assert "leaks not tested: labels are classes" in output
    # Of 997 tokens one is drawn for its own place.
    row = re.search(
        (
            r"predicted tokens: 0\.0 % mask, ([\d.]+) % another token, [\d.]+ % unchanged; "
            r"others: 0\.0 %"
        ),
        output,
    )
    assert float(row[1]) == pytest.approx(25, abs=0.2)
    for options, share in ((["share=0.5", "length=4"], 25), (["share=0.05"], 33)):
        main(["word_order:WordOrder", "--options", *options])
        output = " ".join(capsys.readouterr().out.split())
        # A shuffled token stays in place once in `length` times, and all are visible.
        row = re.search(
            r"100\.0 % of [\d,]+ labels change a visible input, (.*) % at their own place", output
        )
        assert float(row[1]) == pytest.approx(share, abs=2.5)
    (directory / "right.py").write_text(HEAD.format(shift="", body=HIDDEN))
    main(["right:Made", "--options", "share=0.25"])
    output = capsys.readouterr().out
    assert "failed" not in output
    assert "25.0" in output


class _FakeWorker:
    """Stand-in process that trains at once.

    `train(name of the run, output)` returns changes of the second row, or raises.
    """

    def __init__(self, train, output):
        self.train = train
        self.output = output

    def submit(self, job):
        future = Future()
        if not job.flags:
            future.set_result(None)
            return future
        directory = Path(job.flags[-1])
        try:
            change = self.train(directory.name, self.output)
        except Exception as error:
            future.set_exception(error)
            return future
        if change is not None:
            directory.mkdir(exist_ok=True)
            row = {"step": 1, "loss": 5.0, "grad_norm": 1.0, "accuracy": 0.5, "predicted_tokens": 7}
            (directory / "metrics.jsonl").write_text(
                f"{json.dumps(row)}\n{json.dumps(row | {'step': 2} | change)}\n"
            )
            future.set_result(None)
        return future


def _in_four(**change):
    """Return a `train` that returns `change` only for runs of four processes."""
    return lambda name, output: change if "four" in name else {}


def _die(name, output):
    output.write(b"loading\nFatal Python error\n")
    raise WorkerProcessDied(7, "was killed by SIGSEGV")


def _fail(name, output):
    raise ValueError("no tokens")


@pytest.mark.parametrize(
    ("train", "results"),
    [
        (_in_four(grad_norm=1 + 9e-6), ["", ""]),
        (_in_four(loss=5.0001), ["loss 5 and 5.0001 in step 2", ""]),
        (_in_four(grad_norm=1 - 2e-5), ["grad_norm 1 and 0.99998", ""]),
        (_in_four(predicted_tokens=13), ["predicted_tokens 7 and 13", ""]),
        (_in_four(loss=float("nan")), ["loss 5 and nan", ""]),
        (
            lambda name, output: {"loss": 5.0 + (name == "four-stopped")},
            ["", "other losses in 4 processes; expected no state"],
        ),
        (
            lambda name, output: None if name == "four" else {},
            ["training in 4 processes failed: no answer in 0.1 s"],
        ),
        (
            _die,
            [
                (
                    "training in 1 process failed: worker process 7 was killed by SIGSEGV, .*; "
                    "last output: Fatal Python error"
                )
            ],
        ),
        (_fail, ["training in 1 process failed: ValueError: no tokens"]),
    ],
)
def test_runs_are_compared_and_their_failures_named(train, results, monkeypatch):
    monkeypatch.setattr(layouts, "_SECONDS", 0.1)
    monkeypatch.setattr(layouts, "_write_corpus", lambda directory: ())

    @contextlib.contextmanager
    def start_workers(work, count, environment, output):
        yield [_FakeWorker(train, output) for _ in range(count)]

    monkeypatch.setattr(layouts, "start_workers", start_workers)
    actual = layouts.check_training("mlm", ())
    assert len(actual) == len(results)
    for result, words in zip(actual, results, strict=True):
        assert result.passed == (not words)
        assert re.search(words, result.text)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_plug_in_trains_alike_in_every_layout(directory, capfd, refusal):
    shutil.copy(runs.ROOT / "examples/objective_plugin/replaced_tokens.py", directory)
    main(["replaced_tokens:ReplacedTokenDetection", "--options", "share=0.5", "--train"])
    output = " ".join(capfd.readouterr().out.split())
    assert (
        "layouts passed 6 steps in 1 process and in 4 (tensor 2 x pipeline 2)" in output
        and "resume passed" in output
    )
    # In one process there is no rank to see.
    (directory / "of_ranks.py").write_text(
        HEAD.format(shift="", body=f"at = at[int(os.environ.get('RANK', '0')) // 2 :]; {HIDDEN}")
    )
    assert "layouts: " in refusal(main, ["of_ranks:Made", "--train"])
