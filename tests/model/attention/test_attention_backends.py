"""Every way to compute attention inside documents, against its formula: masks, widths of heads, groups, what kernels are told."""

import contextlib
import threading
from types import SimpleNamespace

import attention_helpers as kernels
import numpy as np
import pytest
import torch

from megaenc.objectives import Attention

HOST = torch.device("cpu")
LENGTHS = [5, 1, 14, 150, 12]
PREFIXES = [2, 0, 13, 40, 0]  # in the middle, none, all but one, in the middle, none
WAYS = ("sdpa", "varlen, torch 2.11", "varlen, torch 2.13", "flash-attn 2", "flash-attn 3", "flash-attn 4", "cudnn", "onednn")
SHAPES = [(4, 4, 64), (6, 2, 96), (4, 1, 80), (4, 2, 10)]  # heads, groups, width


@pytest.fixture(scope="module", autouse=True)
def megatron():
    """No process group: attention asks for none."""
    from megaenc.backend import prepare_megatron

    prepare_megatron()


def packing(attention, lengths=LENGTHS, prefixes=PREFIXES):
    from megaenc.model.packed_sequences import PackedSequences

    prefixes = np.array(prefixes) if attention == Attention.PREFIX else None
    return PackedSequences.from_edges([0, *np.cumsum(lengths).tolist()], attention, HOST, prefixes)


def numbers(heads, groups, width, lengths=LENGTHS):
    """q, k, v and the gradient from above."""
    tokens = sum(lengths)
    torch.manual_seed(0)
    return [torch.randn(tokens, count, width) for count in (heads, groups, groups, heads)]


@pytest.fixture
def plug(monkeypatch):
    """Put a stand-in where the kernel of one of WAYS would be called; returns the name of the backend."""
    from megaenc.model.attention import backends, padded

    backends.load_flash_kernel.cache_clear()

    def plug(way):
        name, _, version = way.partition(", torch ")
        if name == "varlen":
            told = {"enable_gqa": True} if version == "2.13" else {}
            monkeypatch.setattr(backends, "_GQA_OPTION", told)
            monkeypatch.setattr(backends, "varlen_attn", kernels.varlen_2_13 if told else kernels.varlen_2_11)
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


