"""Saved models in other versions of transformers, and the modes of files."""

import json
import os
import stat

import pytest
from convert import hf_models
from transformers import AutoConfig

from megaenc.hf.model import find_lowest_version, save_hf_config, save_hf_model

FULL = "full_attention"
LOCAL = "sliding_attention"
BASES = {
    kind: {"rope_type": "default", "rope_theta": base}
    for kind, base in ((FULL, 5000.0), (LOCAL, 300.0))
}


def build_config(model_type: str, **options):
    count = len(options.get("layer_types", "..")) or 2
    shape = hf_models.SHAPE | {
        "num_hidden_layers": count,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return AutoConfig.for_model(**shape, model_type=model_type, **options)


# With these fields and versions, the logits of these models were equal in transformers 4.57.6 and
# 5.3.0.
@pytest.mark.parametrize(
    ("model_type", "options", "fields", "version"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
            {"rope_theta": 777.0},
            "4.57",
        ),
        (
            "llama",
            {"rope_parameters": hf_models.LLAMA3},
            {
                "rope_theta": 2500.0,
                "rope_scaling": {k: v for k, v in hf_models.LLAMA3.items() if k != "rope_theta"},
            },
            "4.57",
        ),
        ("qwen3", {"rope_parameters": hf_models.YARN}, {"rope_theta": 2500.0}, "4.57"),
        ("eurobert", {"mask_token_id": 1}, {"rope_theta": 10000.0}, "5.3"),
        (
            "modernbert",
            {"rope_parameters": BASES, "layer_types": [FULL, LOCAL, FULL, LOCAL]},
            {
                "global_rope_theta": 5000.0,
                "local_rope_theta": 300.0,
                "global_attn_every_n_layers": 2,
            },
            "4.57",
        ),
        (
            "modernbert",
            {"rope_parameters": BASES, "layer_types": [LOCAL, FULL, LOCAL, FULL]},
            {
                "global_rope_theta": 5000.0,
                "local_rope_theta": 300.0,
                "global_attn_every_n_layers": None,
            },
            "5.3",
        ),
        (
            "modernbert-decoder",  # Ettin's
            {
                "rope_parameters": {FULL: BASES[FULL], LOCAL: BASES[FULL]},
                "layer_types": [LOCAL, FULL, LOCAL, LOCAL],
            },
            {"global_rope_theta": 5000.0, "local_rope_theta": 5000.0},
            "4.57",
        ),
        (
            "gemma3_text",
            {
                "rope_parameters": BASES
                | {FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0}}
            },
            {
                "rope_theta": 5000.0,
                "rope_local_base_freq": 300.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            "4.57",
        ),
        ("electra", {}, {"rope_theta": None}, ""),
    ],
)
def test_configs_have_the_fields_of_older_versions(model_type, options, fields, version, tmp_path):
    config = build_config(model_type, **options)
    save_hf_config(config, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: saved.get(name) for name in fields} == fields
    assert find_lowest_version(config) == version
    again = AutoConfig.from_pretrained(tmp_path)
    for name in ("rope_parameters", "layer_types"):
        assert getattr(again, name, None) == getattr(config, name, None), "in this version"


def test_all_files_of_a_model_have_the_mode_of_the_process(tmp_path):
    before = os.umask(0o027)
    try:
        save_hf_model(hf_models.build("llama with stretched positions"), tmp_path)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes["model.safetensors"] == 0o640 and set(modes.values()) == {0o640}
