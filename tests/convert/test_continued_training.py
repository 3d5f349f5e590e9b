"""Imported models train as transformers' own models do, in any parallel layout."""

import hf_models
import numpy as np
import plain_loop
import pytest
import runs
import torch
from whole_models import core_to_hf, load_weights

from megaenc.convert.run_checkpoint import open_run_checkpoint
from megaenc.training.config import parse_config
from megaenc.training.planning import build_plan

PEAK = 5e-4
STEPS = 10
DECAY = 4
CLIP = 1.0
# Long packs without edges at each document: stretched positions are far enough apart to tell.
RUN = [
    "--objective-schedule",
    "mlm:1.0",
    "--train-iters",
    "10",
    "--lr",
    "5e-4",
    "--lr-warmup-iters",
    "0",
    "--seq-length",
    "256",
]
RUN += [
    "--lr-wsd-decay-iters",
    "4",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "4",
    "--eval-interval",
    "0",
]
RUN += ["--packing", "random-length"]
MODELS = [
    "llama with stretched positions",
    "qwen2",
    "qwen3",
    "modernbert",
    "modernbert with norm biases",
    "modernbert-decoder",
]
MODELS += ["neobert", "gemma3"]
BOTH_OBJECTIVES = [
    "--objective-schedule",
    "clm:0.5,mlm:0.5",
]  # as the Ettin paper continues a decoder; windows under both masks


def learning_rate(n: int) -> float:
    return PEAK * (STEPS - n + 1) / DECAY if n > STEPS - DECAY else PEAK


@pytest.fixture(scope="module")
def continued(small_corpus, tmp_path_factory):
    """Return, by name, a model and the flags and directory of a run from it.

    The model has ten spare rows of the vocabulary. The run has two tensor-parallel ranks, or one
    process for ModernBERT.
    """
    found = {}
    jobs = []
    for name in MODELS:
        directory = tmp_path_factory.mktemp("continued")
        model = hf_models.build(name, vocab_size=410, attn_implementation="eager")
        hf_models.write(model, directory / "hf", small_corpus.tokenizer)
        hf_models.from_hf(directory / "hf", directory / "core")
        core = directory / "core"
        flags = [
            "--config",
            str(core / "config.yaml"),
            *small_corpus.flags,
            *RUN,
            "--init-from",
            str(core),
        ]
        flags += BOTH_OBJECTIVES if name in ("modernbert-decoder", "gemma3") else []
        ranks = 1 if name == "modernbert" else 2
        jobs.append(
            runs.Job(directory / "run", [*flags, "--tensor-model-parallel-size", str(ranks)], ranks)
        )
        found[name] = (model, flags, directory / "run")
    runs.in_turn(jobs, directory, timeout=800)
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_equal_those_of_a_plain_loop(name, continued):
    """Losses, norms and all weights agree, biases and query and key norms too."""
    model, flags, run_directory = continued[name]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = build_plan(parse_config(flags, "test"))
    losses, norms = plain_loop.train(model, plan, STEPS, learning_rate, CLIP)
    assert max(norms) > CLIP, "the clip never bit, so it was not tested"
    expected = model.state_dict()
    rows = runs.metrics(run_directory)
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-4)
    np.testing.assert_allclose([row["grad_norm"] for row in rows], norms, rtol=1e-4)
    run = open_run_checkpoint(run_directory)
    for name, tensor in core_to_hf(
        load_weights(run, None)[1], run.model, run.vocab_size, run.origin.family
    ).items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert (tensor - before[name]).abs().max() > 1e-3, f"{name} was not trained"
