"""What a run folder says of its model is what the model is, or it is one line."""

import json
import shutil

import hf_models
import pytest
import yaml

from megaenc.convert.command import main
from megaenc.convert.run_checkpoint import open_run_checkpoint
from megaenc.errors import InputError


@pytest.fixture(scope="module")
def core(small_corpus, tmp_path_factory):
    """A run folder of a Llama that came in. Not to be changed."""
    folder = tmp_path_factory.mktemp("core")
    model = hf_models.build("llama with stretched positions", vocab_size=410).bfloat16()
    hf = hf_models.write(model, folder / "hf", small_corpus.tokenizer)
    main(["from-hf", "--input", str(hf), "--output", str(folder / "core")])
    return folder / "core"


@pytest.fixture
def refused(core, tmp_path, refusal):
    """Export a copy of `core` in which `file` was changed by `edit(values)`; returns the line that refuses it."""

    def export(file, edit):
        folder = shutil.copytree(core, tmp_path / "run")
        read, write = (yaml.safe_load, yaml.safe_dump) if file == "config.yaml" else (json.loads, json.dumps)
        values = read((folder / file).read_text())
        (folder / file).write_text(write(edit(values) or values))
        line = refusal(main, ["to-hf", "--load", folder, "--output", tmp_path / "hf"])
        assert f"{folder / file}: " in line and not (tmp_path / "hf").exists()
        return line

    return export


@pytest.mark.parametrize(
    ("field", "value", "made_with"),
    [
        ("rotary_base", 10000.0, 2500.0),
        ("rope_scaling_factor", 8.0, 32.0),
        ("norm_epsilon", 1e-3, 1e-6),
        ("num_layers", 3, 2),
        ("num_query_groups", 4, 2),
        ("untie_embeddings_and_output_weights", True, False),
        ("bf16", False, True),
        ("vocab_size", 400, 410),
    ],
)
def test_a_model_that_config_yaml_has_otherwise_is_named(field, value, made_with, core, refused):
    assert yaml.safe_load((core / "config.yaml").read_text())[field] == made_with
    line = refused("config.yaml", lambda flags: flags.update({field: value}))
    assert f"field `{field}`: found {value}, expected {made_with}" in line


def test_a_seed_that_is_not_the_runs_draws_no_other_weights(core, refused):
    """Of a run; what came in has none."""
    folder = shutil.copytree(core, core.parent / "seed")
    facts = json.loads((folder / "run.json").read_text())
    facts["identity"]["seed"] = 7
    (folder / "run.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match="field `seed`: found 1, expected 7"):
        open_run_checkpoint(folder)


def stage(**values):
    return lambda facts: facts["start"]["before"][0].update(values)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda facts: [facts], "expected the run.json of a pretraining run"),
        (lambda facts: facts.pop("identity"), "KeyError('identity')"),
        (lambda facts: facts.update(identity=[1]), "expected the run.json of a pretraining run"),
        (lambda facts: facts.update(vocab_size="410"), "field `vocab_size`: found '410', expected a number of 1 or more"),
        (lambda facts: facts.update(vocab_size=-1), "field `vocab_size`: found -1, expected a number of 1 or more"),
        (lambda facts: facts.update(vocab_size=10), "field `vocab_size`: found 10, expected the rows of a model of"),
        (lambda facts: facts.update(start=[]), "expected the run.json of a pretraining run"),
        (lambda facts: facts["start"].update(at="1"), "start: field `at`: found '1', expected a int"),
        (lambda facts: facts["start"].update(kind="else"), "start: field `kind`: found 'else', expected one of new"),
        (lambda facts: facts["start"].update(before=[{"run": 1}]), "expected the run.json of a pretraining run"),
        (stage(run=1), "start: field `run`: found 1, expected a str"),
        (stage(context="512"), "start: field `context`: found '512', expected a int"),
        (stage(generation=[1]), "start: field `generation`: found [1], expected a dict"),
        (stage(config_fields=[1]), "start: field `config_fields`: found [1], expected a dict"),
        (stage(family="gemma"), "start: field `family`: found 'gemma', expected one of eurobert, llama"),
        (lambda facts: facts.update(source="hub"), "expected the run.json of a pretraining run"),
        (lambda facts: facts["source"].update(mask_token={"origin": "added"}), "expected the run.json of a pretraining run"),
    ],
)
def test_run_json_that_no_run_wrote_is_one_line(edit, words, refused):
    assert words in refused("run.json", lambda facts: result if isinstance(result := edit(facts), list) else None)


def test_deeply_nested_json_is_one_line(core, tmp_path, refusal):
    folder = shutil.copytree(core, tmp_path / "run")
    (folder / "run.json").write_text("[" * 100_000)
    assert "run.json" in refusal(main, ["to-hf", "--load", folder, "--output", tmp_path / "hf"])


def test_what_nobody_changed_is_read(core):
    assert open_run_checkpoint(core).vocab_size == 410
