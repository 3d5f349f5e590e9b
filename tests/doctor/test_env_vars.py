"""Harmful and harmless variables; other variables are not shown."""

import re
from pathlib import Path

import pytest
from findings import by_name

from megaenc.doctor.env_vars import check_env_vars
from megaenc.doctor.result import CheckContext

ROCM_ENV = Path(__file__).parents[2] / "docker" / "rocm_env.sh"


def found(**environment):
    return by_name(check_env_vars(CheckContext(environment=environment)))


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("NVTE_FLASH_ATTN", "0", "note"),
        ("NVTE_FLASH_ATTN", "1", "ok"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", "note"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "ok"),
        ("NCCL_NET", "Socket", "note"),
        ("NCCL_NET", "IB", "ok"),
        ("NCCL_ALGO", "Ring", "note"),
        ("NCCL_DEBUG", "info", "note"),
        ("NCCL_DEBUG", "WARN", "ok"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "ok"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "note"),
        ("TRITON_INTERPRET", "1", "problem"),
    ],
)
def test_values_that_bite(name, value, level):
    one = found(**{name: value})[name]
    assert (one.level, one.result) == (level, value)
    assert bool(one.advice) == (level != "ok")


def test_an_encoder_is_made_whatever_is_said_of_transformer_engine_s_attention(
    one_process, monkeypatch
):
    """Only megatron-core's own models refuse NVTE_FLASH_ATTN=0 of AMD's launchers."""
    import torch
    from megatron.core.models.common.language_module.language_module import LanguageModule

    from megaenc.backend import ParallelConfig
    from megaenc.model import ModelConfig
    from megaenc.model.encoder import build_encoder

    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    tiny = ModelConfig(
        num_layers=1, hidden_size=32, ffn_hidden_size=80, num_attention_heads=4, num_query_groups=2
    )
    encoder = build_encoder(tiny, 100, 32, ParallelConfig(), torch.float32, seed=3)
    with pytest.raises(AssertionError, match="NVTE_FLASH_ATTN"):
        LanguageModule._set_attention_backend(encoder)


def test_what_rocm_env_sets_does_not_bite():
    set_there = dict(
        re.findall(r"^megaenc_default (\w+) (\S+)$", ROCM_ENV.read_text(), re.MULTILINE)
    )
    assert len(set_there) > 8
    assert {name: each.level for name, each in found(**set_there).items()} == dict.fromkeys(
        set_there, "ok"
    )


def test_nothing_else_is_shown():
    names = [
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "PATH",
        "NVIDIA_API_KEY",
        "AMD_ACCESS_KEY_ID",
        "TORCH_HUB_KEY",
        "NCCL_TOKEN",
    ]
    ends = [
        "AUTH_HEADER",
        "BASICAUTH",
        "CREDENTIALS",
        "PASS",
        "PWD",
        "SESSION_ID",
        "APIKEY",
        "PIN",
        "auth_token",
    ]
    text = found(**dict.fromkeys([*names, *(f"NVIDIA_{end}" for end in ends)], "hunter2"))
    assert [each.name for each in text.values()] == ["variables"]
    assert "hunter2" not in str(text)


def test_variables_that_only_resemble_secrets_are_shown():
    names = ["CUDA_DSNAP", "NCCL_BYPASS_CHECK", "NCCL_IB_PKEY", "TORCH_DISASSEMBLY", "UCX_PINNED"]
    assert list(found(**dict.fromkeys(names, "7"))) == names


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ("http://user:hunter2@proxy:80", "http://***@proxy:80"),
        ("https://hunter2@host/path", "https://***@host/path"),
        ("tcp://user:hunt/er2@h@host", "tcp://***@host"),
        ("https://host/a?sig=hunter2&x=1", "https://host/a?sig=***&x=1"),
        ("api_key=hunter2;a=b", "api_key=***;a=b"),
        ("Password=hunter2", "Password=***"),
        ("Authorization: Bearer hunter2", "Authorization: Bearer ***"),
        (
            "expandable_segments:True,max_split_size_mb:128",
            "expandable_segments:True,max_split_size_mb:128",
        ),
        ("^docker0,lo", "^docker0,lo"),
        ("mlx5_0:1,mlx5_1:1", "mlx5_0:1,mlx5_1:1"),
        ("/a/b@c:/d", "/a/b@c:/d"),
    ],
)
def test_secrets_within_a_value_are_masked(value, masked):
    assert found(NCCL_NET_PLUGIN=value)["NCCL_NET_PLUGIN"].result == masked


def test_two_ways_to_hide_devices_are_a_note():
    text = found(HIP_VISIBLE_DEVICES="0", ROCR_VISIBLE_DEVICES="3")
    assert text["HIP_ and ROCR_VISIBLE_DEVICES"].level == "note"
    assert text["HIP_VISIBLE_DEVICES"].mismatch_level == "ok", "srun gives each rank its own"
