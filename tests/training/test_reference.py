"""Training against an independent reference: transformers' model, torch's AdamW and a loop of a dozen lines."""

import numpy as np
import pytest
import runs
import torch
from transformers import EuroBertForMaskedLM

from megaenc.convert.to_hf import to_hf
from megaenc.randomness import SampleRandomness
from megaenc.training.plan import make_plan
from megaenc.training.settings import read_settings

PEAK, WARMUP, DECAY, STEPS, CLIP = 3e-3, 4, 5, 20, 0.5  # what runs.SHORT_RUN asks for


def learning_rate(n: int) -> float:
    """Written out again here, as the design states it."""
    if n <= WARMUP:
        return PEAK * n / WARMUP
    return PEAK * (STEPS - n + 1) / DECAY if n > STEPS - DECAY else PEAK


def allowed(edges: list[int], attention: str, prefixes: np.ndarray | None) -> torch.Tensor:
    """The additive mask [1, 1, T, T] of one pack: 0 where a position may look, in its document alone, -inf elsewhere."""
    document = torch.repeat_interleave(torch.arange(len(edges) - 1), torch.tensor(edges).diff())
    same = document[:, None] == document[None]
    seen = same if attention == "bidirectional" else same.tril()
    if attention == "prefix":
        in_prefix = torch.arange(edges[-1]) < torch.tensor([*(np.array(edges[:-1]) + prefixes)])[document]
        seen = seen | (same & in_prefix[:, None] & in_prefix[None])
    return torch.where(seen, 0.0, float("-inf"))[None, None]


@pytest.mark.parametrize("schedule", ["clm:1.0", "mlm:1.0", "prefix_lm:8,mlm(mask=0.4->0.15,span=3):6,mntp:6"])
def test_twenty_losses_equal_those_of_a_plain_loop(schedule, small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--objective-schedule", schedule, "--no-bf16"]
    runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "run")])
    runs.script(runs.WORKERS / "starting_point.py", [str(tmp_path / "start"), *flags])
    to_hf(tmp_path / "start", tmp_path / "hf")

    model = EuroBertForMaskedLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").train()
    model.get_input_embeddings().padding_idx = None  # pad is eos here, and eos is a token that is trained
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    plan = make_plan(read_settings(flags, "test"))
    batch_size = plan.settings.global_batch_size
    losses, norms = [], []
    for n in range(1, STEPS + 1):
        objective, loss_sum, count = plan.schedule.objective(n), torch.zeros(()), 0
        for sample in range((n - 1) * batch_size, n * batch_size):
            pack = plan.packs[sample]
            targets = objective.targets(pack, SampleRandomness(plan.settings.seed, pack.sample, pack.epoch))
            logits = model(
                input_ids=torch.from_numpy(targets.inputs)[None],
                position_ids=torch.from_numpy(pack.positions)[None],
                attention_mask=allowed(pack.edges.tolist(), objective.attention, targets.prefixes),
            ).logits[0]
            predicted = logits[torch.from_numpy(targets.predict_at)]
            loss_sum = loss_sum + torch.nn.functional.cross_entropy(predicted, torch.from_numpy(targets.labels), reduction="sum")
            count += len(targets.labels)
        loss = loss_sum / count
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(n)
        optimizer.step()
        losses.append(loss.item())

    rows = runs.metrics(tmp_path / "run")
    assert max(norms) > CLIP, "the clip never bit, so it was not tested"
    np.testing.assert_allclose([row["learning_rate"] for row in rows], [learning_rate(n) for n in range(1, STEPS + 1)])
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-4)
    np.testing.assert_allclose([row["grad_norm"] for row in rows], norms, rtol=1e-4)
