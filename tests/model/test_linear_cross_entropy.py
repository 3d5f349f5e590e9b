"""The output layer with its loss, in parts and over ranks, against torch."""

import dataclasses

import pytest
import runs
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megaenc.model.linear_cross_entropy import rows_per_chunk

ROWS = 50
HIDDEN = 16
VOCABULARY = 60
PADDED = 64


@pytest.fixture
def work(one_process):
    """Return hidden_NH, weight_VH and labels_N; the weights predict some labels."""
    hidden = torch.randn(ROWS, HIDDEN)
    weight = torch.randn(PADDED, HIDDEN)
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    labels[:10] = (hidden @ weight[:VOCABULARY].T)[:10].argmax(1)
    return hidden, weight, labels


def copy_leaves(tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def loss_of(hidden, weight, labels, **others):
    """Return the loss; `others` are fields of `Predictions` or further options."""
    from megatron.core import parallel_state

    from megaenc.model.linear_cross_entropy import Predictions, linear_cross_entropy

    names = {field.name for field in dataclasses.fields(Predictions)}
    predictions = Predictions(
        None, labels, **{name: value for name, value in others.items() if name in names}
    )
    options = {name: value for name, value in others.items() if name not in names}
    return linear_cross_entropy(
        hidden,
        weight,
        predictions,
        VOCABULARY,
        parallel_state.get_tensor_model_parallel_group(),
        **options,
    )


def soft_labels_of(labels, columns=5):
    """Return ids and probabilities, the label first; the first row repeats an id."""
    generator = torch.Generator().manual_seed(1)
    others = torch.rand(len(labels), VOCABULARY, generator=generator).argsort(dim=1)[
        :, : columns - 1
    ]
    ids = torch.cat([labels[:, None], others], dim=1)
    ids[0, 1] = ids[0, 0]
    return ids, torch.rand(ids.shape, generator=generator).mul(5).softmax(dim=1)


def dense(ids, probabilities):
    """Return the same distributions over the whole vocabulary, for torch."""
    return torch.zeros(len(ids), VOCABULARY).scatter_add_(1, ids, probabilities)


@pytest.mark.parametrize(
    "given", [(), ("weights",), ("bias_V",), ("soft_labels",), ("weights", "bias_V", "soft_labels")]
)
@pytest.mark.parametrize(
    ("at_once", "widened"),
    [(1, 3), (7, 3), (ROWS, ROWS)],
    ids=["a row", "seven rows", "everything"],
)
def test_it_is_the_cross_entropy_of_all_logits(work, at_once, widened, given, monkeypatch):
    """Gradients and accuracy agree too; soft labels skip the kernel of hard labels."""
    from megaenc.model import linear_cross_entropy as loss_module
    from megaenc.model.kernels import FusedKernels

    monkeypatch.setattr(loss_module, "_CACHE_ELEMENTS", PADDED * widened)
    *tensors, labels = work
    tensors.append(torch.randn(PADDED) if "bias_V" in given else torch.zeros(PADDED))
    here = copy_leaves(tensors)
    there = copy_leaves(tensors)
    weights = torch.rand(ROWS) * 5
    weights[3] = 0
    soft_labels = soft_labels_of(labels)
    others = {"weights": weights, "bias_V": here[2], "soft_labels": soft_labels}
    options = {name: others[name] for name in given} | {"chunk_size": PADDED * at_once}
    options |= {"fused": FusedKernels(loss=True)} if "soft_labels" in given else {}
    loss, correct = loss_of(*here[:2], labels, **options)
    logits = there[0] @ there[1][:VOCABULARY].T + there[2][:VOCABULARY]
    losses = F.cross_entropy(
        logits, dense(*soft_labels) if "soft_labels" in given else labels, reduction="none"
    )
    losses = losses * weights if "weights" in given else losses
    (loss * 0.5).backward()  # as the schedules scale it
    (losses.sum() * 0.5).backward()
    torch.testing.assert_close(loss, losses.sum(), rtol=1e-6, atol=0)
    for actual, expected in zip(here[: 3 if "bias_V" in given else 2], there, strict=False):
        assert (actual.grad - expected.grad).norm() <= 1e-6 * expected.grad.norm()
    assert (here[1].grad[VOCABULARY:] == 0).all()
    assert int(correct) == int((logits.argmax(1) == labels).sum())
    with torch.no_grad():
        single, also_correct = loss_of(*here[:2], labels, per_token=True, **options)
    torch.testing.assert_close(single, losses)
    assert also_correct == correct


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("rows", [7, ROWS])
def test_classes_have_the_first_rows(work, rows, buffered):
    """Other rows, also those of tokens, affect neither the loss nor gradients."""
    from megaenc.model.kernels import FusedKernels

    hidden, weight, _ = work
    labels = torch.arange(ROWS) % 3
    bias = torch.randn(PADDED)
    here = copy_leaves((hidden, weight, bias))
    there = copy_leaves((hidden, weight, bias))
    buffer = torch.zeros(PADDED, HIDDEN) if buffered else None
    options = {
        "bias_V": here[2],
        "classes": 3,
        "chunk_size": PADDED * rows,
        "fused": FusedKernels(loss=True),
    }
    loss, correct = loss_of(*here[:2], labels, main_grad_VH=buffer, **options)
    logits = there[0] @ there[1][:3].T + there[2][:3]
    expected = F.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert int(correct) == int((logits.argmax(1) == labels).sum())
    gradients = [here[0].grad, buffer if buffered else here[1].grad, here[2].grad]
    for actual, reference in zip(gradients, there, strict=True):
        torch.testing.assert_close(actual, reference.grad, rtol=1e-5, atol=1e-6)


def test_losses_of_single_tokens_have_no_gradients(work):
    with pytest.raises(ValueError, match="per_token: found gradients enabled"):
        loss_of(*work, per_token=True)


@pytest.mark.parametrize("at_once", [PADDED * 7, PADDED * ROWS])
def test_the_weights_gradient_is_added_to_its_buffer_in_forward(work, at_once):
    *weights, labels = work
    here = copy_leaves(weights)
    there = copy_leaves(weights)
    buffer = torch.ones(PADDED, HIDDEN)
    loss, _ = loss_of(*here, labels, chunk_size=at_once, main_grad_VH=buffer)
    expected, _ = loss_of(*there, labels, chunk_size=at_once)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(buffer - 1, there[1].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(here[0].grad, there[0].grad)
    assert here[1].grad_added_to_main_grad and here[1].grad.shape == there[1].grad.shape
    before = buffer.clone()
    with torch.no_grad():
        loss_of(*here, labels, main_grad_VH=buffer)
    assert torch.equal(buffer, before)
    loss, _ = loss_of(*here, labels, main_grad_VH=buffer)
    with pytest.raises(RuntimeError, match="expected an unscaled loss"):
        (loss * 0.5).backward()


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("at_once", [1, ROWS])
def test_gradients_of_parts_are_added_up_in_float32(work, at_once, is_soft):
    """In bfloat16 each part and the sum are rounded once, so errors stay small."""
    hidden, weight, labels = work
    options = {"soft_labels": soft_labels_of(labels)} if is_soft else {}
    here = [tensor.bfloat16().requires_grad_() for tensor in (hidden, weight)]
    exact = [tensor.detach().float().requires_grad_() for tensor in here]
    loss, _ = loss_of(*here, labels, chunk_size=PADDED * at_once, **options)
    expected, _ = loss_of(*exact, labels, **options)
    loss.backward()
    expected.backward()
    assert abs(loss - expected) < 2**-7 * expected
    for one, other in zip(here, exact, strict=True):
        assert (one.grad.float() - other.grad).norm() < 2**-6 * other.grad.norm()
    assert (here[1].grad.float() - exact[1].grad).norm() < 2**-7 * exact[1].grad.norm()


def test_of_equals_the_lowest_id_is_the_guess(work):
    hidden = torch.ones(2, HIDDEN)
    weight = torch.ones(PADDED, HIDDEN)
    assert int(loss_of(hidden, weight, torch.tensor([0, 1]))[1]) == 1


class Operations(TorchDispatchMode):
    """Counters of matrix products and of the elements of the largest new tensor."""

    def __init__(self):
        super().__init__()
        self.products = 0
        self.numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **keywords or {})
        self.products += function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
        given = {
            tensor.untyped_storage().data_ptr()
            for tensor in arguments
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in given
            ):  # no view
                self.numel = max(self.numel, tensor.numel())
        return out


def test_where_nobody_asks_for_gradients_none_are_made(work):
    hidden, weight, labels = work
    weight.requires_grad_()
    for is_training, products in ((True, 3), (False, 1)):
        with torch.set_grad_enabled(is_training), Operations() as operations:
            loss_of(hidden, weight, labels)
        assert operations.products == products


def test_all_logits_never_exist(one_process):
    """A vocabulary of 128,256 and 1,024 predictions would be half a GiB in float32."""
    hidden = torch.randn(1024, 4, requires_grad=True)
    weight = torch.randn(128_256, 4, requires_grad=True)
    with Operations() as operations:
        loss_of(hidden, weight, torch.randint(0, VOCABULARY, (1024,)))[0].backward()
    assert operations.numel <= 2**26


@pytest.mark.parametrize(
    ("rows", "width", "found"),
    [(10_000, 2 * 128_256, 3_456), (523, 2 * 128_256, 640), (0, 1, 1), (10, 2**31, 1)],
)
def test_parts_are_few_and_even(rows, width, found):
    """10,000 rows, of which a GiB holds 4,096, form three parts of whole tiles of 128."""
    assert rows_per_chunk(rows, width, 2**30) == found


@pytest.mark.multiprocess
def test_over_ranks_it_is_the_same():
    """The last of four shards of a padded vocabulary is only padding."""
    runs.script(runs.WORKERS / "loss_over_ranks.py", [], processes=4)
