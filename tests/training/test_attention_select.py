"""The choice of the attention backend: the fastest that is right on every rank."""

import json

import pytest
import runs
import torch
from checkpoint_helpers import errors
from training_helpers import plan_of

from megaenc.errors import InputError
from megaenc.objectives import Attention
from megaenc.training.command import main

WRONG = "values off by 0.5, where 0.06 is allowed"


def choose(requested, backend, masks=tuple(Attention)):
    from megaenc.backend import ParallelConfig
    from megaenc.model import ModelConfig
    from megaenc.training.attention_select import select_attention

    return select_attention(
        requested, ModelConfig(), ParallelConfig(), torch.float32, masks, backend
    )


@pytest.fixture
def machine(monkeypatch, one_process):
    """A machine with backends that are right, wrong or missing; notes those tried."""
    from megaenc.model.kernels.selftest import SelfTestResult
    from megaenc.training import attention_select

    def machine(**kinds):
        tried = []

        def check(name, **arguments):
            tried.append((name, arguments))
            kind = kinds.get(name, "missing")
            why = {"right": "", "wrong": WRONG, "missing": "is not installed"}[kind]
            return SelfTestResult(
                name, kind != "missing", 0.5 if kind == "wrong" else 0.0, 0.06, why
            )

        monkeypatch.setattr(attention_select, "check_backend", check)
        return tried

    return machine


@pytest.mark.parametrize(
    ("kinds", "expected", "tried"),
    [
        ({"flash": "right", "varlen": "right", "sdpa": "right"}, "flash", ["flash"]),
        (
            {"varlen": "wrong", "cudnn": "right", "sdpa": "right"},
            "cudnn",
            ["flash", "varlen", "cudnn"],
        ),
        (
            {"flash": "wrong", "varlen": "wrong", "sdpa": "right"},
            "sdpa",
            ["flash", "varlen", "cudnn", "onednn", "sdpa"],
        ),
    ],
)
def test_the_first_that_is_right_and_no_word_of_what_is_missing(
    kinds, expected, tried, machine, one_process, capsys
):
    checks = machine(**kinds)
    assert choose("auto", one_process) == expected
    assert [name for name, _ in checks] == tried
    assert capsys.readouterr().out.splitlines() == [
        f"attention by {name} is not used: {WRONG}" for name in kinds if kinds[name] == "wrong"
    ]


@pytest.mark.parametrize(
    ("wrong", "tried"), [((), [4]), ((4,), [4, 3]), ((4, 3, 2), [4, 3, 2])], ids=str
)
def test_another_flash_attn_takes_the_place_of_one_that_fails(
    wrong, tried, one_process, monkeypatch, capsys
):
    """The next backend is tried after all versions failed to import or to compile."""
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
    assert choose("auto", one_process) == ("varlen" if len(wrong) == 3 else "flash")
    assert seen == tried
    names = [f"flash-attn {version}" if version in tried[:-1] else "flash" for version in wrong]
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "attention: compiling flash-attn 4, about 20 seconds the first time"
    assert lines == [f"attention by {name} is not used: {WRONG}" for name in names]


def test_the_one_that_is_asked_for_and_no_other(machine, one_process, capsys):
    checks = machine(flash="right", varlen="right", sdpa="right")
    assert choose("varlen", one_process) == "varlen"
    assert [name for name, _ in checks] == ["varlen"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (
            "cudnn",
            "--attention-backend cudnn: is not installed; "
            "expected a backend that works here, or auto",
        ),
        (
            "varlen",
            f"--attention-backend varlen: {WRONG}; expected a backend that works here, or auto",
        ),
        (
            "auto",
            "--attention-backend auto: no attention backend works here: "
            f"varlen is not used: {WRONG}; sdpa is not used: {WRONG}",
        ),
    ],
)
def test_where_none_is_right(requested, message, machine, one_process):
    machine(varlen="wrong", sdpa="wrong")
    with pytest.raises(InputError) as refused:
        choose(requested, one_process)
    assert str(refused.value) == message


