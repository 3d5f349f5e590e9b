import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from transformers import Trainer, get_linear_schedule_with_warmup

from megaenc.errors import InputError
from megaenc.finetune import optimizer
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.optimizer import MasterWeightOptimizer, check_warmup

_STEPS, _PEAK = 20, 1e-2


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))


def _batches(count=_STEPS):
    torch.manual_seed(1)
    return [(torch.randint(50, (8,)), torch.randint(5, (8,))) for _ in range(count)]


def _backward(model, tokens, labels, times=1.0):
    """`times`: 20 gives a norm above 1, so that clipping is seen."""
    (nn.functional.cross_entropy(model(tokens).float(), labels) * times).backward()


def _reference(model, batches):
    """What transformers.Trainer does with them."""
    decayed = Trainer.get_decay_parameter_names(None, model)
    groups = [[p for n, p in model.named_parameters() if (n in decayed) == which] for which in (True, False)]
    adam = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        lr=_PEAK,
        betas=(0.9, 0.95),
        eps=1e-5,
        fused=False,
    )
    schedule = get_linear_schedule_with_warmup(adam, math.ceil(0.1 * _STEPS), _STEPS)
    norms = []
    for number, batch in enumerate(batches):
        _backward(model, *batch, times=20.0 if number % 2 else 0.1)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        adam.step()
        schedule.step()
        adam.zero_grad()
    return norms


def test_updates_are_those_of_the_trainer():
    model = _model()
    expected = copy.deepcopy(model)
    norms = _reference(expected, _batches())
    assert min(norms) < 1 < max(norms)
    updates = MasterWeightOptimizer(model, learning_rate=_PEAK, steps=_STEPS, protocol=FinetuneConfig(precision="fp32"))
    for number, batch in enumerate(_batches()):
        _backward(model, *batch, times=20.0 if number % 2 else 0.1)
        assert updates.step() == pytest.approx(norms[number], rel=1e-5)
        assert all(parameter.grad is None for parameter in model.parameters())
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_rates_rise_and_fall():
    """The first update of a warm-up has rate 0, as transformers has it."""
    model = nn.Linear(1, 1)
    updates = MasterWeightOptimizer(model, learning_rate=_PEAK, steps=8, protocol=FinetuneConfig(precision="fp32", warmup=0.2))
    rates = []
    for _ in range(8):
        rates.append(updates._adam.param_groups[0]["lr"])
        _step(model, updates)
    assert rates == pytest.approx([_PEAK * share for share in (0, 1 / 2, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)], rel=1e-12)


def _step(model, updates):
    model(torch.ones(1, 1)).sum().backward()
    updates.step()


def test_decay_spares_norms_and_biases_of_a_model_whose_norms_are_its_own():
    from transformers import Qwen3Config, Qwen3Model

    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen3Model(Qwen3Config(vocab_size=20, num_hidden_layers=1, attention_bias=True, **sizes))
    groups = MasterWeightOptimizer(
        model, learning_rate=1.0, steps=1, protocol=FinetuneConfig(precision="fp32")
    )._adam.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0]
    spared = {name for name, parameter in model.named_parameters() if any(parameter is one for one in groups[1]["params"])}
    assert spared == {name for name, _ in model.named_parameters()} - set(Trainer.get_decay_parameter_names(None, model))
    assert {"norm.weight", "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_proj.bias"} <= spared
    assert "embed_tokens.weight" not in spared


def test_masters_take_updates_that_bfloat16_would_lose():
    batches = _batches()
    exact, rounded, lossy = _model(), _model().bfloat16(), _model().bfloat16()
    start = [parameter.detach().float().clone() for parameter in rounded.parameters()]
    with torch.no_grad():
        for parameter, value in zip(exact.parameters(), start, strict=True):
            parameter.copy_(value)
    runs = {"fp32": exact, "bf16": rounded, "paper-bf16": lossy}
    for precision, model in runs.items():
        updates = MasterWeightOptimizer(model, learning_rate=1e-4, steps=_STEPS, protocol=FinetuneConfig(precision=precision))
        for batch in batches:
            _backward(model, *batch)
            updates.step()
        if precision == "bf16":
            masters = list(updates._masters.values())
    apart = {"bf16": masters, "paper-bf16": list(lossy.parameters())}
    moved = sum((e - s).square().sum() for e, s in zip(exact.parameters(), start, strict=True)).sqrt()
    errors = {
        name: (sum((e - o.float()).square().sum() for e, o in zip(exact.parameters(), others, strict=True)).sqrt() / moved).item()
        for name, others in apart.items()
    }
    assert errors["bf16"] < 0.2 < errors["paper-bf16"]
    for parameter, master in zip(rounded.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.bfloat16())


def test_a_master_starts_from_what_was_loaded():
    model = nn.Linear(4, 4).bfloat16()
    model.weight.unrounded = model.weight.detach().float() + 1e-4
    loaded = model.weight.unrounded
    weight, bias = MasterWeightOptimizer(
        model, learning_rate=1.0, steps=1, protocol=FinetuneConfig(precision="bf16")
    )._masters.values()
    assert weight is loaded
    assert torch.equal(bias, model.bias.float())
    assert not hasattr(model.weight, "unrounded")  # held once


def test_gradients_of_several_passes_add_up_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    updates = MasterWeightOptimizer(model, learning_rate=1.0, steps=2, protocol=FinetuneConfig(precision="bf16", clip_grad=0))
    for value in (256.0, 1.0, 1.0, 1.0):  # 256 + 1 is 256 in bfloat16
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert updates.step() == 259.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_changes_nothing(precision):
    model = _model() if precision == "fp32" else _model().bfloat16()
    updates = MasterWeightOptimizer(
        model, learning_rate=_PEAK, steps=_STEPS, protocol=FinetuneConfig(precision=precision, warmup=0.0)
    )
    batch = _batches(1)[0]
    before = copy.deepcopy(model.state_dict())
    _backward(model, *batch, times=math.nan)
    assert math.isnan(updates.step())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    _backward(model, *batch)
    assert math.isfinite(updates.step())
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_schedule_of_rates_that_are_all_0_is_refused():
    with pytest.raises(InputError, match=r"--warmup: found 0.1 and 1 step, whose rate is 0, expected more steps"):
        check_warmup(1, 0.1)
    for steps, warmup in [(1, 0.0), (2, 0.1), (2, 0.99), (1000, 0.1)]:
        check_warmup(steps, warmup)


def test_a_closed_optimizer_is_freed_though_the_model_lives():
    """Parameters of 16 bits call it after each backward pass."""
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    made = optimizer.MasterWeightOptimizer(model, learning_rate=1e-3, steps=1, protocol=FinetuneConfig(precision="bf16"))
    gone = weakref.ref(made)
    made.close()
    del made
    gc.collect()
    assert gone() is None
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None
