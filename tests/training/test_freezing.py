"""Frozen parts of the model, unchanged bit by bit, and training of the others."""

import json
import math

import numpy as np
import plain_loop
import pytest
import runs
import torch
from runs import Job
from training_helpers import plan_of
from transformers import EuroBertForMaskedLM

from megaenc.convert.to_hf import to_hf
from megaenc.model.freezing import find_part, parse_freeze
from megaenc.training.callbacks.run_messages import describe_frozen
from megaenc.training.command import main

RUN = [
    *runs.SHORT_RUN[:16], "--num-layers", "4", "--eval-interval", "0", "--clip-grad", "0.5",
    "--lr", "3e-3", "--lr-warmup-iters", "2", "--lr-decay-style", "constant",
]  # fmt: skip
FROZEN = ["embedding", "layers.1-2"]
PHASES = [
    "--phases",
    json.dumps({"objective": "clm", "train_iters": 3, "freeze": "head"}),
    json.dumps({"objective": "mlm", "train_iters": 3, "freeze": FROZEN}),
]
TIED = [
    "--no-untie-embeddings-and-output-weights",
    "--embedding-norm",
    "--prediction-head",
    "--output-layer-bias",
]
TP2_PP2 = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
INTERLEAVED = [
    "--pipeline-model-parallel-size",
    "2",
    "--num-layers-per-virtual-pipeline-stage",
    "1",
]
SPLIT = ["--use-distributed-optimizer"]


@pytest.mark.parametrize("frozen_steps", [range(1, 8), (1, 2, 3), (3, 4)])
def test_losses_and_norms_equal_those_of_a_plain_loop(frozen_steps, small_corpus, tmp_path):
    """torch trains transformers' model with requires_grad off for the frozen weights.

    Its AdamW corrects the bias of each weight by the number of that weight's own updates.
    """
    flags = [*small_corpus.flags, *RUN, "--no-bf16", "--phases"]
    for step in range(1, 8):
        frozen = {"freeze": FROZEN} if step in frozen_steps else {}
        flags.append(json.dumps({"objective": "mlm", "train_iters": 1} | frozen))
    main([*flags, "--save", str(tmp_path / "run")])
    # A rate below any rounding leaves the weights as they were.
    main([*flags, "--lr", "1e-30", "--exit-interval", "1", "--save", str(tmp_path / "start")])
    to_hf(tmp_path / "start", tmp_path / "hf")
    model = EuroBertForMaskedLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")

    def freeze(step: int) -> None:
        for part in (model.model.embed_tokens, model.model.layers[1:3]):
            part.requires_grad_(step not in frozen_steps)

    rows = runs.metrics(tmp_path / "run")
    rates = [row["learning_rate"] for row in rows]
    losses, norms = plain_loop.train(
        model, plan_of(*flags), 7, lambda step: rates[step - 1], 0.5, freeze
    )
    assert max(norms) > 0.5, "the clip never bit, so it was not tested"
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-4)
    np.testing.assert_allclose([row["grad_norm"] for row in rows], norms, rtol=1e-4)


