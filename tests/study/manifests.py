"""A small manifest for tests, and how to change it."""

from pathlib import Path

import yaml

from megaenc.study.manifest.schema import Manifest, read_manifest
from megaenc.study.plan.dag import StageGraph, build_graph

STUDY = Path(__file__).parents[2] / "configs" / "study"

BASE = {
    "sizes": {
        "toy": {
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 2,
            "num_query_groups": 1,
        }
    },
    "pretrain": {
        "seq_length": 64,
        "global_batch_size": 8,
        "lr_warmup_iters": 10,
        "lr_wsd_decay_iters": 20,
        "bf16": False,
    },
    "corpus": {"demo": True, "vocab_size": 1024},
    "models": [
        {"size": "toy", "steps": 400, "clm_share": [0, 0.25, 1], "mask": 0.4},
        {"size": "toy", "steps": 100, "clm_share": [0, 1], "mask": 0.4},
        {"after": ["toy-clm-400", "toy-mlm40-400"], "steps": [20, 120, 220], "mask": 0.4},
    ],
    "finetune": {"datasets": ["demo_sc", "demo_ir"], "learning_rates": [1e-4, 1e-3], "seeds": 3},
}

TOY = {"size": "toy", "steps": 400, "mask": 0.4}
"""Entry of one model."""

EMBED = {
    "datasets": ["sci=ir/sci", "demo_ir"],
    "train": "qa/pairs.jsonl",
    "seeds": 2,
    "batch_size": 64,
    "query_prefix": "- ",
}
"""Section `embed` with two sets, pairs to train on, and a flag of evaluation and training."""


def write(directory: Path, **changes) -> Path:
    """BASE with some of its keys changed (None: left out), as a file."""
    values = {key: value for key, value in (BASE | changes).items() if value is not None}
    path = directory / "study.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def read(directory: Path, *entries: dict, **changes) -> Manifest:
    """Return the manifest that `write` writes, with these models instead of BASE's."""
    return read_manifest(
        write(directory, **changes, **({"models": list(entries)} if entries else {}))
    )


def graph(directory: Path, *entries: dict, **changes) -> StageGraph:
    """The graph of the manifest that `read` reads."""
    return build_graph(read(directory, *entries, **changes))
