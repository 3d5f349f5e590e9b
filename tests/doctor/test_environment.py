"""Variables that bite, those that do not, and that nothing else is shown."""

import re
from pathlib import Path

import pytest

from megaenc.doctor.environment import BITES, variables
from megaenc.doctor.findings import Asked

ROCM_ENV = Path(__file__).parents[2] / "docker" / "rocm_env.sh"


def found(**environment):
    return {each.what: each for each in variables(Asked(environment=environment))}


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("NVTE_FLASH_ATTN", "0", "problem"),
        ("NVTE_FLASH_ATTN", "1", "ok"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", "note"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "ok"),
        ("CUDA_LAUNCH_BLOCKING", "1", "note"),
        ("CUDA_LAUNCH_BLOCKING", "0", "ok"),
        ("NCCL_P2P_DISABLE", "1", "note"),
        ("NCCL_P2P_DISABLE", "0", "ok"),
        ("NCCL_ALGO", "Ring", "note"),
        ("NCCL_DEBUG", "info", "note"),
        ("NCCL_DEBUG", "WARN", "ok"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "note"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "ok"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "note"),
        ("TRITON_INTERPRET", "1", "problem"),
        ("RCCL_MSCCL_ENABLE", "0", "ok"),
    ],
)
def test_values_that_bite(name, value, level):
    one = found(**{name: value})[name]
    assert (one.level, one.found) == (level, value)
    assert bool(one.advice) == (level != "ok")


def test_what_megatron_core_refuses_to_start_with_is_what_is_named(one_process):
    """The problem that is told of NVTE_FLASH_ATTN=0 is one."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.enums import AttnBackend

    class Config:
        attention_backend = AttnBackend.auto

    class Model:
        config = Config

    with pytest.MonkeyPatch.context() as patch:
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            patch.setenv(name, "0")
            with pytest.raises(AssertionError, match=name):
                LanguageModule._set_attention_backend(Model)
            patch.setenv(name, "1")
        LanguageModule._set_attention_backend(Model)


def test_what_rocm_env_sets_does_not_bite():
    set_there = dict(re.findall(r"^megaenc_default (\w+) (\S+)$", ROCM_ENV.read_text(), re.MULTILINE))
    assert len(set_there) > 8
    assert {each.what: each.level for each in variables(Asked(environment=set_there))} == dict.fromkeys(set_there, "ok")


def test_nothing_else_is_shown():
    shown = found(HF_TOKEN="secret", HOME="/root", AWS_SECRET_ACCESS_KEY="secret", PATH="/bin", NVIDIA_API_KEY="secret")
    assert [each.level for each in shown.values()] == ["ok"]
    assert "secret" not in str(shown)


def test_a_key_of_a_network_is_no_secret():
    assert found(NCCL_IB_PKEY="1")["NCCL_IB_PKEY"].found == "1"


def test_two_ways_to_hide_devices_are_a_note():
    shown = found(HIP_VISIBLE_DEVICES="0", ROCR_VISIBLE_DEVICES="3")
    assert shown["HIP_ and ROCR_VISIBLE_DEVICES"].level == "note"
    assert shown["HIP_VISIBLE_DEVICES"].alike == "ok", "srun gives each rank its own"


def test_every_bite_says_what_to_do():
    assert all(bite.advice and bite.level != "ok" for bite in BITES)
