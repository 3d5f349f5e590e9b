"""The same run in every layout: one process against tensor, pipeline, sequence and data parallelism, over whole runs."""

from pathlib import Path

import numpy as np
import pytest
import runs
from safetensors.numpy import load_file

from megaenc.convert.to_hf import to_hf

pytestmark = pytest.mark.multiprocess

LAYOUTS = {
    "TP2": (2, ["--tensor-model-parallel-size", "2"]),
    "PP2": (2, ["--pipeline-model-parallel-size", "2"]),
    "TP2 SP": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "DP2": (2, []),
    "TP2 PP2": (4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
}


START = [*runs.SHORT_RUN, "--no-bf16", "--init-method", "full_megatron"]


@pytest.fixture(scope="module")
def reference(small_corpus, tmp_path_factory) -> Path:
    """Twenty float32 steps of clm and mlm in one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    runs.script(runs.PRETRAIN, [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder)])
    return folder


@pytest.fixture(scope="module")
def starting_point(small_corpus, tmp_path_factory) -> Path:
    """Initial weights and first batches of the same run."""
    folder = tmp_path_factory.mktemp("start") / "run"
    runs.script(runs.WORKERS / "starting_point.py", [str(folder), *small_corpus.flags, *START])
    to_hf(folder, folder / "hf")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_is_that_of_one_process(layout, small_corpus, reference, tmp_path):
    processes, flags = LAYOUTS[layout]
    folder = tmp_path / "run"
    runs.script(
        runs.PRETRAIN, [*small_corpus.flags, *runs.SHORT_RUN, *flags, "--no-bf16", "--save", str(folder)], processes=processes
    )
    assert len(runs.metrics(folder)) == 20
    runs.assert_same_curve(folder, reference, tolerance=1e-4)
    for objective in ("clm", "mlm"):
        actual, expected = (runs.validations(run)[-1]["objectives"][objective] for run in (folder, reference))
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert actual["accuracy"] == expected["accuracy"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_and_masks_are_identical(layout, small_corpus, starting_point, tmp_path):
    processes, flags = LAYOUTS[layout]
    folder = tmp_path / "run"
    arguments = [str(folder), *small_corpus.flags, *START, *flags]
    runs.script(runs.WORKERS / "starting_point.py", arguments, processes=processes)

    to_hf(folder, folder / "hf")
    actual, expected_weights = (load_file(run / "hf" / "model.safetensors") for run in (folder, starting_point))
    assert actual.keys() == expected_weights.keys()
    for name in expected_weights:
        np.testing.assert_array_equal(actual[name], expected_weights[name], err_msg=name)

    batches = sorted(folder.glob("batch_*.npz"))
    assert {batch.stem.split("_")[1] for batch in batches} == {b.stem.split("_")[1] for b in starting_point.glob("batch_*.npz")}
    for batch in batches:
        expected = np.load(starting_point / f"{batch.stem.split('_rank')[0]}_rank0.npz")
        actual_batch = np.load(batch)
        for name in ("tokens", "positions", "predict_at", "labels"):
            np.testing.assert_array_equal(actual_batch[name], expected[name], err_msg=f"{batch.stem} {name}")


DROPPED = [*runs.SHORT_RUN, "--no-bf16", "--attention-output-dropout", "0.1"]


@pytest.fixture(scope="module")
def dropped(small_corpus, tmp_path_factory) -> Path:
    """The same steps with dropout."""
    folder = tmp_path_factory.mktemp("dropped") / "run"
    runs.script(runs.PRETRAIN, [*small_corpus.flags, *DROPPED, "--save", str(folder)])
    return folder


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        (2, ["--pipeline-model-parallel-size", "2"]),
        (2, ["--micro-batch-size", "3"]),
        (1, ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]),
    ],
    ids=["TP2 SP", "PP2", "DP2, other rows", "recomputed"],
)
def test_dropout_is_that_of_one_process(processes, flags, small_corpus, dropped, tmp_path):
    folder = tmp_path / "run"
    runs.script(runs.PRETRAIN, [*small_corpus.flags, *DROPPED, *flags, "--save", str(folder)], processes=processes)
    assert len(runs.metrics(folder)) == 20
    for name in ("loss", "grad_norm"):
        expected = [row[name] for row in runs.metrics(dropped)]
        np.testing.assert_allclose([row[name] for row in runs.metrics(folder)], expected, rtol=1e-6 if name == "loss" else 1e-5)


def test_dropout_goes_on_after_a_stop_and_spares_validation(small_corpus, dropped, reference, tmp_path):
    flags = [*small_corpus.flags, *DROPPED, "--save", str(tmp_path / "run")]
    runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "7"])
    runs.script(runs.PRETRAIN, flags)
    assert runs.curve(tmp_path / "run") == runs.curve(dropped)
    losses, without = ([row["loss"] for row in runs.metrics(run)] for run in (dropped, reference))
    assert all(abs(a / b - 1) > 1e-5 for a, b in zip(losses, without, strict=True))
    still = [*small_corpus.flags, *DROPPED, *runs.STANDSTILL, "--eval-interval", "1"]
    validations = []
    for name, more in (("drop", []), ("keep", ["--attention-output-dropout", "0"])):
        runs.script(
            runs.PRETRAIN, [*still, "--lr-warmup-iters", "0", "--lr-wsd-decay-iters", "1", *more, "--save", str(tmp_path / name)]
        )
        validations.append([row["objectives"] for row in runs.validations(tmp_path / name)])
    assert validations[0] == validations[1]


@pytest.mark.slow
def test_bf16_follows_float32(small_corpus, reference, tmp_path):
    folder = tmp_path / "run"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--bf16", "--tensor-model-parallel-size", "2", "--save", str(folder)]
    runs.script(runs.PRETRAIN, flags, processes=2)
    actual, expected = (np.array([row["loss"] for row in runs.metrics(run)]) for run in (folder, reference))
    np.testing.assert_allclose(actual, expected, rtol=2e-2)
    assert np.abs(actual / expected - 1).max() > 1e-5, "bfloat16 was asked for and float32 was used"
