"""Kernel launches and bytes of one layer with the fused kernels of an accelerator.

One layer is the difference between models of three and of two layers, forward and backward. Each
operation that is not a view is a launch. Kernels and products read their inputs and write their
outputs once. Attention, which is the same in all versions, is left out.
"""

import os
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megaenc import backend

assert os.environ.get("TRITON_INTERPRET") == "1", "expected to be started by test_interpreted.py"
SHAPE = "--hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 4 --num-query-groups 2"
SHAPE += " --seq-length 64 --micro-batch-size 1 --global-batch-size 1 --train-iters 4 --bf16"
TOKENS = 64
HIDDEN = 48
FFN = 80
DIM = 12
QUERIES = 48  # QUERIES and KEYS are widths of all heads
KEYS = 24
PARAMETERS = HIDDEN * (2 * QUERIES + 2 * KEYS + 3 * FFN)
NO_LAUNCH = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_assert_async",
)


class Launches(TorchDispatchMode):
    """Counters of launches by operation, and of bytes of kernels and products."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.bytes = Counter()

    def add(self, name: str, *tensors: Tensor) -> None:
        """Count a launch that reads or writes each of `tensors` once."""
        self.counts[name] += 1
        self.bytes[name] += sum(tensor.nbytes for tensor in tensors)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        outputs = [
            tensor
            for tensor in (result if isinstance(result, tuple | list) else [result])
            if isinstance(tensor, Tensor)
        ]
        storages = {
            tensor.untyped_storage().data_ptr()
            for tensor in arguments
            if isinstance(tensor, Tensor)
        }
        is_view = not function._schema.is_mutable and any(
            out.untyped_storage().data_ptr() in storages for out in outputs
        )
        name = function.overloadpacket.__name__
        if outputs and not is_view and name not in NO_LAUNCH:
            self.add(name)
        return result


class CountedKernel:
    """Triton kernel with counted launches; a tensor that is passed twice is read once."""

    def __init__(self, kernel, launches: Launches):
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            tensors = {value.data_ptr(): value for value in arguments if isinstance(value, Tensor)}
            self.launches.add(self.kernel.fn.__name__, *tensors.values())
            with _disable_current_modes():
                self.kernel[grid](*arguments, **constants)

        return launch


class _Attention(torch.autograd.Function):
    """Uncounted stand-in for attention."""

    @staticmethod
    def forward(ctx, q, k, v):
        with _disable_current_modes():
            ctx.likes = [torch.empty_like(x) for x in (q, k, v)]
            return q.clone()

    @staticmethod
    def backward(ctx, gradient):
        with _disable_current_modes():
            return tuple(torch.ones_like(x) for x in ctx.likes)


def count_micro_batch(
    layers: int, flags: list[str], fused: set[str], corpus, monkeypatch
) -> Launches:
    """Return the launches of a micro-batch with `layers` layers.

    The model uses the kernels `fused` and those of all models.
    """
    from megaenc.backend import main_grad
    from megaenc.model import layer, linear_cross_entropy
    from megaenc.model.kernels import glu, norm, rotary, selftest
    from megaenc.training.config import parse_config
    from megaenc.training.planning import build_plan

    monkeypatch.setattr(
        selftest, "check_kernel", lambda name, *_: selftest.SelfTestResult(name, True, 0.0, 1.0, "")
    )
    launches = Launches()

    def accumulate(total, a, b, *, in_float32):
        """Accumulate as an accelerator does: one product reads and writes the sum."""
        launches.add("addmm", a, b, *([] if total is None else [total, total]))
        with _disable_current_modes():
            product = a.float() @ b.float()
            return product if total is None else total.add_(product)

    plan = build_plan(
        parse_config([*corpus.flags, *SHAPE.split(), "--num-layers", str(layers), *flags], "test")
    )
    device = backend.init_distributed(plan.settings.layout, plan.settings.seed)
    from megaenc.training.engine import Engine

    try:
        engine = Engine(plan, device)
        used = {name for name, is_used in engine.fused_kernels.items() if is_used}
        assert used == {"rotary", "loss", "sum", *fused}
        with monkeypatch.context() as patch:
            patch.setattr(
                layer,
                "compute_attention",
                lambda name, q, k, v, *_, **__: _Attention.apply(q, k, v),
            )
            for module in (main_grad, linear_cross_entropy):
                patch.setattr(module, "accumulate_matmul", accumulate)
            specs = engine.micro_batch_specs(1)
            for module in (norm, rotary, glu):
                for name in [name for name in vars(module) if name.endswith("_kernel")]:
                    patch.setattr(module, name, CountedKernel(getattr(module, name), launches))
            with launches:
                engine.run_micro_batches(specs, (), train=True)
    finally:
        backend.destroy_distributed()
    return launches


@pytest.mark.parametrize(
    ("flags", "fused"),
    [
        (["--model", "tiny"], {"norm", "swiglu"}),
        (["--model", "modernbert-base", "--window-size", "16"], {"layer_norm", "geglu"}),
    ],
    ids=["tiny", "modernbert-base"],
)
def test_a_layer_launches_what_it_needs(flags, fused, small_corpus, monkeypatch):
    two = count_micro_batch(2, flags, fused, small_corpus, monkeypatch)
    three = count_micro_batch(3, flags, fused, small_corpus, monkeypatch)
    assert not two.counts - three.counts
    assert three.counts - two.counts == {
        "mm": 8,  # outputs and gradients of inputs
        "addmm": 4,  # gradients of weights, added to their buffers
        "norm_forward_kernel": 2,
        "norm_backward_kernel": 2,
        "qkv_rotary_kernel": 2,
        "glu_forward_kernel": 1,
        "glu_backward_kernel": 1,
        # Gradients of norm weights: sums of programs are added, cast and added to their buffers.
        "sum": 2,
        "_to_copy": 2,
        "add_": 2,
    }
    moved = {name: three.bytes[name] - two.bytes[name] for name in three.bytes}
    token = 2 * TOKENS  # bytes of a number for each token
    assert moved["norm_forward_kernel"] == 8 * token * HIDDEN + 2 * HIDDEN * 2
    assert moved["qkv_rotary_kernel"] == 4 * token * (QUERIES + 2 * KEYS) + 2 * TOKENS * DIM * 4
    assert moved["glu_forward_kernel"] + moved["glu_backward_kernel"] == 8 * token * FFN
    assert (
        moved["addmm"] == token * (4 * HIDDEN + 2 * QUERIES + 2 * KEYS + 3 * FFN) + 8 * PARAMETERS
    )
