"""Training compared with transformers' model, torch's AdamW and a plain loop."""

import numpy as np
import plain_loop
import pytest
import runs
from training_helpers import plan_of
from transformers import EuroBertForMaskedLM

from megaenc.convert.to_hf import to_hf
from megaenc.training.command import main

RUN = [
    *runs.SHORT_RUN,
    "--no-bf16",
    "--eval-interval",
    "0",
    "--train-iters",
    "8",
    "--lr-warmup-iters",
    "2",
]
RUN += ["--lr-wsd-decay-iters", "3"]
RATES = [1.5e-3, 3e-3, 3e-3, 3e-3, 3e-3, 3e-3, 2e-3, 1e-3]  # as the design states it
DISTILLED = "distill(teacher={teacher},mask=0.3,top_k=8"
SCHEDULES = [
    "clm:4,mlm:4", "diffusion:1.0", "gpt_bert(causal=0.3):1.0", "sum(clm:3,mlm(mask=0.3):10):1.0",
    "prefix_lm:2,mlm(mask=0.4->0.15,span=3):2,mntp:2,span_corruption:2",
    f"{DISTILLED},share=0.9->0.5):4,sum(clm:1,{DISTILLED},temperature=2):2):4",
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_equal_those_of_a_plain_loop(schedule, small_corpus, teacher, tmp_path):
    flags = [
        *small_corpus.flags,
        *RUN,
        "--objective-schedule",
        schedule.replace("{teacher}", str(teacher)),
    ]
    main([*flags, "--save", str(tmp_path / "run")])
    # A rate below any rounding leaves the weights as they were.
    main([*flags, "--lr", "1e-30", "--exit-interval", "1", "--save", str(tmp_path / "start")])
    to_hf(tmp_path / "start", tmp_path / "hf")

    model = EuroBertForMaskedLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    plan = plan_of(*flags)
    losses, norms = plain_loop.train(model, plan, 8, lambda step: RATES[step - 1], 0.5)

    rows = runs.metrics(tmp_path / "run")
    assert max(norms) > 0.5, "the clip never bit, so it was not tested"
    np.testing.assert_allclose([row["learning_rate"] for row in rows], RATES)
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-4)
    # Step 1 comes before rounding adds up over steps.
    np.testing.assert_allclose(rows[0]["loss"], losses[0], rtol=1e-6)
    np.testing.assert_allclose([row["grad_norm"] for row in rows], norms, rtol=1e-4)
