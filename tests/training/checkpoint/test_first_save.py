"""A save before the first update, in which the optimizer has no state yet: what it leaves is as good as any other."""

import pytest
import runs
import torch

from megaenc.training.config import parse_config
from megaenc.training.planning import build_plan


def weights(engine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for chunk in engine.chunks for parameter in chunk.parameters()]


@pytest.mark.parametrize("more", [["--no-bf16"], ["--bf16", "--use-distributed-optimizer"]])
def test_what_goes_on_from_it_is_what_was_never_saved(more, one_process, small_corpus, tmp_path):
    from megaenc.training.checkpoint.manager import CheckpointManager
    from megaenc.training.engine import Engine

    plan = build_plan(parse_config([*small_corpus.flags, *runs.SHORT_RUN, *more], "test"))
    saved = Engine(plan, one_process)
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(saved, 0, {})
    loaded = Engine(plan, one_process)
    untouched = Engine(plan, one_process)
    checkpoints.load(loaded, 0)
    for step in (1, 2):
        norms = {engine.train_step(step).grad_norm for engine in (saved, loaded, untouched)}
        assert len(norms) == 1, norms
    for engine in (saved, loaded):
        assert all(map(torch.equal, weights(engine), weights(untouched)))
