"""Attention inside documents: results, kernel arguments, padding and memory."""

import contextlib
import inspect
import os
import threading

import attention_helpers as kernels
import numpy as np
import pytest
import torch

from megaenc.objectives import Attention

HOST = torch.device("cpu")
ACCELERATOR = torch.device("cuda", 0)
LENGTHS = [5, 1, 14, 150, 12]
WAYS = (
    "sdpa",
    "varlen, torch 2.11",
    "varlen, torch 2.13",
    "flash-attn 2",
    "flash-attn 3",
    "flash-attn 4",
    "cudnn",
    "onednn",
)


def packing(attention, lengths=LENGTHS, prefixes=None):
    from megaenc.model.packed_sequences import PackedSequences

    return PackedSequences.from_cu_seqlens(
        [0, *np.cumsum(lengths).tolist()], attention, HOST, prefixes
    )


def numbers(heads, groups, width, lengths=LENGTHS):
    """Return q, k, v and the gradient of the output."""
    tokens = sum(lengths)
    torch.manual_seed(0)
    return [torch.randn(tokens, count, width) for count in (heads, groups, groups, heads)]


@pytest.fixture
def plug(monkeypatch):
    """Put a stand-in in place of a kernel of one of WAYS; return the backend name."""
    from megaenc.model.attention import backends, padded

    backends.load_flash_kernel.cache_clear()

    def plug(way):
        name, _, version = way.partition(", torch ")
        if name == "varlen":
            told = {"enable_gqa": True} if version == "2.13" else {}
            monkeypatch.setattr(backends, "_GQA_OPTION", told)
            monkeypatch.setattr(
                backends, "varlen_attn", kernels.varlen_2_13 if told else kernels.varlen_2_11
            )
        elif name.startswith("flash"):
            kernels.install(monkeypatch, "flash_attn", kernels.flash_attn_2)
            if name.endswith("3"):
                kernels.install(monkeypatch, "flash_attn_interface", kernels.flash_attn_3)
            if name.endswith("4"):
                kernels.install_4(monkeypatch, kernels.flash_attn_4)
            if not name.endswith("2"):
                monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
            return "flash"
        elif name == "cudnn":
            monkeypatch.setattr(padded, "cudnn_only", contextlib.nullcontext)
        return name

    yield plug
    backends.load_flash_kernel.cache_clear()


@pytest.fixture
def check(monkeypatch):
    """Run the self-test of a backend that this machine may lack."""
    from megaenc.model.attention import selftest

    monkeypatch.setattr(selftest, "missing_requirement", lambda *_: "")

    def run(name, heads, groups, head_dim, dtype=torch.float32, **others):
        shape = {
            "heads": heads,
            "groups": groups,
            "head_dim": head_dim,
            "dtype": dtype,
            "device": HOST,
        }
        return selftest.check_backend(name, **shape, **others)

    return run


def computed(name, q, k, v, upstream, packed, window=None):
    """Return the output and the gradients of q, k and v."""
    from megaenc.model.attention.backends import compute_attention

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = compute_attention(name, *leaves, packed, window=window)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