def computed(name, q, k, v, upstream, packed, window=None):
    """Values and the gradients of q, k and v."""
    from megaenc.model.attention.backends import compute_attention

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = compute_attention(name, *leaves, packed, window=window)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "{}-{}-{}".format(*shape))
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_the_formula(way, shape, attention, plug):
    from megaenc.model.attention.selftest import reference_attention

    inputs, packed = numbers(*shape), packing(attention)
    found = computed(plug(way), *inputs, packed)
    for here, there in zip(found, reference_attention(*inputs, packed.spans()), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("window", [1, 7, 13, 70, 149, 1000])
@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("way", WAYS)
def test_a_window_hides_what_is_farther_away(way, attention, window, plug):
    """Of one token, of fewer and more than a document and a block have, and of all but one, which hides nothing."""
    from megaenc.model.attention.selftest import reference_attention

    inputs, packed = numbers(4, 2, 16), packing(attention)
    found = computed(plug(way), *inputs, packed, window)
    for here, there in zip(found, reference_attention(*inputs, packed.spans(), window), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=2e-5)
    everything = computed("sdpa", *inputs, packed)
    same = [torch.allclose(here, there, atol=1e-4) for here, there in zip(found, everything, strict=True)]
    assert same == [window >= 149] * 4


@pytest.mark.parametrize("attention", Attention)
def test_a_window_as_long_as_the_longest_document_is_none(attention):
    """Bit by bit: the same operations."""
    inputs, packed = numbers(4, 2, 16), packing(attention)
    for here, there in zip(computed("sdpa", *inputs, packed, 149), computed("sdpa", *inputs, packed), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("way", WAYS)
def test_no_document_has_a_prefix(way, plug):
    inputs = numbers(4, 2, 16)
    found = computed(plug(way), *inputs, packing(Attention.PREFIX, prefixes=[0] * len(LENGTHS)))
    expected = computed("sdpa", *inputs, packing(Attention.CAUSAL))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_scale_of_its_own(way, plug):
    from megaenc.model.attention.backends import compute_attention

    q, k, v, _ = numbers(4, 2, 10)
    name, packed = plug(way), packing(Attention.CAUSAL)
    torch.testing.assert_close(
        compute_attention(name, q, k, v, packed, 0.5),
        compute_attention(name, q * 0.5 * 10**0.5, k, v, packed),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((9, 0), None, "432"), ((8, 0), None, "2"), ((10, 0), None, "42"), ((12, 0), None, "42"), ((9, 0), "7.0", "2")],
)
def test_each_device_has_its_versions_of_flash_attn(capability, hip, expected, plug, monkeypatch):
    """Those that are excluded one after the other, and then none."""
    from megaenc.model.attention import backends

    plug("flash-attn 3")
    called = []
    kernels.install(monkeypatch, "flash_attn", lambda **_: called.append("2"))
    kernels.install(monkeypatch, "flash_attn_interface", lambda **_: called.append("3"))
    kernels.install_4(monkeypatch, lambda **_: called.append("4"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backends, "_excluded_versions", set())
    for version in expected:
        backends.load_flash_kernel(HOST)(*"qkv", None, None, 1, 1, scale=1.0, causal=True, window=-1)
        backends.exclude_flash_attn(int(version))
    assert "".join(called) == expected
    assert backends.flash_attn_versions(HOST) == []


@pytest.mark.parametrize(("capability", "hip", "expected"), [((9, 0), None, "432"), ((10, 0), None, "2"), ((9, 0), "7.0", "2")])
def test_only_measured_versions_are_chosen_without_a_name(capability, hip, expected, monkeypatch):
    from megaenc.model.attention import backends

    accelerator = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backends, "_excluded_versions", set())
    monkeypatch.setattr(backends, "_installed_flash_versions", lambda: [4, 3, 2])
    backends.exclude_unmeasured_flash_attn(accelerator)
    assert "".join(map(str, backends.flash_attn_versions(accelerator))) == expected


def test_a_backend_is_named_with_its_release(monkeypatch):
    from megaenc.model.attention import backends

    monkeypatch.setattr(backends, "flash_attn_versions", lambda device: [4, 2])
    kernels.install_4(monkeypatch, kernels.flash_attn_4)
    assert backends.describe_backend("flash", HOST) == "flash (flash-attn 4.0.0b36)"
    monkeypatch.setattr(backends, "flash_attn_versions", lambda device: [3])
    assert backends.describe_backend("flash", HOST) == "flash (flash-attn 3)"  # built from sources, without metadata
    assert backends.describe_backend("varlen", HOST) == "varlen"


@pytest.fixture
def shapes(monkeypatch):
    """Of the keys in each call of torch's scaled dot product."""
    from megaenc.model.attention import padded

    seen, dot_product = [], torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, **how):
        seen.append(tuple(k.shape))
        return dot_product(q, k, v, **how)

    monkeypatch.setattr(padded, "cudnn_only", contextlib.nullcontext)
    monkeypatch.setattr(padded.F, "scaled_dot_product_attention", watched)
    return seen


def test_padded_documents_come_in_few_shapes(shapes):
    """Five documents of up to 128 tokens are a batch of eight, three of up to 512 one of four."""
    lengths = [128, 1, 300, 17, 257, 90, 512, 64]
    q, k, v, upstream = numbers(4, 2, 8, lengths)
    computed("cudnn", q, k, v, upstream, packing(Attention.CAUSAL, lengths))
    assert shapes == [(8, 2, 128, 8), (4, 2, 512, 8)]


@pytest.mark.parametrize("attention", Attention)
def test_padding_is_worked_out_once_for_all_layers(attention, shapes, monkeypatch):
    from megaenc.model.attention.padded import PaddedBatches

    times, from_packed = [], PaddedBatches.from_packed
    monkeypatch.setattr(PaddedBatches, "from_packed", lambda *arguments: times.append(1) or from_packed(*arguments))
    inputs, packed = numbers(4, 2, 8), packing(attention)
    for _ in range(3):
        computed("cudnn", *inputs, packed)
    assert (len(times), len(shapes)) == (1, 6)


def test_what_is_lacking():
    from megaenc.model.attention.backends import missing_requirement

    accelerator = torch.device("cuda", 0)
    assert missing_requirement("sdpa", HOST, torch.float32) == missing_requirement("sdpa", accelerator, torch.float32) == ""
    for name in ("flash", "varlen", "cudnn"):
        assert missing_requirement(name, HOST, torch.bfloat16) == "needs an accelerator"
        assert missing_requirement(name, accelerator, torch.float32) == "computes in 16-bit numbers and not in float32"
    assert missing_requirement("varlen", accelerator, torch.bfloat16) == ""


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("avx512_bf16", ""),
        ("avx512_bf16 amx_bf16", "needs a processor with AVX512-BF16 and without AMX, which sdpa uses"),
        ("bf16 asimd", "needs a processor with AVX512-BF16 and without AMX, which sdpa uses"),
        ("avx512f", "needs a processor with AVX512-BF16 and without AMX, which sdpa uses"),
    ],
)
def test_what_onednn_lacks(flags, reason, monkeypatch):
    from megaenc.model.attention import backends

    monkeypatch.setattr(backends, "read_cpu_flags", lambda: frozenset(flags.split()))
    assert backends.missing_requirement("onednn", HOST, torch.bfloat16) == reason
    assert backends.missing_requirement("onednn", HOST, torch.float32) == "computes in bfloat16 and not in float32"
    assert backends.missing_requirement("onednn", torch.device("cuda", 0), torch.bfloat16) == "needs a CPU"
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert backends.missing_requirement("onednn", HOST, torch.bfloat16) == (reason or "this torch has no oneDNN")


