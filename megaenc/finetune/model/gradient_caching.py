"""Gradient caching: a batch's loss, backpropagated one pack at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megaenc.finetune.model.backbone import PackedTexts


def backward_by_packs(
    packs: Sequence[PackedTexts],
    embed: Callable[[PackedTexts], Tensor],
    compute_loss: Callable[[Tensor], Tensor],
) -> Tensor:
    """Backpropagate a loss of all packs' embeddings pack by pack; return it detached.

    The loss and its gradients equal those of one large batch, but only the graph of one pack is in
    memory, and all packs but the first are embedded twice, with the same dropout (gradient caching,
    Gao et al. 2021, 2101.06983). Gradients are added to those that parameters have, those of
    `compute_loss` too.

    Args:
        packs: At least one.
        embed: Function that returns the embeddings of a pack, [texts, size].
        compute_loss: Function of the embeddings [texts, size], in the order of the packs.
    """
    device = packs[0].tokens.device
    on_gpu = device.type == "cuda"
    first = embed(packs[0])
    random_states = []
    embedded = [first.detach()]
    with torch.no_grad():
        for packed in packs[1:]:
            random_states.append(
                (torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None)
            )
            embedded.append(embed(packed))
    vectors = torch.cat(embedded).requires_grad_()
    loss = compute_loss(vectors)
    loss.backward()
    first_gradient, *next_gradients = vectors.grad.split([len(part) for part in embedded])
    first.backward(first_gradient)
    del first  # frees its graph
    for packed, (state, gpu_state), gradient in zip(
        packs[1:], random_states, next_gradients, strict=True
    ):
        with torch.random.fork_rng([device] if on_gpu else []):
            torch.set_rng_state(state)
            if on_gpu:
                torch.cuda.set_rng_state(gpu_state, device)
            embed(packed).backward(gradient)
    return loss.detach()
