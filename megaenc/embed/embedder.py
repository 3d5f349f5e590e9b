"""Embeddings of texts by a Hugging Face or sentence-transformers directory.

Texts are packed without padding.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from megaenc.backend.device import detect_backend
from megaenc.console import ProgressLine, print_rank_0
from megaenc.data.tokenizer.fast_encode import replace_surrogates
from megaenc.data.tokenizer.special_tokens import (
    SpecialTokensMode,
    resolve_special_tokens,
    set_special_tokens,
)
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.embed.config import ContrastiveConfig, EmbeddingFlags
from megaenc.errors import InputError, first_error_line
from megaenc.finetune.model.backbone import AttentionDirection, Backbone, PackedTexts, pack_texts
from megaenc.finetune.model.fingerprint import check_model_directory
from megaenc.finetune.model.load import load_backbone
from megaenc.finetune.tasks.base import POOLING_FUNCTIONS
from megaenc.hf.checkpoint import HFCheckpoint
from megaenc.hf.model import load_hf_config
from megaenc.json_files import parse_json, read_json_object, read_regular_file

DEFAULT_LENGTH = 512
"""Maximum tokens of a text for a directory that names none."""
_TEXTS_PER_BATCH = 1024
_MAX_HUB_NAME = 96
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
# The names that sentence-transformers looks for, in this order
_DOCUMENT_PROMPTS = (
    "document",
    "passage",
    "corpus",
)

Pooling = Literal["mean", "cls", "lasttoken"]


@dataclass(frozen=True)
class EmbeddingConfig:
    """Rules for embedding texts with a model: attention, pooling, length, prefixes.

    `read_embedding_config` reads them from a directory, and flags may override them. `pooling` is
    "mean", "cls" or "lasttoken"; `attention` None is the model's own, `max_length` 0 the lower of
    DEFAULT_LENGTH and the model's context, `truncate_dim` 0 the full size, and `special_tokens`
    "own" the tokenizer as it is. `query_prefix`, `document_prefix` and, for other texts,
    `default_prefix` are put before texts, "" for none, and `lower_case` changes them. `normalize`
    tells whether the model scales embeddings to length 1. By default `pooling` is "mean",
    `attention` "bidirectional" and `special_tokens` "own".
    """

    pooling: Pooling = "mean"
    attention: AttentionDirection | None = "bidirectional"
    """None: the model's own."""
    max_length: int = 0
    """Maximum tokens of a text, special tokens included; 0: DEFAULT_LENGTH, or the model's context
    if that is shorter."""
    query_prefix: str = ""
    document_prefix: str = ""
    lower_case: bool = False
    truncate_dim: int = 0
    """Size to which embeddings are cut before they get length 1; 0: the model's."""
    default_prefix: str = ""
    """Text before texts that are neither query nor document."""
    special_tokens: SpecialTokensMode | Literal["", "own"] = "own"
    """own: the tokenizer as it is; empty: the same, but an EOS for a tokenizer that adds
    nothing."""
    normalize: bool = False
    """True if the directory's modules scale embeddings to length 1; cosines do not depend on it,
    probes do."""


def fetch_model(name_or_directory: str) -> str:
    """Return the path of a model's directory, downloaded from the Hub for ORG/NAME.

    If ORG/NAME or ORG is an existing directory, ORG/NAME is a path, not a name of the Hub.

    Raises:
        InputError: There is neither such a directory nor such a model, or the directory holds no
            model (see `check_model_directory`).
    """
    parent, _, name = name_or_directory.rpartition("/")
    # False for a name that is too long
    is_path = os.path.isdir(name_or_directory) or os.path.isdir(parent)
    if is_path or len(name) > _MAX_HUB_NAME or not _HUB_NAME.fullmatch(name_or_directory):
        check_model_directory(name_or_directory)
        return name_or_directory
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name_or_directory, allow_patterns=_HUB_FILES)
    except Exception as error:  # HTTP, file system and the Hub's own errors
        raise InputError(
            f"--model {name_or_directory}: neither a directory nor a model that the Hub gives "
            f"({first_error_line(error, 120)})"
        ) from None


