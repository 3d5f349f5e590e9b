"""A study that has begun is planned around its runs: starts stay, branches follow."""

import shutil

from manifests import TOY
from stage_artifacts import build_stages, make, make_run

BOTH = {"models": [TOY | {"steps": [400, 600]}], "finetune": None}
SHORT = {"models": [TOY], "finetune": None}


def starts(stages):
    """(kind, parent, step) of each run by its name."""
    runs = [node for id, node in stages.items() if id.startswith("pretrain/")]
    return {run.name: (run.start, run.parent, run.branch_step) for run in runs}


def test_a_longer_model_does_not_turn_a_run_that_has_begun_into_its_branch(tmp_path):
    assert starts(build_stages(tmp_path, **BOTH))["toy-mlm40-400"] == (
        "branch",
        "toy-mlm40-600",
        380,
    )
    make_run(build_stages(tmp_path, **SHORT)["pretrain/toy-mlm40-400"], 100)
    stages = build_stages(tmp_path, **BOTH)
    assert starts(stages) == {
        "toy-mlm40-400": ("new", "", 0),
        "toy-mlm40-600": ("branch", "toy-mlm40-400", 380),
    }
    for node in stages.values():
        node.check()
    [command] = stages["pretrain/toy-mlm40-400"].remaining_commands()
    assert "--branch-from" not in command and command[command.index("--save-steps") + 1] == "380"


def test_a_run_that_has_not_kept_the_step_is_branched_where_it_can_be_or_not_at_all(tmp_path):
    make(build_stages(tmp_path, **SHORT)["pretrain/toy-mlm40-400"])
    assert starts(build_stages(tmp_path, **BOTH))["toy-mlm40-600"] == ("new", "", 0)
    shutil.rmtree(tmp_path / "study")
    with_one_on_the_way = [TOY | {"checkpoints": [250]}]
    make(
        build_stages(tmp_path, models=with_one_on_the_way, finetune=None)["pretrain/toy-mlm40-400"]
    )
    assert starts(build_stages(tmp_path, **BOTH))["toy-mlm40-600"] == (
        "branch",
        "toy-mlm40-400",
        250,
    )


def test_a_branch_is_left_by_others_at_steps_that_it_makes_itself(tmp_path):
    """600 was branched off 400; what shares 80 steps with both is a branch of 400."""
    make_run(build_stages(tmp_path, **SHORT)["pretrain/toy-mlm40-400"], 50)
    make_run(build_stages(tmp_path, **BOTH)["pretrain/toy-mlm40-600"], 390)
    three = {"models": [TOY | {"steps": [400, 600, 100]}], "finetune": None}
    stages = starts(build_stages(tmp_path, **three))
    assert stages["toy-mlm40-100"] == ("branch", "toy-mlm40-400", 80)
    assert stages["toy-mlm40-600"] == ("branch", "toy-mlm40-400", 380)


def test_without_its_parent_a_branch_is_planned_anew(tmp_path):
    stages = build_stages(tmp_path, **BOTH)
    make(stages["pretrain/toy-mlm40-600"], stages["pretrain/toy-mlm40-400"])
    shutil.rmtree(tmp_path / "study" / "runs" / "toy-mlm40-600")
    again = build_stages(tmp_path, **BOTH)
    assert starts(again) == starts(stages)
    make(again["pretrain/toy-mlm40-600"])
    again["pretrain/toy-mlm40-400"].check()
