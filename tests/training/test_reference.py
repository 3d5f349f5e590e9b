"""Training against an independent reference: transformers' model, torch's AdamW and a loop of a dozen lines."""

import numpy as np
import plain_loop
import pytest
import runs
from transformers import EuroBertForMaskedLM

from megaenc.convert.to_hf import to_hf
from megaenc.training.config import parse_config
from megaenc.training.planning import build_plan

PEAK, WARMUP, DECAY, STEPS, CLIP = 3e-3, 4, 5, 20, 0.5  # what runs.SHORT_RUN asks for


def learning_rate(n: int) -> float:
    """Written out again here, as the design states it."""
    if n <= WARMUP:
        return PEAK * n / WARMUP
    return PEAK * (STEPS - n + 1) / DECAY if n > STEPS - DECAY else PEAK


SCHEDULES = [
    "clm:1.0", "mlm:1.0", "diffusion:1.0", "gpt_bert(causal=0.3):1.0", "sum(clm:3,mlm(mask=0.3):10):1.0",
    "prefix_lm:8,mlm(mask=0.4->0.15,span=3):4,mntp:4,span_corruption:4",
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_twenty_losses_equal_those_of_a_plain_loop(schedule, small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--objective-schedule", schedule, "--no-bf16"]
    runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "run")])
    runs.script(runs.WORKERS / "starting_point.py", [str(tmp_path / "start"), *flags])
    to_hf(tmp_path / "start", tmp_path / "hf")

    model = EuroBertForMaskedLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    losses, norms = plain_loop.train(model, build_plan(parse_config(flags, "test")), STEPS, learning_rate, CLIP)

    rows = runs.metrics(tmp_path / "run")
    assert max(norms) > CLIP, "the clip never bit, so it was not tested"
    np.testing.assert_allclose([row["learning_rate"] for row in rows], [learning_rate(n) for n in range(1, STEPS + 1)])
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-4)
    np.testing.assert_allclose(rows[0]["loss"], losses[0], rtol=1e-6)  # before rounding adds up over updates
    np.testing.assert_allclose([row["grad_norm"] for row in rows], norms, rtol=1e-4)
