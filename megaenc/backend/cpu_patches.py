"""Patches that run megatron-core on a machine without an accelerator.

megatron-core allocates on `torch.cuda.current_device()` or `device="cuda"`, calls `.cuda()` and
compares `.type()` with CUDA's names. Each megatron.core module gets a proxy of `torch` that uses
the CPU; two patched tensor methods check their caller. Where torch's arithmetic is too coarse on a
CPU, megatron-core gets another: the gradient norm, and the embedding's gradient.
"""

import contextlib
import functools
import importlib
import sys
import types

import torch

CPU = torch.device("cpu")

# Modules that megatron-core imports on use; they must be loaded before `torch` is replaced in them.
_LAZY_MODULES = (
    "models.common.language_module.language_module",
    "transformer.transformer_block",
)
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


class _ModuleProxy(types.ModuleType):
    """A proxy of a module that overrides some names."""

    def __init__(self, original: types.ModuleType, **overrides) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(original.__dict__)
        self.__dict__.update(overrides, _original=original)

    def __getattr__(self, name: str):
        return getattr(self._original, name)


class _NullStream:
    """A no-op replacement of `torch.cuda.Stream`: on a CPU everything runs in order."""

    def wait_stream(self, *_) -> None: ...
    def wait_event(self, *_) -> None: ...
    def synchronize(self) -> None: ...


def _force_cpu_device(factory):
    """Wrap a tensor factory so that `device="cuda"` becomes the CPU."""

    @functools.wraps(factory)
    def create(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create


def _is_called_by_megatron() -> bool:
    """Return whether the caller of the calling function is in megatron.core."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.core")


def _do_nothing(*_, **__) -> None:
    return


_installed = False


def install() -> None:
    """Install the patches that let megatron-core run on a CPU.

    They replace `torch` in the modules of megatron.core that are loaded by then, and Tensor.type
    and Tensor.cuda for calls from megatron.core. `prepare_megatron` calls it; further calls do
    nothing.

    Raises:
        RuntimeError: CUDA or HIP is available.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU patches are for machines without an accelerator; this one has CUDA or HIP"
        )
    if _installed:
        return
    for name in _LAZY_MODULES:
        importlib.import_module("megatron.core." + name)
    _replace_torch()
    _replace_norm()
    _replace_embedding()
    _replace_tensor_methods()
    _installed = True


def _replace_torch() -> None:
    """Replace `torch` in all loaded megatron.core modules by a proxy for the CPU."""
    # The accelerator's random state is that of a separate generator, so that the CPU's is not
    # changed.
    generator = torch.Generator()
    cuda = _ModuleProxy(
        torch.cuda,
        manual_seed=generator.manual_seed,
        get_rng_state=lambda *_, **__: generator.get_state(),
        set_rng_state=lambda state, *_, **__: generator.set_state(state),
        current_device=lambda: CPU,
        current_stream=lambda *_, **__: _NullStream(),
        default_stream=lambda *_, **__: _NullStream(),
        Stream=lambda *_, **__: _NullStream(),
        stream=lambda _: contextlib.nullcontext(),
        synchronize=_do_nothing,
        empty_cache=_do_nothing,
    )
    proxy = _ModuleProxy(
        torch, cuda=cuda, **{name: _force_cpu_device(getattr(torch, name)) for name in _FACTORIES}
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = proxy
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = cuda.get_rng_state
    random._set_cuda_rng_state = cuda.set_rng_state


def _replace_norm() -> None:
    """Replace megatron-core's L2 norm by one that is precise for large tensors.

    On a CPU, torch's is 1e-5 off for a million float32 elements, 1 % for 100 million.
    """
    from megatron.core.optimizer import clip_grads

    def l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor, *_):
        zero = torch.zeros((), dtype=torch.float64)
        squares = sum(
            (_sum_of_squares(tensor) for tensors in tensor_lists for tensor in tensors), zero
        )
        return squares.sqrt().float().reshape(1), None

    if clip_grads.l2_norm_impl is clip_grads.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm


def _sum_of_squares(tensor: torch.Tensor, width: int = 4096) -> torch.Tensor:
    """Return the sum of squares of all elements, float64[].

    Rows of `width` elements are summed in float32, and the rows in float64.
    """
    flat = tensor.reshape(-1)
    end = flat.numel() // width * width
    parts = (flat[:end].view(-1, width), flat[end:].view(1, -1))
    return sum(
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).double().square().sum()
        for part in parts
    )


class _Embedding(torch.autograd.Function):
    """Rows of a 16-bit matrix by index, with gradients summed in float32.

    The sums are rounded once.
    """

    @staticmethod
    def forward(ctx, indices, weight):
        ctx.save_for_backward(indices)
        ctx.rows = len(weight)
        return torch.nn.functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx, gradient):
        (indices,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(
            gradient.float(), indices, ctx.rows, -1, False
        ).to(gradient.dtype)


def _replace_embedding() -> None:
    """Replace megatron-core's embedding by one whose gradients are precise.

    torch sums its bfloat16 gradients in bfloat16, 27 % off for a token seen 2,000 times.
    """
    from megatron.core.tensor_parallel import layers

    def embedding(indices, weight):
        plain = weight.dtype == torch.float32
        return (
            torch.nn.functional.embedding(indices, weight)
            if plain
            else _Embedding.apply(indices, weight)
        )

    layers.F = _ModuleProxy(torch.nn.functional, embedding=embedding)


def _replace_tensor_methods() -> None:
    """Make Tensor.type and Tensor.cuda treat the CPU as a CUDA device.

    Only calls by megatron-core are affected.
    """
    type_of = torch.Tensor.type
    to_cuda = torch.Tensor.cuda

    @functools.wraps(type_of)
    def tensor_type(self, *args, **kwargs):
        result = type_of(self, *args, **kwargs)
        if isinstance(result, str) and _is_called_by_megatron():
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    @functools.wraps(to_cuda)
    def tensor_cuda(self, *args, **kwargs):
        return self if _is_called_by_megatron() else to_cuda(self, *args, **kwargs)

    torch.Tensor.type = tensor_type
    torch.Tensor.cuda = tensor_cuda
