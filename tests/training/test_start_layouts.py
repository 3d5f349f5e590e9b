"""Branches, and runs that begin with another's weights, where the optimizer's state is shared out and stages are interleaved."""

import json
from pathlib import Path

import pytest
import runs
import torch
from runs import Job
from whole_models import load_weights

from megaenc.convert.run_checkpoint import open_run_checkpoint

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

INTERLEAVED = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
LAYOUTS = {"DP2": ["--no-bf16"], "PP2": [*INTERLEAVED, "--bf16"]}
RUN = [*runs.SHORT_RUN, "--num-layers", "4", "--eval-interval", "0", "--lr-wsd-decay-iters", "3", "--use-distributed-optimizer"]
PARENT = [*RUN, "--train-iters", "12", "--objective-schedule", "clm", "--save-interval", "8"]
TWO_STAGES = [*RUN, "--train-iters", "11", "--objective-schedule", "clm:8,mlm:3"]
CONTINUED = [*RUN, "--train-iters", "4", "--objective-schedule", "mlm", "--lr-warmup-iters", "0"]


@pytest.fixture(scope="module")
def folder_of(small_corpus, tmp_path_factory):
    """The folder of a run by what it is and by layout."""
    root = tmp_path_factory.mktemp("starts")

    def folder(kind: str, layout: str) -> Path:
        return root / f"{kind}_{layout}"

    def job(kind: str, layout: str, flags: list[str], **more) -> Job:
        return Job(folder(kind, layout), [*small_corpus.flags, *flags, *LAYOUTS[layout]], processes=2, **more)

    jobs = []
    for layout in LAYOUTS:
        jobs.append(job("parent", layout, PARENT))
        jobs.append(job("whole", layout, TWO_STAGES))
    runs.in_turn(jobs, root)
    jobs = []
    for layout in LAYOUTS:
        parent = folder("parent", layout)
        torch.save(load_weights(open_run_checkpoint(parent), 12)[1], parent / "weights.pt")
        jobs.append(job("branch", layout, [*TWO_STAGES, "--branch-from", str(parent), "--branch-at", "8"]))
        jobs.append(job("initialised", layout, [*CONTINUED, "--init-from", str(parent)]))
        jobs.append(job("by hand", layout, CONTINUED, weights=parent / "weights.pt"))
    start = [*INTERLEAVED, "--branch-from", str(folder("parent", "DP2")), "--branch-at", "8"]
    jobs.append(job("branch of the other", "DP2", [*TWO_STAGES, *start]))
    runs.in_turn(jobs, root)
    return folder


def shards(folder: Path, step: int) -> dict[str, str]:
    """The checksums of what holds the weights and the optimizer's state."""
    state = json.loads((folder / "checkpoints" / f"iter_{step:07d}" / "state.json").read_text())
    return {name: entry["sha256"] for name, entry in state["files"].items() if name.endswith(".distcp")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_branch_is_bitwise_the_run_from_the_beginning(layout, folder_of):
    branch = folder_of("branch", layout)
    reference = folder_of("whole", layout)
    assert [row["step"] for row in runs.metrics(branch)] == [9, 10, 11]
    assert runs.curve(branch) == runs.curve(reference, after=8)
    assert shards(branch, 11) == shards(reference, 11) != {}


def test_off_a_parent_in_another_layout_it_is_the_same_up_to_rounding(folder_of):
    branch = folder_of("branch of the other", "DP2")
    for name in ("loss", "grad_norm"):
        assert runs.largest_difference(name, branch, folder_of("whole", "DP2"), after=8) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_a_parents_weights_it_is_a_new_run_given_those_weights(layout, folder_of):
    initialised = folder_of("initialised", layout)
    by_hand = folder_of("by hand", layout)
    assert runs.curve(initialised) == runs.curve(by_hand)
    assert shards(initialised, 4) == shards(by_hand, 4) != {}