def read_embedding_config(directory: str) -> EmbeddingConfig:
    """Return the EmbeddingConfig that a model's directory defines.

    It is that of sentence-transformers if the directory has modules.json, else the default,
    `EmbeddingConfig()`. The model's weights are not read.

    Raises:
        InputError: transformers does not know config.json, a module or pooling is not supported, or
            a file is malformed.
    """
    path = Path(directory)
    # Unreadable models are refused before any text is embedded
    load_hf_config(HFCheckpoint(path, "--model"))
    if not (path / "modules.json").exists():
        return EmbeddingConfig()
    modules = _read_modules(path / "modules.json")
    parts = [str(module.get("path", "")) for module in modules]
    if parts[0] not in ("", ".") or any(Path(part).name != part for part in parts[1:]):
        raise InputError(
            f"{path / 'modules.json'}: found the paths {parts}, expected the model's directory and "
            "directories in it"
        )
    pooling = _read_pooling(path / parts[1] / "config.json")
    transformer = _read_optional(path / "sentence_bert_config.json")
    settings = _read_optional(path / "config_sentence_transformers.json")
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise InputError(
            f"{path / 'config_sentence_transformers.json'}: field `prompts`: expected texts by name"
        )
    max_length = (
        transformer.get("max_seq_length")
        or _read_optional(path / "tokenizer_config.json").get("model_max_length")
        or 0
    )
    # Or NaN
    if (
        isinstance(max_length, bool)
        or not isinstance(max_length, int | float)
        or not max_length >= 0
    ):
        raise InputError(
            f"{path}: max_seq_length: found {str(max_length)[:40]!r}, expected a number of tokens"
        )
    document_prefix = next((prompts[name] for name in _DOCUMENT_PROMPTS if name in prompts), "")
    lower_case = bool(transformer.get("do_lower_case"))
    return EmbeddingConfig(
        pooling,
        None,
        int(min(max_length, 1 << 30)),
        prompts.get("query", ""),
        document_prefix,
        lower_case,
        default_prefix=prompts.get(str(settings.get("default_prompt_name")), ""),
        normalize=len(modules) == 3,
    )


def override_config(
    config: EmbeddingConfig, given: EmbeddingFlags | ContrastiveConfig
) -> EmbeddingConfig:
    """Return a copy of `config` with the values of the flags that are given.

    A prefix is given unless it is None; another flag is given unless it is 0 or an empty text.
    """
    values = {field.name: getattr(given, field.name, None) for field in dataclasses.fields(config)}
    is_given = {
        name: value is not None if name.endswith("_prefix") else bool(value)
        for name, value in values.items()
    }
    return dataclasses.replace(
        config, **{name: value for name, value in values.items() if is_given[name]}
    )


def build_embedder(
    name: str, directory: str, config: EmbeddingConfig, given: EmbeddingFlags
) -> "Embedder":
    """Return a directory's Embedder on this machine's device, and print its rules.

    Its `config` has the attention and the length in effect.

    Args:
        name: Name of the model in the printed rules and in errors.
        config: Rules, which include those of `given` already (see `override_config`).
        given: Flags for precision and batch size; its length and size are only checked.

    Raises:
        InputError: A length or size is beyond the model's, or the model cannot be loaded.
    """
    backend = detect_backend()
    dtype = (
        torch.bfloat16
        if given.precision == "bf16" or (not given.precision and backend.has_bf16)
        else torch.float32
    )
    embedder = Embedder(
        directory, config, device=backend.device, dtype=dtype, batch_size=given.batch_size
    )
    if given.max_length > embedder.max_length:
        raise InputError(
            f"--max-length: found {given.max_length}, expected at most the {embedder.max_length} "
            f"tokens that {name} reads"
        )
    if given.truncate_dim > (full := embedder.backbone.hidden_size):
        raise InputError(
            f"--truncate-dim: found {given.truncate_dim}, expected at most {full}, the size of "
            f"{name}'s embeddings"
        )
    config = dataclasses.replace(
        config, attention=embedder.backbone.attention, max_length=embedder.max_length
    )
    embedder.config = config
    prefixes = "".join(
        f", {kind} prefix {text!r}"
        for kind, text in (
            ("query", config.query_prefix),
            ("document", config.document_prefix),
            ("default", config.default_prefix),
        )
        if text
    )
    size = f", cut to {config.truncate_dim} numbers" if config.truncate_dim else ""
    print_rank_0(
        f"{name}: {config.pooling} pooling, {config.attention} attention, at most "
        f"{config.max_length} tokens, "
        f"{'bf16' if dtype == torch.bfloat16 else 'fp32'}{prefixes}{size}"
    )
    return embedder


