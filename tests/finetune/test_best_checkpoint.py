"""Validation during training: weights of the best step, and early stopping."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small_data import read_json

from megaenc.finetune.command import run_main
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.datasets.registry import find_dataset
from megaenc.finetune.grid.jobs import build_jobs
from megaenc.finetune.optimizer import MasterWeightOptimizer
from megaenc.finetune.results import files as result_files
from megaenc.finetune.tasks import Scores
from megaenc.finetune.train import train_and_evaluate
from megaenc.finetune.validation import ValidationHistory


def plan(model, datasets, output, *, train_on="", rate=2e-2, **protocol):
    values = dict(max_steps=14, batch_size=8, epochs=9, precision="fp32") | protocol
    options = DatasetConfig(train_on=str(train_on))
    [job] = build_jobs(
        [str(model)],
        datasets,
        [rate],
        [0],
        str(output),
        FinetuneConfig(**values),
        options,
        find_dataset,
    )
    return job


def train(job):
    assert train_and_evaluate(job)
    found = {}
    for dataset in job.evaluate_on:
        path = result_files.job_directory(job, dataset.name) / "results.json"
        found[dataset.name] = read_json(path)
    return found


@pytest.fixture
def weights_by_step(monkeypatch):
    """Record the float32 masters after each step of trainings in this test."""
    recorded = []
    step = MasterWeightOptimizer.step

    def step_and_record(self):
        norm = step(self)
        recorded.append({weight.numpy().tobytes() for weight in self.copy_weights().values()})
        return norm

    monkeypatch.setattr(MasterWeightOptimizer, "step", step_and_record)
    return recorded


@pytest.mark.parametrize("family, rate, precision", [("tc", 5e-3, "bf16"), ("ir", 2e-2, "fp32")])
def test_the_weights_of_the_best_step_are_used(
    family, rate, precision, model, data, tmp_path, weights_by_step
):
    job = plan(
        model,
        [str(data / family)],
        tmp_path,
        rate=rate,
        precision=precision,
        eval_interval=4,
        best_checkpoint=True,
    )
    kept = tmp_path / "kept"
    result = train(replace(job, save_model=str(kept)))[family]
    scores = {one["step"]: one["score"] for one in result["evaluations"]}
    best = result["best_step"]
    assert list(scores) == [4, 8, 12, 14] and best < 14
    assert best == min(step for step in scores if scores[step] == max(scores.values()))
    assert result["validation"]["score"] == scores[best] and result["steps"] == 14
    details = read_json(kept / "finetuning.json")
    assert (details["best_step"], details["steps"], details["trained"]) == (
        best,
        14,
        result["trained"],
    )
    assert f"| steps | `14, weights of step {best}` |" in (kept / "README.md").read_text()
    assert weights_by_step[best - 1] <= {
        weight.numpy().tobytes() for weight in load_file(kept / "model.safetensors").values()
    }
    if precision == "fp32":
        assert details["scores"]["test"]["score"] == result["test"]["score"]


def test_validation_during_training_changes_no_weight(model, data, tmp_path):
    plain = train(plan(model, [str(data / "ir")], tmp_path / "plain"))["ir"]
    often = train(plan(model, [str(data / "ir")], tmp_path / "often", eval_interval=3))["ir"]
    assert [one["step"] for one in often.pop("evaluations")] == [3, 6, 9, 12, 14] and often.pop(
        "best_step"
    )
    assert often.pop("protocol") == plain.pop("protocol") | {"eval_interval": 3}
    assert often == plain and "evaluations" not in plain


def test_early_stopping_ends_where_a_longer_training_has_been(model, data, tmp_path, capsys):
    whole = train(
        plan(model, [str(data / "ir")], tmp_path / "whole", eval_interval=2, best_checkpoint=True)
    )["ir"]
    short = train(
        plan(model, [str(data / "ir")], tmp_path / "short", eval_interval=2, early_stopping=2)
    )["ir"]
    assert (
        whole["best_step"] == short["best_step"] == short["steps"] - 4
        and short["steps"] < whole["steps"] == 14
    )
    assert short["evaluations"] == whole["evaluations"][: short["steps"] // 2]
    assert short["trained"] == whole["trained"] and short["test"] == whole["test"]
    assert (
        f"little ir 2e-02 sd0: stopped after {short['steps']} of 14 steps: --early-stopping 2"
        in capsys.readouterr().out
    )
    patience = (14 - whole["best_step"]) // 2
    last = train(
        plan(model, [str(data / "ir")], tmp_path / "last", eval_interval=2, early_stopping=patience)
    )["ir"]
    assert last["steps"] == 14 and "stopped after" not in capsys.readouterr().out


def test_sets_that_share_a_training_have_the_results_of_their_own(model, data, tmp_path):
    sets = [str(data / "ir"), str(data / "other")]
    flags = {"train_on": data / "ir", "eval_interval": 2, "early_stopping": 2, "rate": 5e-2}
    both = train(plan(model, sets, tmp_path / "both", **flags))
    assert both["ir"]["best_step"] != both["other"]["best_step"]
    for name, dataset in (("ir", sets[0]), ("other", sets[1])):
        assert train(plan(model, [dataset], tmp_path / name, **flags)) == {name: both[name]}


def test_of_equal_scores_the_earliest_is_best():
    history = ValidationHistory(FinetuneConfig(eval_interval=5, early_stopping=3))
    weights = torch.nn.Parameter(torch.zeros(2))
    for step, score in ((5, 0.5), (10, 0.7), (15, 0.7), (20, 0.6), (25, 0.7)):
        assert not history.is_stopped
        history.add(
            step,
            Scores(score, {}, None, {}, [], {}),
            lambda step=step: {weights: torch.full((2,), float(step))},
        )
    assert history.is_stopped and (history.step, history.best_step, history.scores.score) == (
        10,
        10,
        0.7,
    )
    history.restore()
    assert weights.tolist() == [10, 10]


@pytest.mark.parametrize(
    ("flags", "where"),
    [({"max_steps": 4, "eval_interval": 2}, "2"), ({"max_steps": 2}, "2, the last")],
)
def test_a_prediction_that_is_nan_is_a_failed_run(flags, where, model, data, tmp_path):
    """The first of two updates has rate 0, the second ruins the model."""
    assert not train_and_evaluate(
        plan(model, [str(data / "sc")], tmp_path, rate=1e40, warmup=0.5, **flags)
    )
    [path] = tmp_path.rglob("failed.json")
    failure = read_json(path)
    assert (failure["reason"], failure["step"]) == (
        f"a prediction of the model is NaN or inf after step {where}",
        2,
    )
    assert not [*tmp_path.rglob("results.json")]


def test_the_command_prints_and_reads_the_scores_by_step(model, data, tmp_path, capfd, refusal):
    flags = ["--model", model, "--dataset", data / "sc", "--output", tmp_path, "--batch-size", 8,
             "--precision", "fp32",
             "--max-steps", 6, "--eval-interval", 3, "--best-checkpoint"]  # fmt: skip
    for again in ("", "finished before, "):
        run_main([str(flag) for flag in flags])
        said = capfd.readouterr().out
        [path] = tmp_path.rglob("results.json")
        values = read_json(path)
        first, last = [f"{100 * one['score']:.2f}" for one in values["evaluations"]]
        best = values["best_step"]
        assert (
            f"validation score by step: 3 {first}, 5 {last}; best: step {best}\n" in said
            and f"; {again}{tmp_path}" in said
        )
    said = refusal(run_main, flags[:-1])
    assert (
        "field `protocol.best_checkpoint`: found True, expected False; use the recorded value"
        in said
    )
    path.write_text(path.read_text().replace('"step": 3', '"step": "x"'))
    assert (
        "results.json: field `evaluations.0.step`: found 'x', expected a valid integer"
        in refusal(run_main, flags)
    )


@pytest.mark.parametrize("limits, steps, said", [
    ({"max_steps": 0, "epochs": 1.5}, 8, ""),  # of 40 examples
    ({"max_steps": 3, "epochs": 1.5}, 3,
     "0.6 epochs instead of --epochs 1.5: --max-steps 3; --max-steps 0 lifts this limit"),
    ({"max_steps": 3, "epochs": 1.0}, 3, ""),  # as in the study
])  # fmt: skip
def test_the_limit_of_a_training_is_printed(limits, steps, said, model, data, tmp_path, capsys):
    assert train(plan(model, [str(data / "sc")], tmp_path, **limits))["sc"]["steps"] == steps
    lines = [line for line in capsys.readouterr().out.splitlines() if "epochs" in line]
    assert lines == [f"sc: {said}"] * bool(said)
