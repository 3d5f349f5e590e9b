"""A checkpoint saved before the first step, when the optimizer has no state yet."""

import pytest
import runs
import torch


def weights(engine) -> list[torch.Tensor]:
    return [
        parameter.detach().clone() for chunk in engine.chunks for parameter in chunk.parameters()
    ]


@pytest.mark.parametrize("more", [["--no-bf16"], ["--bf16", "--use-distributed-optimizer"]])
def test_what_goes_on_from_it_is_what_was_never_saved(more, engine_of, small_corpus, tmp_path):
    from megaenc.training.checkpoint.manager import CheckpointManager

    flags = [*small_corpus.flags, *runs.SHORT_RUN, *more]
    saved = engine_of(*flags)
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(saved, 0, {})
    loaded = engine_of(*flags)
    untouched = engine_of(*flags)
    checkpoints.load(loaded, 0)
    for step in (1, 2):
        norms = {engine.train_step(step).grad_norm for engine in (saved, loaded, untouched)}
        assert len(norms) == 1, norms
    for engine in (saved, loaded):
        assert all(map(torch.equal, weights(engine), weights(untouched)))