@pytest.mark.parametrize("precision", ["--no-bf16", "--bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "stable_adamw", "muon"])
def test_each_optimizer_updates_only_the_others(optimizer, precision, small_corpus, engine_of):
    """The others are those of a run whose frozen weights are reset after each step."""
    from megaenc.model.encoder import named_global_parameters

    flags = [*small_corpus.flags, *RUN, precision, "--optimizer", optimizer, "--clip-grad", "0"]
    engine = engine_of(*flags, "--freeze", *FROZEN)
    reference = engine_of(*flags)
    shape = reference.plan.settings.shape
    frozen = parse_freeze(FROZEN, shape)
    expected = dict(named_global_parameters(reference._encoders[0]))
    start = []
    for name, weight in expected.items():
        if find_part(name, shape) in frozen:
            for tensor in {weight, getattr(weight, "main_param", weight)}:
                start.append((tensor.detach(), tensor.detach().clone()))
    for step in range(1, 4):
        engine.train_step(step)
        reference.train_step(step)
        for tensor, values in start:
            tensor.copy_(values)
    [core_optimizer] = engine.optimizer.chained_optimizers
    for name, weight in named_global_parameters(engine._encoders[0]):
        assert weight.equal(expected[name]), name
        master = getattr(weight, "main_param", weight)
        has_moments = bool(core_optimizer.optimizer.state[master])
        assert has_moments == (find_part(name, shape) not in frozen), name


def read_state(directory, step: int) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state of a checkpoint, those of layers one by one."""
    from torch.distributed.checkpoint import FileSystemReader, load

    directory = str(directory / f"checkpoints/iter_{step:07d}")
    entries = FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    load(state, checkpoint_id=directory, no_dist=True)
    singles = {}
    for name, tensor in state.items():
        before, layers, rest = name.partition("decoder.layers.")
        if not layers or rest[0].isdigit():
            singles[name] = tensor
            continue
        for index, part in enumerate(tensor):  # all layers in one tensor
            singles[f"{before}{layers}{index}.{rest}"] = part
    return singles


def assert_frozen(directory, flags) -> None:
    """Assert that the second of PHASES changes the state of all weights but FROZEN."""
    before = read_state(directory, 3)
    after = read_state(directory, 6)
    shape = plan_of(*flags).settings.shape
    frozen = parse_freeze(FROZEN, shape)
    assert before.keys() == after.keys()
    for name in before:
        if "muon" in flags and "exp_avg_sq" in name:
            continue  # zero for Muon's matrices
        is_frozen = find_part(name.partition("model.")[2], shape) in frozen
        assert before[name].equal(after[name]) == is_frozen, name


def check(flags, layouts, directory) -> None:
    """Run PHASES in one process and in each layout, and compare."""
    jobs = [Job(directory / "one", flags)]
    for name, (processes, more) in layouts.items():
        jobs.append(Job(directory / name, [*flags, *more], processes))
    runs.in_turn(jobs, directory)
    for job in jobs:
        tolerance = 5e-3 if "--bf16" in flags else 1e-5
        runs.assert_same_curve(job.save, directory / "one", tolerance)
        assert_frozen(job.save, flags)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_layouts_freeze_the_same(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *RUN, *PHASES, "--no-bf16"]
    check(flags, {"TP2 PP2": (4, TP2_PP2), "DP2": (2, SPLIT)}, tmp_path)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--no-bf16", "--bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "stable_adamw", "muon"])
def test_more_layouts_freeze_the_same(optimizer, precision, small_corpus, tmp_path):
    """Embeddings are tied, over stages too; ranks of DP4 update ranges of few weights."""
    flags = [*small_corpus.flags, *RUN, *PHASES, *TIED, precision, "--optimizer", optimizer]
    layouts = {
        "interleaved": (2, INTERLEAVED),
        "TP2 PP2": (4, TP2_PP2),
        "DP2": (2, []),
        "DP4": (4, SPLIT),
    }
    check(flags, layouts, tmp_path)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_another_layout_resumes_a_run_that_always_freezes(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *RUN, "--no-bf16", "--train-iters", "6", "--freeze", *FROZEN]
    stopped = [*flags, "--exit-interval", "3"]
    jobs = [
        Job(tmp_path / "whole", flags),
        Job(tmp_path / "TP2 PP2", [*stopped, *TP2_PP2], 4),
        Job(tmp_path / "DP2", [*stopped, *SPLIT], 2),
        Job(tmp_path / "to DP2", [*flags, *SPLIT], 2, copy_of=tmp_path / "TP2 PP2"),
        Job(tmp_path / "to TP2 PP2", [*flags, *TP2_PP2], 4, copy_of=tmp_path / "DP2"),
    ]
    runs.in_turn(jobs, tmp_path)
    for job in jobs[3:]:
        runs.assert_same_curve(job.save, tmp_path / "whole", 1e-5)


def test_a_resume_inside_a_phase_changes_nothing(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *RUN, *PHASES]
    main([*flags, "--save", str(tmp_path / "whole")])
    resumed = [*flags, "--save", str(tmp_path / "run"), "--exit-interval", "5"]
    main(resumed)
    main(resumed)
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")
    whole = read_state(tmp_path / "whole", 6)
    state = read_state(tmp_path / "run", 6)
    assert [name for name in whole if not whole[name].equal(state[name])] == []


def test_a_branch_trains_what_its_parent_has_always_frozen(small_corpus, tmp_path):
    """Its parent has no moments of these weights, and saves zeros."""
    flags = [*small_corpus.flags, *RUN]
    steps = [*flags, "--objective-schedule", "clm", "--train-iters", "8", "--freeze", *FROZEN]
    parent = [*steps, "--save", str(tmp_path / "parent"), "--exit-interval", "2"]
    main(parent)
    main(parent)
    frozen = {"objective": "clm", "train_iters": 4, "freeze": FROZEN}
    phases = ["--phases", json.dumps(frozen), "{objective: mlm, train_iters: 2}"]
    start = ["--branch-from", str(tmp_path / "parent"), "--branch-at", "4"]
    main([*flags, *phases, *start, "--save", str(tmp_path / "run")])
    main([*flags, *phases, "--save", str(tmp_path / "whole")])
    runs.assert_same_weights(tmp_path / "run", tmp_path / "whole", 6)
    moments = read_state(tmp_path / "parent", 4)
    name = "optimizer.state.exp_avg.model.embedding.word_embeddings.weight"
    assert not moments[name].any()
    assert read_state(tmp_path / "run", 6)[name].any()


def test_the_plan_names_what_is_frozen(small_corpus, tmp_path, capfd, refusal):
    flags = [*small_corpus.flags, *RUN, *PHASES]
    main([*flags, "--dry-run"])
    text = capfd.readouterr().out
    assert "steps 1 to 3 freeze head\nsteps 4 to 6 freeze embedding, layers.1-2\n" in text
    alone = [*small_corpus.flags, *RUN, "--train-iters", "4"]
    alone += ["--save", str(tmp_path / "alone"), "--exit-interval", "2"]
    main([*alone, "--freeze", "head"])
    assert "\n  steps 1 to 4 freeze head\n" in capfd.readouterr().out
    line = refusal(main, [*alone])
    assert "freeze is ['head'] there, not given here" in line


def test_the_plan_joins_phases_that_freeze_the_same(small_corpus):
    objective = {"objective": "clm", "train_iters": 2}
    texts = ["layers.0-1", ["layers.1-1", "layers.0"], "head", None, *["head", "embedding"] * 4]
    phases = [json.dumps(objective | {"freeze": freeze}) for freeze in texts]
    lines = describe_frozen(plan_of(*small_corpus.flags, *RUN, "--phases", *phases).settings)
    assert lines == [
        "steps 1 to 4 freeze layers.0-1",
        "steps 5 to 6 freeze head",
        "steps 9 to 10 freeze head",
        "steps 11 to 12 freeze embedding",
        "steps 13 to 14 freeze head",
        "steps 15 to 16 freeze embedding",
        "... 4 more ranges of steps that freeze parts",
    ]


def test_frozen_gradients_do_not_blame_a_pack(small_corpus, engine_of):
    engine = engine_of(*small_corpus.flags, *RUN, "--no-bf16", "--freeze", "embedding")
    next(engine.chunks[0].parameters()).register_hook(lambda gradient: gradient * math.nan)
    with engine.no_grad_reduction():
        result = engine.local_loss_and_grad_norm([0], engine.plan.schedule.objective(1))
    assert all(0 < value < math.inf for value in result)
    assert engine.train_step(1).is_applied


def test_moments_that_no_step_makes_are_not_reserved(small_corpus, engine_of, monkeypatch):
    from megaenc.model.encoder import named_global_parameters
    from megaenc.training.distributed import largest_batch

    rooms = []
    monkeypatch.setattr("megaenc.training.planning.check_device", lambda *_: None)
    monkeypatch.setattr(largest_batch, "measure_room", lambda: 1e9)
    monkeypatch.setattr(
        largest_batch,
        "find_largest_batch",
        lambda engine, objectives, candidates, room, *_: rooms.append(room) or 1,
    )
    auto = ["--micro-batch-size", "auto"]
    engine = engine_of(*small_corpus.flags, *RUN, "--no-bf16", *auto, "--freeze", *FROZEN)
    largest_batch.fill_micro_batches(engine.plan, engine)
    shape = engine.plan.settings.shape
    frozen = parse_freeze(FROZEN, shape)
    trained = sum(
        weight.numel()
        for name, weight in named_global_parameters(engine._encoders[0])
        if find_part(name, shape) not in frozen
    )
    assert rooms == [1e9 - 8 * trained]


def test_runs_that_freeze_the_same_have_one_identity(small_corpus):
    """Whatever the order, the repeats and the ranges of the values."""

    def identity(*freeze):
        return plan_of(*small_corpus.flags, *RUN, "--freeze", *freeze).identity

    first = identity("head", "layers.3", "layers.1-1", "layers.0-1", "embedding", "head")
    assert first["freeze"] == ["embedding", "layers.0-1", "layers.3", "head"]
    assert first == identity("embedding", "layers.0-1", "layers.3-3", "head")
