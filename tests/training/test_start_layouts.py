"""Branches, and runs that begin with another's weights, where the optimizer's state is shared out and stages are interleaved."""

import json
from itertools import product
from pathlib import Path

import pytest
import runs
import torch
from runs import Job

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

LAYOUTS = {
    "DP2": ["--use-distributed-optimizer"],
    "PP2": [
        "--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1", "--use-distributed-optimizer",
    ],
}  # fmt: skip
PRECISIONS = ("--no-bf16", "--bf16")
WAYS = list(product(LAYOUTS, PRECISIONS))

RUN = [*runs.SHORT_RUN, "--num-layers", "4", "--eval-interval", "0", "--lr-wsd-decay-iters", "3"]
PARENT = [*RUN, "--train-iters", "12", "--objective-schedule", "clm", "--save-interval", "8"]
TWO_STAGES = [*RUN, "--train-iters", "11", "--objective-schedule", "clm:8,mlm:3"]
CONTINUED = [*RUN, "--train-iters", "4", "--objective-schedule", "mlm", "--lr-warmup-iters", "0"]


@pytest.fixture(scope="module")
def folder_of(small_corpus, tmp_path_factory):
    """The folder of a run by what it is, layout and precision."""
    from whole_models import load_weights

    from megaenc.convert.run_checkpoint import open_run_checkpoint

    root = tmp_path_factory.mktemp("starts")

    def folder(kind: str, layout: str, precision: str) -> Path:
        return root / f"{kind}_{layout}{precision}"

    def job(kind: str, layout: str, precision: str, flags: list[str], **more) -> Job:
        flags = [*small_corpus.flags, *flags, *LAYOUTS[layout], precision]
        return Job(folder(kind, layout, precision), flags, processes=2, **more)

    jobs = [job(kind, *way, flags) for way in WAYS for kind, flags in (("parent", PARENT), ("whole", TWO_STAGES))]
    runs.in_turn(jobs, root)
    jobs = []
    for way in WAYS:
        parent = folder("parent", *way)
        torch.save(load_weights(open_run_checkpoint(parent), 12)[1], parent / "weights.pt")
        jobs.append(job("branch", *way, [*TWO_STAGES, "--branch-from", str(parent), "--branch-at", "8"]))
        jobs.append(job("initialised", *way, [*CONTINUED, "--init-from", str(parent)]))
        jobs.append(job("by hand", *way, CONTINUED, weights=parent / "weights.pt"))
    for layout, other in (("DP2", "PP2"), ("PP2", "DP2")):
        start = ["--branch-from", str(folder("parent", other, "--no-bf16")), "--branch-at", "8"]
        jobs.append(job("branch of the other", layout, "--no-bf16", [*TWO_STAGES, *start]))
    runs.in_turn(jobs, root)
    return folder


def shards(folder: Path, step: int) -> dict[str, str]:
    """The checksums of what holds the weights and the optimizer's state."""
    state = json.loads((folder / "checkpoints" / f"iter_{step:07d}" / "state.json").read_text())
    return {name: entry["sha256"] for name, entry in state["files"].items() if name.endswith(".distcp")}


@pytest.mark.parametrize(("layout", "precision"), WAYS)
def test_a_branch_is_bitwise_the_run_from_the_beginning(layout, precision, folder_of):
    branch, reference = (folder_of(kind, layout, precision) for kind in ("branch", "whole"))
    assert [row["step"] for row in runs.metrics(branch)] == [9, 10, 11]
    assert runs.curve(branch) == runs.curve(reference, after=8)
    assert shards(branch, 11) == shards(reference, 11) != {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_off_a_parent_in_the_other_layout_it_is_the_same_up_to_rounding(layout, folder_of):
    branch, reference = (folder_of(kind, layout, "--no-bf16") for kind in ("branch of the other", "whole"))
    for name in ("loss", "grad_norm"):
        assert runs.largest_difference(name, branch, reference, after=8) < 1e-5


@pytest.mark.parametrize(("layout", "precision"), WAYS)
def test_with_a_parents_weights_it_is_a_new_run_given_those_weights(layout, precision, folder_of):
    initialised, by_hand = (folder_of(kind, layout, precision) for kind in ("initialised", "by hand"))
    assert runs.curve(initialised) == runs.curve(by_hand)
    assert shards(initialised, 4) == shards(by_hand, 4) != {}
