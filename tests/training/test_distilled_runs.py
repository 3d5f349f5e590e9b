"""Runs with a teacher: against a plain loop, over ranks, after a stop, and without the teacher or with another one."""

import shutil

import numpy as np
import plain_loop
import pytest
import runs
from convert import hf_models
from safetensors.torch import load_file, save_file
from transformers import EuroBertForMaskedLM

from megaenc.convert.command import main as convert
from megaenc.convert.to_hf import to_hf
from megaenc.training.command import main
from megaenc.training.config import parse_config
from megaenc.training.planning import build_plan

STEPS = 6


@pytest.fixture(scope="module")
def teacher(small_corpus, tmp_path_factory):
    """A random EuroBERT with the tokenizer of the corpus. Not to be changed."""
    folder = tmp_path_factory.mktemp("teacher")
    return hf_models.write(hf_models.build("eurobert", max_position_embeddings=64), folder, small_corpus.tokenizer)


def flags_of(small_corpus, teacher):
    """Six float32 steps: a share that changes, then a sum with another objective."""
    distill = f"distill(teacher={teacher},mask=0.3,top_k=8"
    schedule = f"{distill},share=0.9->0.5):4,sum(clm:1,{distill},temperature=2):2):2"
    return [
        *small_corpus.flags, *runs.SHORT_RUN, "--train-iters", str(STEPS), "--objective-schedule", schedule, "--no-bf16",
        "--lr", "5e-4", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1", "--eval-interval", str(STEPS),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def flags(small_corpus, teacher):
    return flags_of(small_corpus, teacher)


@pytest.fixture(scope="module")
def reference(flags, tmp_path_factory):
    """All of it in one process without a stop."""
    folder = tmp_path_factory.mktemp("one") / "run"
    runs.script(runs.PRETRAIN, [*flags, "--save", str(folder)])
    return folder


def test_losses_equal_those_of_a_plain_loop(flags, reference, tmp_path):
    runs.script(runs.WORKERS / "starting_point.py", [str(tmp_path / "start"), *flags])
    to_hf(tmp_path / "start", tmp_path / "hf")
    model = EuroBertForMaskedLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    plan = build_plan(parse_config(flags, "test"))
    losses, norms = plain_loop.train(model, plan, STEPS, lambda step: plan.learning_rate(step), 0.5)
    rows = runs.metrics(reference)
    np.testing.assert_allclose(rows[0]["loss"], losses[0], rtol=1e-6)
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-4)
    np.testing.assert_allclose([row["grad_norm"] for row in rows], norms, rtol=1e-4)


@pytest.mark.multiprocess
def test_tensor_and_pipeline_parallel_runs_are_those_of_one_process(flags, reference, tmp_path):
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, [*flags, *layout, "--save", str(tmp_path / "run")], processes=4)
    runs.assert_same_curve(tmp_path / "run", reference, tolerance=1e-5)
    actual, expected = (runs.validations(folder)[-1]["objectives"] for folder in (tmp_path / "run", reference))
    assert sum(name.startswith("distill(") for name in expected) == 2
    for objective in expected:
        assert actual[objective]["loss"] == pytest.approx(expected[objective]["loss"], rel=1e-5), objective


@pytest.mark.slow
@pytest.mark.multiprocess
def test_twenty_steps_are_equal_in_both_layouts(small_corpus, teacher, tmp_path):
    """Without switches of objectives, as test_every_objective.py trains the others."""
    schedule = f"distill(teacher={teacher},mask=0.3,top_k=8)"
    length = ["--train-iters", "20", "--objective-schedule", schedule, "--eval-interval", "0", "--lr", "5e-4", "--no-bf16"]
    flags = [*small_corpus.flags, *runs.SHORT_RUN, *length, "--save"]
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, [*flags, str(tmp_path / "one")])
    runs.script(runs.PRETRAIN, [*flags, str(tmp_path / "four"), *layout], processes=4)
    runs.assert_same_curve(tmp_path / "four", tmp_path / "one", tolerance=1e-6)
    assert runs.metrics(tmp_path / "one")[-1]["loss"] < runs.metrics(tmp_path / "one")[0]["loss"] - 0.1


def test_another_micro_batch_size_changes_only_rounding(flags, reference, tmp_path):
    runs.script(runs.PRETRAIN, [*flags, "--micro-batch-size", "8", "--save", str(tmp_path / "run")])
    runs.assert_same_curve(tmp_path / "run", reference, tolerance=1e-5)


def test_a_stopped_run_resumes_bitwise_and_only_with_the_same_teacher(small_corpus, teacher, reference, tmp_path, refusal):
    own = shutil.copytree(teacher, tmp_path / "teacher")
    flags = [*flags_of(small_corpus, own), "--save", str(tmp_path / "run"), "--exit-interval", "3"]
    for _ in range(2):
        runs.script(runs.PRETRAIN, flags)
    names = ("step", "loss", "accuracy", "grad_norm", "predicted_tokens")
    actual, expected = ([[row[name] for name in names] for row in runs.metrics(run)] for run in (tmp_path / "run", reference))
    assert actual == expected
    actual, expected = (list(runs.validations(run)[-1]["objectives"].values()) for run in (tmp_path / "run", reference))
    assert actual == expected

    weights = load_file(own / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, own / "model.safetensors", {"format": "pt"})
    line = refusal(main, flags)
    assert "holds a different run: objective_packages is {'distill': 'config.json (" in line


def test_a_run_is_exported_without_its_teacher(small_corpus, teacher, tmp_path, refusal):
    own = shutil.copytree(teacher, tmp_path / "teacher")
    flags = [*flags_of(small_corpus, own), "--exit-interval", "1"]
    runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "run")])
    shutil.rmtree(own)
    convert(["to-hf", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "hf")])
    assert "distill(teacher=" in (tmp_path / "hf/README.md").read_text()
    assert "no such folder" in refusal(main, [*flags, "--save", str(tmp_path / "new")]) and not (tmp_path / "new").exists()
