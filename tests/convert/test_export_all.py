"""Every kept checkpoint of a run, step 0 too, under the study's names."""

import shutil
from pathlib import Path

import hf_models
import pytest
import torch
from small_data import read_json
from transformers import AutoTokenizer
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


@pytest.mark.multiprocess
def test_each_kept_checkpoint_and_step_0(two_runs, exports):
    size = f"{open_run_checkpoint(two_runs / 'run').model.parameter_count(400) / 1e6:.3g}m"
    name = f"{size}-clm-10-mlm40-20"
    assert [exports[step].name for step in (0, 10, 20)] == [f"{name}-0", f"{name}-10", name]
    assert len(list(exports[20].parent.iterdir())) == 3
    for step, directory in exports.items():
        assert read_json(directory / "conversion.json")["step"] == step
        card = (directory / "README.md").read_text()
        assert f"# {directory.name}\n" in card and f"this is step {step}," in card
        assert f"| {step} | held out, `mlm` |" in card, (
            "figures are those of the step and no later ones"
        )
    norms = [hf_models.weights(directory)["model.norm.weight"] for directory in exports.values()]
    assert not torch.equal(norms[0], norms[1]) and not torch.equal(norms[1], norms[2])


@pytest.mark.multiprocess
def test_a_directory_has_the_ids_of_its_tokenizer(exports, small_corpus):
    directory = exports[20]
    config = read_json(directory / "config.json")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert config["vocab_size"] == len(tokenizer) == 400, "vocabulary padding is not exported"
    assert (config["mask_token_id"], config["eos_token_id"]) == (
        tokenizer.mask_token_id,
        tokenizer.eos_token_id,
    )
    plain = AutoTokenizer.from_pretrained(small_corpus.tokenizer)("stan plark")["input_ids"]
    document = [*plain, tokenizer.eos_token_id]
    assert tokenizer("stan plark")["input_ids"] == document, "a document as it was trained"
    assert tokenizer("stan plark", "stan plark")["input_ids"] == document * 2
    assert tokenizer("")["input_ids"] == [tokenizer.eos_token_id]


@pytest.mark.multiprocess
def test_step_0_is_what_a_run_begins_with(two_runs):
    """Step 0 is drawn from the seed and equals the weights of step 1, bit by bit."""
    run = open_run_checkpoint(two_runs / "still")
    drawn = load_weights(run, 0)[1]
    kept = load_weights(run, 1)[1]
    assert drawn.keys() == kept.keys() and "output_layer.weight" not in drawn
    assert all(torch.equal(drawn[name], kept[name]) for name in kept)


@pytest.mark.multiprocess
def test_what_is_no_checkpoint_leaves_nothing(two_runs, tmp_path, refusal):
    run = shutil.copytree(two_runs / "run", Path("run"))
    command = ["to-hf", "--load", run, "--output", "hf"]
    line = refusal(main, [*command, "--ckpt-step", "5"])
    assert "expected the checkpoint of step 5; choose one of steps 10, 20" in line
    assert "--ckpt-step 10: found --all too" in refusal(
        main, [*command, "--all", "--ckpt-step", "10"]
    )
    checkpoints = run / "checkpoints"
    shard = sorted((checkpoints / "iter_0000020").glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert "its content changed" in refusal(main, [*command, "--all"])
    for step in (10, 20):  # saves that were not finished
        (checkpoints / f"iter_{step:07d}").rename(checkpoints / f".iter_{step:07d}.0123")
    (checkpoints / "latest_checkpointed_iteration.txt").unlink()
    for flags in ([], ["--all"]):
        line = refusal(main, [*command, *flags])
        assert "only an unfinished checkpoint; give the run's command again" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def named(schedule, steps, step=None, before=(), model="610m", **facts):
    settings = PretrainConfig(
        objective_schedule=schedule, train_iters=steps, model=model, shape=get_preset(model)
    )
    start = RunInit("weights", before=tuple(before)) if before else NEW_WEIGHTS
    run = RunCheckpoint(
        Path("run"), settings.shape, 128256, 2048, torch.bfloat16, {}, settings, start, facts
    )
    return export_name(
        run, Schedule.build(schedule, steps, VOCABULARY), steps if step is None else step
    )


@pytest.mark.parametrize(
    ("schedule", "steps", "name"),
    [
        ("clm:10000,mlm(mask=0.4):32000", 42000, "610m-clm-10k-mlm40-42k"),
        ("clm", 42000, "610m-clm-42k"),
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


HALF_CLM = "clm:10000,mlm(mask=0.4):32000"


@pytest.mark.parametrize(
    ("before", "schedule", "steps", "name"),
    [
        (
            Ancestor("runs/clm", 42000, "clm", 1, total=42000),
            "mlm(mask=0.4)",
            22000,
            "610m-clm-dec42k-mlm40-64k",
        ),
        (
            Ancestor("runs/two", 42000, HALF_CLM, 1, total=42000),
            "mlm",
            2000,
            "610m-clm-10k-mlm40-dec42k-mlm40-44k",
        ),
        (
            Ancestor("runs/clm", 10000, "clm:0.5,mlm:0.5", 1, total=42000),
            "mlm",
            22000,
            "610m-clm-10k-mlm40-32k",
        ),
        (
            Ancestor("runs/clm", 42000, "clm", 1),
            "mlm",
            22000,
            "610m-clm-42k-mlm40-64k",
        ),  # its length was not recorded
        (
            Ancestor("runs/own", 42000, "own(way=2)", 1, total=42000),
            "mlm",
            22000,
            "610m-own-way-2-dec42k-mlm40-64k",
        ),
        (
            Ancestor("hub/SmolLM2-135M", 0, "clm", 0, "llama", 8192),
            "mlm",
            10000,
            "smollm2-135m-mlm40-10k",
        ),
    ],
)
def test_names_count_on_from_the_runs_before(before, schedule, steps, name):
    assert named(schedule, steps, before=[before]) == name


def test_what_came_in_keeps_its_name():
    came_in = Ancestor("hub/SmolLM2-135M", 0, "clm", 0, "llama", 8192)
    assert named("clm", 200, 0, before=[came_in], source={}) == "smollm2-135m"
