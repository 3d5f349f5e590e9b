"""Trained embedding models as sentence-transformers directories.

A directory is reloaded and compared before it gets its name.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from megaenc.atomic_io import atomic_dir
from megaenc.convert.sentence_transformers import write_json, write_sentence_layout
from megaenc.data.tokenizer.fast_encode import PROBES
from megaenc.embed.config import TRAINING_DETAILS, TRAINING_LOG
from megaenc.embed.contrastive import ContrastiveData
from megaenc.embed.embedder import Embedder, read_embedding_config
from megaenc.errors import InputError
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.kept_model import padding_id, write_trained_tokenizer
from megaenc.finetune.model.backbone import Backbone, PackedTexts
from megaenc.finetune.model.task_class import build_hf_model, check_same_outputs
from megaenc.hf.model import save_hf_model
from megaenc.tables import escape_markdown, format_facts

_CHECKED_TEXTS = 16
_TOLERANCE = 1e-5
"""Maximum difference of a number in the embeddings of the trained and the reloaded model."""


def export_embedder(
    target: Path,
    embedder: Embedder,
    data: ContrastiveData,
    details: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write a trained embedding model for sentence-transformers, in float32.

    Only rank 0 calls it. The directory also has training.json, training.jsonl and a model card. If
    the reloaded model gives other tokens or embeddings, InputError is raised and no directory is
    written.

    Args:
        target: New directory.
        embedder: Model in float32 and eval mode (see `ContrastiveTrainer.finish`).
        data: Training data, some texts of which are compared.
        details: Content of training.json, see `build_embedding_card`.
        rows: Rows of training.jsonl.
    """
    config = embedder.config
    with atomic_dir(target) as directory:
        hf_model = build_hf_model(
            embedder.backbone, nn.Identity(), TaskFamily.IR, (), padding_id(embedder.tokenizer)
        )
        save_hf_model(hf_model, directory)
        tokenizer = copy.deepcopy(embedder.tokenizer)
        if {tokenizer.pad_token, tokenizer.eos_token, tokenizer.sep_token} == {None}:
            # sentence-transformers always pads
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        write_trained_tokenizer(
            tokenizer, directory, embedder.max_length, hf_model.config.model_type
        )
        del hf_model
        prompts = {"query": config.query_prefix, "document": config.document_prefix}
        options = {"pooling": config.pooling, "lower_case": config.lower_case}
        write_sentence_layout(
            directory, embedder.backbone.hidden_size, embedder.max_length, prompts, **options
        )
        write_json(directory / TRAINING_DETAILS, details)
        (directory / TRAINING_LOG).write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
        (directory / "README.md").write_text(
            build_embedding_card(target.resolve().name, details), encoding="utf-8"
        )
        try:
            _check_reloaded(directory, embedder, data)
        except InputError as error:
            message = str(error).replace(str(directory), "the written directory")
            raise InputError(
                f"--output {target}: nothing is written, as the model cannot be exported: {message}"
            ) from None


def check_exportable(backbone: Backbone, texts: PackedTexts) -> None:
    """Check that transformers' class computes the states of `backbone` on `texts`.

    `export_embedder` writes this class.

    Args:
        backbone: Float32 backbone with the attention of the training.
        texts: Texts to compare states on.

    Raises:
        InputError: The states differ.
    """
    hf_model = build_hf_model(backbone, nn.Identity(), TaskFamily.IR, (), None).to(backbone.device)
    flag = f"--attention {backbone.attention}"
    advice = (
        "expected an attention that an export has too; leave --attention out, or choose another "
        "--model"
    )
    check_same_outputs(hf_model, texts, lambda: backbone.compute_states(texts), flag, advice)


def _check_reloaded(directory: Path, embedder: Embedder, data: ContrastiveData) -> None:
    """Check the tokens and embeddings of a written directory on texts of all lengths.

    Raises:
        InputError: They are not those of `embedder`.
    """
    backbone = embedder.backbone
    reloaded = Embedder(
        str(directory),
        read_embedding_config(str(directory)),
        device=backbone.device,
        dtype=torch.float32,
    )
    order = np.argsort(data.lengths, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(_CHECKED_TEXTS, len(order))).astype(int)]
    texts = [data.texts[index] for index in chosen] + [text for text in PROBES if text.strip()]
    rows = embedder.tokenize(texts, quiet=True)
    for text, expected, actual in zip(
        texts, rows, reloaded.tokenize(texts, quiet=True), strict=True
    ):
        if not np.array_equal(expected, actual):
            raise InputError(
                f"its tokenizer encodes {text[:40]!r} as {actual[:8].tolist()}, the trained "
                f"model's as {expected[:8].tolist()}"
            )
    difference = (embedder.embed(rows) - reloaded.embed(rows)).abs().max().item()
    if not difference <= _TOLERANCE:
        raise InputError(
            f"its embeddings differ by {difference:.2g} from the trained model's, expected at most "
            f"{_TOLERANCE:g}"
        )


def build_embedding_card(name: str, details: Mapping[str, Any]) -> str:
    """Return the text of README.md, a model card, for a trained embedding model.

    Args:
        name: Title of the card.
        details: Content of the model's training.json. `base_model`, `config` (ContrastiveConfig as
            a dictionary), `fingerprints` (SHA-256 by role), `pairs`, `steps`, `loss`, `masked`,
            `max_length` and `embedding_size` are read.
    """
    config = details["config"]
    base = details["base_model"]
    settings = {
        name: " ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in config.items()
    }
    facts = {
        "base model": base,
        "pairs": f"{details['pairs']:,}",
        "steps": f"{details['steps']:,}",
        "final loss": f"{details['loss']:.4f}",
        "masked false negatives": f"{details['masked']:,}",
        **{name.replace("_", " "): value for name, value in settings.items() if value != ""},
        **{f"SHA-256 of {role}": digest for role, digest in details["fingerprints"].items()},
    }
    sizes = config["matryoshka_dims"]
    smaller = (
        f'\n\nsmaller = SentenceTransformer("DIRECTORY", truncate_dim={min(sizes)})'
        if sizes
        else ""
    )
    about = (
        f" Embeddings may be cut to their first {', '.join(map(str, sorted(sizes)))} numbers."
        if sizes
        else ""
    )
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
license: unknown
tags: [megaenc, sentence-transformers, feature-extraction]
---

# {escape_markdown(name)}

{escape_markdown(base)} trained contrastively on pairs of queries and documents. \
Texts of at most {details["max_length"]:,} tokens
become vectors of {details["embedding_size"]:,} numbers, compared by their cosine.{about}

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("DIRECTORY")
queries = model.encode(["a query"], prompt_name="query")
documents = model.encode(["a text"], prompt_name="document")
model.similarity(queries, documents){smaller}
```

## Training

{format_facts(facts)}

`training.json` has these values, and `training.jsonl` the loss by step.
"""
