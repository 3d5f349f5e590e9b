"""Flags of the fine-tuning commands and the files that name them."""

import dataclasses
from pathlib import Path

from megaenc import flags
from megaenc.finetune import command
from megaenc.finetune.command import RunSettings, run_main
from megaenc.finetune.datasets import DATASETS
from megaenc.finetune.examples import Family
from megaenc.finetune.grid import GridSettings, grid_main

CONFIGS = Path(__file__).parents[2] / "configs" / "finetune"


def test_the_studys_file_says_what_the_defaults_are():
    found = flags.from_yaml(GridSettings(), CONFIGS / "paper.yaml")
    assert set(found.datasets) == {name for name in DATASETS if not name.startswith("demo_")} and len(found.datasets) == 12
    assert dataclasses.replace(found, datasets=()) == GridSettings()


def test_the_command_line_wins_over_the_file():
    argv = ["--config", str(CONFIGS / "demo.yaml"), "--seeds", "1"]
    found = flags.parse_with_config(GridSettings, argv, prog="test", description="")
    assert (found.seeds, found.protocol.max_steps, found.learning_rates) == (1, 40, (2e-4, 5e-4))


def test_what_is_missing_is_named(refusal):
    assert refusal(run_main, ["--dataset", "sst2"]) == "error: --model: missing; see megaenc finetune run --help"
    assert refusal(run_main, ["--model", "here"]) == "error: --dataset: missing; see megaenc finetune run --help"
    assert "--model: found none, expected at least one" in refusal(grid_main, ["--config", CONFIGS / "demo.yaml"])


def test_each_family_says_what_its_scores_stand_beside():
    assert set(command._WITHOUT_A_MODEL) == set(Family)


def test_a_run_has_the_protocol_of_a_grid():
    assert RunSettings().protocol == GridSettings().protocol and RunSettings().data == GridSettings().data
