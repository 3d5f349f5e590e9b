"""The output layer with its loss, in parts and over ranks, against torch's cross-entropy on all logits at once."""

import json

import pytest
import runs
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, HIDDEN, VOCABULARY, PADDED = 50, 16, 60, 64


@pytest.fixture
def work(one_process):
    """hidden_NH, weight_VH and labels_N; some labels are what the weights guess."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN), torch.randn(PADDED, HIDDEN)
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    labels[:10] = (hidden @ weight[:VOCABULARY].T)[:10].argmax(1)
    return hidden, weight, labels


def loss_of(hidden, weight, labels, **others):
    from megatron.core import parallel_state

    from megaenc.model.linear_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, labels, VOCABULARY, parallel_state.get_tensor_model_parallel_group(), **others)


@pytest.mark.parametrize("widened", [PADDED * 3, PADDED * ROWS], ids=["widened by three rows", "widened at once"])
@pytest.mark.parametrize("at_once", [1, PADDED * 7, PADDED * ROWS], ids=["a row", "seven rows", "everything"])
def test_it_is_the_cross_entropy_of_all_logits(work, at_once, widened, monkeypatch):
    from megaenc.model import linear_cross_entropy as loss_module

    monkeypatch.setattr(loss_module, "_CACHE_ELEMENTS", widened)
    *weights, labels = work
    here, there = ([tensor.clone().requires_grad_() for tensor in weights] for _ in range(2))
    loss, correct = loss_of(*here, labels, chunk_size=at_once)
    logits = there[0] @ there[1][:VOCABULARY].T
    expected = F.cross_entropy(logits, labels, reduction="sum")
    (loss * 0.5).backward()  # as the schedules scale it
    (expected * 0.5).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([tensor.grad for tensor in here], [tensor.grad for tensor in there])
    assert int(correct) == int((logits.argmax(1) == labels).sum()) >= 10
    assert (here[1].grad[VOCABULARY:] == 0).all()


@pytest.mark.parametrize("at_once", [PADDED * 7, PADDED * ROWS])
def test_the_weights_gradient_is_added_to_its_buffer_in_forward(work, at_once):
    *weights, labels = work
    here, there = ([tensor.clone().requires_grad_() for tensor in weights] for _ in range(2))
    buffer = torch.randn(PADDED, HIDDEN)
    before = buffer.clone()
    loss, _ = loss_of(*here, labels, chunk_size=at_once, main_grad_VH=buffer)
    expected, _ = loss_of(*there, labels, chunk_size=at_once)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(buffer - before, there[1].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(here[0].grad, there[0].grad)
    assert here[1].grad_added_to_main_grad and here[1].grad.shape == there[1].grad.shape
    with torch.no_grad():
        loss_of(*here, labels, main_grad_VH=buffer)
    torch.testing.assert_close(buffer - before, there[1].grad, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_in_its_buffer_cannot_be_scaled(work):
    *weights, labels = work
    hidden, weight = (tensor.clone().requires_grad_() for tensor in weights)
    loss, _ = loss_of(hidden, weight, labels, main_grad_VH=torch.zeros(PADDED, HIDDEN))
    with pytest.raises(RuntimeError, match="expected an unscaled loss"):
        (loss * 0.5).backward()


@pytest.mark.parametrize("at_once", [PADDED * 7, PADDED * ROWS])
def test_weights_scale_losses_and_gradients(work, at_once):
    *tensors, labels = work
    weights = torch.rand(ROWS) * 5
    weights[3] = 0
    here, there = ([tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2))
    loss, _ = loss_of(*here, labels, chunk_size=at_once, weights_N=weights)
    expected = (F.cross_entropy(there[0] @ there[1][:VOCABULARY].T, labels, reduction="none") * weights).sum()
    (loss * 0.5).backward()
    (expected * 0.5).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([tensor.grad for tensor in here], [tensor.grad for tensor in there])
    with torch.no_grad():
        losses, _ = loss_of(*tensors, labels, per_token=True, weights_N=weights)
    torch.testing.assert_close(losses.sum(), expected)


def soft_labels_of(labels, columns=5):
    """Ids and probabilities: the label first, then others of the whole vocabulary; of the first row one id stands twice."""
    generator = torch.Generator().manual_seed(1)
    others = torch.rand(len(labels), VOCABULARY, generator=generator).argsort(dim=1)[:, : columns - 1]
    ids = torch.cat([labels[:, None], others], dim=1)
    ids[0, 1] = ids[0, 0]
    return ids, torch.rand(ids.shape, generator=generator).mul(5).softmax(dim=1)


def dense(ids, probabilities):
    """The same distributions over the whole vocabulary, for torch's cross-entropy."""
    return torch.zeros(len(ids), VOCABULARY).scatter_add_(1, ids, probabilities)


@pytest.mark.parametrize("at_once", [1, PADDED * 7, PADDED * ROWS])
def test_soft_labels_are_the_cross_entropy_with_a_distribution(work, at_once):
    """With weights and a bias, and of a kernel that reads one label no use is made."""
    from megaenc.model.kernels import FusedKernels

    *tensors, labels = work
    tensors.append(torch.randn(PADDED))
    soft_labels, weights = soft_labels_of(labels), torch.rand(ROWS) * 5
    here, there = ([tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2))
    options = {"weights_N": weights, "soft_labels": soft_labels, "chunk_size": at_once}
    loss, correct = loss_of(*here[:2], labels, bias_V=here[2], fused=FusedKernels(loss=True), **options)
    logits = there[0] @ there[1][:VOCABULARY].T + there[2][:VOCABULARY]
    losses = F.cross_entropy(logits, dense(*soft_labels), reduction="none") * weights
    (loss * 0.5).backward()
    (losses.sum() * 0.5).backward()
    torch.testing.assert_close(loss, losses.sum(), rtol=1e-6, atol=0)
    for actual, expected in zip(here, there, strict=True):
        assert (actual.grad - expected.grad).norm() <= 1e-6 * expected.grad.norm()
    assert int(correct) == int((logits.argmax(1) == labels).sum())
    with torch.no_grad():
        single, _ = loss_of(*tensors[:2], labels, bias_V=tensors[2], per_token=True, **options)
    torch.testing.assert_close(single, losses)