@pytest.mark.parametrize("shape", [(4, 4, 64), (6, 2, 96), (4, 1, 10)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_the_formula_under_each_mask_and_window(way, shape, plug, check):
    verdict = check(plug(way), *shape, windows=(None, 1, 7))
    assert verdict.passed, verdict.reason


def test_a_window_as_long_as_the_longest_document_is_none():
    """The results are bitwise equal; a shorter window differs."""
    inputs = numbers(4, 2, 16)
    packed = packing(Attention.CAUSAL)
    everything = computed("sdpa", *inputs, packed)[0]
    assert torch.equal(computed("sdpa", *inputs, packed, 149)[0], everything)
    assert not torch.equal(computed("sdpa", *inputs, packed, 148)[0], everything)


@pytest.mark.parametrize("way", WAYS)
def test_documents_without_prefixes_and_a_scale_of_its_own(way, plug):
    from megaenc.model.attention.backends import compute_attention

    q, k, v, _ = numbers(4, 2, 10)
    name = plug(way)
    found = compute_attention(
        name, q, k, v, packing(Attention.PREFIX, prefixes=np.zeros(len(LENGTHS), int)), 0.5
    )
    expected = compute_attention("sdpa", q * 0.5 * 10**0.5, k, v, packing(Attention.CAUSAL))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_versions_of_flash_attn_are_tried_one_after_the_other(plug, monkeypatch):
    from megaenc.model.attention import backends

    plug("flash-attn 3")
    called = []
    kernels.install(monkeypatch, "flash_attn", lambda **_: called.append(2))
    kernels.install(monkeypatch, "flash_attn_interface", lambda **_: called.append(3))
    kernels.install_4(monkeypatch, lambda **_: called.append(4))
    monkeypatch.setattr(backends, "_excluded_versions", set())
    for version in (4, 3, 2):
        backends.load_flash_kernel(HOST)(
            *"qkv", None, None, 1, 1, scale=1.0, causal=True, window=-1
        )
        assert called[-1] == version
        backends.exclude_flash_attn(version)
    assert backends.flash_attn_versions(HOST) == []


NONE = "flash-attn is not installed"
HOPPER = "version 3 needs a Hopper GPU"
BLACKWELL = "version 4 needs a Hopper or Blackwell GPU"


@pytest.mark.parametrize(
    ("installed", "capability", "hip", "usable", "measured", "lacking"),
    [
        ([], (9, 0), None, [], [], NONE),
        ([4, 3, 2], (9, 0), None, [4, 3, 2], [4, 3, 2], ""),
        ([4, 3, 2], (8, 0), None, [2], [2], ""),
        ([4, 3, 2], (10, 0), None, [4, 2], [2], ""),
        ([4, 3, 2], (9, 0), "7.0", [2], [2], ""),
        ([4, 3], (8, 0), None, [], [], f"flash-attn 2 is not installed; {BLACKWELL}; {HOPPER}"),
    ],
)
def test_each_device_has_its_versions_of_flash_attn(
    installed, capability, hip, usable, measured, lacking, monkeypatch
):
    """Measured versions are chosen by default, others on request."""
    from megaenc.model.attention import backends

    monkeypatch.setattr(backends, "_installed_flash_versions", lambda: installed)
    monkeypatch.setattr(backends, "_excluded_versions", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert backends.flash_attn_versions(ACCELERATOR) == usable
    assert backends.missing_requirement("flash", ACCELERATOR, torch.bfloat16) == lacking
    backends.exclude_unmeasured_flash_attn(ACCELERATOR)
    assert backends.flash_attn_versions(ACCELERATOR) == measured


def test_versions_of_flash_attn_are_found_by_their_files(tmp_path, monkeypatch):
    """Version 4 installs flash_attn/cute without flash_attn/__init__.py."""
    from megaenc.model.attention import backends

    # A run in this process may have excluded some.
    monkeypatch.setattr(backends, "_excluded_versions", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.syspath_prepend(tmp_path)
    for file, content, versions in (
        ("flash_attn/cute/__init__.py", "", []),
        (
            "flash_attn_4-4.0.0b36.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n",
            [4],
        ),
        ("flash_attn_interface.py", "", [4, 3]),
        ("flash_attn/__init__.py", "", [4, 3, 2]),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
        # The import system reads a directory again if its time has changed.
        os.utime(tmp_path, (len(versions), len(versions)))
        assert backends.flash_attn_versions(HOST) == versions
    assert backends.describe_backend("flash", HOST) == "flash (flash-attn 4.0.0b36)"
    monkeypatch.setattr(backends, "_excluded_versions", {4})
    assert (
        backends.describe_backend("flash", HOST) == "flash (flash-attn 3)"
    )  # built from sources, without metadata


def test_padding_is_of_few_shapes_and_worked_out_once_for_all_layers(monkeypatch):
    """Five documents of up to 128 tokens form a batch of eight, three of 512 a four."""
    from megaenc.model.attention import padded

    times = []
    from_packed = padded.PaddedBatches.from_packed
    shapes = []
    dot_product = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, **how):
        shapes.append(tuple(k.shape))
        return dot_product(q, k, v, **how)

    monkeypatch.setattr(padded, "cudnn_only", contextlib.nullcontext)
    monkeypatch.setattr(padded.F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(
        padded.PaddedBatches,
        "from_packed",
        lambda *arguments: times.append(1) or from_packed(*arguments),
    )
    lengths = [128, 1, 300, 17, 257, 90, 512, 64]
    inputs = numbers(4, 2, 8, lengths)
    packed = packing(Attention.CAUSAL, lengths)
    for _ in range(3):
        computed("cudnn", *inputs, packed)
    assert shapes == 3 * [(8, 2, 128, 8), (4, 2, 512, 8)] and len(times) == 1


def test_what_is_lacking(monkeypatch):
    from megaenc.model.attention.backends import missing_requirement

    assert missing_requirement("sdpa", HOST, torch.float32) == ""
    for name in ("flash", "varlen", "cudnn"):
        assert missing_requirement(name, HOST, torch.bfloat16) == "needs an accelerator"
        assert (
            missing_requirement(name, ACCELERATOR, torch.float32)
            == "computes in 16-bit numbers and not in float32"
        )
    assert missing_requirement("varlen", ACCELERATOR, torch.bfloat16) == ""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert missing_requirement("cudnn", ACCELERATOR, torch.bfloat16) == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert missing_requirement("cudnn", ACCELERATOR, torch.bfloat16) == "this torch has no cuDNN"


def test_what_onednn_lacks(monkeypatch):
    from megaenc.model.attention import backends

    def lacks(flags, device=HOST, dtype=torch.bfloat16):
        monkeypatch.setattr(backends, "read_cpu_flags", lambda: frozenset(flags.split()))
        return backends.missing_requirement("onednn", device, dtype)

    assert lacks("avx512_bf16") == ""
    for flags in ("avx512_bf16 amx_bf16", "avx512f"):
        assert lacks(flags) == "needs a processor with AVX512-BF16 and without AMX, which sdpa uses"
    assert lacks("avx512_bf16", dtype=torch.float32) == "computes in bfloat16 and not in float32"
    assert lacks("avx512_bf16", ACCELERATOR) == "needs a CPU"
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert lacks("avx512_bf16") == "this torch has no oneDNN"


LONG = (300, 33, 1, 33, 600, 300)
LONG_PREFIXES = (100, 33, 0, 20, 550, 100)


@pytest.fixture
def long_documents(monkeypatch):
    """Documents that the self-test computes in several blocks of queries."""
    from megaenc.model.attention import selftest

    monkeypatch.setattr(selftest, "_CPU_PACK", selftest.TrialPack(LONG, LONG_PREFIXES))


@pytest.mark.usefixtures("long_documents")
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((6, 2, 10), {}),
        ((3, 1, 7), {"_QUERY_BLOCK": 64, "KEPT_KEYS": 128}),
        ((6, 2, 10), {"_MAX_SCORES": 2**14, "KEPT_KEYS": 0}),
    ],
    ids=["default", "some probabilities again", "all again"],
)
def test_onednn_in_blocks_is_the_formula(shape, sizes, check, monkeypatch):
    """Probabilities are saved for backward, recomputed, or both."""
    from megaenc.model.attention import onednn

    for name, value in sizes.items():
        monkeypatch.setattr(onednn, name, value)
    verdict = check("onednn", *shape, windows=(None, 20, 150))
    assert verdict.passed, verdict.reason


@pytest.mark.usefixtures("long_documents")
@pytest.mark.parametrize("kept", [1024, 0])
def test_onednn_is_as_near_as_torch_in_bfloat16(kept, check, monkeypatch):
    """Scores are about 16; rounded to bfloat16 they would be five times as far off."""
    from megaenc.model.attention import onednn, selftest

    monkeypatch.setattr(onednn, "KEPT_KEYS", kept)
    monkeypatch.setattr(selftest, "_QUERY_SCALE", 16.0)
    onednn_error = check("onednn", 4, 2, 64, torch.bfloat16).error
    assert onednn_error <= 1.8 * check("sdpa", 4, 2, 64, torch.bfloat16).error


def test_onednn_keeps_documents_apart_and_repeats_itself():
    """The results stay bitwise equal if a neighbouring document is NaN."""
    inputs = [x.bfloat16() for x in numbers(4, 2, 16, LONG)]
    packed = packing(Attention.CAUSAL, LONG)
    start, _, stop = packed.spans()[2]
    broken = [x.index_fill(0, torch.arange(start, stop), float("nan")) for x in inputs]
    first = computed("onednn", *inputs, packing(Attention.CAUSAL, LONG))
    again = computed("onednn", *inputs, packing(Attention.CAUSAL, LONG))
    for one, two, three in zip(first, again, computed("onednn", *broken, packed), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one[:start], three[:start]) and torch.equal(one[stop:], three[stop:])


def test_onednn_saves_a_bounded_number_of_bytes():
    """Save probabilities of at most KEPT_KEYS keys a token, none without gradients."""
    from megaenc.model.attention import onednn
    from megaenc.model.attention.backends import compute_attention

    lengths = [2500, 1000, 60]
    packed = packing(Attention.BIDIRECTIONAL, lengths)
    rows = 4 * (sum(lengths) + 64)
    saved = []
    inputs = [x.bfloat16().requires_grad_() for x in numbers(4, 2, 8, lengths)[:3]]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        compute_attention("onednn", *inputs, packed)
        most = sum(x.nbytes for x in inputs) + 4 * rows + rows * onednn.KEPT_KEYS
        assert sum(x.nbytes for x in saved) <= most
        saved.clear()
        with torch.no_grad():
            compute_attention("onednn", *inputs, packed)
    assert not saved


def test_float32_products_are_as_before():
    """The precision of the caller survives exceptions and threads in any order."""
    from megaenc.model.attention.onednn import float32_by_onednn

    matmul = torch.backends.mkldnn.matmul
    with pytest.raises(RuntimeError, match="inside"), float32_by_onednn():
        assert matmul.fp32_precision == "bf16"
        raise RuntimeError("inside")
    assert matmul.fp32_precision == "none"
    entered = threading.Event()
    leave = threading.Event()

    def other():
        with float32_by_onednn():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with float32_by_onednn():
        thread.start()
        entered.wait()
    assert matmul.fp32_precision == "bf16"
    leave.set()
    thread.join()
    assert matmul.fp32_precision == "none"
    matmul.fp32_precision = "ieee"
    try:
        with float32_by_onednn():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = "none"


def test_real_kernels_take_what_the_stand_ins_take():
    """Compare the argument names with the installed version of torch."""
    from torch.nn.attention.varlen import varlen_attn

    from megaenc.model.attention import backends

    inspect.signature(varlen_attn).bind(
        *range(7), scale=1.0, window_size=(-1, 0), **backends._GQA_OPTION
    )


def test_documents_of_any_length_are_kept_from_cudnn(monkeypatch):
    """The dot product of torch gets meta tensors in place of an accelerator's."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megaenc.model.attention import backends, blocks

    allowed = []
    monkeypatch.setattr(
        blocks, "sdpa_kernel", lambda kinds: allowed.extend(kinds) or sdpa_kernel(kinds)
    )
    inputs = [x.to("meta") for x in numbers(4, 2, 16)[:3]]
    out = backends.compute_attention("sdpa", *inputs, packing(Attention.CAUSAL))
    assert out.shape == inputs[0].shape
    assert SDPBackend.MATH in allowed and SDPBackend.CUDNN_ATTENTION not in allowed
