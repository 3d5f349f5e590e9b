"""A run that begins with another's weights, where the optimizer's state is shared out and stages are interleaved."""

import pytest
import runs
import torch
from runs import Job
from whole_models import load_weights

from megaenc.convert.run_checkpoint import open_run_checkpoint

LAYOUTS = {
    "data": ["--no-bf16"],
    "interleaved": ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1", "--bf16"],
}
RUN = [*runs.SHORT_RUN, "--num-layers", "4", "--eval-interval", "0", "--lr-wsd-decay-iters", "3", "--use-distributed-optimizer"]
PARENT = [*RUN, "--train-iters", "8", "--objective-schedule", "clm"]
CONTINUED = [*RUN, "--train-iters", "4", "--objective-schedule", "mlm", "--lr-warmup-iters", "0"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_a_parents_weights_it_is_a_new_run_given_those_weights(layout, small_corpus, tmp_path):
    more = [*small_corpus.flags, *LAYOUTS[layout]]
    parent = tmp_path / "parent"
    runs.script(runs.PRETRAIN, [*PARENT, *more, "--save", str(parent)], processes=2)
    file = parent / "weights.pt"
    torch.save(load_weights(open_run_checkpoint(parent), 8)[1], file)
    initialised = Job(tmp_path / "initialised", [*CONTINUED, *more, "--init-from", str(parent)], 2)
    by_hand = Job(tmp_path / "by_hand", [*CONTINUED, *more], 2, weights=file)
    runs.in_turn([initialised, by_hand], tmp_path)
    assert runs.curve(initialised.save) == runs.curve(by_hand.save)
    runs.assert_same_weights(initialised.save, by_hand.save, 4)
