"""Layers of Transformer Engine, with stand-ins for its classes.

It cannot be installed without CUDA. The stand-ins compute what megatron-core's layers compute, but
keep a state next to the weights, as those of Transformer Engine do.
"""

from dataclasses import replace

import pytest
import torch

from megaenc.backend import KernelConfig, ParallelConfig
from megaenc.errors import InputError
from megaenc.model import ModelConfig

TINY = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=80,
    num_attention_heads=4,
    num_query_groups=2,
    qk_layernorm=True,
)
TINY = replace(TINY, apply_layernorm_1p=True, post_norms=True)  # all norms that a layer may have
ENGINE = KernelConfig(transformer_impl="transformer_engine")
pytestmark = pytest.mark.usefixtures("one_process")


class KeepsState:
    """Mixin with an extra state that a checkpoint must save and restore."""

    def get_extra_state(self):
        return torch.tensor([1, 2, 3], dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state is None, "nothing was saved for it"


@pytest.fixture
def stand_ins(monkeypatch):
    """Return megatron-core's provider with classes that can be built here."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megaenc.model import transformer_engine
    from megaenc.model.norms import RMSNorm

    class TEColumnParallelLinear(KeepsState, ColumnParallelLinear):
        pass

    class TERowParallelLinear(KeepsState, RowParallelLinear):
        pass

    class EngineNorm(KeepsState, RMSNorm):
        pass

    class TENorm:
        def __new__(cls, config, hidden_size, eps=1e-5):
            return EngineNorm(config, hidden_size, eps)

    class Provider:
        def column_parallel_linear(self):
            return TEColumnParallelLinear

        def row_parallel_linear(self):
            return TERowParallelLinear

        def layer_norm(self, rms_norm=False, for_qk=False):
            return TENorm

    monkeypatch.setattr(transformer_engine, "_spec_provider", Provider)


def build(kernels, seed=3):
    from megaenc.model.encoder import build_encoder

    return build_encoder(TINY, 100, 32, ParallelConfig(), torch.float32, seed=seed, kernels=kernels)


def test_linear_layers_and_norms_are_its_own_and_attention_and_first_values_are_not(stand_ins):
    kinds = {name: type(module).__name__ for name, module in build(ENGINE).decoder.named_modules()}
    layer = {
        name.removeprefix("layers.1."): kind
        for name, kind in kinds.items()
        if name.startswith("layers.1.")
    }
    assert {name: layer[name] for name in layer if "linear" in name} == {
        "self_attention.linear_qkv": "TEColumnParallelLinear",
        "self_attention.linear_proj": "TERowParallelLinear",
        "mlp.linear_fc1": "TEColumnParallelLinear",
        "mlp.linear_fc2": "TERowParallelLinear",
    }
    norms = [kind for name, kind in kinds.items() if "norm" in name and kind != "IdentityOp"]
    assert norms == ["EngineNorm"] * (2 * 6 + 1)
    assert layer["self_attention.core_attention"] == "PackedAttention"
    assert kinds.keys() == {name for name, _ in build(KernelConfig()).decoder.named_modules()}
    here = dict(build(ENGINE).named_parameters())
    there = dict(build(KernelConfig()).named_parameters())
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_a_checkpoint_of_either_is_one_of_the_other(stand_ins, tmp_path):
    """The files do not differ, and each loads those of the other."""
    from megaenc.training.checkpoint.chunk_files import (
        ChunkReader,
        parse_index,
        publish_chunks,
        write_chunks,
    )
    from megaenc.training.checkpoint.state_tensors import list_module_state

    def chunks(encoder):
        return [
            chunk for tensor in list_module_state(encoder).values() for chunk in tensor.chunks()
        ]

    for number, (saves, loads) in enumerate([(ENGINE, KernelConfig()), (KernelConfig(), ENGINE)]):
        saved = build(saves, seed=5)
        loaded = build(loads, seed=6)
        directory = tmp_path / str(number)
        directory.mkdir()
        write_chunks(directory, 0, chunks(saved))
        digests = publish_chunks(directory, 1, 0)
        _, stored = parse_index((directory / "index.json").read_bytes(), digests)
        assert {each.key for each in stored} == {each.key for each in chunks(loaded)}
        ChunkReader(directory, stored).read(chunks(loaded))
        theirs = dict(saved.named_parameters())
        assert all(
            torch.equal(parameter, theirs[name]) for name, parameter in loaded.named_parameters()
        )


def test_its_layers_add_to_gradient_buffers_without_apex_and_the_output_layer_waits_for_them(
    stand_ins,
):
    encoder = build(ENGINE)
    assert encoder.config.gradient_accumulation_fusion
    assert all(
        module.gradient_accumulation_fusion
        for name, module in encoder.decoder.named_modules()
        if ".linear_" in name
    )
    assert (
        not encoder.output_layer.gradient_accumulation_fusion
    )  # it is megatron-core's own, and needs a buffer to add to
    assert not build(KernelConfig()).config.gradient_accumulation_fusion


@pytest.mark.parametrize("fp8_format", [None, "hybrid"])
def test_float8_is_left_to_it(stand_ins, fp8_format):
    """megatron-core's configuration has the format only for Transformer Engine."""
    from megaenc.model.layer_spec import build_transformer_config

    asked = KernelConfig(transformer_impl="transformer_engine", fp8_format=fp8_format)
    config = build_transformer_config(TINY, ParallelConfig(), torch.float32, asked)
    assert (config.transformer_impl, config.fp8, config.fp8_recipe) == (
        "transformer_engine",
        fp8_format,
        "tensorwise",
    )
    assert (
        build_transformer_config(
            TINY, ParallelConfig(), torch.float32, KernelConfig(fp8_format="hybrid")
        ).fp8
        is None
    )


def test_one_line_says_that_it_is_not_installed():
    from megaenc.backend import detect_backend
    from megaenc.model.fp8.linear import check_linear_layers

    with pytest.raises(
        InputError,
        match="--transformer-impl transformer_engine: transformer-engine is not installed; "
        "install it",
    ):
        check_linear_layers(ENGINE, detect_backend(), [], torch.float32)


def test_float8_needs_a_version_that_finds_scales_anew_and_a_machine_that_has_it(monkeypatch):
    import megatron.core.utils
    from megatron.core.extensions import transformer_engine as extension
    from packaging.version import Version

    from megaenc.model.transformer_engine import check_transformer_engine

    answers = {
        "is_fp8_available": staticmethod(
            lambda: (False, "Device compute capability 8.9 or higher required")
        )
    }
    monkeypatch.setattr(extension, "HAVE_TE", True)
    monkeypatch.setattr(
        extension, "FP8GlobalStateManager", type("Manager", (), answers), raising=False
    )
    monkeypatch.setattr(megatron.core.utils, "get_te_version", lambda: Version("2.1.0"))
    check_transformer_engine(None)
    with pytest.raises(
        InputError,
        match=r"--fp8-format hybrid: found transformer-engine 2\.1\.0, expected 2\.2\.0 or later",
    ):
        check_transformer_engine("hybrid")
    monkeypatch.setattr(megatron.core.utils, "get_te_version", lambda: Version("2.4.0"))
    with pytest.raises(
        InputError,
        match=r"no float8 on this machine \(Device compute capability 8.9 or higher required\)",
    ):
        check_transformer_engine("hybrid")
