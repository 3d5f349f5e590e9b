"""Loss and accuracy over a vocabulary that is spread over the tensor-parallel ranks: sums and counts, never means."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def summed_loss(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and correct guesses, each summed over the N predictions: (float32 with gradient, int64).

    `logits_NV` is this rank's share of the vocabulary and is overwritten; N may be 0.
    """
    correct = (predictions(logits_NV.detach()) == labels_N).sum()  # first: the loss reuses the memory of the logits
    return vocab_parallel_cross_entropy(logits_NV.float(), labels_N).sum(), correct


@torch.no_grad()
def predictions(logits_NV: Tensor) -> Tensor:
    """int64[N]: the most likely token over all ranks' shares, the lowest id among equals."""
    group = parallel_state.get_tensor_model_parallel_group()
    first = logits_NV.size(1) * parallel_state.get_tensor_model_parallel_rank()
    highest, at = logits_NV.float().max(dim=1)
    best = highest.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group=group)
    token = torch.where(highest == best, at + first, torch.iinfo(torch.int64).max)
    dist.all_reduce(token, dist.ReduceOp.MIN, group=group)
    return token
