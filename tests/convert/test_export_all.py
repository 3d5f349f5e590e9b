"""Every kept checkpoint of a run under the study's names, step 0 included."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import hf_models
import pytest
import runs
import torch
from whole_models import load_weights

from megaenc.convert.command import main
from megaenc.convert.naming import export_name
from megaenc.convert.run_checkpoint import RunCheckpoint, open_run_checkpoint
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.model.config import get_preset
from megaenc.objectives import Schedule
from megaenc.training.config import PretrainConfig
from megaenc.training.run_init import NEW_WEIGHTS, Ancestor, RunInit

VOCABULARY = Vocabulary(size=64, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="f" * 64)


@pytest.fixture(scope="module")
def two_runs(small_corpus, tmp_path_factory):
    """The same twenty steps with checkpoints each 5 steps, of which those of 10 and 20 stay; the second run only stands still."""
    folder = tmp_path_factory.mktemp("all")
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--bf16"]
    keep = ["--save-interval", "5", "--keep-every", "10"]
    still = ["--train-iters", "1", "--lr", "1e-30", "--objective-schedule", "mlm", "--lr-warmup-iters", "0"]
    still += ["--lr-wsd-decay-iters", "1", "--no-untie-embeddings-and-output-weights"]
    jobs = [
        runs.Job(folder / "run", [*flags, *keep, "--tensor-model-parallel-size", "2"], 2),
        runs.Job(folder / "still", [*flags, *still]),
    ]
    runs.in_turn(jobs, folder)
    return folder


@pytest.mark.multiprocess
def test_each_kept_checkpoint_and_step_0(two_runs, tmp_path, capsys):
    main(["to-hf", "--load", str(two_runs / "run"), "--output", str(tmp_path / "hf"), "--all"])
    size = f"{open_run_checkpoint(two_runs / 'run').model.parameter_count(400) / 1e6:.3g}m"
    name = f"{size}-clm-10-mlm40-20"
    steps = {f"{name}-0": 0, f"{name}-10": 10, name: 20}
    assert {folder.name for folder in (tmp_path / "hf").iterdir()} == {*steps}
    said = capsys.readouterr().out
    for folder, step in steps.items():
        proof = json.loads((tmp_path / "hf" / folder / "conversion.json").read_text())
        assert proof["step"] == step and f"/{folder}: as EuroBertForMaskedLM" in said
        card = (tmp_path / "hf" / folder / "README.md").read_text()
        assert f"# {folder}\n" in card and f"this is step {step}," in card
        assert f"| {step} | held out, `mlm` |" in card, "figures are those of the step and no later ones"
    weights = [hf_models.weights(tmp_path / "hf" / folder) for folder in steps]
    assert not any(torch.equal(a["model.norm.weight"], b["model.norm.weight"]) for a, b in pairwise(weights))


@pytest.mark.multiprocess
def test_step_0_is_what_a_run_begins_with(two_runs):
    """Drawn from the seed again: bit by bit what is there after an update too small to change a weight."""
    run = open_run_checkpoint(two_runs / "still")
    drawn, kept = (load_weights(run, step)[1] for step in (0, 1))
    assert drawn.keys() == kept.keys() and "output_layer.weight" not in drawn
    assert all(torch.equal(drawn[name], kept[name]) for name in kept)


@pytest.mark.multiprocess
def test_what_cannot_be_is_one_line_and_leaves_nothing(two_runs, tmp_path, refusal):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    run = two_runs / "run"
    for flags, words in (
        (["--output", tmp_path / "hf", "--all", "--ckpt-step", "10"], "--ckpt-step 10: found --all too"),
        (["--output", tmp_path / "taken", "--all"], "exists already"),
        (
            ["--output", tmp_path / "hf", "--ckpt-step", "5"],
            "expected the checkpoint of step 5; choose one of steps 10, 20",
        ),
        (
            ["--output", tmp_path / "hf", "--max-shard-size", "five"],
            "--max-shard-size: found 'five', expected a size such as 500MB",
        ),
        (["--output", tmp_path / "hf", "--license", "a: b"], "--license: found 'a: b', expected an identifier of the Hub"),
    ):
        assert words in refusal(main, ["to-hf", "--load", run, *flags])
        assert not (tmp_path / "hf").exists()


@pytest.mark.multiprocess
def test_a_damaged_checkpoint_leaves_no_folder_of_the_whole_ones(two_runs, tmp_path, refusal):
    run = shutil.copytree(two_runs / "run", tmp_path / "run")
    shard = sorted((run / "checkpoints" / "iter_0000020").glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    line = refusal(main, ["to-hf", "--load", run, "--output", tmp_path / "out" / "hf", "--all"])
    assert "its content changed" in line and not list((tmp_path / "out").iterdir())


@pytest.mark.multiprocess
def test_a_save_that_was_not_finished_is_no_checkpoint(two_runs, tmp_path, refusal):
    run = shutil.copytree(two_runs / "run", tmp_path / "run")
    checkpoints = run / "checkpoints"
    for step in (10, 20):
        (checkpoints / f"iter_{step:07d}").rename(checkpoints / f".iter_{step:07d}.0123")
    (checkpoints / "latest_checkpointed_iteration.txt").unlink()
    for flags in ([], ["--all"]):
        line = refusal(main, ["to-hf", "--load", run, "--output", tmp_path / "hf", *flags])
        assert "only an unfinished checkpoint; give the run's command again" in line
        assert not (tmp_path / "hf").exists()


def named(schedule, steps, step=None, before=(), model="610m", **facts):
    settings = PretrainConfig(objective_schedule=schedule, train_iters=steps, model=model, shape=get_preset(model))
    start = RunInit("weights", before=tuple(before)) if before else NEW_WEIGHTS
    run = RunCheckpoint(Path("run"), settings.shape, 128256, 2048, torch.bfloat16, {}, settings, start, facts)
    return export_name(run, Schedule.build(schedule, steps, VOCABULARY), steps if step is None else step)


@pytest.mark.parametrize(
    ("schedule", "steps", "name"),
    [
        ("clm:10000,mlm(mask=0.4):32000", 42000, "610m-clm-10k-mlm40-42k"),
        ("clm", 42000, "610m-clm-42k"),
        ("mlm(mask=0.2)", 42000, "610m-mlm20-42k"),
        ("clm:0.25,mlm:0.75", 12000, "610m-clm-3k-mlm40-12k"),
        ("clm:100,clm:100,mlm(mask=0.15,random=0.1):300", 500, "610m-clm-200-mlm15-random0.1-500"),
        ("mix(clm:0.3,mlm:0.7)", 2000, "610m-mix-clm-3-mlm-7-2k"),
        ("mlm(mask=0.4->0.15)", 2000, "610m-mlm-mask-0.4to0.15-2k"),
        ("5x(clm:0.05,mlm:0.15)", 2000, "610m-5x-clm-0.05-mlm-0.15-2k"),
    ],
)
def test_names_are_the_studys(schedule, steps, name):
    assert named(schedule, steps) == name
    assert named(schedule, steps, 1000 if steps > 1000 else 100).startswith(f"{name}-1")
    assert named(schedule, steps, 0) == f"{name}-0"


def test_names_count_on_from_the_runs_before():
    finished = [Ancestor("runs/clm", 42000, "clm", 1, total=42000)]
    assert named("mlm(mask=0.4)", 22000, before=finished) == "610m-clm-dec42k-mlm40-64k"
    assert named("mlm(mask=0.4)", 22000, 1000, before=finished) == "610m-clm-dec42k-mlm40-64k-1000"
    two_phases = [Ancestor("runs/two", 42000, "clm:10000,mlm(mask=0.4):32000", 1, total=42000)]
    assert named("mlm(mask=0.4)", 2000, before=two_phases) == "610m-clm-10k-mlm40-dec42k-mlm40-44k"
    on_the_way = [Ancestor("runs/clm", 10000, "clm:0.5,mlm:0.5", 1, total=42000)]
    assert named("mlm(mask=0.4)", 22000, before=on_the_way) == "610m-clm-10k-mlm40-32k"
    not_recorded = [Ancestor("runs/clm", 42000, "clm", 1)]
    assert named("mlm(mask=0.4)", 22000, before=not_recorded) == "610m-clm-42k-mlm40-64k"
    not_installed = [Ancestor("runs/own", 42000, "own(way=2)", 1, total=42000)]
    assert named("mlm(mask=0.4)", 22000, before=not_installed) == "610m-own-way-2-dec42k-mlm40-64k"
    hf = Ancestor("hub/SmolLM2-135M", 0, "clm", 0, "llama", 8192)
    assert named("mlm", 10000, before=[hf]) == "smollm2-135m-mlm40-10k"
    assert named("clm", 200, 0, before=[hf], source={}) == "smollm2-135m"
