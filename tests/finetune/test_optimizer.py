import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3Model, Trainer, get_linear_schedule_with_warmup

from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.optimizer import MasterWeightOptimizer, check_warmup

_STEPS = 20
_PEAK = 1e-2


class _Qwen3(nn.Module):
    """A decoder whose norms are classes of its own, as a classifier of single tokens."""

    def __init__(self):
        super().__init__()
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "head_dim": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        self.model = Qwen3Model(
            Qwen3Config(vocab_size=50, num_hidden_layers=1, attention_bias=True, **sizes)
        )

    def forward(self, tokens):
        return self.model(tokens[:, None]).last_hidden_state[:, 0]


def _model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5)
    )


def _batches(count=_STEPS):
    torch.manual_seed(1)
    return [(torch.randint(50, (8,)), torch.randint(5, (8,))) for _ in range(count)]


def _backward(model, tokens, labels, times=1.0):
    """`times`: 20 gives a norm above 1, so that clipping is seen."""
    (nn.functional.cross_entropy(model(tokens).float(), labels) * times).backward()


def _optimizer(model, rate=_PEAK, steps=_STEPS, **protocol):
    return MasterWeightOptimizer(
        model, learning_rate=rate, steps=steps, protocol=FinetuneConfig(**protocol)
    )


@pytest.mark.parametrize("make", [_model, _Qwen3])
def test_updates_are_those_of_the_trainer(make):
    """Of transformers, with its schedule, and without decay of norms and biases."""
    model = make()
    expected = copy.deepcopy(model)
    decayed = Trainer.get_decay_parameter_names(None, expected)
    groups = [
        [p for n, p in expected.named_parameters() if (n in decayed) == which]
        for which in (True, False)
    ]
    adam = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        lr=_PEAK,
        betas=(0.9, 0.95),
        eps=1e-5,
        fused=False,
    )
    schedule = get_linear_schedule_with_warmup(adam, math.ceil(0.1 * _STEPS), _STEPS)
    updates = _optimizer(model, precision="fp32")
    norms = []
    for number, batch in enumerate(_batches()):
        times = 20.0 if number % 2 else 0.1
        _backward(expected, *batch, times)
        norms.append(nn.utils.clip_grad_norm_(expected.parameters(), 1.0).item())
        assert updates.learning_rate == schedule.get_last_lr()[0]
        adam.step()
        schedule.step()
        adam.zero_grad()
        _backward(model, *batch, times)
        assert updates.step() == pytest.approx(norms[-1], rel=1e-5)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert min(norms) < 1 < max(norms)
    # Attention over one token has no gradient but rounding, which Adam divides by its epsilon: of
    # float64 both differ by up to 2e-5.
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-5)


def _flat(weights):
    return torch.cat([weight.detach().float().flatten() for weight in weights])


def test_masters_take_updates_that_bfloat16_would_lose():
    rounded = _model().bfloat16()
    start = _flat(rounded.parameters())
    trained = {}
    for precision in ("fp32", "bf16", "paper-bf16"):
        model = copy.deepcopy(rounded).float() if precision == "fp32" else copy.deepcopy(rounded)
        updates = _optimizer(model, rate=1e-4, precision=precision)
        for batch in _batches():
            _backward(model, *batch)
            updates.step()
        trained[precision] = _flat(
            updates.get_masters().values() if precision == "bf16" else model.parameters()
        )
        if precision == "bf16":
            assert torch.equal(_flat(model.parameters()), trained[precision].bfloat16().float())
    moved = (trained["fp32"] - start).norm()
    errors = {
        precision: (weights - trained["fp32"]).norm() / moved
        for precision, weights in trained.items()
    }
    assert errors["bf16"] < 0.2 < errors["paper-bf16"]


def test_a_master_starts_from_what_was_loaded():
    model = nn.Linear(4, 4).bfloat16()
    loaded = model.weight.detach().float() + 1e-4
    model.weight.unrounded = loaded
    weight, bias = _optimizer(model, precision="bf16").get_masters().values()
    assert weight is loaded
    assert torch.equal(bias, model.bias.float())
    assert not hasattr(model.weight, "unrounded")  # held once


def test_gradients_of_several_passes_add_up_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    updates = _optimizer(model, precision="bf16", clip_grad=0)
    for value in (256.0, 1.0, 1.0, 1.0):  # 256 + 1 is 256 in bfloat16
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert updates.step() == 259.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_changes_nothing(precision):
    model = _model() if precision == "fp32" else _model().bfloat16()
    updates = _optimizer(model, precision=precision, warmup=0.0)
    [batch] = _batches(1)
    before = _flat(model.parameters())
    for times in (math.nan, 1.0):
        _backward(model, *batch, times=times)
        norm = updates.step()
        assert (
            math.isnan(norm) == math.isnan(times) == torch.equal(_flat(model.parameters()), before)
        )


def test_a_schedule_of_rates_that_are_all_0_is_refused():
    with pytest.raises(
        InputError, match=r"--warmup: found 0.1 and 1 step, whose rate is 0, expected more steps"
    ):
        check_warmup(1, 0.1)
    for steps, warmup in [(1, 0.0), (2, 0.1), (2, 0.99), (1000, 0.1)]:
        check_warmup(steps, warmup)


def test_a_closed_optimizer_is_freed_though_the_model_lives():
    """Parameters of 16 bits call it after each backward pass."""
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    made = _optimizer(model, precision="bf16")
    gone = weakref.ref(made)
    made.close()
    del made
    gc.collect()
    assert gone() is None
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None
