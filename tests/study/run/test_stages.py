"""Inputs of a stage are compared with current ones: no study of two recipes."""

import json
import shutil

import manifests
import pytest
import small_data
import stage_artifacts
from corpus_helpers import VOCABULARY, write_whole_corpus
from stage_artifacts import GRID, STUDY, TWO, assert_stale, make

from megaenc.data.packing.builder import RunData
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.results import files as result_files
from megaenc.study.run.stage import StaleArtifactError, check_stages, finished_stages, format_flags
from megaenc.training.config import parse_config
from megaenc.training.planning import build_plan

CHANGED = [{**TWO[0], "pretrain": {"weight_decay": 0.0}}, TWO[1]]


@pytest.fixture
def study(tmp_path):
    """A finished study of two models."""
    stages = stage_artifacts.build_stages(tmp_path, models=TWO, finetune=GRID)
    make(*stages.values())
    return tmp_path


def nodes(directory, **changes):
    return stage_artifacts.build_stages(directory, **{"models": TWO, "finetune": GRID, **changes})


def test_a_run_of_the_stages_command_fits(study, small_corpus):
    stage = nodes(study)["pretrain/base"]
    data = {"data_path": [str(small_corpus.prefix)], "tokenizer": str(small_corpus.tokenizer)}
    plan = build_plan(parse_config(format_flags(stage.flags | data), "pretrain"))
    (stage.directory / "run.json").write_text(json.dumps(plan.run_metadata))
    stage.check()


def test_a_run_that_freezes_other_parts(tmp_path):
    def stage(*freeze):
        models = [{**TWO[0], "pretrain": {"freeze": [*freeze]}}, TWO[1]]
        return nodes(tmp_path, models=models)["pretrain/base"]

    make(stage("layers.0", "embedding"))
    stage("embedding", "layers.0-0").check()
    assert_stale(stage(), "freeze is .* there, not given here")
    file = stage().directory / "run.json"
    metadata = json.loads(file.read_text())
    del metadata["identity"]["freeze"]  # as in a run that freezes nothing
    file.write_text(json.dumps(metadata))
    stage().check()
    assert_stale(stage("embedding"), "freeze is not given there, .* here")


def test_another_recipe_names_every_directory_that_was_made_of_the_old_one(study):
    stages = nodes(study, models=CHANGED)
    with pytest.raises(StaleArtifactError) as refused:
        check_stages(stages.values(), stages, study / STUDY)
    directories = "runs/base runs/more hf/base hf/more results/base results/more"
    assert "runs/base: made from another manifest: weight_decay is 0.1 there, 0.0 here" in str(
        refused.value
    )
    assert f"remove all that depends on it ({directories}), or choose" in str(refused.value)


def test_what_is_left_of_a_run_that_is_to_be_made_again_is_not_done(study):
    """The run was removed; its export, results and continuations were not."""
    shutil.rmtree(study / STUDY / "runs" / "base")
    stages = nodes(study, models=CHANGED)
    check_stages(stages.values(), stages, study / STUDY)  # there is nothing to compare them with
    assert finished_stages(stages.values()) == {"corpus"}
    make(stages["pretrain/base"])
    assert finished_stages(stages.values()) == set(stages)
    for id, expected in (
        ("pretrain/more", "began with another base than"),
        ("export/base", "made from another base than"),
    ):
        assert_stale(stages[id], expected)
    make(stages["export/base"])
    stages["export/base"].check()


def test_results_of_another_export_are_not_this_models(study):
    stages = nodes(study)
    stage_artifacts.make_export(stages["export/more"], weights="others")
    assert_stale(
        stages["finetune/more@demo_sc"],
        r"results/more: made with other settings: finetune: model is \w{12} there, \w{12} here",
    )


def test_an_export_that_does_not_say_of_which_run_it_is(study):
    stages = nodes(study)
    certificate = stages["export/base"].directory / "conversion.json"
    certificate.write_text(json.dumps({"run": "base", "step": 100}))
    assert_stale(stages["export/base"], "made from another base")
    shutil.rmtree(study / STUDY / "runs" / "base")
    assert_stale(stages["export/base"], "made from another base")


def test_every_result_is_compared_and_not_the_first_alone(study):
    two_seeds = {**GRID, "seeds": 2}
    stages = nodes(study, finetune=two_seeds)
    grid = stages["finetune/base@demo_sc"]
    assert not grid.is_done()
    make(grid)
    grid.check()
    first, second = sorted(grid.directory.rglob("results.json"))
    second.write_text(first.read_text().replace('"max_steps": 1000', '"max_steps": 7'))
    assert_stale(grid, "max_steps is 7 there, 1000 here")


def test_results_of_other_data_of_the_same_name(tmp_path):
    """Local data are looked at; what is no longer there cannot be compared."""
    data = tmp_path / "sc"
    data.mkdir()
    (data / "train.jsonl").write_text(
        '{"text": "one", "label": 0}\n{"text": "two", "label": 1}\n' * 20
    )
    local = {**GRID, "datasets": ["mine=sc"], "task": "SC"}
    stages = nodes(tmp_path, finetune=local)
    make(*stages.values())
    nodes(tmp_path, finetune=local)["finetune/base@mine"].check()
    with (data / "train.jsonl").open("a") as stream:
        stream.write('{"text": "three", "label": 1}\n')
    assert_stale(nodes(tmp_path, finetune=local)["finetune/base@mine"], "finetune: dataset is ")
    shutil.rmtree(data)
    nodes(tmp_path, finetune=local)["finetune/base@mine"].check()


