"""Run directories that contradict their weights are refused with one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from small_data import read_json, write_file

from megaenc.convert.command import main
from megaenc.convert.run_checkpoint import open_run_checkpoint
from megaenc.errors import InputError


@pytest.fixture
def core(came_in):
    """Return a run directory of an imported Llama. Not to be changed."""
    return came_in("llama with stretched positions", torch.bfloat16)[1]


@pytest.mark.parametrize(
    ("file", "place", "value", "words"),
    [
        (
            "config.yaml",
            ["rotary_base"],
            10000.0,
            "field `rotary_base`: found 10000.0, expected 2500.0",
        ),
        ("config.yaml", ["num_layers"], 3, "field `num_layers`: found 3, expected 2"),
        ("config.yaml", ["bf16"], False, "field `bf16`: found False, expected True"),
        ("config.yaml", ["vocab_size"], 400, "field `vocab_size`: found 400, expected 410"),
        ("run.json", ["identity"], [1], "field `identity`: found no settings of a run"),
        (
            "run.json",
            ["vocab_size"],
            "410",
            "field `vocab_size`: found '410', expected a number of 1 or more",
        ),
        (
            "run.json",
            ["vocab_size"],
            10,
            "field `vocab_size`: found 10, expected the rows of a model of",
        ),
        ("run.json", ["start", "at"], "1", "start: field `at`: found '1', expected a int"),
        (
            "run.json",
            ["start", "kind"],
            "else",
            "start: field `kind`: found 'else', expected one of new",
        ),
        (
            "run.json",
            ["start", "before", 0, "generation"],
            [1],
            "start: field `generation`: found [1], expected a dict",
        ),
        (
            "run.json",
            ["start", "before", 0, "family"],
            "gemma",
            "start: field `family`: found 'gemma', expected one of",
        ),
        (
            "run.json",
            ["source", "mask_token"],
            {"origin": "added"},
            "expected the run.json of a pretraining run",
        ),
    ],
)
def test_what_no_run_wrote_is_one_line(file, place, value, words, core, refusal):
    path = shutil.copytree(core, Path("run")) / file
    is_yaml = file == "config.yaml"
    values = yaml.safe_load(path.read_text()) if is_yaml else read_json(path)
    part = values
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    path.write_text(yaml.safe_dump(values) if is_yaml else json.dumps(values))
    line = refusal(main, ["to-hf", "--load", "run", "--output", "hf"])
    assert words in line and f"run/{file}: " in line and not Path("hf").exists()


def test_a_seed_that_is_not_the_runs_draws_no_other_weights(core):
    """A run has a seed; an imported model has none."""
    path = shutil.copytree(core, Path("run")) / "run.json"
    facts = read_json(path)
    facts["identity"]["seed"] = 7
    write_file(path, facts)
    with pytest.raises(InputError, match="field `seed`: found 1, expected 7"):
        open_run_checkpoint(Path("run"))
