"""The graph: single trainings, branches, and runs that would accept it."""

from pathlib import Path

import manifests
import pytest
from manifests import TOY, graph

from megaenc import flags
from megaenc.data.packing.data_path import find_corpora, list_prefixes
from megaenc.model.config import get_preset
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.dag import build_graph, count_shared_steps
from megaenc.study.run.stage import format_flags
from megaenc.training.config import PretrainConfig, parse_config


def starts(plan):
    return {
        name: (run.start, run.parent, run.branch_step, run.steps) for name, run in plan.runs.items()
    }


def test_every_shared_beginning_is_trained_once(tmp_path):
    assert starts(graph(tmp_path)) == {
        "toy-mlm40-400": ("new", "", 0, 400),
        "toy-clm-400": ("new", "", 0, 400),
        "toy-clm-100-mlm40-400": ("branch", "toy-clm-400", 100, 300),
        "toy-mlm40-100": ("branch", "toy-mlm40-400", 80, 20),
        "toy-clm-100": ("branch", "toy-clm-400", 80, 20),
        "toy-clm-dec400-mlm40-620": ("weights", "toy-clm-400", 0, 220),
        "toy-clm-dec400-mlm40-520": ("branch", "toy-clm-dec400-mlm40-620", 100, 20),
        "toy-clm-dec400-mlm40-420": ("weights", "toy-clm-400", 0, 20),
        "toy-mlm40-dec400-mlm40-620": ("weights", "toy-mlm40-400", 0, 220),
        "toy-mlm40-dec400-mlm40-520": ("branch", "toy-mlm40-dec400-mlm40-620", 100, 20),
        "toy-mlm40-dec400-mlm40-420": ("weights", "toy-mlm40-400", 0, 20),
    }


def test_a_run_comes_after_those_that_it_needs_and_they_keep_what_it_takes(tmp_path):
    plan = graph(
        tmp_path, *manifests.BASE["models"], TOY | {"steps": 300, "checkpoints": [50, 200]}
    )
    done = set()
    for stage in plan.stages.values():
        assert set(stage.needs) <= done, stage.id
        done.add(stage.id)
    for run in plan.runs.values():
        if run.branch_step:
            parent = plan.runs[run.parent]
            assert (
                run.branch_step in parent.checkpoint_steps and run.branch_step > parent.branch_step
            )
    for export in plan.exports.values():
        run = plan.runs[export.run]
        assert (
            export.step in (*run.checkpoint_steps, run.model.steps)
            and export.step > run.branch_step
        )
    # Whose first 280 steps it shares
    assert plan.exports["toy-mlm40-300-200"].run == "toy-mlm40-400"
    assert plan.runs["toy-mlm40-400"].checkpoint_steps == (50, 80, 200, 280)


@pytest.mark.parametrize(
    ("change", "start"),
    [
        *(
            ({"seed": 2}, "new"),
            ({"pretrain": {"lr_warmup_iters": 11}}, "new"),
            ({"mask": 0.3}, "new"),
        ),
        # YAML reads 2e-3 as text; 1.0 is what clip_grad is anyway.
        *(
            ({"pretrain": {"lr": 0.002}}, "branch"),
            ({"peak_rate": 2e-3}, "branch"),
            ({"pretrain": {"clip_grad": 1.0}}, "branch"),
        ),
    ],
)
def test_only_what_differs_from_the_first_step_shares_nothing(tmp_path, change, start):
    pretrain = manifests.BASE["pretrain"] | {"lr": "2e-3"}
    entries = [TOY, TOY | {"steps": 300, "name": "other"} | change]
    plan = starts(graph(tmp_path, *entries, pretrain=pretrain))
    assert [begins for begins, *_ in plan.values()] == ["new", start]


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("clm:100,mlm:300", "clm:200,mlm:200", 100),
        ("clm:100,mlm:300", "clm:100,mlm(mask=0.3):300", 100),
        ("clm:100,clm:100,mlm:200", "clm:200,mlm:200", 380),
        ("mlm:200,mlm(mask=0.4->0.2):200", "mlm:200,mlm(mask=0.4->0.2):200", 380),
        ("mlm(mask=0.4->0.2):200,mlm:200", "mlm(mask=0.4->0.2):400", 0),
        ("mix(clm:1,mlm:1):200,mlm:200", "mix(clm:2,mlm:2):300,clm:100", 200),
        ("4x(clm:50,mlm:50)", "clm:50,mlm:350", 100),
    ],
)
def test_how_far_two_schedules_agree(tmp_path, one, other, shared):
    entries = [
        {"size": "toy", "steps": 400, "name": name, "schedule": text}
        for name, text in (("one", one), ("other", other))
    ]
    first, second = manifests.read(tmp_path, *entries).models
    assert count_shared_steps(first, second) == count_shared_steps(second, first) == shared