def test_reranking_may_stand_next_to_pairs_in_the_studys_template(tmp_path):
    rows = {"sc": {"text": "a", "text_pair": "b", "label": 1}, "ranked": {"query": "q"}}
    rows["ranked"] |= {"document": "d", "negatives": ["n"]}
    for name, row in rows.items():
        small_data.write_splits(tmp_path / name, "jsonl", [row])
    local = {**GRID, "datasets": ["./sc", "./ranked"]}
    grid = nodes(tmp_path, finetune=local)["finetune/base@ranked"]
    assert grid.data.flags.pair_template == "study"
    assert [*grid.data.fingerprints] == ["sc", "ranked"]


@pytest.mark.parametrize("family", TaskFamily)
def test_local_data_has_results_of_any_family(family, tmp_path):
    grid = nodes(tmp_path, finetune={**GRID, "datasets": ["mine=later"]})["finetune/base@mine"]
    place = (family, "mine", "mine", grid.flags["learning_rates"][0], 0)
    directory = result_files.run_directory(grid.directory, *place)
    directory.mkdir(parents=True)
    assert grid.progress() == (0, 1)
    (directory / result_files.RESULTS).touch()
    assert grid.progress() == (1, 1)


def test_a_run_on_a_blend_that_has_changed(tmp_path):
    """By a corpus more, another text, temperature or limit of epochs."""
    (tmp_path / "data").mkdir()

    def write_corpus(name, size):
        write_whole_corpus(
            tmp_path / "data" / f"{name}_text_document", [[2] * size + [0]] * 100, vocab_size=32
        )

    def stage(**flags):
        pretrain = (
            manifests.BASE["pretrain"]
            | {"data_path": ["data/*_text_document"], "tokenizer": "tokenizer"}
            | blend
            | flags
        )
        return nodes(tmp_path, pretrain=pretrain, corpus={"vocab_size": 1024})["pretrain/base"]

    def refused(**flags):
        assert_stale(stage(**flags), "trained with another data than that of")

    blend = {"blend_temperature": 0.5, "blend_max_epochs": 2}
    write_corpus("a", 10)
    write_corpus("b", 20)
    run = stage()
    config = {
        "split": "99,1,0",
        "packing": "concat",
        "seq_length": 64,
        "seed": 1,
        "temperature": 0.5,
        "max_epochs": 2,
    }
    data = RunData.open(run.flags["data_path"], VOCABULARY, **config)
    make(run, identity={"data": data.fingerprint})
    file = run.directory / "run.json"
    metadata = json.loads(file.read_text()) | {
        "reading": [{"tokens": row.tokens} for row in data.corpus_usage(10)]
    }
    for name in blend:
        metadata["identity"].pop(name, None)  # runs do not record them
    file.write_text(json.dumps(metadata))
    stage().check()
    refused(blend_max_epochs=3)
    refused(blend_temperature=0.4)
    write_corpus("b", 30)
    refused()
    write_corpus("b", 20)
    stage().check()
    write_corpus("c", 40)
    refused()


def corpus(directory, vocab_size=300):
    return nodes(directory, corpus={"text": ["text.jsonl"], "vocab_size": vocab_size})["corpus"]


def test_a_corpus_remembers_what_it_was_asked_to_be(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "the cat sat on the mat"}\n')
    node = corpus(tmp_path)
    node.prepare()
    (node.directory / "tokenizer").mkdir()  # and then it was interrupted
    node.check()
    assert_stale(corpus(tmp_path, 310), "corpus: vocab_size is 300 there, 310 here")
    make(node)
    # A small text gives fewer ids than were asked for.
    (node.directory / "corpus_text_document.json").write_text(
        '{"vocab_size": 270, "sources": [{"path": "text.jsonl"}]}'
    )
    corpus(tmp_path).check()
    text.write_text('{"text": "the cat sat on the mat, and on others"}\n')
    assert_stale(corpus(tmp_path), r"corpus: text\.jsonl had 35 bytes, has 50 now")
    text.unlink()
    corpus(tmp_path).check()


def test_a_run_on_another_corpus_is_told(study):
    write_whole_corpus(
        study / STUDY / "corpus" / "corpus_text_document",
        [[2, 0]],
        sha256={"bin": "d1", "idx": "i"},
    )
    run = nodes(study)["pretrain/base"]
    right = {"data": "d1", "tokenizer": VOCABULARY.fingerprint}
    for name in right:
        shutil.rmtree(run.directory)
        stage_artifacts.make_run(run, 100, right | {name: "another"})
        assert_stale(run, f"runs/base: trained with another {name} than")
    shutil.rmtree(run.directory)
    stage_artifacts.make_run(run, 100, right)
    run.check()