def test_what_is_checked_is_what_the_run_will_compute(machine, one_process):
    """The check has the heads and groups of a tensor-parallel rank, and its masks."""
    from megaenc.backend import ParallelConfig
    from megaenc.model.config import get_preset
    from megaenc.training.attention_select import select_attention

    checks = machine(flash="right")
    layout = ParallelConfig(tensor_model_parallel_size=2)
    select_attention(
        "auto",
        get_preset("1b"),
        layout,
        torch.bfloat16,
        {Attention.PREFIX, Attention.CAUSAL},
        one_process,
    )
    [(_, arguments)] = checks
    assert (
        arguments.items()
        >= {"heads": 9, "groups": 3, "head_dim": 96, "dtype": torch.bfloat16}.items()
    )
    assert arguments["masks"] == [Attention.CAUSAL, Attention.PREFIX]
    assert arguments["device"] == one_process.device


@pytest.mark.parametrize(
    ("schedule", "interval", "masks"),
    [
        ("prefix_lm", "0", {"prefix"}),
        ("clm", "1", {"causal", "bidirectional"}),  # validated under both
        ("mlm:0.5,prefix_lm:0.5", "0", {"bidirectional", "prefix"}),
    ],
)
def test_the_masks_of_a_run(schedule, interval, masks, short_run, machine, one_process):
    from megaenc.training.attention_select import select_plan_attention

    checks = machine(sdpa="right")
    flags = [*short_run, "--objective-schedule", schedule, "--eval-interval", interval]
    select_plan_attention(plan_of(*flags), one_process)
    arguments = checks[-1][1]
    assert set(arguments["masks"]) == masks
    assert (arguments["seq_length"], arguments["packs"]) == (64, 2)


@pytest.mark.multiprocess
def test_a_kernel_that_is_wrong_on_one_rank_is_used_on_none(short_run, tmp_path):
    """The run is then the same as any other."""
    flags = [*short_run, "--exit-interval", "2", "--eval-interval", "0"]
    flags += ["--tensor-model-parallel-size", "2", "--save"]
    ended = runs.script(
        runs.WORKERS / "attention_by_rank.py", [*flags, str(tmp_path / "here")], processes=2
    )
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("attention by")]
    assert line.startswith("attention by flash is not used: values off by ")
    assert line.endswith(" on rank 1")
    assert "under causal attention with heads 16 wide" in line
    assert "; attention by varlen)" in ended.stdout
    assert (
        json.loads((tmp_path / "here" / "run.json").read_text())["kernels"]["attention_backend"]
        == "varlen"
    )
    runs.script(runs.PRETRAIN, [*flags, str(tmp_path / "there")], processes=2)
    assert runs.curve(tmp_path / "here") == runs.curve(tmp_path / "there")


@pytest.mark.multiprocess
def test_one_asked_for_that_is_wrong_on_one_rank_is_refused(short_run):
    flags = [*short_run, "--attention-backend", "flash"]
    ended = runs.script(runs.WORKERS / "attention_by_rank.py", flags, processes=2, expect=1)
    [line] = errors(ended)
    assert (
        line.startswith("error: --attention-backend flash: values off by ")
        and " on rank 1; expected a backend" in line
    )


def test_a_run_may_go_on_by_another(short_run, tmp_path):
    """config.yaml has the flag, run.json the choice; neither is in the run's identity."""
    save = tmp_path / "run"
    flags = [*short_run, "--save", str(save), "--exit-interval", "1"]
    main(flags)
    kernels = json.loads((save / "run.json").read_text())["kernels"]
    assert kernels["attention_backend"] == "sdpa"
    # A processor has none of the fused kernels.
    assert kernels["fused"] and not any(kernels["fused"].values())
    assert "attention_backend: auto" in (save / "config.yaml").read_text()
    main([*flags, "--attention-backend", "sdpa"])
    assert runs.metrics(save)[-1]["step"] == 2
    assert "attention_backend: sdpa" in (save / "config.yaml").read_text()
