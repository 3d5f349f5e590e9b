"""Which attention a run computes by: the fastest that is right on every rank, and one line where that is not what was wanted."""

import json

import pytest
import runs
import torch
from checkpoint_helpers import errors

from megaenc.errors import InputError
from megaenc.objectives import Attention

WRONG = "values off by 0.5, where 0.06 is allowed"


def choose(requested, backend, masks=tuple(Attention)):
    from megaenc.backend import ParallelConfig
    from megaenc.model import ModelConfig
    from megaenc.training.attention_select import select_attention

    return select_attention(requested, ModelConfig(), ParallelConfig(), torch.float32, masks, backend)


@pytest.fixture
def machine(monkeypatch, one_process):
    """A machine on which each backend is what it is said to be: right, wrong or missing; says which were tried."""
    from megaenc.model.kernels.selftest import SelfTestResult
    from megaenc.training import attention_select

    def machine(**kinds):
        tried = []

        def check(name, **arguments):
            tried.append((name, arguments))
            kind = kinds.get(name, "missing")
            why = {"right": "", "wrong": WRONG, "missing": "is not installed"}[kind]
            return SelfTestResult(name, kind != "missing", 0.5 if kind == "wrong" else 0.0, 0.06, why)

        monkeypatch.setattr(attention_select, "check_backend", check)
        return tried

    return machine


@pytest.mark.parametrize(
    ("kinds", "expected", "tried"),
    [
        ({"flash": "right", "varlen": "right", "sdpa": "right"}, "flash", ["flash"]),
        ({"varlen": "right", "cudnn": "right", "sdpa": "right"}, "varlen", ["flash", "varlen"]),
        ({"varlen": "wrong", "cudnn": "right", "sdpa": "right"}, "cudnn", ["flash", "varlen", "cudnn"]),
        ({"flash": "wrong", "varlen": "wrong", "sdpa": "right"}, "sdpa", ["flash", "varlen", "cudnn", "onednn", "sdpa"]),
        ({"onednn": "right", "sdpa": "right"}, "onednn", ["flash", "varlen", "cudnn", "onednn"]),
    ],
)
def test_the_first_that_is_right_and_no_word_of_what_is_missing(kinds, expected, tried, machine, one_process, capsys):
    checks = machine(**kinds)
    assert choose("auto", one_process) == expected
    assert [name for name, _ in checks] == tried
    assert capsys.readouterr().out.splitlines() == [
        f"attention by {name} is not used: {WRONG}" for name in kinds if kinds[name] == "wrong"
    ]


@pytest.mark.parametrize("requested", ["auto", "flash"])
@pytest.mark.parametrize(("wrong", "tried"), [((), [4]), ((4,), [4, 3]), ((4, 3), [4, 3, 2]), ((4, 3, 2), [4, 3, 2])], ids=str)
def test_another_flash_attn_takes_the_place_of_one_that_fails(wrong, tried, requested, one_process, monkeypatch, capsys):
    """Which may be an import or a compilation: the next backend is tried when the last version has failed, too."""
    from megaenc.model.attention import backends
    from megaenc.model.kernels.selftest import SelfTestResult
    from megaenc.training import attention_select

    seen = []

    def check(name, device, **others):
        if name != "flash":
            return SelfTestResult(name, True, 0.0, 0.06, "")
        seen.append(backends.flash_attn_versions(device)[0])
        return SelfTestResult(name, True, None, 0.06, WRONG if seen[-1] in wrong else "")

    monkeypatch.setattr(backends, "_excluded_versions", set())
    monkeypatch.setattr(backends, "_installed_flash_versions", lambda: [4, 3, 2])
    monkeypatch.setattr(backends, "_unsupported_reason", lambda version, device: "")
    monkeypatch.setattr(backends, "is_hopper", lambda device: True)
    monkeypatch.setattr(attention_select, "check_backend", check)
    if len(wrong) == 3 and requested == "flash":
        with pytest.raises(InputError, match=WRONG):
            choose(requested, one_process)
    else:
        assert choose(requested, one_process) == ("varlen" if len(wrong) == 3 else "flash")
        names = [f"flash-attn {version}" if version in tried[:-1] else "flash" for version in wrong]
        first, *lines = capsys.readouterr().out.splitlines()
        assert first == "attention: compiling flash-attn 4, about 20 seconds the first time"
        assert lines == [f"attention by {name} is not used: {WRONG}" for name in names]
    assert seen == tried


def test_the_one_that_is_asked_for_and_no_other(machine, one_process, capsys):
    checks = machine(flash="right", varlen="right", sdpa="right")
    assert choose("varlen", one_process) == "varlen"
    assert [name for name, _ in checks] == ["varlen"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("cudnn", "--attention-backend cudnn: is not installed; expected a backend that works here, or auto"),
        ("varlen", f"--attention-backend varlen: {WRONG}; expected a backend that works here, or auto"),
        (
            "auto",
            f"--attention-backend auto: no attention backend works here: varlen is not used: {WRONG}; sdpa is not used: {WRONG}",
        ),
    ],
)
def test_where_none_is_right(requested, message, machine, one_process):
    machine(varlen="wrong", sdpa="wrong")
    with pytest.raises(InputError) as refused:
        choose(requested, one_process)
    assert str(refused.value) == message


