"""The same run in layouts beyond even TP, PP and DP: uneven and interleaved stages, and all of it at once."""

from pathlib import Path

import numpy as np
import pytest
import runs
from safetensors.numpy import load_file

from megaenc.convert.to_hf import to_hf
from megaenc.training.command import main

# Four layers; both phases, warm-up, decay and a clip that bites, as in SHORT_RUN.
RUN = [*runs.SHORT_RUN, "--num-layers", "4", "--train-iters", "12", "--eval-interval", "12", "--no-bf16"]
PP = "--pipeline-model-parallel-size"
INTERLEAVED = [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"]
LAYOUTS = {
    "PP3, uneven": (3, [PP, "3"]),
    "PP3, embedding and head alone": (3, [PP, "3", "--pipeline-model-parallel-layout", "E|t*4|L"]),
    "PP2, interleaved": (2, INTERLEAVED),
    "PP2, interleaved unevenly": (2, [PP, "2", "--pipeline-model-parallel-layout", "Ett|t|t|L"]),
}


EVERYTHING = [
    *INTERLEAVED, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer",
    "--recompute-granularity", "full",
]  # fmt: skip


@pytest.fixture(scope="module")
def reference(small_corpus, tmp_path_factory) -> Path:
    """In one process without a stop."""
    folder = tmp_path_factory.mktemp("one") / "run"
    main([*small_corpus.flags, *RUN, "--save", str(folder)])
    return folder


def assert_same_run(folder: Path, reference: Path, tolerance: float = 1e-5) -> None:
    """Every step, and both validations of the last one."""
    assert len(runs.metrics(folder)) == 12
    runs.assert_same_curve(folder, reference, tolerance)
    actual, expected = (runs.validations(run)[-1]["objectives"] for run in (folder, reference))
    for objective in expected:
        assert actual[objective]["loss"] == pytest.approx(expected[objective]["loss"], rel=tolerance)
        assert actual[objective]["accuracy"] == expected[objective]["accuracy"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_is_that_of_one_process(layout, small_corpus, reference, tmp_path):
    processes, flags = LAYOUTS[layout]
    folder = tmp_path / "run"
    runs.script(runs.PRETRAIN, [*small_corpus.flags, *RUN, *flags, "--save", str(folder)], processes=processes)
    assert_same_run(folder, reference)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_eight_processes_with_everything_at_once(small_corpus, reference, tmp_path):
    """TP2 x PP2 (interleaved) x DP2, sequence parallel, with the distributed optimizer and recomputation."""
    folder = tmp_path / "run"
    result = runs.script(runs.PRETRAIN, [*small_corpus.flags, *RUN, *EVERYTHING, "--save", str(folder)], processes=8)
    assert "TP 2, PP 2 (layers 1 + 1 | 1 + 1), DP 2, SP" in result.stdout
    assert_same_run(folder, reference)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_bf16_follows_float32_over_interleaved_stages_and_a_stop(small_corpus, reference, tmp_path):
    """Two interleaved stages with the distributed optimizer, then one process: master weights and moments go along."""
    command = [*small_corpus.flags, *RUN, "--bf16", "--save", str(tmp_path / "run"), "--exit-interval", "6"]
    two = [*command, *INTERLEAVED, "--use-distributed-optimizer"]
    runs.script(runs.PRETRAIN, two, processes=2, fresh=True)  # by torchrun: each rank has an order of its own for sets
    main(command)
    actual, expected = ([row["loss"] for row in runs.metrics(folder)] for folder in (tmp_path / "run", reference))
    np.testing.assert_allclose(actual, expected, rtol=1e-2)


@pytest.mark.multiprocess
def test_initial_weights_are_identical(small_corpus, tmp_path):
    weights = []
    for name, (processes, flags) in {"one": (1, []), "many": LAYOUTS["PP2, interleaved unevenly"]}.items():
        arguments = [str(tmp_path / name), *small_corpus.flags, *RUN, *flags]
        runs.script(runs.WORKERS / "starting_point.py", arguments, processes=processes)
        to_hf(tmp_path / name, tmp_path / name / "hf")
        weights.append(load_file(tmp_path / name / "hf" / "model.safetensors"))
    one, many = weights
    assert one.keys() == many.keys()
    for name in one:
        np.testing.assert_array_equal(many[name], one[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_goes_on_in_any_split(small_corpus, reference, tmp_path):
    """Interleaved, then uneven stages, then one process; the export is that of a run that never stopped."""
    folder = tmp_path / "run"
    flags = [*small_corpus.flags, *RUN, "--save", str(folder), "--exit-interval", "4"]
    runs.script(runs.PRETRAIN, [*flags, *INTERLEAVED], processes=2)
    output = runs.script(runs.PRETRAIN, [*flags, PP, "3"], processes=3).stdout
    assert "PP 3 (layers 1 | 2 | 1)" in output and "resuming after step 4" in output
    main(flags)
    assert_same_run(folder, reference)
    for run in (folder, reference):
        to_hf(run, tmp_path / f"{run.parent.name}_hf")
    actual, expected = (load_file(tmp_path / f"{run.parent.name}_hf" / "model.safetensors") for run in (folder, reference))
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("processes", "flags", "complaint"),
    [
        (2, [PP, "2", "--num-layers-per-virtual-pipeline-stage", "3"], "4 layers on 2 stages are not two or more chunks of 3"),
        (1, ["--num-layers-per-virtual-pipeline-stage", "0"], "--num-layers-per-virtual-pipeline-stage: found 0"),
        (2, [PP, "2", "--recompute-granularity", "full", "--recompute-num-layers", "2",
             "--pipeline-model-parallel-layout", "Ettt|tL"], "found 2, expected a divisor of the 3 layers of a stage"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_refused(processes, flags, complaint, small_corpus, monkeypatch, refusal):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert complaint in refusal(main, [*small_corpus.flags, *RUN, *flags])
