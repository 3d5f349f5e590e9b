"""Reference training with transformers, torch's AdamW and one pack at a time."""

import itertools
from collections.abc import Callable

import numpy as np
import torch

from megaenc.counter_rng import SampleRandomness
from megaenc.training.plan import Plan


def allowed(edges: list[int], attention: str, prefixes: np.ndarray | None) -> torch.Tensor:
    """Return the additive mask [1, 1, T, T] of one pack.

    It is 0 where a position may look, only in its document, and -inf elsewhere.
    """
    document = torch.repeat_interleave(torch.arange(len(edges) - 1), torch.tensor(edges).diff())
    same = document[:, None] == document[None]
    seen = same if attention == "bidirectional" else same.tril()
    if attention == "prefix":
        in_prefix = (
            torch.arange(edges[-1]) < torch.tensor([*(np.array(edges[:-1]) + prefixes)])[document]
        )
        seen = seen | (same & in_prefix[:, None] & in_prefix[None])
    return torch.where(seen, 0.0, float("-inf"))[None, None]


def attention_masks(config, edges: list[int], attention: str, prefixes: np.ndarray | None):
    """Return the mask, or one for each kind of layer if some have a window."""
    mask = allowed(edges, attention, prefixes)
    if config.model_type not in ("modernbert", "modernbert-decoder", "gemma3_text"):
        return mask
    reach = config.sliding_window - (
        config.model_type != "modernbert"
    )  # the others' windows count the token itself
    inside = torch.ones(mask.shape[2:], dtype=torch.bool).triu(-reach).tril(reach)
    return {"full_attention": mask, "sliding_attention": mask.masked_fill(~inside, float("-inf"))}


def summed_loss(model, plan: Plan, step: int) -> tuple[torch.Tensor, int]:
    """Return the weighted cross-entropy of a step, summed, and its divisor."""
    loss_sum = torch.zeros(())
    count = 0
    batch_size = plan.settings.global_batch_size
    passes = itertools.product(
        plan.schedule.objectives(step), range((step - 1) * batch_size, step * batch_size)
    )
    for (factor, objective), sample in passes:
        pack = plan.packs[sample]
        targets = objective.targets(
            pack, SampleRandomness(plan.settings.seed, pack.sample, pack.epoch)
        )
        logits = model(
            input_ids=torch.from_numpy(targets.inputs)[None],
            position_ids=torch.from_numpy(pack.positions)[None],
            attention_mask=attention_masks(
                model.config, pack.cu_seqlens.tolist(), objective.attention, targets.prefixes
            ),
        ).logits[0]
        predicted = logits[torch.from_numpy(targets.predict_at)]
        labels = torch.from_numpy(targets.labels)
        if targets.soft_labels is not None:  # torch takes distributions over the whole vocabulary
            ids, probabilities = map(torch.from_numpy, targets.soft_labels)
            labels = torch.zeros_like(predicted).scatter_add_(1, ids, probabilities)
        losses = torch.nn.functional.cross_entropy(predicted, labels, reduction="none")
        weights = (
            torch.ones(len(losses))
            if targets.weights is None
            else torch.from_numpy(targets.weights)
        )
        loss_sum = loss_sum + factor * (losses * weights).sum()
        count += factor * (len(targets.labels) if targets.count is None else targets.count)
    return loss_sum, count


def train(
    model,
    plan: Plan,
    steps: int,
    learning_rate: Callable[[int], float],
    clip: float,
    before_step: Callable[[int], None] = lambda step: None,
) -> tuple[list[float], list[float]]:
    """Train `model` for `steps` steps; return losses and gradient norms."""
    model.train()
    model.get_input_embeddings().padding_idx = (
        None  # pad is eos here, and eos is a token that is trained
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate(1), betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1
    )
    losses = []
    norms = []
    for step in range(1, steps + 1):
        before_step(step)
        loss_sum, count = summed_loss(model, plan, step)
        loss = loss_sum / count
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms
