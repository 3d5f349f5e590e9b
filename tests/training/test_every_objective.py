"""Every objective in one run, one of another package, and one with a teacher."""

import shutil

import pytest
import runs
from safetensors.torch import load_file, save_file

from megaenc.convert.command import main as convert
from megaenc.objectives.registry import OBJECTIVES
from megaenc.training.command import main

FIXED = "mlm(mask=0.15,random=0.1,keep=0.1)"
# Each objective alone, options that change, a mixture, an alternation and a sum, with the name that
# rows have for it.
PHASES = {
    "clm:1": ["clm"],
    f"{FIXED}:1": [FIXED],
    "mlm(mask=0.4->0.15,span=2->4):4": ["mlm(mask=0.4->0.15,span=2.0->4.0)"] * 4,
    "prefix_lm:1": ["prefix_lm"],
    "mix(clm:0.4,mlm(mask=0.2->0.4):0.3,prefix_lm:0.3):6": [
        "clm", "prefix_lm", "clm", "mlm(mask=0.2->0.4)", "prefix_lm", "prefix_lm",
    ],
    "2x(clm:1,mntp:1)": ["clm", "mntp"] * 2,
    "diffusion(low=0.1):1": ["diffusion(low=0.1)"],
    "gpt_bert(causal=0.4,mask=0.3):1": ["gpt_bert(mask=0.3,causal=0.4)"],
    "span_corruption:1": ["span_corruption"],
    "sum(clm:1,mlm(mask=0.3):3):1": ["sum(clm:1,mlm(mask=0.3):3)"],
}  # fmt: skip


def test_rows_name_what_each_step_trained(small_corpus, tmp_path, capsys):
    names = [name for phase in PHASES.values() for name in phase]
    schedule = [
        "--train-iters",
        str(len(names)),
        "--objective-schedule",
        ",".join(PHASES),
        "--lr",
        "5e-4",
        "--no-bf16",
    ]
    flags = [*runs.SHORT_RUN, *schedule, "--eval-interval", str(len(names))]
    main([*small_corpus.flags, *flags, "--save", str(tmp_path / "run")])
    assert ", ... (13 phases); 8 packs" in capsys.readouterr().out, "not all of a long list"
    rows = runs.metrics(tmp_path / "run")
    assert [row["objective"] for row in rows] == names
    assert set(runs.validations(tmp_path / "run")[-1]["objectives"]) == {
        "clm", "mlm", FIXED, "mlm(mask=0.15,span=4.0)", "mntp", "prefix_lm", "diffusion(low=0.1)",
        "gpt_bert(mask=0.3,causal=0.4)", "span_corruption", "mlm(mask=0.3)",
    }  # fmt: skip


def test_two_steps_with_the_objective_of_another_package(short_run, plugin, tmp_path, refusal):
    """The package's README works, and without the package there is one line."""
    flags = [
        *short_run, "--train-iters", "2", "--lr-warmup-iters", "0", "--lr-wsd-decay-iters", "0",
        "--objective-schedule", "word_order(share=0.3->0.9)", "--save", str(tmp_path / "run"),
    ]  # fmt: skip
    assert "unknown objective `word_order`" in refusal(main, flags)
    runs.script(runs.PRETRAIN, flags, packages=plugin)
    first, second = runs.metrics(tmp_path / "run")
    assert first["objective"] == second["objective"] == "word_order(share=0.3->0.9)"
    assert (
        0 < 2 * first["predicted_tokens"] < second["predicted_tokens"] - first["predicted_tokens"]
    )

    export = ["to-hf", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf")]
    line = refusal(convert, export)
    assert (
        "unknown objective `word_order`" in line and "install the package of the objective" in line
    )
    runs.script(runs.ROOT / "tools" / "convert_checkpoint.py", export, packages=plugin)
    assert "`word_order(share=0.9)`" in (tmp_path / "hf" / "README.md").read_text()


def test_an_encoder_that_predicts_classes_goes_out_without_its_output_layer(
    small_corpus, tmp_path, monkeypatch, refusal
):
    monkeypatch.syspath_prepend(runs.ROOT / "examples" / "objective_plugin")
    from replaced_tokens import ReplacedTokenDetection

    monkeypatch.setitem(OBJECTIVES._registered, "replaced_tokens", ReplacedTokenDetection)
    flags = [
        *small_corpus.flags,
        *runs.SHORT_RUN,
        "--train-iters",
        "4",
        "--lr-warmup-iters",
        "1",
        "--lr-wsd-decay-iters",
        "1",
    ]
    flags += [
        "--objective-schedule",
        "mlm:1,sum(clm:1,replaced_tokens:1):1,replaced_tokens:2",
        "--save-interval",
        "1",
    ]
    main([*flags, "--no-bf16", "--eval-interval", "4", "--save", str(tmp_path / "run")])
    scores = runs.validations(tmp_path / "run")[-1]["objectives"]
    assert scores["replaced_tokens"]["loss"] < 1 < scores["mlm"]["loss"]
    assert scores["replaced_tokens"]["most_frequent"] == pytest.approx(0.85, abs=0.03)

    export = ["to-hf", "--load", str(tmp_path / "run"), "--output"]
    line = refusal(convert, [*export, str(tmp_path / "hf")])
    assert "step 4" in line and "predicts 2 classes and no tokens; expected --encoder-only" in line
    assert not (tmp_path / "hf").exists()
    convert([*export, str(tmp_path / "both"), "--ckpt-step", "2"])
    assert "fill-mask" in (tmp_path / "both/README.md").read_text()
    convert([*export, str(tmp_path / "hf"), "--encoder-only"])
    card = (tmp_path / "hf/README.md").read_text()
    assert "pipeline_tag: feature-extraction" in card and "| one of 2 classes |" in card
    assert "lm_head.weight" not in load_file(tmp_path / "hf/model.safetensors")


def test_a_run_goes_on_with_the_same_teacher_alone_and_is_exported_without_it(
    distilled, teacher, tmp_path, refusal
):
    teacher_copy = shutil.copytree(teacher, tmp_path / "teacher")
    flags = [flag.replace(str(teacher), str(teacher_copy)) for flag in distilled]
    save = ["--save", str(tmp_path / "run")]
    # This process would remember the teacher, so another one runs.
    runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "1", *save])

    weights = load_file(teacher_copy / "model.safetensors")
    save_file(
        {name: 2 * tensor for name, tensor in weights.items()},
        teacher_copy / "model.safetensors",
        {"format": "pt"},
    )
    line = refusal(main, [*flags, *save])
    assert "holds a different run: objective_packages is {'distill': 'config.json (" in line

    shutil.rmtree(teacher_copy)
    convert(["to-hf", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf")])
    assert "distill(teacher=" in (tmp_path / "hf/README.md").read_text()
    line = runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "new")], expect=2).stderr
    assert "no such directory" in line
    assert not (tmp_path / "new").exists()


def test_a_sum_with_weights_of_many_digits_trains_as_their_ratio(short_run, tmp_path):
    """A micro-batch of 512 tokens with these weights has a divisor above 2**31."""
    flags = [
        *short_run, "--exit-interval", "2", "--micro-batch-size", "8", "--eval-interval", "0",
    ]  # fmt: skip
    for name, schedule in (
        ("digits", "sum(clm:0.8388607,mlm:1.6777215)"),
        ("ratio", "sum(clm:1,mlm:2)"),
    ):
        main([*flags, "--objective-schedule", schedule, "--save", str(tmp_path / name)])
    for quantity in ("loss", "grad_norm"):
        assert runs.largest_difference(quantity, tmp_path / "digits", tmp_path / "ratio") < 1e-5
