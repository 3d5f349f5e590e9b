"""Each attention backend on this process's device against the formula: values, gradients, nothing across documents."""

from megaenc.doctor.findings import Asked, Finding, Probe, ok, problem

_HEADS, _GROUPS = 4, 2
_WIDTHS = (64, 96)
"""Of heads: those of the 210M and 610M models, and of the 1B model."""
_NOTHING_LEFT = "torch's own attention is broken here, and nothing trains right by it: install torch anew"
_LONGEST = 1024  # tokens of a document, on an accelerator


def backends(asked: Asked) -> list[Probe]:
    """A probe for each backend there is."""
    from megaenc.backend.megatron import prepare_megatron

    prepare_megatron()
    from megaenc.model.attention_backends import ORDER

    return [
        Probe("attention", name, f"{__name__}:backend", arguments=(name,), patience=3, advice=_escape(name)) for name in ORDER
    ]


def backend(asked: Asked, name: str) -> list[Finding]:
    """One of them, under every mask, in the numbers that a run here may be made in."""
    import torch

    from megaenc.backend.device import detect
    from megaenc.backend.megatron import prepare_megatron
    from megaenc.backend.process import share_cores

    prepare_megatron()
    share_cores()
    from megaenc.model.attention_check import check_backend
    from megaenc.objectives import Attention

    device = detect().device
    numbers = (torch.float32, torch.bfloat16) if name == "sdpa" else (torch.bfloat16,)
    worst = 0.0
    for dtype in numbers:
        for width in _WIDTHS:
            sizes = dict(heads=_HEADS, groups=_GROUPS, head_dim=width, seq_length=_LONGEST)
            verdict = check_backend(name, **sizes, dtype=dtype, device=device)
            if not verdict.available:
                return [ok(name, f"cannot be used: {verdict.why}")]
            if not verdict.right:
                return [problem(name, f"{verdict.why}, in {_short(dtype)}", _advice(name), alike="note")]
            worst = max(worst, verdict.error / verdict.allowed)
    masks, widths, kinds = ", ".join(Attention), " and ".join(map(str, _WIDTHS)), " and ".join(map(_short, numbers))
    return [ok(name, f"right: {masks}; heads {widths} wide; {kinds}; {100 * worst:.0f} % of the error allowed")]


def _short(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _escape(name: str) -> str:
    """From a backend that hangs or dies, which the check at the start of a run cannot find for that run."""
    if name == "sdpa":
        return _NOTHING_LEFT
    return f"a run hangs or dies there too, by --attention-backend auto as well: name another one than {name}"


def _advice(name: str) -> str:
    if name == "sdpa":
        return _NOTHING_LEFT
    return "--attention-backend auto finds that too and takes the next, a slower one: install one made for this torch"
