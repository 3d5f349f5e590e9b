"""Two stand-ins for megatron-core: used only where needed, for known wheels only."""

import subprocess
import sys

import pytest
import torch

from megaenc.backend import cpu_patches, megatron
from megaenc.backend.optimizer_patches import GroupStepAdamW
from megaenc.errors import InputError


def test_host_adapter_is_refused_where_there_is_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="has CUDA or HIP"):
        cpu_patches.install()


def test_unknown_wheel_is_refused():
    with pytest.raises(InputError, match=r"megatron-core 0\.99\.0 is installed, expected 0\.16\.1"):
        megatron.check_megatron_version("0.99.0")
    assert megatron.check_megatron_version() == "0.16.1"


@pytest.mark.usefixtures("one_process")
def test_torch_is_itself_for_everybody_else():
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).cuda()


@pytest.mark.usefixtures("one_process")
def test_the_gradient_of_a_token_that_is_seen_often_is_summed_in_float32():
    """In bfloat16, a sum of 2,000 gradients of MLM's mask token stops growing."""
    from megatron.core.tensor_parallel import VocabParallelEmbedding
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, params_dtype=torch.bfloat16
    )
    embedding = VocabParallelEmbedding(10, 8, init_method=torch.nn.init.zeros_, config=config)
    indices = torch.full((1, 2000), 3)
    indices[0, ::50] = torch.arange(40) % 3
    gradient = torch.rand(1, 2000, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    embedding(indices).backward(gradient)
    exact = torch.zeros(10, 8, dtype=torch.float64).index_add_(0, indices[0], gradient[0].double())
    torch.testing.assert_close(embedding.weight.grad.double(), exact, rtol=2**-8, atol=0)


@pytest.mark.slow
def test_importing_transformers_after_the_adapters_works():
    code = (
        "from megaenc.backend import prepare_megatron; prepare_megatron(); "
        "from transformers import EuroBertModel"
    )
    subprocess.run(
        [sys.executable, "-W", "error::UserWarning:megaenc", "-c", code], check=True, timeout=120
    )


def test_adamw_is_torchs():
    """Two groups with changing rates equal torch's; each group counts steps once.

    Each step divides the sums of gradients that it is given by a divisor of its own.
    """
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(7, 5, generator=generator), torch.randn(3, generator=generator)]
    own_weights = [torch.nn.Parameter(x.clone()) for x in start]
    torch_weights = [torch.nn.Parameter(x.clone()) for x in start]
    common = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    ours = GroupStepAdamW([{"params": [p]} for p in own_weights], **common)
    torchs = torch.optim.AdamW([{"params": [p]} for p in torch_weights], foreach=False, **common)
    for step in range(5):
        ours.grad_scale = 1000.0 + step
        for optimizer, scale in ((ours, ours.grad_scale), (torchs, 1.0)):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
                [parameter] = group["params"]
                parameter.grad = torch.sin(parameter.detach() * (step + 1)) * scale
            optimizer.step()
    for a, b in zip(own_weights, torch_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert [group["step"] for group in ours.param_groups] == [5, 5]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in ours.state.values())


@pytest.mark.usefixtures("one_process")
def test_gradient_norm_is_exact_for_large_matrices():
    """torch's own float32 norm on the host is 4e-4 off here."""
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    gradients = [
        torch.randn(size, generator=torch.Generator().manual_seed(0)) for size in (10_000_019, 7)
    ]
    exact = float(torch.cat(gradients).double().norm())
    norm = get_grad_norm_fp32(gradients, grad_stats_parallel_group=torch.distributed.group.WORLD)
    assert norm == pytest.approx(exact, rel=1e-6)
