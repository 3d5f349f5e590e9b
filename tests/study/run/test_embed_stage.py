"""Zero-shot retrieval as a stage: its commands, stale outputs and refusals."""

import manifests
import pytest
import small_data
import stage_artifacts
import zero_shot_directories
from manifests import EMBED
from stage_artifacts import STUDY, TWO, make

from megaenc.study.plan.command import format_plan
from megaenc.study.plan.cost import compute_study_cost
from megaenc.study.run.stage import StaleArtifactError, check_stages, finished_stages

ONE = {"models": TWO[:1], "finetune": None}


@pytest.fixture
def data(tmp_path):
    """The retrieval set and the pairs of EMBED, and a built demo set."""
    for directory in (tmp_path / "ir" / "sci", tmp_path / STUDY / "demo" / "demo_ir"):
        small_data.write_files(
            directory,
            dict.fromkeys(("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"), directory.name),
        )
    small_data.write_file(tmp_path / "qa" / "pairs.jsonl", [{"query": "a", "document": "b"}])
    return tmp_path


def build(directory, **embed):
    """Return the stages of a study of one model with EMBED and other keys of it."""
    return stage_artifacts.build_stages(directory, embed={**EMBED, **embed}, **ONE)


def make_all(stage):
    """Write all that a stage writes."""
    stage.prepare()
    zero_shot_directories.make_evaluation(stage, "pretrained")
    for seed in stage.data.entry.training_seeds:
        zero_shot_directories.make_training(stage, seed)
        zero_shot_directories.make_evaluation(stage, f"seed-{seed}")


@pytest.fixture
def study(data):
    """A finished study of one model and EMBED."""
    stages = build(data)
    make(*(stage for stage in stages.values() if stage.kind != "embed"))
    make_all(stages["embed/base"])
    return data


def words(command):
    """Return the words of a command after `python -m megaenc`."""
    return command[command.index("megaenc") + 1 :]


def test_commands_follow_each_other_until_all_seeds_are_evaluated(data):
    stages = build(data)
    make(*(stage for stage in stages.values() if stage.kind != "embed"))
    stage = stages["embed/base"]
    study = data / STUDY
    root = study / "embed" / "base"
    sets = f"--data sci={data}/ir/sci demo_ir={study}/demo/demo_ir"
    first = (
        f"embed eval --model pretrained={study}/hf/base {sets} --output {root}/pretrained.json "
        "--overwrite --query-prefix=- "
    )
    expected = [first]
    for name in ("seed-0", "seed-1"):
        training = (
            f"embed train --model {study}/hf/base --data {data}/qa/pairs.jsonl --output "
            f"{root}/{name}"
        )
        expected.append(f"{training} --seed {name[-1]} --batch-size 64 --query-prefix=- ")
        expected.append(
            f"embed eval --model {name}={root}/{name} {sets} --output {root}/{name}.json "
            "--overwrite --no-bm25"
        )
    assert stage.needs == ("export/base",) and stage.progress() == (0, 3)
    assert [" ".join(words(command)) for command in stage.remaining_commands()] == expected
    made = [stage.remaining_commands()[0]]
    zero_shot_directories.make_evaluation(stage, "pretrained")
    for seed in range(2):
        made.append(stage.remaining_commands()[0])
        zero_shot_directories.make_training(stage, seed)
        made.append(stage.remaining_commands()[0])
        zero_shot_directories.make_evaluation(stage, f"seed-{seed}")
    assert [" ".join(words(command)) for command in made] == expected
    assert stage.is_done() and stage.progress() == (3, 3) and not stage.remaining_commands()
    check_stages(stages.values(), stages, study)
    assert finished_stages(stages.values()) == set(stages)


def test_the_demo_set_is_built_first_and_without_pairs_nothing_is_trained(tmp_path):
    stage = stage_artifacts.build_stages(
        tmp_path, embed={"datasets": ["demo_ir"], "bm25": False}, **ONE
    )["embed/base"]
    demo, evaluation = map(words, stage.remaining_commands())
    assert demo == ["finetune", "demo", "--output", f"{tmp_path}/{STUDY}/demo"]
    assert (
        evaluation[-1] == "--no-bm25" and stage.progress() == (0, 1) and stage.planned_seconds == 30
    )


STALE = [
    # changed keys of `embed`, and words of the error
    ({"batch_size": 32}, "embed: batch_size is 64 there, 32 here (seed-0)"),
    ({"query_prefix": ""}, "query_prefix is -  there,  here"),
    ({"pooling": "cls"}, "embed: pooling is mean there, cls here (seed-0)"),
    (
        {"train": "qa/others.jsonl"},
        "embed: train is pairs.jsonl there, others.jsonl here (pairs.json)",
    ),
]
FILES = [
    ("ir/sci/corpus.jsonl", "embed: sci is "),
    ("qa/pairs.jsonl", "bytes of train is 32 there, 7 here (pairs.json)"),
    # The training, not only the evaluation
    (
        f"{STUDY}/hf/base/model.safetensors",
        "here (seed-0)",
    ),
    (f"{STUDY}/embed/base/seed-1/model.safetensors", "(seed-1)"),
    (f"{STUDY}/embed/base/seed-1/tokenizer.json", "embed: tokenizer is "),
]


def test_a_changed_manifest_other_data_or_weights_make_it_stale(study):
    for changes, expected in STALE:
        stages = build(study, **changes)
        with pytest.raises(StaleArtifactError) as error:
            check_stages(stages.values(), stages, study / STUDY)
        assert expected in str(error.value) and "remove all that depends on it (embed/base)" in str(
            error.value
        )
    for name, expected in FILES:
        before = (study / name).read_text()
        (study / name).write_text("changed")
        with pytest.raises(StaleArtifactError) as error:
            build(study)["embed/base"].check()
        assert expected in str(error.value)
        (study / name).write_text(before)


def test_a_new_set_or_seed_is_evaluated_and_a_damaged_file_again(study):
    three = build(study, seeds=3)["embed/base"]
    stage = build(study)["embed/base"]
    assert [words(command)[:2] for command in three.remaining_commands()] == [
        ["embed", "train"],
        ["embed", "eval"],
    ]
    more = build(study, datasets=["sci=ir/sci", "demo_ir", "new=ir/sci"])["embed/base"]
    assert [words(command)[3].partition("=")[0] for command in more.remaining_commands()] == [
        "pretrained",
        "seed-0",
        "seed-1",
    ]
    more.check()
    (stage.directory / "seed-1.json").write_text("[" * 100_000)
    assert stage.progress() == (2, 3)
    stage.check()


def test_the_plan_counts_evaluations_trainings_and_hours(tmp_path):
    hardware = {"tokens_per_second": 512, "embed_seconds": 90}
    graph = manifests.graph(tmp_path, embed=EMBED, hardware=hardware)
    cost = compute_study_cost(graph)
    checkpoints = len(graph.exports)
    assert list(graph.stages)[-checkpoints:] == [f"embed/{name}" for name in graph.exports]
    assert (cost.embed_runs, cost.embed_hours) == (
        2 * checkpoints,
        pytest.approx(2 * checkpoints * 90 / 3600),
    )
    lines = list(format_plan(graph, cost))
    assert (
        f"zero-shot retrieval: {3 * checkpoints} evaluations on 2 data sets, {checkpoints} "
        "checkpoints as pretrained" in lines
    )
    assert (
        f"  and after {2 * checkpoints} contrastive trainings: 2 seeds of each checkpoint" in lines
    )
    assert (
        f"  {cost.embed_hours:.1f} hours of one device at 90 seconds a training with its evaluation"
        in lines
    )