def test_what_is_checked_is_what_the_run_will_compute(machine, one_process):
    """Its heads and groups as a tensor-parallel rank has them, and its masks."""
    from megaenc.backend import ParallelConfig
    from megaenc.model.config import get_preset
    from megaenc.training.attention_select import select_attention

    checks = machine(flash="right")
    layout = ParallelConfig(tensor_model_parallel_size=2)
    select_attention("auto", get_preset("1b"), layout, torch.bfloat16, {Attention.PREFIX, Attention.CAUSAL}, one_process)
    [(_, arguments)] = checks
    assert (arguments["heads"], arguments["groups"], arguments["head_dim"], arguments["dtype"]) == (9, 3, 96, torch.bfloat16)
    assert arguments["masks"] == [Attention.CAUSAL, Attention.PREFIX]
    assert arguments["device"] == one_process.device


@pytest.mark.parametrize(
    ("schedule", "more", "masks"),
    [
        ("clm", ["--eval-interval", "0"], {"causal"}),
        ("mlm", ["--eval-interval", "0"], {"bidirectional"}),
        ("prefix_lm", ["--eval-interval", "0"], {"prefix"}),
        ("clm", [], {"causal", "bidirectional"}),  # validated under both
        ("mlm:0.5,prefix_lm:0.5", [], {"causal", "bidirectional", "prefix"}),
    ],
)
def test_the_masks_of_a_run(schedule, more, masks, small_corpus, machine, one_process):
    from megaenc.training.attention_select import select_plan_attention
    from megaenc.training.config import parse_config
    from megaenc.training.planning import build_plan

    checks = machine(sdpa="right")
    flags = [*small_corpus.flags, "--seq-length", "64", "--objective-schedule", schedule, "--train-iters", "4", *more]
    select_plan_attention(build_plan(parse_config([*flags, "--micro-batch-size", "2"], "test")), one_process)
    arguments = checks[-1][1]
    assert set(arguments["masks"]) == masks
    assert (arguments["seq_length"], arguments["packs"]) == (64, 2)


@pytest.mark.multiprocess
def test_a_kernel_that_is_wrong_on_one_rank_is_used_on_none(small_corpus, tmp_path):
    """The run is then the same as any other."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--train-iters", "4", "--lr-wsd-decay-iters", "2"]
    flags += ["--lr-warmup-iters", "2", "--tensor-model-parallel-size", "2"]
    faulty_run, reference = tmp_path / "here", tmp_path / "there"
    ended = runs.script(runs.WORKERS / "attention_by_rank.py", [*flags, "--save", str(faulty_run)], processes=2)
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("attention by")]
    assert line.startswith("attention by flash is not used: values off by ") and line.endswith(" on rank 1")
    assert "under causal attention with heads 16 wide" in line
    assert "; attention by varlen)" in ended.stdout
    assert json.loads((faulty_run / "run.json").read_text())["kernels"]["attention_backend"] == "varlen"
    runs.script(runs.PRETRAIN, [*flags, "--save", str(reference)], processes=2)
    assert runs.curve(faulty_run) == runs.curve(reference)


@pytest.mark.multiprocess
def test_one_asked_for_that_is_wrong_on_one_rank_is_refused(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--attention-backend", "flash"]
    ended = runs.script(runs.WORKERS / "attention_by_rank.py", flags, processes=2, expect=1)
    [line] = errors(ended)
    assert line.startswith("error: --attention-backend flash: values off by ") and " on rank 1; expected a backend" in line


def test_what_needs_an_accelerator_is_refused_in_one_line(small_corpus, refusal):
    from megaenc.training.command import main

    line = refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--attention-backend", "varlen"])
    assert line == "error: --attention-backend varlen: needs an accelerator; expected a backend that works here, or auto"


def test_a_run_may_go_on_by_another(small_corpus, tmp_path):
    """What was asked for stands in config.yaml, what was chosen in run.json; neither is what makes it this run."""
    save = tmp_path / "run"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(save), "--save-interval", "4"]
    runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "4"])
    assert json.loads((save / "run.json").read_text())["kernels"]["attention_backend"] == "sdpa"
    fused = json.loads((save / "run.json").read_text())["kernels"]["fused"]
    assert fused and not any(fused.values())  # what was asked for, a processor has not
    assert "attention_backend: auto" in (save / "config.yaml").read_text()
    ended = runs.script(runs.PRETRAIN, [*flags, "--attention-backend", "sdpa", "--exit-interval", "8"])
    assert "resuming after step 4" in ended.stdout
    assert "attention_backend: sdpa" in (save / "config.yaml").read_text()