def _read_modules(path: Path) -> list[dict[str, Any]]:
    """Read the modules of a sentence-transformers directory.

    Raises:
        InputError: They are not a transformer, a pooling and maybe a normalization.
    """
    try:
        modules = parse_json(read_regular_file(path))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: cannot be read ({first_error_line(error, 80)}); expected a list of modules"
        ) from None
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise InputError(
            f"{path}: found the modules {', '.join(kinds)}, expected Transformer, Pooling and "
            "maybe Normalize"
        )
    return modules


def _read_pooling(path: Path) -> Pooling:
    """Read the pooling mode from a pooling module's config.json of any version.

    Raises:
        InputError: The pooling is not supported.
    """
    values = read_json_object(path, "the pooling of sentence-transformers")
    names = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
    by_flag = [
        key.removeprefix("pooling_mode_")
        for key, on in values.items()
        if key.startswith("pooling_mode_") and on is True
    ]
    mode = values.get("pooling_mode") or [names.get(name, name) for name in by_flag] or "mean"
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    if not isinstance(mode, str) or mode not in POOLING_FUNCTIONS:
        raise InputError(
            f"{path}: found the pooling {str(mode)[:40]}, expected one of "
            f"{', '.join(POOLING_FUNCTIONS)}"
        )
    if values.get("include_prompt") is False:
        raise InputError(
            f"{path}: field `include_prompt`: found false, expected true: pooling over the prompt "
            "too"
        )
    return mode