def test_soft_labels_of_one_id_are_labels(work):
    hidden, weight, labels = work
    with torch.no_grad():
        hard, soft = (
            loss_of(hidden, weight, labels, per_token=True, soft_labels=given)[0]
            for given in (None, (labels[:, None], torch.ones(ROWS, 1)))
        )
    assert torch.equal(hard, soft)


def test_soft_labels_in_bfloat16(work):
    """No further from the exact gradients than a few roundings of the logits."""
    hidden, weight, labels = (tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in work)
    soft_labels = soft_labels_of(labels)
    actual, expected = ([tensor.clone().requires_grad_() for tensor in pair] for pair in
                        ((hidden, weight), (hidden.float(), weight.float())))  # fmt: skip
    loss, _ = loss_of(*actual, labels, chunk_size=PADDED * 7, soft_labels=soft_labels)
    exact = F.cross_entropy(expected[0] @ expected[1][:VOCABULARY].T, dense(*soft_labels), reduction="sum")
    loss.backward()
    exact.backward()
    assert abs(loss - exact) < 2**-7 * exact
    for one, other in zip(actual, expected, strict=True):
        assert (one.grad.float() - other.grad).norm() < 2**-6 * other.grad.norm()


def test_losses_of_single_tokens(work):
    hidden, weight, labels = work
    with torch.no_grad():
        losses, correct = loss_of(hidden, weight, labels, chunk_size=PADDED * 7, per_token=True)
        total, also_correct = loss_of(hidden, weight, labels, chunk_size=PADDED * 7)
    torch.testing.assert_close(losses, F.cross_entropy(hidden @ weight[:VOCABULARY].T, labels, reduction="none"))
    assert (losses.sum(), correct) == (total, also_correct)
    with pytest.raises(ValueError, match="per_token: found gradients enabled"):
        loss_of(hidden, weight, labels, per_token=True)


@pytest.mark.parametrize("at_once", [PADDED * 7, PADDED * ROWS])
def test_a_bias_is_part_of_the_logits(work, at_once):
    *weights, labels = work
    weights.append(torch.randn(PADDED))
    here, there = ([tensor.clone().requires_grad_() for tensor in weights] for _ in range(2))
    loss, correct = loss_of(*here[:2], labels, chunk_size=at_once, bias_V=here[2])
    logits = there[0] @ there[1][:VOCABULARY].T + there[2][:VOCABULARY]
    expected = F.cross_entropy(logits, labels, reduction="sum")
    (loss * 0.5).backward()
    (expected * 0.5).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([tensor.grad for tensor in here], [tensor.grad for tensor in there])
    assert int(correct) == int((logits.argmax(1) == labels).sum())


def test_where_nobody_asks_for_gradients_none_are_made(work):
    hidden, weight, labels = work

    class Products(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            self.found += function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
            return function(*arguments, **keywords or {})

    def products():
        with Products() as counted:
            loss_of(hidden, weight.requires_grad_(), labels)
        return counted.found

    assert products() == 3
    with torch.no_grad():
        assert products() == 1


def test_gradients_of_parts_are_added_up_in_float32(work):
    """In bfloat16 each part is rounded once and the sum once: with row after row no worse than a few roundings."""
    hidden, weight, labels = (tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in work)
    gradients = []
    for at_once in (1, PADDED * ROWS):
        here = weight.clone().requires_grad_()
        loss_of(hidden, here, labels, chunk_size=at_once)[0].backward()
        gradients.append(here.grad.float())
    exact = weight.float().requires_grad_()
    loss_of(hidden.float(), exact, labels)[0].backward()
    for gradient in gradients:
        assert (gradient - exact.grad).norm() < 2**-7 * exact.grad.norm()


def test_of_equals_the_lowest_id_is_the_guess(work):
    hidden, weight = torch.ones(2, HIDDEN), torch.ones(PADDED, HIDDEN)
    assert int(loss_of(hidden, weight, torch.tensor([0, 1]))[1]) == 1


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made inside."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:  # no view
                self.numel = max(self.numel, tensor.numel())
        return out


def test_all_logits_never_exist(one_process):
    """A vocabulary of 128,256 and 2,048 predictions: a GiB as float32."""
    hidden, weight = torch.randn(2048, 4, requires_grad=True), torch.randn(128_256, 4, requires_grad=True)
    with Largest() as largest:
        loss_of(hidden, weight, torch.randint(0, VOCABULARY, (2048,)))[0].backward()
    assert largest.numel <= 2**26


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_ranks_it_is_the_same(ranks, tmp_path):
    """Of four shares of a padded vocabulary the last is padding alone."""
    runs.script(runs.WORKERS / "loss_over_ranks.py", [str(tmp_path / "found.json")], processes=ranks)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["correct"] == found["expected_correct"] >= 10
    for name in ("loss", "to_hidden", "to_weight", "soft_loss", "soft_to_hidden", "soft_to_weight"):
        assert found[name] < 1e-6, found
