"""Steps with NaN or infinite loss or gradient: skipped, counted, limited."""

import json
import subprocess

import pytest
import runs
from workers.bad_packs import spoil

from megaenc.training.command import main

# Eight packs a step: step 5 reads packs 32 to 39, in micro-batches of two.
RUN = [
    *runs.SHORT_RUN,
    "--train-iters",
    "8",
    "--lr-wsd-decay-iters",
    "2",
    "--eval-interval",
    "0",
    "--save-interval",
    "1",
]


def state_after(directory, step):
    """Return a checkpoint's state by file, and the optimizer's number of updates."""
    checkpoint = directory / "checkpoints" / f"iter_{step:07d}"
    shards = {file.name: file.read_bytes() for file in checkpoint.glob("*.distcp")}
    return shards, json.loads((checkpoint / "index.json").read_text())["optimizer_step"]


def assert_step_5_was_left_out(directory) -> None:
    before, updates_before = state_after(directory, 4)
    after, updates_after = state_after(directory, 5)
    later, updates_later = state_after(directory, 6)
    assert (updates_before, updates_after, updates_later) == (4, 4, 5)
    assert before == after
    assert all(later[name] != content for name, content in before.items())
    rows = runs.metrics(directory)
    assert [row["skipped_updates"] for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert None in (rows[4]["loss"], rows[4]["grad_norm"])
    assert rows[4]["tokens"] == 5 * rows[0]["tokens"]
    assert all(row["loss"] and row["grad_norm"] for row in rows[:4] + rows[5:])


def run_with(packs, flags, directory, processes, **how) -> subprocess.CompletedProcess:
    arguments = [json.dumps(packs), *flags, "--save", str(directory)]
    return runs.script(runs.WORKERS / "bad_packs.py", arguments, processes=processes, **how)


@pytest.mark.parametrize(("precision", "quantity"), [("--no-bf16", "loss"), ("--bf16", "gradient")])
def test_nothing_changes_and_the_pack_is_named(
    precision, quantity, small_corpus, tmp_path, monkeypatch, capsys
):
    spoil({37: quantity}, monkeypatch.setattr)
    main([*small_corpus.flags, *RUN, precision, "--save", str(tmp_path / "run")])
    assert_step_5_was_left_out(tmp_path / "run")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 5: ")]
    assert line.startswith(
        f"step 5: {quantity} is NaN or infinite, from pack 37 of {small_corpus.prefix} on rank 0 ("
    )
    assert line.endswith("); step skipped, 1 so far")


LAYOUTS = {
    "tensor": (["--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16"], "ranks 0-1"),
    # Pack 37 is the sixth of its step: the third micro-batch, which the first of two data-parallel
    # ranks reads.
    "data": (["--use-distributed-optimizer", "--no-bf16"], "rank 0"),
    "interleaved": (
        [
            "--num-layers",
            "4",
            "--pipeline-model-parallel-size",
            "2",
            "--num-layers-per-virtual-pipeline-stage",
            "1",
            "--bf16",
        ],
        "ranks 0-1",
    ),
}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_the_ranks_that_read_it_are_named(layout, small_corpus, tmp_path):
    flags, ranks = LAYOUTS[layout]
    output = run_with({37: "loss"}, [*small_corpus.flags, *RUN, *flags], tmp_path / "run", 2).stdout
    assert_step_5_was_left_out(tmp_path / "run")
    [line] = [line for line in output.splitlines() if line.startswith("step 5: ")]
    assert f"from pack 37 of {small_corpus.prefix} on {ranks} (" in line


@pytest.mark.multiprocess
def test_beyond_the_limit_it_ends_with_one_line_and_the_checkpoint_before(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *RUN, "--no-bf16", "--max-skipped-updates", "1"]
    result = run_with(
        {37: "loss", 46: "loss", 47: "gradient"}, flags, tmp_path / "run", 2, expect=1
    )
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith(
        "error: step 6: loss is NaN or infinite, "
        f"from packs 46-47 of {small_corpus.prefix} on rank 1 ("
    )
    assert (
        "step skipped, 2 so far, --max-skipped-updates allows 1; "
        "give the same command with --skip-packs 46-47" in line
    )
    assert (
        tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    ).read_text() == "5\n"
    assert [row["skipped_updates"] for row in runs.metrics(tmp_path / "run")] == [0, 0, 0, 0, 1, 2]


def test_what_no_pack_gives_alone_points_to_the_hardware(small_corpus, monkeypatch, refusal):
    """The NaN of a step is gone when its packs are run again."""
    spoil({37: "loss"}, monkeypatch.setattr)
    from megaenc.training.distributed import nonfinite

    diagnose = nonfinite.diagnose_nonfinite_step

    def healed(*arguments):
        monkeypatch.undo()
        return diagnose(*arguments)

    monkeypatch.setattr(nonfinite, "diagnose_nonfinite_step", healed)
    line = refusal(
        main, [*small_corpus.flags, *RUN[:-2], "--no-bf16", "--max-skipped-updates", "0"]
    )
    assert (
        "from none of its 8 packs when each is run separately, which points to the hardware; "
        "in the step itself" in line
    )
    assert "of rank 0 (" in line
    assert "allows 0; give the same command again, on other machines" in line


def test_weights_that_are_no_good_are_not_blamed_on_the_packs(small_corpus, monkeypatch, refusal):
    spoil(dict.fromkeys(range(32, 40), "loss"), monkeypatch.setattr)
    line = refusal(
        main, [*small_corpus.flags, *RUN[:-2], "--no-bf16", "--max-skipped-updates", "0"]
    )
    assert "from each of its 8 packs: the weights have diverged" in line
    assert "lower --lr" in line


def test_a_gradient_alone_is_never_reduced(small_corpus, engine_of):
    """The backward pass may start reductions itself, which needs an accelerator."""
    engine = engine_of(*small_corpus.flags, *RUN, "--no-bf16")
    groups = [group for chunk in engine.chunks for group in chunk.bucket_groups]
    finalize = engine.config.finalize_model_grads_func
    are_reduced = []
    next(engine.chunks[0].parameters()).register_hook(
        lambda gradient: are_reduced.append(
            [
                engine.config.finalize_model_grads_func,
                *(group.is_last_microbatch for group in groups),
            ]
        )
    )
    with engine.no_grad_reduction():
        results = [
            engine.local_loss_and_grad_norm([sample], engine.plan.schedule.objective(1))
            for sample in (0, 1, 0)
        ]
    assert are_reduced == 3 * [[None, *(False for _ in groups)]]
    assert results[0] == results[2] != results[1]
    assert min(min(results)) > 0
    assert engine.config.finalize_model_grads_func is finalize
    assert all(group.is_last_microbatch for group in groups)
    assert engine.train_step(1).is_applied