LONG, LONG_PREFIXES = [300, 33, 1, 33, 700, 31, 300, 33, 32], [100, 33, 0, 33, 650, 1, 100, 20, 0]
BLOCKS = [{}, {"_QUERY_BLOCK": 64, "KEPT_KEYS": 128}, {"_SCORES_AT_ONCE": 2**14, "KEPT_KEYS": 0}]


@pytest.mark.parametrize("sizes", BLOCKS, ids=["default", "some probabilities again", "all again"])
@pytest.mark.parametrize("window", [None, 20, 200])
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 10), (3, 1, 7)], ids=str)
@pytest.mark.parametrize("attention", Attention)
def test_onednn_in_blocks_is_the_formula(attention, shape, window, sizes, monkeypatch):
    """Documents of several blocks of queries, with probabilities saved for backward, computed again, and both."""
    from megaenc.model.attention import onednn
    from megaenc.model.attention.selftest import reference_attention

    for name, value in sizes.items():
        monkeypatch.setattr(onednn, name, value)
    inputs, packed = numbers(*shape, LONG), packing(attention, LONG, LONG_PREFIXES)
    found = computed("onednn", *inputs, packed, window)
    for here, there in zip(found, reference_attention(*inputs, packed.spans(), window), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=5e-5)


def in_float64(q, k, v, upstream, spans):
    """Values and gradients of bidirectional attention."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    queries, keys, values = (x.repeat_interleave(q.size(1) // x.size(1), dim=1).transpose(0, 1) for x in leaves)
    parts = []
    for start, _, stop in spans:
        scores = queries[:, start:stop] @ keys[:, start:stop].mT * q.size(-1) ** -0.5
        parts.append(scores.softmax(-1) @ values[:, start:stop])
    out = torch.cat(parts, dim=1).transpose(0, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream.double())


@pytest.mark.parametrize("kept", [1024, 0])
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_onednn_is_as_near_as_torch_in_bfloat16(size, kept, monkeypatch):
    """To float64, with scores of 1 and of 16: scores rounded to bfloat16 would be five times as far."""
    from megaenc.model.attention import onednn

    monkeypatch.setattr(onednn, "KEPT_KEYS", kept)
    q, k, v, upstream = numbers(4, 2, 64, LONG)
    inputs, packed = [x.bfloat16() for x in (q * size, k * size, v, upstream)], packing(Attention.BIDIRECTIONAL, LONG)
    exact = in_float64(*inputs, packed.spans())
    error, torchs = (
        [float((here - there).norm() / there.norm()) for here, there in zip(computed(name, *inputs, packed), exact, strict=True)]
        for name in ("onednn", "sdpa")
    )
    assert all(here <= 1.8 * there for here, there in zip(error, torchs, strict=True)), (error, torchs)


def test_onednn_keeps_documents_apart_and_repeats_itself():
    """Bit by bit, also if a neighbour is NaN: padding holds no number of another document."""
    inputs, packed = [x.bfloat16() for x in numbers(4, 2, 16, LONG)], packing(Attention.CAUSAL, LONG)
    first, again = computed("onednn", *inputs, packed), computed("onednn", *inputs, packing(Attention.CAUSAL, LONG))
    start, _, stop = packed.spans()[2]
    broken = [x.index_fill(0, torch.arange(start, stop), float("nan")) for x in inputs]
    for one, two, three in zip(first, again, computed("onednn", *broken, packed), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one[:start], three[:start]) and torch.equal(one[stop:], three[stop:])
        assert three[start:stop].isnan().all()


@pytest.mark.parametrize("attention", Attention)
def test_onednn_saves_a_bounded_number_of_bytes(attention):
    """Probabilities for at most KEPT_KEYS keys a token, and nothing without a gradient."""
    from megaenc.model.attention import onednn
    from megaenc.model.attention.backends import compute_attention

    lengths = [2500, 1000, 60]
    packed, tokens, saved = packing(attention, lengths, [1300, 1000, 0]), sum(lengths), []
    q, k, v, _ = (x.bfloat16().requires_grad_() for x in numbers(4, 2, 8, lengths))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        compute_attention("onednn", q, k, v, packed)
        others = q.nbytes + k.nbytes + v.nbytes + 4 * 4 * (tokens + 64)
        assert sum(x.nbytes for x in saved) <= others + 2 * 4 * (tokens + 64) * onednn.KEPT_KEYS / 2
        saved.clear()
        with torch.no_grad():
            compute_attention("onednn", q, k, v, packed)
    assert not saved


def test_float32_products_are_as_before():
    """After an exception, with threads that end in another order, and under another precision, which stays."""
    from megaenc.model.attention.onednn import float32_by_onednn

    matmul = torch.backends.mkldnn.matmul
    assert matmul.fp32_precision == "none"
    with pytest.raises(RuntimeError, match="inside"), float32_by_onednn():
        assert matmul.fp32_precision == "bf16"
        raise RuntimeError("inside")
    assert matmul.fp32_precision == "none"
    entered, leave = threading.Event(), threading.Event()

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


def test_the_folder_of_flash_attn_4_only_is_not_version_2(tmp_path, monkeypatch):
    """It installs flash_attn/cute and no flash_attn/__init__.py; without its metadata it may be a part of version 2."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    from megaenc.model.attention import backends

    assert backends.flash_attn_versions(HOST) == []
    assert backends.missing_requirement("flash", torch.device("cuda", 0), torch.bfloat16) == "flash-attn is not installed"
    (tmp_path / "flash_attn_4-4.0.0b36.dist-info").mkdir()
    (tmp_path / "flash_attn_4-4.0.0b36.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4\n"
    )
    assert backends.flash_attn_versions(HOST) == [4]
    assert backends.missing_requirement("flash", torch.device("cuda", 0), torch.bfloat16) == ""


