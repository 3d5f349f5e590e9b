"""Triton's kernels, interpreted: equal to torch's bit by bit, except for rounding.

The interpreter rounds wrongly.
"""

import torch
import triton

from megaenc.model.fp8.tensor import Float8Recipe

torch.manual_seed(0)
TYPES = [(torch.float8_e4m3fn, torch.float8_e5m2)]
if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):  # whose interpreter knows AMD's
    TYPES.append((torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))
for forward, gradient in TYPES:
    own = Float8Recipe(forward, gradient, triton=True)
    plain = Float8Recipe(forward, gradient)
    for to in (forward, gradient):
        for dtype in (torch.float32, torch.bfloat16):
            # What float8 holds already, times a power of two: nothing is rounded.
            spread = torch.randn(100, 3 * 208).mul(2).exp().mul(torch.randn(100, 3 * 208).sign())
            held = spread.to(to).float().nan_to_num(0.0, 1.0, -1.0)
            held[held.abs() < torch.finfo(to).smallest_normal] = 0.0
            x = (held / 16).to(dtype)[:, 208:416]  # columns of more
            assert torch.equal(x.float() * 16, held[:, 208:416])
            amax_bits = own.amax_bits(x)
            assert torch.equal(amax_bits, plain.amax_bits(x))
            mine = own.quantize(x, amax_bits, to)
            theirs = plain.quantize(x, amax_bits, to)
            assert torch.equal(mine[0].float(), theirs[0].float())
            assert torch.equal(mine[1], theirs[1])
            for rows in (1, 64, 100):
                turned = own.transpose(theirs[0][:rows])
                assert torch.equal(
                    turned.view(torch.uint8), plain.transpose(theirs[0][:rows]).view(torch.uint8)
                )
    for wrong in (float("nan"), float("inf"), -float("inf")):
        x = torch.randn(40, 48)
        x[3, 4] = wrong
        assert own.amax_bits(x) == plain.amax_bits(x)
        assert own.quantize(x, own.amax_bits(x), forward)[1].isnan()
    for x in (torch.zeros(16, 16), torch.full((16, 16), 1e-38), torch.full((16, 16), 3e38)):
        assert (
            own.quantize(x, own.amax_bits(x), forward)[1]
            == plain.quantize(x, plain.amax_bits(x), forward)[1]
        )
