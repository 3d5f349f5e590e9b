"""Whether this process's device multiplies right, how fast, and whether it has bfloat16 itself."""

import time

from megaenc.doctor.findings import Asked, Finding, note, ok, problem

_SLOW = 0.4  # of an accelerator's peak in its data sheet


def products(asked: Asked) -> list[Finding]:
    """Matrix products in float32 and bfloat16 against float64 on the host."""
    import torch

    from megaenc.backend.device import detect, host_has_bf16, peak_bf16, rounds_to_tf32
    from megaenc.backend.process import share_cores

    backend = detect()
    share_cores()
    found, rates = [], {}
    in_float32 = 2.0**-10 if rounds_to_tf32(backend.device) else 1e-5
    for dtype, allowed in ((torch.float32, in_float32), (torch.bfloat16, 2.0**-7)):
        name = str(dtype).removeprefix("torch.")
        error = product_error(backend.device, dtype)
        rates[dtype] = rate(backend.device, dtype)
        text = f"{rates[dtype] / 1e12:.3g} TFLOP/s" if rates[dtype] > 1e12 else f"{rates[dtype] / 1e9:.3g} GFLOP/s"
        if not error <= allowed:
            advice = "nothing that this device computes can be trusted: try another one, or another build of torch"
            found.append(problem(f"products in {name}", f"off by {error:.2g}, where {allowed:.2g} is allowed", advice))
        else:
            found.append(ok(f"products in {name}", f"right, {text}"))
    if backend.is_host:
        has = host_has_bf16()
        faster = rates[torch.bfloat16] > rates[torch.float32]
        text = f"{'has' if has else 'no'} instructions for it; it is {'faster' if faster else 'slower'} than float32 here"
        advice = f"runs take {'bfloat16' if has else 'float32'} by default: try --{'no-' if has else ''}bf16 on a short one"
        found.append(ok("bfloat16", text, "note") if has == faster else note("bfloat16", text, advice, "note"))
    else:
        has, peak = backend.has_bf16, peak_bf16(torch.cuda.get_device_name(backend.device))
        text = "has instructions for it" if has else "no instructions for it"
        found.append(ok("bfloat16", text, "note") if has else note("bfloat16", text, "runs take float32 by default", "note"))
        if peak and rates[torch.bfloat16] < _SLOW * peak:
            advice = "somebody else computes on it, or it is throttled: look at clocks, power and temperature"
            found.append(note("speed", f"{100 * rates[torch.bfloat16] / peak:.0f} % of the data sheet's bfloat16", advice))
    return found


def product_error(device, dtype) -> float:
    """|found - exact| / |exact| of a product of two 384 x 384 matrices of normal numbers, as lengths of all numbers."""
    import torch

    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randn(384, 384, generator=drawn).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    found = (a.to(device) @ b.to(device)).double().cpu()
    return float((found - exact).norm() / exact.norm())


def rate(device, dtype) -> float:
    """FLOP/s of a square matrix product, the best of six: of 8192 on an accelerator, on a host of what takes a moment."""
    import torch

    if device.type == "cpu":
        from megaenc.backend.device import detect

        return detect().peak_flops(dtype)
    size, best = 8192, float("inf")
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(6):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        a @ b
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
