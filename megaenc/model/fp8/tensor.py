"""float8 quantization with one scale per matrix, and matrix products.

The products use torch's own kernel. The scale is the largest power of two that keeps the matrix's
largest element in range: scaling does not round, and a part of a matrix is rounded to the same
values as the full matrix.
"""

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megaenc.backend import Backend
from megaenc.backend.parallel_config import FLOAT8_ALIGNMENT
from megaenc.console import print_rank_0
from megaenc.errors import InputError

TEST_ROWS = 100  # of the matrices of the self-test
# The bits of 2^-100, infinity and NaN as float32.
_SMALLEST = 27 << 23
_INFINITE = 255 << 23
_NAN = 0x7FC00000


@dataclass(frozen=True)
class Float8Recipe:
    """Matrix operations of float8 linear layers, and the dtypes of their operands.

    `select_float8_recipe` builds it; its methods quantize, transpose and multiply matrices.
    `forward` is the float8 dtype of inputs and weights, `gradient` that of output gradients;
    `triton` selects Triton kernels in place of torch's operations, with the same results.
    """

    forward: torch.dtype
    gradient: torch.dtype
    triton: bool = False
    """whether our Triton kernels quantize and transpose matrices, with the same results as torch in
    fewer passes"""

    def amax_bits(self, x: Tensor) -> Tensor:
        """Return the float32 bit pattern of max abs(x), as int32[] on the device of `x`.

        NaN is the largest, then infinity. Patterns are ordered like their magnitudes, so that those
        of parts of a matrix are combined by their maximum.
        """
        if self.triton:
            from megaenc.model.fp8 import kernels

            return kernels.amax_bits(x)
        return (
            torch.linalg.vector_norm(x.detach(), math.inf, dtype=torch.float32)
            .abs()
            .view(torch.int32)
        )

    def quantize(self, x: Tensor, amax_bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a tensor as float8, scaled by a power of two, and the inverse scale.

        Args:
            amax_bits: Result of the method `amax_bits` for `x`, or for a matrix of which `x` is a
                part.
            dtype: float8 dtype of the result, `forward` or `gradient` of this recipe.

        Returns:
            (float8 tensor of the shape of `x`, inverse scale float32[]). The inverse scale is NaN
            if `amax_bits` is not finite, and the tensor then has no meaning.
        """
        if self.triton:
            from megaenc.model.fp8 import kernels

            return kernels.quantize(x, amax_bits, dtype, max_value_bits(dtype))
        # A power of two is (exponent + 127) << 23; if `amax_bits` has the larger mantissa, the
        # subtraction borrows from the exponent.
        exponent = (max_value_bits(dtype) - amax_bits.clamp(min=_SMALLEST)) >> 23
        scale = (127 + exponent) << 23
        inverse = (127 - exponent) << 23
        inverse = torch.where(amax_bits < _INFINITE, inverse, _NAN)
        return (x.contiguous() * scale.view(torch.float32)).to(dtype), inverse.view(torch.float32)

    def transpose(self, x: Tensor) -> Tensor:
        """Return the transpose of a float8 matrix, padded for matrix products.

        It is a contiguous float8[columns, rows rounded up to a multiple of 16], 0 in the padding.
        """
        if self.triton:
            from megaenc.model.fp8 import kernels

            return kernels.transpose(x)
        bytes_ = F.pad(x.view(torch.uint8).t(), (0, -x.size(0) % FLOAT8_ALIGNMENT))
        return bytes_.contiguous().view(x.dtype)

    @staticmethod
    def matmul(
        a: Tensor,
        b: Tensor,
        a_inverse: Tensor,
        b_inverse: Tensor,
        out_dtype: torch.dtype,
        fast: bool = False,
    ) -> Tensor:
        """Return the product a b^T of float8 matrices times both inverse scales.

        Args:
            a: [n, k], contiguous.
            b: [m, k], contiguous. On accelerators m and k are multiples of 16, or torch raises a
                RuntimeError, and at most one matrix has 5 bits of exponent.
            a_inverse: Inverse scale of `a`, float32[].
            b_inverse: Inverse scale of `b`, float32[].
            fast: Whether to use the hardware's less accurate accumulation, sufficient for forward.

        Returns:
            [n, m] in `out_dtype`.
        """
        # torch's own product of e4m3 by e4m3 takes a hundred times as long on a CPU.
        if not a.is_cuda:
            return (a.float() @ b.float().t() * (a_inverse * b_inverse)).to(out_dtype)
        return torch._scaled_mm(
            a, b.t(), scale_a=a_inverse, scale_b=b_inverse, out_dtype=out_dtype, use_fast_accum=fast
        )


@functools.cache
def max_value_bits(dtype: torch.dtype) -> int:
    """Return the float32 bit pattern of the largest finite number of `dtype`."""
    return int(torch.tensor(torch.finfo(dtype).max, dtype=torch.float32).view(torch.int32))


def rounding_error(dtype: torch.dtype) -> float:
    """Return an upper bound of the relative error of rounding to a float8 dtype.

    It bounds the root mean square over many numbers in the normal range; it is a fraction, not a
    percentage.
    """
    # torch.finfo is wrong for float8_e5m2fnuz.
    next_value = (torch.ones((), dtype=dtype).view(torch.uint8) + 1).view(dtype)
    return (float(next_value) - 1) / 2 / math.sqrt(3)


@functools.cache
def select_float8_recipe(fp8_format: str, backend: Backend) -> Float8Recipe:
    """Return the Float8Recipe of a format on this machine, computed once in a process.

    On accelerators Triton kernels are used if their results match torch's bit by bit. Each rank
    decides for itself; if rank 0 does not use them, it prints the reason.

    Args:
        fp8_format: `hybrid` (gradients with 5 bits of exponent, all else with 4) or `e4m3` (all
            with 4). It is not checked: other text counts as `e4m3`.
        backend: Hardware of this process.

    Raises:
        InputError: The machine has no float8 matrix products.
    """
    forward, wide = _select_types(fp8_format, backend)
    plain = Float8Recipe(forward, wide if fp8_format == "hybrid" else forward)
    if backend.is_cpu:
        return plain
    fused = Float8Recipe(plain.forward, plain.gradient, triton=True)
    if reason := _find_difference(fused, plain, backend.device):
        print_rank_0(
            f"--fp8-format {fp8_format}: Triton kernels are not used to quantize ({reason}); "
            "torch's slower ones are"
        )
        return plain
    return fused


def _select_types(fp8_format: str, backend: Backend) -> tuple[torch.dtype, torch.dtype]:
    """Return this machine's float8 dtypes with 4 and with 5 bits of exponent.

    Raises:
        InputError: The machine has no float8 matrix products.
    """
    open_compute = (torch.float8_e4m3fn, torch.float8_e5m2)
    mi300 = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    if backend.is_cpu or (
        backend.name == "cuda" and torch.cuda.get_device_capability(backend.device) >= (8, 9)
    ):
        return open_compute
    if backend.name == "rocm":
        architecture = torch.cuda.get_device_properties(backend.device).gcnArchName.split(":")[0]
        if architecture.startswith("gfx94"):
            return mi300
        if architecture.startswith(("gfx95", "gfx12")):
            return open_compute
    raise InputError(
        f"--fp8-format {fp8_format}: {backend.description} has no float8 matrix products; "
        "expected one that has (H100, L40S, "
        "MI300X or later), or no --fp8-format"
    )


def _find_difference(fused: Float8Recipe, plain: Float8Recipe, device: torch.device) -> str:
    """Return a description of the first bitwise difference between two recipes.

    It may be an error; the text is empty if there is none.
    """
    try:
        generator = torch.Generator(device).manual_seed(0)
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(
                TEST_ROWS, 3 * 208, dtype=dtype, device=device, generator=generator
            ).exp_()[:, 208:416]
            amax_bits = fused.amax_bits(x), plain.amax_bits(x)
            if not torch.equal(*amax_bits):
                return f"the largest magnitude of {dtype} differs"
            for to in {fused.forward, fused.gradient}:
                fused_x8, fused_inverse = fused.quantize(x, amax_bits[1], to)
                plain_x8, plain_inverse = plain.quantize(x, amax_bits[1], to)
                if not (
                    torch.equal(fused_x8.view(torch.uint8), plain_x8.view(torch.uint8))
                    and torch.equal(fused_inverse, plain_inverse)
                ):
                    return f"{dtype} is rounded to {to} differently"
                if not torch.equal(
                    fused.transpose(plain_x8).view(torch.uint8),
                    plain.transpose(plain_x8).view(torch.uint8),
                ):
                    return f"{to} is transposed differently"
    except Exception as error:  # compilers raise errors of many types
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
