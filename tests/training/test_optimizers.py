"""StableAdamW and Muon, compared with plain formulas."""

import pytest
import torch

OPTIMIZERS = ("stable_adamw", "muon")


@pytest.fixture(scope="module")
def optimizers():
    """The module, which imports megatron-core."""
    from megaenc.backend.megatron import prepare_megatron

    prepare_megatron()
    from megaenc.training import optimizers

    return optimizers


def build(optimizers, optimizer_class, model: torch.nn.Module, **flags):
    """Build the optimizer of a plain model whose matrices are all Muon's.

    `attention` is split into queries, keys and values. The bias is in a group of its own, without
    weight decay.
    """
    parts = {
        2: lambda name, weight: (2, 1, 1) if name.startswith("attention") else (weight.size(0),),
        1: lambda *_: (),
    }
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    optimizer = optimizer_class(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], **flags
    )
    optimizer.shards = [
        optimizers.WeightShard(
            weight.shape,
            weight,
            weight.numel(),
            group=2 - weight.dim(),
            parts=parts[weight.dim()](name, weight),
        )
        for name, weight in model.named_parameters()
    ]
    return optimizer


def small_model() -> torch.nn.ModuleDict:
    """Build two layers, the first with 3 blocks of 4 rows each."""
    torch.manual_seed(1)
    return torch.nn.ModuleDict(
        {"attention": torch.nn.Linear(6, 12), "last": torch.nn.Linear(12, 5, bias=False)}
    ).double()


def train(model: torch.nn.ModuleDict, update) -> list[torch.Tensor]:
    """Return the weights after ten steps; gradients grow a hundredfold after step 5.

    `update`: an optimizer, whose gradients are sums with a divisor for each step; or a function of
    the step.
    """
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 11):
        divisor = 1000.0 + step if isinstance(update, torch.optim.Optimizer) else 1.0
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        target = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        out = model["last"](torch.tanh(model["attention"](x)))
        model.zero_grad()
        ((out - target).square().mean() * (100.0 if step > 5 else 1.0) * divisor).backward()
        if divisor > 1:
            update.grad_scale = divisor
            update.step()
        else:
            with torch.no_grad():
                update(step)
    return [weight.detach() for weight in model.parameters()]


def test_stable_adamw_is_the_papers_algorithm(optimizers):
    """Algorithm 2 of arXiv 2304.13013 with corrected decay rates.

    The first moments need no correction then.
    """
    lr = 0.01
    beta1 = 0.9
    beta2 = 0.95
    eps = 1e-8
    decay = 0.1
    model = small_model()
    reference = small_model()
    adam = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    optimizer = build(optimizers, optimizers.StableAdamW, model, **adam)
    actual = train(model, optimizer)
    moments = {
        weight: (torch.zeros_like(weight), torch.zeros_like(weight))
        for weight in reference.parameters()
    }
    clipped = []

    def step_by_the_paper(t: int) -> None:
        b1 = beta1 * (1 - beta1 ** (t - 1)) / (1 - beta1**t)
        b2 = beta2 * (1 - beta2 ** (t - 1)) / (1 - beta2**t)
        for weight, (v, u) in moments.items():
            g = weight.grad
            v.copy_(b1 * v + (1 - b1) * g)
            u.copy_(b2 * u + (1 - b2) * g * g)
            rms = float((g * g / u.clamp(min=eps**2)).mean().sqrt())
            clipped.append(rms > 1.001)
            eta = lr / max(1.0, rms)
            own_decay = decay if weight.dim() == 2 else 0.0
            weight.copy_(weight - eta * own_decay * weight - eta * v / (u.sqrt() + eps))

    expected = train(reference, step_by_the_paper)
    assert 0 < sum(clipped) < len(clipped)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # the root mean square is float32


@pytest.mark.parametrize("name", ["StableAdamW", "Muon"])
def test_weights_frozen_at_first_train_as_from_the_start(name, optimizers):
    model = small_model()
    late_model = small_model()
    late = build(optimizers, getattr(optimizers, name), late_model)
    for group in late.param_groups:
        group["step"] = 3
    late.frozen_steps = dict.fromkeys(late_model.parameters(), 3)
    expected = train(model, build(optimizers, getattr(optimizers, name), model))
    for a, b in zip(train(late_model, late), expected, strict=True):
        assert a.equal(b)


def by_svd(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Apply the Newton-Schulz iterations to the singular values."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def test_orthogonalization_knows_no_size_and_rounds_in_bfloat16(optimizers):
    matrix = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    result = optimizers.orthogonalize(matrix, 5)
    torch.testing.assert_close(result.double(), by_svd(matrix.double(), 5), rtol=0, atol=2e-4)
    torch.testing.assert_close(
        optimizers.orthogonalize(1e-12 * matrix, 5), result, rtol=0, atol=2e-4
    )
    torch.testing.assert_close(
        optimizers.orthogonalize(matrix.bfloat16(), 5), result.bfloat16(), rtol=0, atol=0.1
    )
    assert not optimizers.orthogonalize(torch.zeros(5, 12), 5).any()


def test_muon_by_singular_values(optimizers):
    """Queries, keys and values are separate matrices; the bias is AdamW's."""
    lr = 0.02
    decay = 0.1
    adam = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}
    model = small_model()
    reference = small_model()
    muon = build(optimizers, optimizers.Muon, model, **adam)
    muon.dtype = torch.float32
    actual = train(model, muon)
    attention = reference["attention"].weight
    last = reference["last"].weight
    adamw = torch.optim.AdamW([reference["attention"].bias], **adam | {"weight_decay": 0.0})
    momenta = {matrix: torch.zeros_like(matrix) for matrix in (attention, last)}
    blocks = torch.arange(12).view(3, 4)
    rows_of = {
        attention: [blocks[:, :2].flatten(), blocks[:, 2], blocks[:, 3]],
        last: [torch.arange(5)],
    }

    def step_by_hand(_: int) -> None:
        adamw.step()
        for matrix, momentum in momenta.items():
            momentum.copy_(0.95 * momentum + 0.05 * matrix.grad)
            nesterov = 0.95 * momentum + 0.05 * matrix.grad
            update = torch.zeros_like(matrix)
            for rows in rows_of[matrix]:
                part = nesterov[rows]
                update[rows] = 0.2 * max(part.shape) ** 0.5 * by_svd(part, 5)
            matrix.copy_(matrix - lr * (update + decay * matrix))

    expected = train(reference, step_by_hand)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)  # orthogonalized in float32


@pytest.mark.parametrize("name", ["adamw", *OPTIMIZERS])
def test_one_step_without_decay_of_norms_and_biases(name, short_run, engine_of):
    """First gradients are equal: two runs differ by the decay lr * decay * weight."""
    model = ["--add-qkv-bias", "--qk-layernorm", "--normalization", "LayerNorm", "--norm-bias"]
    flags = [
        *short_run,
        "--optimizer",
        name,
        *model,
        "--lr",
        "0.01",
        "--lr-warmup-iters",
        "0",
        "--weight-decay",
    ]
    weights = []
    for more in (["0"], ["5"], ["5", "--no-weight-decay-norm-bias"]):
        engine = engine_of(*flags, *more)
        start = [weight.detach().clone() for weight in engine.chunks[0].parameters()]
        engine.train_step(1)
        weights.append([weight.detach() for weight in engine.chunks[0].parameters()])
    for before, undecayed, decayed, matrices in zip(start, *weights, strict=True):
        expected = undecayed - 0.05 * before
        torch.testing.assert_close(decayed, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            matrices, expected if before.dim() == 2 else undecayed, rtol=0, atol=1e-6
        )
