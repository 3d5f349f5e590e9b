"""The loss over a vocabulary that is spread over all ranks, and how far it and its gradients are from one process's: `FILE`."""

import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROWS, HIDDEN, VOCABULARY = 50, 16, 45


def main(file: str) -> None:
    from megaenc import backend
    from megaenc.backend import ParallelConfig, prepare_megatron
    from megaenc.dist_env import get_world_size

    prepare_megatron()
    backend.init_distributed(ParallelConfig(tensor_model_parallel_size=get_world_size()), 0)
    from megatron.core import parallel_state

    from megaenc.model.linear_cross_entropy import linear_cross_entropy

    torch.manual_seed(0)
    share = 64 // get_world_size()
    hidden, weight = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(64, HIDDEN, requires_grad=True)
    logits = hidden @ weight[:VOCABULARY].T
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    labels[:10] = logits[:10].argmax(1)
    ids = torch.cat([labels[:, None], torch.rand(ROWS, VOCABULARY).argsort(dim=1)[:, :6]], dim=1)
    probabilities = torch.rand(ids.shape).mul(5).softmax(dim=1)
    distributions = torch.zeros(ROWS, VOCABULARY).scatter_add_(1, ids, probabilities)

    group = parallel_state.get_tensor_model_parallel_group()
    mine = slice(group.rank() * share, (group.rank() + 1) * share)
    columns = min(max(VOCABULARY - mine.start, 0), share)
    found = {"expected_correct": int((logits.argmax(1) == labels).sum())}
    for prefix, target, soft_labels in (("", labels, None), ("soft_", distributions, (ids, probabilities))):
        expected = F.cross_entropy(logits, target, reduction="sum")
        to_hidden, to_weight = torch.autograd.grad(expected, (hidden, weight), retain_graph=True)
        part = weight.detach()[mine].clone().requires_grad_()
        here = hidden.detach().clone().requires_grad_()
        options = {"chunk_size": 7 * share, "soft_labels": soft_labels}
        loss, correct = linear_cross_entropy(here, part, labels, columns, group, **options)
        loss.backward()
        gathered = [torch.empty_like(part) for _ in range(get_world_size())]
        dist.all_gather(gathered, part.grad, group=group)
        found |= {
            f"{prefix}loss": float((loss - expected).abs() / expected),
            f"{prefix}to_hidden": float((here.grad - to_hidden).norm() / to_hidden.norm()),
            f"{prefix}to_weight": float((torch.cat(gathered) - to_weight).norm() / to_weight.norm()),
            f"{prefix}correct": int(correct),
        }
    if group.rank() == 0:
        with open(file, "w") as out:
            json.dump(found, out)
    backend.destroy_distributed()


if __name__ == "__main__":
    main(sys.argv[1])
