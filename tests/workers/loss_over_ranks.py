"""The loss over a vocabulary split over all ranks, compared with torch's."""

import torch
import torch.nn.functional as F

ROWS = 50
HIDDEN = 16
VOCABULARY = 45


def main() -> None:
    from megaenc import backend
    from megaenc.backend import ParallelConfig, prepare_megatron
    from megaenc.dist_env import get_world_size

    prepare_megatron()
    backend.init_distributed(ParallelConfig(tensor_model_parallel_size=get_world_size()), 0)
    from megatron.core import parallel_state

    from megaenc.model.linear_cross_entropy import Predictions, linear_cross_entropy

    torch.manual_seed(0)
    share = 64 // get_world_size()
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    weight = torch.randn(64, HIDDEN, requires_grad=True)
    logits = hidden @ weight[:VOCABULARY].T
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    labels[:10] = logits[:10].argmax(1)
    ids = torch.cat([labels[:, None], torch.rand(ROWS, VOCABULARY).argsort(dim=1)[:, :6]], dim=1)
    probabilities = torch.rand(ids.shape).mul(5).softmax(dim=1)
    distributions = torch.zeros(ROWS, VOCABULARY).scatter_add_(1, ids, probabilities)

    group = parallel_state.get_tensor_model_parallel_group()
    mine = slice(group.rank() * share, (group.rank() + 1) * share)
    columns = min(max(VOCABULARY - mine.start, 0), share)
    # 20 classes are on one rank of two, and on two ranks of four.
    for target, soft_labels, classes in (
        (labels, None, 0),
        (distributions, (ids, probabilities), 0),
        (labels % 20, None, 20),
    ):
        scores = logits[:, : classes or VOCABULARY]
        expected = F.cross_entropy(scores, target, reduction="sum")
        to_hidden, to_weight = torch.autograd.grad(expected, (hidden, weight), retain_graph=True)
        part = weight.detach()[mine].clone().requires_grad_()
        here = hidden.detach().clone().requires_grad_()
        predictions = Predictions(
            None, labels % classes if classes else labels, soft_labels=soft_labels, classes=classes
        )
        loss, correct = linear_cross_entropy(
            here, part, predictions, columns, group, chunk_size=7 * share
        )
        loss.backward()
        assert int(correct) == int((scores.argmax(1) == predictions.labels).sum()) > 0
        assert abs(loss - expected) < 1e-6 * expected
        assert (here.grad - to_hidden).norm() < 1e-6 * to_hidden.norm()
        assert (part.grad - to_weight[mine]).norm() < 1e-6 * to_weight.norm()
    backend.destroy_distributed()


if __name__ == "__main__":
    main()