def _read_optional(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file."""
    return read_json_object(path) if path.exists() else {}


class Embedder:
    """Model that embeds texts: tokenizer, backbone with packed attention, and pooling.

    Texts go through `tokenize`, then `embed` (in training `pool`). The backbone is in eval mode.
    `max_length` is the maximum number of tokens of a text in effect, special ones included;
    InputError if it leaves no room for text, or if the model cannot be loaded.

    Args:
        directory: Directory of a Hugging Face or sentence-transformers model.
        config: Rules, as of `read_embedding_config`.
        dtype: Dtype of the weights, on `device`.
        batch_size: Texts of a forward pass of `embed`.
        check: Called with the float32 backbone and short random texts, as in `load_backbone`.
    """

    def __init__(
        self,
        directory: str,
        config: EmbeddingConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int = 32,
        check: Callable[[Backbone, PackedTexts], None] = lambda backbone, texts: None,
    ) -> None:
        self.directory = directory
        self.config = config
        self.batch_size = batch_size
        self.tokenizer = load_tokenizer(directory, "--model")
        if config.special_tokens != "own":
            special = resolve_special_tokens(self.tokenizer, config.special_tokens)
            self.tokenizer = set_special_tokens(self.tokenizer, special)
        self.backbone = load_backbone(
            directory, config.attention, device=device, dtype=dtype, check=check
        )
        self.max_length = min(config.max_length or DEFAULT_LENGTH, self.backbone.context_length)
        added = self.tokenizer.num_special_tokens_to_add()
        if self.max_length <= added:  # tokenizers would not cut at all
            raise InputError(
                f"--max-length: found {self.max_length}, expected room for text next to {added} "
                "added tokens"
            )

    def tokenize(
        self,
        texts: Sequence[str],
        progress: Callable[[int], None] = lambda done: None,
        *,
        quiet: bool = False,
    ) -> list[np.ndarray]:
        """Return the token ids of each text, int32[tokens], at most `max_length` each.

        Longer texts are cut. The special tokens of the config are included and count. Prefixes of
        queries and documents are not added. With `config.lower_case`, texts are lowercased.

        Args:
            progress: Called with the number of texts tokenized so far.
            quiet: Do not print how many texts are cut.
        """
        rows: list[np.ndarray] = []
        truncated = 0
        for start in range(0, len(texts), _TEXTS_PER_BATCH):
            batch = [replace_surrogates(text) for text in texts[start : start + _TEXTS_PER_BATCH]]
            if self.config.lower_case:
                batch = [text.lower() for text in batch]
            encoded = self.tokenizer(
                batch, truncation=True, max_length=self.max_length, return_attention_mask=False
            )
            rows += [np.array(row, dtype=np.int32) for row in encoded["input_ids"]]
            truncated += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
            progress(len(rows))
        if truncated and not quiet:
            print_rank_0(
                f"{truncated:,} of {len(texts):,} texts are longer than {self.max_length} tokens "
                "and are cut"
            )
        return rows

    def pool(self, packed: PackedTexts) -> Tensor:
        """Return the pooled states of each text of a pack, float32[texts, hidden_size].

        They have a graph if gradients are enabled, and any length: they are not normalized.
        """
        return POOLING_FUNCTIONS[self.config.pooling](self.backbone.compute_states(packed), packed)

    @torch.inference_mode()
    def embed(
        self,
        rows: Sequence[np.ndarray],
        progress: Callable[[int], None] = lambda tokens: None,
        *,
        unit_length: bool = True,
    ) -> Tensor:
        """Return the embedding of each text, in order, float32[texts, size].

        They are cut to `config.truncate_dim` numbers, if it is not 0, then scaled to length 1; a
        text without tokens gets zeros. They are on the model's device, made in inference mode.

        Args:
            rows: Token ids of each text, as `tokenize` returns them.
            progress: Called after each forward pass with the number of tokens embedded so far.
            unit_length: False: they are only cut, not scaled.

        Raises:
            InputError: An embedding is NaN or inf.
        """
        lengths = np.array([len(row) for row in rows])
        order = np.argsort(lengths, kind="stable")
        order = order[lengths[order] > 0]
        done = 0
        size = self.config.truncate_dim or self.backbone.hidden_size
        vectors = torch.zeros(len(rows), size, device=self.backbone.device)
        for start in reversed(range(0, len(order), self.batch_size)):
            part = order[start : start + self.batch_size]
            packed = pack_texts([rows[index] for index in part], self.backbone.device)
            pooled = self.pool(packed)[:, :size]
            if not bool(torch.isfinite(pooled).all()):
                raise InputError(
                    f"--model {self.directory}: an embedding is NaN or inf; try --precision fp32"
                )
            vectors[torch.from_numpy(part).to(vectors.device)] = (
                normalize(pooled, dim=1) if unit_length else pooled
            )
            done += len(packed.tokens)
            progress(done)
        return vectors

    def embed_queries_and_documents(
        self, queries: Sequence[str], documents: Sequence[str], place: str = ""
    ) -> tuple[Tensor, Tensor]:
        """Return the embeddings of queries and of documents, after adding their prefixes.

        Both are float32[texts, size] of length 1 on the model's device, as `embed` returns them.
        Progress lines are shown.

        Args:
            place: Beginning of the progress lines.

        Raises:
            InputError: An embedding is NaN or inf.
        """
        texts = [self.config.query_prefix + query for query in queries]
        texts += [self.config.document_prefix + document for document in documents]
        with ProgressLine(f"{place}tokenizing", total=len(texts), closing=False) as line:
            tokens = self.tokenize(texts, line.update)
        with ProgressLine(f"{place}embedding", total=sum(map(len, tokens)), closing=False) as line:
            vectors = self.embed(tokens, line.update)
        return vectors[: len(queries)], vectors[len(queries) :]
