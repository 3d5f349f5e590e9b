"""Every objective in real runs: the same in every layout, the same after a stop, in one process and in four."""

import itertools
import shutil
import sys

import pytest
import runs

from megaenc.convert.command import main as convert
from megaenc.objectives import known
from megaenc.training.command import main

# Steps 1..39: each objective alone, options that change, a mixture, an alternation, and one from another package.
OBJECTIVES = [
    "clm:1", "mlm:2", "mlm(mask=0.15,random=0.1,keep=0.1):2", "mlm(mask=0.3,span=3):2", "mlm(mask=0.4->0.15,span=2->4):4",
    "mntp:2", "prefix_lm:3", "mix(clm:0.2,mlm(mask=0.2->0.4):0.1,prefix_lm:0.7):6", "2x(clm:1,mntp:1)", "word_order(share=0.5):1",
    "diffusion:1", "mix(diffusion(low=0.1):0.7,clm:0.3):4", "gpt_bert(causal=0.4,mask=0.3):2", "span_corruption:2",
    "sum(clm:1,mlm(mask=0.3):3):3",
]  # fmt: skip
STEPS = 39
RUN = [
    *runs.SHORT_RUN, "--train-iters", str(STEPS), "--objective-schedule", ",".join(OBJECTIVES), "--no-bf16",
    "--eval-interval", str(STEPS),
    # At the 3e-3 of SHORT_RUN so many switches make the gradient's norm so sensitive that another micro-batch size alone, in one
    # process, moves it by 2e-3. At this rate rounding stays rounding, and any other difference shows.
    "--lr", "5e-4",
]  # fmt: skip


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The example package as pip installs it, in a folder of its own."""
    source = shutil.copytree(runs.ROOT / "examples" / "objective_plugin", tmp_path_factory.mktemp("source") / "plugin")
    target = tmp_path_factory.mktemp("packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    runs.run([*pip, "--no-build-isolation", "--target", str(target), str(source)])
    return target


@pytest.fixture(scope="module")
def reference(small_corpus, plugin, tmp_path_factory):
    """All of it in one process without a stop."""
    folder = tmp_path_factory.mktemp("one") / "run"
    runs.script(runs.PRETRAIN, [*small_corpus.flags, *RUN, "--save", str(folder)], packages=plugin)
    return folder


def curve(folder):
    names = ("step", "objective", "phase", "loss", "accuracy", "grad_norm", "learning_rate", "predicted_tokens", "flops")
    return [tuple(row[name] for name in names) for row in runs.metrics(folder)]


def test_rows_name_what_each_step_trained(reference):
    rows = runs.metrics(reference)
    named = [row["objective"] for row in rows]
    assert named[0] == "clm" and named[1] == named[2] == "mlm"
    assert named[7:11] == ["mlm(mask=0.4->0.15,span=2.0->4.0)"] * 4
    assert named[11:16] == ["mntp"] * 2 + ["prefix_lm"] * 3
    mixed = "mlm(mask=0.2->0.4)"
    assert named[16:22] == ["clm", "prefix_lm", mixed, "clm", mixed, mixed], "what seed 1 draws, in any layout"
    assert named[22:28] == ["clm", "mntp", "clm", "mntp", "word_order(share=0.5)", "diffusion"]
    assert set(named[28:32]) == {"clm", "diffusion(low=0.1)"}
    assert named[32:36] == ["gpt_bert(mask=0.3,causal=0.4)"] * 2 + ["span_corruption"] * 2
    assert named[36:] == ["sum(clm:1,mlm(mask=0.3):3)"] * 3
    assert [row["phase"] for row in rows[7:11] + rows[16:22]] == [4] * 4 + [7] * 6
    predicted = [row["predicted_tokens"] - before["predicted_tokens"] for before, row in itertools.pairwise(rows)]
    tokens = 8 * 64
    for step, share in ((8, 0.4), (9, 0.4 - 0.25 / 3), (10, 0.15 + 0.25 / 3), (11, 0.15)):
        assert predicted[step - 2] / tokens == pytest.approx(share, abs=0.08)
    assert set(runs.validations(reference)[-1]["objectives"]) == {
        "clm", "mlm", "mlm(mask=0.15,random=0.1,keep=0.1)", "mlm(mask=0.3,span=3.0)", "mlm(mask=0.15,span=4.0)", "mntp",
        "prefix_lm", "word_order(share=0.5)", "diffusion", "diffusion(low=0.1)", "gpt_bert(mask=0.3,causal=0.4)",
        "span_corruption", "mlm(mask=0.3)",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.multiprocess
def test_tensor_and_pipeline_parallel_runs_are_those_of_one_process(small_corpus, plugin, reference, tmp_path):
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    flags = [*small_corpus.flags, *RUN, *layout, "--save", str(tmp_path / "run")]
    runs.script(runs.PRETRAIN, flags, processes=4, packages=plugin)
    runs.assert_same_curve(tmp_path / "run", reference, tolerance=1e-5)
    actual, expected = (runs.validations(folder)[-1]["objectives"] for folder in (tmp_path / "run", reference))
    for objective in expected:
        assert actual[objective]["loss"] == pytest.approx(expected[objective]["loss"], rel=1e-5), objective


ALONE = [
    "clm", "mlm", "mlm(mask=0.3,span=3)", "mntp", "prefix_lm", "diffusion", "gpt_bert(causal=0.3)", "span_corruption",
    "mlm(mask=0.3,unit=word)", "sum(clm:3,mlm(mask=0.3):10)",
]  # fmt: skip


def test_every_objective_is_among_them():
    assert {text.partition("(")[0] for text in ALONE} - {"sum"} == set(known()) - {"word_order", "distill"}, (
        "which test_distilled_runs.py trains"
    )


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("objective", ALONE)
def test_twenty_steps_of_one_objective_are_equal_in_both_layouts(objective, small_corpus, tmp_path):
    """Without switches of objectives the rounding of both layouts stays ten times below this tolerance."""
    length = ["--train-iters", "20", "--objective-schedule", objective, "--eval-interval", "0", "--lr", "5e-4", "--no-bf16"]
    flags = [*small_corpus.flags, *runs.SHORT_RUN, *length, "--save"]
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, [*flags, str(tmp_path / "one")])
    runs.script(runs.PRETRAIN, [*flags, str(tmp_path / "four"), *layout], processes=4)
    runs.assert_same_curve(tmp_path / "four", tmp_path / "one", tolerance=1e-6)
    assert runs.metrics(tmp_path / "one")[-1]["loss"] < runs.metrics(tmp_path / "one")[0]["loss"] - 0.3


def test_a_run_stopped_inside_a_ramp_and_a_mixture_goes_on_bitwise(small_corpus, plugin, reference, tmp_path):
    """Ten steps a time: the first stop is inside the options that change, the others inside mixtures."""
    flags = [*small_corpus.flags, *RUN, "--save", str(tmp_path / "run"), "--exit-interval", "10"]
    for stop in (10, 20, 30, STEPS):
        leg = runs.script(runs.PRETRAIN, flags, packages=plugin)
        assert runs.metrics(tmp_path / "run")[-1]["step"] == stop
        assert "keep=0.1) to step 5, " in leg.stdout and ", ... (18 phases); 8 packs" in leg.stdout, "not all of a long list"
    assert curve(tmp_path / "run") == curve(reference)
    assert runs.validations(tmp_path / "run")[-1]["objectives"] == runs.validations(reference)[-1]["objectives"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["clm:0.25,mlm:0.75", "mlm(mask=0.4->0.15):1.0", "3x(clm:1,mlm:1)", "mix(clm:0.3,mlm:0.7):1.0"]
)
def test_each_kind_of_schedule_resumes_bitwise(schedule, small_corpus, tmp_path):
    flags = [
        *small_corpus.flags, *runs.SHORT_RUN, "--train-iters", "6", "--objective-schedule", schedule, "--lr-warmup-iters", "1",
        "--lr-wsd-decay-iters", "1", "--no-bf16", "--eval-interval", "0",
    ]  # fmt: skip
    main([*flags, "--save", str(tmp_path / "whole")])
    for stop in (3, 6):
        main([*flags, "--save", str(tmp_path / "run"), "--exit-interval", "3"])
        assert runs.metrics(tmp_path / "run")[-1]["step"] == stop
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_two_steps_with_the_objective_of_another_package(small_corpus, plugin, tmp_path, refusal):
    """As its README says, and one line where it is not installed."""
    flags = [
        *small_corpus.flags, *runs.SHORT_RUN, "--train-iters", "2", "--lr-warmup-iters", "0", "--lr-wsd-decay-iters", "0",
        "--objective-schedule", "word_order(share=0.3->0.9)", "--save", str(tmp_path / "run"),
    ]  # fmt: skip
    assert "unknown objective `word_order`" in refusal(main, flags)
    runs.script(runs.PRETRAIN, flags, packages=plugin)
    first, second = runs.metrics(tmp_path / "run")
    assert first["objective"] == second["objective"] == "word_order(share=0.3->0.9)"
    assert 0 < 2 * first["predicted_tokens"] < second["predicted_tokens"] - first["predicted_tokens"]
    assert first["loss"] > 0

    export = ["to-hf", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf")]
    line = refusal(convert, export)
    assert "unknown objective `word_order`" in line and "install the package of the objective" in line
    runs.script(runs.ROOT / "tools" / "convert_checkpoint.py", export, packages=plugin)
    assert "`word_order(share=0.9)`" in (tmp_path / "hf" / "README.md").read_text()

    source = plugin / "word_order.py"
    original = source.read_text()
    source.write_text(original.replace("word order: tokens", "other draws"))
    try:
        changed = runs.script(runs.PRETRAIN, flags, packages=plugin, expect=2)
    finally:
        source.write_text(original)
    assert "objective_packages is {'word_order': 'megaenc-word-order 0.1" in changed.stderr


def test_a_sum_with_weights_of_many_digits_trains_as_their_ratio(small_corpus, tmp_path):
    """A micro-batch of 512 tokens with these weights has a divisor above 2**31."""
    flags = [
        *small_corpus.flags, *runs.SHORT_RUN, "--train-iters", "2", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "0",
        "--micro-batch-size", "8", "--eval-interval", "0", "--no-bf16",
    ]  # fmt: skip
    for name, schedule in (("digits", "sum(clm:0.8388607,mlm:1.6777215)"), ("ratio", "sum(clm:1,mlm:2)")):
        main([*flags, "--objective-schedule", schedule, "--save", str(tmp_path / name)])
    for quantity in ("loss", "grad_norm"):
        assert runs.largest_difference(quantity, tmp_path / "digits", tmp_path / "ratio") < 1e-5
