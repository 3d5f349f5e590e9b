"""The self-test of attention: correct backends pass, each kind of error is named."""

import math

import pytest
import torch

from megaenc.objectives import Attention

HOST = torch.device("cpu")
SHAPE = {"heads": 4, "groups": 2, "head_dim": 64, "dtype": torch.float32, "device": HOST}
BOTH = (Attention.CAUSAL, Attention.BIDIRECTIONAL)


def check(name="sdpa", masks=tuple(Attention), **other):
    from megaenc.model.attention.selftest import check_backend

    return check_backend(name, masks=masks, **SHAPE | other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(6, 2, 96), (4, 1, 80), (2, 2, 8)])
def test_the_dot_product_of_torch_is_right(heads, groups, head_dim, dtype):
    """Errors stay well below the tolerance, and no computation at all would exceed it."""
    verdict = check(heads=heads, groups=groups, head_dim=head_dim, dtype=dtype)
    assert (verdict.passed, verdict.available, verdict.reason) == (True, True, "")
    assert 0 < verdict.error < verdict.tolerance * 0.7


@pytest.mark.parametrize("window", [None, 2])
def test_the_reference_is_the_formula_a_position_at_a_time(window):
    from megaenc.model.attention.selftest import reference_attention

    torch.manual_seed(0)
    spans = [
        (0, 2, 5),
        (5, 5, 6),
        (6, 6, 9),
        (9, 13, 13),
    ]  # a prefix, causal, causal, bidirectional
    inputs = [torch.randn(13, heads, 6, requires_grad=True) for heads in (4, 2, 2, 4)]
    q, k, v, upstream = inputs
    rows = []
    for start, prefix, stop in spans:
        for at in range(start, stop):
            seen = range(start, max(at + 1, prefix if at < prefix else 0))
            seen = [other for other in seen if window is None or abs(other - at) <= window]
            for head in range(4):
                scores = k[seen, head // 2] @ q[at, head] / math.sqrt(6)
                rows.append(scores.softmax(0) @ v[seen, head // 2])
    out = torch.stack(rows).view(13, 4, 6)
    expected = (out, *torch.autograd.grad((out * upstream).sum(), (q, k, v)))
    for here, there in zip(
        reference_attention(*(x.detach() for x in inputs), spans, window),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(here, there.detach())


def test_products_in_tensorfloat_are_allowed_to_whom_has_asked_for_them(monkeypatch):
    from megaenc.model.attention.selftest import error_tolerance

    def allowed(device="cuda"):
        return error_tolerance(torch.float32, 355, torch.device(device))

    assert allowed() < 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        assert allowed() == pytest.approx(16 / 2048, rel=0.02)
        assert allowed("cpu") < 1e-4
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert allowed() == pytest.approx(16 / 2048, rel=0.02)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert allowed() < 1e-4


# Faulty kernels. Each is called like backends.compute_attention, which does the rest correctly.


def right(q, k, v, packing, window=None):
    from megaenc.model.attention.backends import compute_attention

    return compute_attention("sdpa", q, k, v, packing, window=window)


def window_is_ignored(q, k, v, packing, window=None):
    return right(q, k, v, packing)


def window_without_its_farthest_tokens(q, k, v, packing, window=None):
    return right(q, k, v, packing, window and window - 1)


def as_if(attention, packing):
    """Return the same documents under another mask."""
    from megaenc.model.packed_sequences import PackedSequences

    cu_seqlens = packing.cu_seqlens_q.tolist()
    return PackedSequences.from_cu_seqlens(cu_seqlens, attention, HOST)


def mask_is_ignored(q, k, v, packing):
    return right(q, k, v, as_if(Attention.BIDIRECTIONAL, packing))


def everything_is_causal(q, k, v, packing):
    return right(q, k, v, as_if(Attention.CAUSAL, packing))


def scale_of_wider_heads(q, k, v, packing):
    """Use heads of 96 padded to 128 with the scale of 128."""
    return right(q * (96 / 128) ** 0.5, k, v, packing)


def last_key_of_the_document_before(q, k, v, packing):
    """Let the first token of each document see a little of the previous one."""
    out = right(q, k, v, packing)
    first = packing.cu_seqlens_q[1:-1].long()
    return out.index_add(0, first, 0.1 * v[first - 1].repeat_interleave(q.size(1) // v.size(1), 1))


def groups_the_other_way_round(q, k, v, packing):
    return right(q, k.flip(1), v.flip(1), packing)


def no_number(q, k, v, packing):
    out = right(q, k, v, packing)
    return out + torch.where(torch.arange(q.size(0)) == 3, float("nan"), 0.0)[:, None, None]


class _Steeper(torch.autograd.Function):
    """Identity function with 1.2 times its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.2


def gradient_of_keys_alone(q, k, v, packing):
    return right(q, _Steeper.apply(k), v, packing)


def gradient_of_values_alone(q, k, v, packing):
    return right(q, k, _Steeper.apply(v), packing)


def raising(q, k, v, packing):
    raise RuntimeError("no kernel image is available\nfor execution on the device")


def half_of_the_rows(q, k, v, packing):
    return right(q, k, v, packing)[::2]


@pytest.fixture
def planted(monkeypatch):
    """Check `wrong` as if it were the backend `varlen` of this machine."""
    from megaenc.model.attention import selftest

    def verdict(wrong, **how):
        monkeypatch.setattr(selftest, "missing_requirement", lambda *_: "")
        monkeypatch.setattr(
            selftest,
            "compute_attention",
            lambda name, *others, window: wrong(*others, *([window] if window else [])),
        )
        return check("varlen", **how)

    return verdict


@pytest.mark.parametrize("wrong", [window_is_ignored, window_without_its_farthest_tokens])
@pytest.mark.parametrize("mask", Attention)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_window_is_found(wrong, mask, dtype, planted):
    """The documents are four times as long as the window; the fault needs a window."""
    verdict = planted(wrong, masks=[mask], dtype=dtype, windows=(None, 64))
    assert f"values off by {verdict.error:.2g}" in verdict.reason
    assert f"under {mask} attention, 10 tokens to each side, with heads" in verdict.reason
    assert (
        planted(wrong, masks=[mask], dtype=dtype).passed
        and planted(right, masks=[mask], dtype=dtype, windows=(None, 64)).passed
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("wrong", "what", "mask"),
    [
        (mask_is_ignored, "values off by", "causal"),
        (everything_is_causal, "values off by", "bidirectional"),
        (scale_of_wider_heads, "values off by", "causal"),
        (last_key_of_the_document_before, "values off by", "causal"),
        (groups_the_other_way_round, "values off by", "causal"),
        (no_number, "values NaN", "causal"),
        (gradient_of_keys_alone, "gradients of keys off by", "causal"),
        (gradient_of_values_alone, "gradients of values off by", "causal"),
        (raising, "RuntimeError", "causal"),
        (half_of_the_rows, "RuntimeError", "causal"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_wrong_is_named(wrong, what, mask, dtype, planted):
    verdict = planted(wrong, dtype=dtype, head_dim=96)
    assert verdict.available and not verdict.passed
    assert (
        verdict.reason.startswith(what)
        and f"under {mask} attention with heads 96 wide" in verdict.reason
    )
    assert "\n" not in verdict.reason
    if "off by" in what:
        assert (
            verdict.error > 1.5 * verdict.tolerance
            and f"{verdict.error:.2g} (tolerance {verdict.tolerance:.2g})" in verdict.reason
        )


def test_a_leak_that_depends_on_the_neighbour_alone(planted):
    """Only a change of other documents shows a leak that needs unequal lengths."""

    def wrong(q, k, v, packing):
        loud = v.abs().amax() > 20
        return right(q, k, v, packing) + (loud * 0.3 * v.mean(0)).repeat_interleave(
            q.size(1) // v.size(1), 0
        )

    verdict = planted(wrong)
    assert verdict.reason.startswith("values, when other documents change, off by")


def test_only_the_masks_of_the_run_count(planted):
    assert planted(everything_is_causal, masks=[Attention.CAUSAL]).passed
    assert not planted(everything_is_causal, masks=BOTH).passed


def test_what_cannot_be_tried_is_not_computed():
    verdict = check("flash")
    assert (verdict.available, verdict.passed, verdict.error) == (False, False, None)
    assert verdict.reason == "needs an accelerator"


@pytest.fixture
def as_on_an_accelerator(monkeypatch):
    """Return the rows of an accelerator on the host."""
    from megaenc.model.attention import selftest

    rows = selftest._trial_packs
    monkeypatch.setattr(
        selftest, "_trial_packs", lambda _, *others: rows(torch.device("cuda"), *others)
    )


@pytest.mark.parametrize("seq_length", [0, 600, 4096])
def test_what_is_wrong_in_long_documents_alone_is_found_where_a_run_may_have_them(
    seq_length, planted, as_on_an_accelerator
):
    """The planted kernel ignores keys after the 500th."""

    def wrong(q, k, v, packing):
        at = torch.cat([torch.arange(stop - start) for start, stop in packing.documents])
        return right(q, k, torch.where((at > 500)[:, None, None], 0.0, v), packing)

    how = dict(seq_length=seq_length, masks=[Attention.CAUSAL])
    assert planted(right, **how).passed
    verdict = planted(wrong, **how)
    assert verdict.passed == (seq_length == 0)
    assert verdict.passed or verdict.reason.startswith("values off by")


@pytest.mark.parametrize(
    ("packs", "seq_length", "masks", "windows", "needed"),
    [
        (1, 33_000, BOTH, (None,), "take 8 GiB if documents fill 1 packs of 33,000 tokens"),
        (
            600,
            2048,
            [Attention.PREFIX],
            (None,),
            "8 GiB if documents fill 600 packs of 2,048 tokens",
        ),
        (1, 33_000, [Attention.CAUSAL], (None, 64), "take 8 GiB"),
        (1, 33_000, [Attention.BIDIRECTIONAL], (None, 64), "take 16 GiB"),
        (512, 2048, BOTH, (None,), ""),
        (1, 33_000, [Attention.CAUSAL], (None,), ""),
    ],
)
def test_masks_that_would_fill_the_memory_are_refused(
    packs, seq_length, masks, windows, needed, planted
):
    """A causal document needs no mask; a window needs its own."""
    planted(right)
    how = dict(
        packs=packs, seq_length=seq_length, masks=masks, windows=windows, dtype=torch.bfloat16
    )
    verdict = check("cudnn", **how)
    assert verdict.passed == (not needed) and needed in verdict.reason


def test_what_masks_take_is_what_is_said():
    from megaenc.model.attention.padded import PaddedBatches, max_mask_bytes
    from megaenc.model.packed_sequences import PackedSequences

    row = PackedSequences.from_cu_seqlens([0, 300, 600, 900], Attention.BIDIRECTIONAL, HOST)
    [batch] = PaddedBatches.from_packed(row, HOST, torch.bfloat16).batches
    assert batch.bias.nbytes == max_mask_bytes(3, 300, torch.bfloat16)