def test_steps_that_training_itself_compares_agree_with_the_graph(tmp_path):
    """`first_differing_step` refuses a branch: none before it, mostly one right after."""
    from megaenc.data.tokenizer.vocabulary import Vocabulary
    from megaenc.objectives import Schedule
    from megaenc.training.lr_schedule import LearningRateSchedule
    from megaenc.training.parent_run import first_differing_step

    vocabulary = Vocabulary(1024, 0, 1, (0, 1), "")
    runs = build_graph(read_manifest(manifests.STUDY / "paper.yaml")).runs
    branches = [run for run in runs.values() if run.start == "branch"]
    assert len(branches) > 4
    for run in branches:
        child = run.model
        parent = runs[run.parent].model
        schedules = [
            Schedule.build(model.schedule, model.steps, vocabulary, 1) for model in (child, parent)
        ]
        assert first_differing_step(*schedules, run.branch_step) is None
        assert (
            first_differing_step(*schedules, run.branch_step + 1)
            or run.branch_step == child.last_undecayed_step
        )
        rates = [
            LearningRateSchedule(1.0, model.warmup, model.decay, model.steps)
            for model in (child, parent)
        ]
        for step in (1, run.branch_step // 2 + 1, run.branch_step):
            assert rates[0](step) == rates[1](step)


@pytest.mark.parametrize("file", sorted(manifests.STUDY.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_real_settings_take_every_run(file):
    manifest = read_manifest(file)
    assert len({model.name for model in manifest.models}) == len(manifest.models) >= 10
    for run in build_graph(manifest, Path("out")).runs.values():
        flag_values = run.flags
        shape = get_preset(flag_values.get("model", "tiny"))
        settings = flags.replace_fields(PretrainConfig(shape=shape), flag_values, source="plan")
        settings.check(manifest.hardware.devices)
        assert (
            settings.total_iters == run.model.steps
            and settings.objective_schedule == run.model.schedule
        )
        assert settings.learning_rate.lr_warmup_iters == run.model.warmup
        assert (
            settings.output.save_steps == run.checkpoint_steps
            and settings.output.save == f"out/runs/{run.name}"
        )
        assert bool(settings.start.branch_from) == (run.start == "branch")
        assert (settings.start.skip_samples == "parent") == (run.start == "weights")
    assert settings == flags.replace_fields(
        parse_config(format_flags(flag_values), "pretrain"), {"model": settings.model}, source="x"
    )


def test_paths_are_found_from_the_directory_of_data(tmp_path):
    """Local sets, corpora and a tokenizer; names of directories are no patterns."""
    directory = tmp_path / "data[1]"
    (directory / "tok").mkdir(parents=True)
    (directory / "qa").mkdir()
    for name in ("a", "b"):
        (directory / f"{name}.idx").touch()
    settings = {"datasets": ["squad=qa", "qa"], "learning_rates": [1e-4], "seeds": 1}
    for tokenizer, expected in (
        ("tok", str(directory / "tok")),
        ("EuroBERT/EuroBERT-210m", "EuroBERT/EuroBERT-210m"),
    ):
        pretrain = manifests.BASE["pretrain"] | {
            "data_path": ["1/3", "?", "0.5", "/b"],
            "tokenizer": tokenizer,
        }
        pretrain["valid_data_path"] = ["web=w", "law=/l"]
        path = manifests.write(
            tmp_path, pretrain=pretrain, corpus={"vocab_size": 1024}, finetune=settings
        )
        plan = build_graph(read_manifest(path, directory))
        [run, *_] = plan.runs.values()
        words = run.flags["data_path"]
        assert run.flags["valid_data_path"] == [f"web={directory / 'w'}", "law=/l"]
        assert (
            words[::2] == ["1/3", "0.5"] and words[3] == "/b" and run.flags["tokenizer"] == expected
        )
        prefixes = list_prefixes(find_corpora([words[1]]))
        assert prefixes == [str(directory / "a"), str(directory / "b")]
    datasets = [grid.flags["datasets"] for grid in plan.grids.values()]
    assert datasets[:2] == [(f"squad={directory / 'qa'}",), (str(directory / "qa"),)]