HINTS = {3: "version 3 needs a Hopper GPU", 4: "version 4 needs a Hopper or Blackwell GPU"}


@pytest.mark.parametrize("installed", [(), (2,), (3,), (4,), (2, 3), (3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize(("capability", "hip"), [((9, 0), None), ((8, 0), None), ((10, 0), None), ((9, 0), "7.0")])
def test_flash_attn_is_there_or_not(installed, capability, hip, monkeypatch):
    """What is tried is what there is: versions 3 and 4 on AMD's or on an older device are none."""
    from megaenc.model.attention import backends

    accelerator = torch.device("cuda", 0)
    modules = [backends._FLASH_MODULES[version] for version in installed if version != 4]
    monkeypatch.setattr(backends.util, "find_spec", lambda name: SimpleNamespace(origin="here") if name in modules else None)
    if 4 in installed:
        kernels.install_4(monkeypatch, kernels.flash_attn_4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    usable = {(9, 0): [4, 3, 2], (8, 0): [2], (10, 0): [4, 2]}[capability] if not hip else [2]
    expected = [version for version in usable if version in installed]
    assert backends.flash_attn_versions(accelerator) == expected
    hints = [HINTS[version] for version in (4, 3) if version in installed]
    lacking = "; ".join(["flash-attn 2 is not installed", *hints]) if hints else "flash-attn is not installed"
    assert backends.missing_requirement("flash", accelerator, torch.bfloat16) == ("" if expected else lacking)


def test_cudnn_is_there_or_not(monkeypatch):
    from megaenc.model.attention.backends import missing_requirement

    accelerator = torch.device("cuda", 0)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert missing_requirement("cudnn", accelerator, torch.bfloat16) == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert missing_requirement("cudnn", accelerator, torch.bfloat16) == "this torch has no cuDNN"


def test_real_kernels_take_what_the_stand_ins_take():
    """The names of the arguments that are given: torch's own, as installed here."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    from megaenc.model.attention import backends

    inspect.signature(varlen_attn).bind(*range(7), scale=1.0, window_size=(-1, 0), **backends._GQA_OPTION)


def test_documents_of_any_length_are_kept_from_cudnn(monkeypatch):
    """By torch's dot product on an accelerator, for which tensors without numbers stand in."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megaenc.model.attention import backends, blocks

    allowed = []
    monkeypatch.setattr(blocks, "sdpa_kernel", lambda kinds: allowed.extend(kinds) or sdpa_kernel(kinds))
    q, k, v, _ = (x.to("meta") for x in numbers(4, 2, 16))
    assert backends.compute_attention("sdpa", q, k, v, packing(Attention.PREFIX)).shape == q.shape
    assert SDPBackend.MATH in allowed and SDPBackend.CUDNN_ATTENTION not in allowed
