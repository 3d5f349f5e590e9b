"""Conversion of a Hugging Face model to a run directory.

The directory has a checkpoint of step 0, from which runs start in any layout.
"""

import copy
import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from megaenc import __version__, backend, flags
from megaenc.atomic_io import atomic_dir
from megaenc.convert.architectures import (
    SOURCE_FIELDS,
    ModelFamily,
    find_family,
    infer_objective,
    parse_hf_config,
    to_model_config,
)
from megaenc.convert.param_mapping import VOCABULARY_ROWS, iter_mappings, vocabulary_names
from megaenc.convert.safetensors_writer import parse_dtype
from megaenc.convert.tokenizer_io import (
    MaskToken,
    ensure_mask_token,
    read_tokenizer,
    write_tokenizer,
)
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, first_error_line
from megaenc.hf.checkpoint import TrainableHFCheckpoint
from megaenc.hf.model import find_model_class
from megaenc.model.config import ModelConfig
from megaenc.output_paths import create_parent_with_rollback, refuse_existing
from megaenc.training.checkpoint_dir import file_digests
from megaenc.training.run_dir import CONFIG_FILE, RUN_FILE, TOKENIZER_DIR
from megaenc.training.run_init import RUN_FORMAT, Ancestor, RunInit

MAX_SEQ_LENGTH = 2048  # tokens, the study's context; default for models with a longer one
_ROWS = 8192  # of the vocabulary's matrices, the largest ones, that are read at a time


@dataclass(frozen=True)
class HFSource:
    """Hugging Face model directory whose config and weights were checked.

    Built by `open_hf_source`. directory: its files, whose `tensor` reads a weight by name; family:
    its family; config: transformers' config object; model: its shape, with `vocab_size`, the rows
    of its embedding.
    """

    directory: TrainableHFCheckpoint
    family: ModelFamily
    config: Any
    model: ModelConfig

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights: bfloat16 if all are stored in it, else float32."""
        return torch.bfloat16 if self.directory.dtypes == {"BF16"} else torch.float32

    @property
    def generation(self) -> dict[str, Any]:
        """Return the generation config as a dictionary.

        Without a generation_config.json it has only `eos_token_id`, config.json's list of several
        ids, or is empty.
        """
        ends = getattr(self.config, "eos_token_id", None)  # absent in NeoBERT's
        return self.directory.generation or (
            {"eos_token_id": ends} if isinstance(ends, list) else {}
        )

    @property
    def config_fields(self) -> dict[str, Any]:
        """Return the fields of config.json that exports keep, without any defaults."""
        return {
            name: self.directory.config[name]
            for name in SOURCE_FIELDS
            if name in self.directory.config
        }

    @property
    def facts(self) -> dict[str, Any]:
        """Return the origin of the weights for run.json: family, name, context and files.

        `files` has the SHA-256 of config.json and of each weight file, by name; all are read.
        """
        files = [self.directory.config_file, *self.directory.files]
        return {
            "family": self.family.model_type,
            "name": self.directory.path.resolve().name,
            "context": self.config.max_position_embeddings,
            "files": {name: entry["sha256"] for name, entry in file_digests(files).items()},
        }


def open_hf_source(path: Path, *, tie: bool = False) -> HFSource:
    """Open the Hugging Face directory `path` and check that its files agree.

    Weights are in safetensors files. Only those that must be zero or equal to others are read, and
    no tokenizer.

    Args:
        tie: Use the embedding as the missing output layer, even if config.json does not tie them.

    Raises:
        InputError: A file, field or tensor, which the message names, is wrong; or `tie` is given
            though the directory has an output layer.
    """
    directory = TrainableHFCheckpoint(path)
    where = str(directory.config_file)
    family = find_family(directory.config, where)
    config = parse_hf_config(directory.config, where)
    model = to_model_config(config, family, where)
    embedding, head = vocabulary_names(model, family.model_type)
    if tie and head in directory.shapes:
        raise InputError(
            f"--tie-word-embeddings: {path} holds an output layer, `{head}`; leave the flag out"
        )
    if model.untie_embeddings_and_output_weights and head not in directory.shapes:
        if not tie:
            raise InputError(
                f"{path}: no tensor `{head}`: the model was saved without its output layer, "
                "which training needs; give --tie-word-embeddings to take the embedding for it"
            )
        model = dataclasses.replace(model, untie_embeddings_and_output_weights=False)
    model = dataclasses.replace(model, vocab_size=config.vocab_size)
    tied = not model.untie_embeddings_and_output_weights
    try:
        shapes = read_hf_shapes(config, family)
    except Exception as error:  # wrong sizes raise errors of many types, such as integer overflow
        raise InputError(
            f"{where}: {first_error_line(error)}; expected the sizes of the weights"
        ) from None
    if tied:
        shapes.pop(head, None)
    directory.check(shapes, optional={head} if tied else set())
    for name in family.zero_bias_names(model):
        if directory.tensor(name).any():
            raise InputError(
                f"{path}: tensor `{name}`: found a bias of attention's output, "
                "expected none or zeros"
            )
    if (
        tied
        and head in directory.shapes
        and not torch.equal(directory.tensor(head), directory.tensor(embedding))
    ):
        raise InputError(
            f"{where}: field `tie_word_embeddings`: found true, but `{head}` is not `{embedding}`"
        )
    return HFSource(directory, family, config, model)


def read_hf_shapes(config: Any, family: ModelFamily) -> dict[str, tuple[int, ...]]:
    """Return the weight shapes, by name, of the Hugging Face model for `config`.

    It is the model with output layer, which is omitted if tied. No weights are read or allocated.

    Args:
        config: Transformers' config object, which is not changed.
    """
    kind = find_model_class(family.export_family.architecture)
    with torch.device("meta"):
        model = kind(copy.deepcopy(config))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def from_hf(
    source: Path,
    output: Path,
    *,
    add_mask_token: bool = False,
    tie: bool = False,
    dtype: Literal["source", "bf16", "fp32"] = "source",
) -> tuple[HFSource, MaskToken]:
    """Convert the Hugging Face directory `source` to a new run directory `output`.

    It returns (opened source, mask token of the tokenizer). The run directory has a checkpoint of
    step 0 with only the weights, and a config.yaml with the flags of runs that start from it
    (`--init-from`). A single process calls it, without a process group; nothing is printed. An
    InputError (parts do not fit, a weight is NaN or infinite, no mask token) leaves no directory.

    Args:
        output: Directory to create, with missing parents; it must not exist.
        add_mask_token: Add a mask token, also for causal models; an error if the tokenizer has one.
        tie: Use the embedding as the output layer; an error if the directory has one.
        dtype: Dtype of the checkpoint; source: bf16 if all source weights are, else fp32.
    """
    refuse_existing(output, "--output")
    hf_source = open_hf_source(source, tie=tie)
    tokenizer = read_tokenizer(source, hf_source.config.vocab_size)
    mask = ensure_mask_token(tokenizer, add_mask_token)
    if mask.origin == "reserved" and _is_row_untrained(hf_source, mask.id):
        mask = dataclasses.replace(mask, origin="untrained")
    model = dataclasses.replace(
        hf_source.model, vocab_size=max(hf_source.model.vocab_size, mask.id + 1)
    )
    weights = parse_dtype(dtype, "source", hf_source.dtype)
    with create_parent_with_rollback(output, "--output"), atomic_dir(output) as directory:
        origin = hf_source.facts | {"mask_token": dataclasses.asdict(mask)}
        path = str(hf_source.directory.path.resolve())
        objective = infer_objective(hf_source.config, hf_source.family)
        stage = Ancestor(
            path,
            0,
            objective,
            0,
            origin["family"],
            origin["context"],
            hf_source.generation,
            config_fields=hf_source.config_fields,
        )
        vocabulary, identity = write_run_files(
            directory,
            output,
            tokenizer,
            model,
            seq_length=min(hf_source.config.max_position_embeddings, MAX_SEQ_LENGTH),
            dtype=weights,
            objective=objective,
            source=origin,
            before=(stage,),
        )
        backend.init_distributed(backend.ParallelConfig(), seed=0)
        try:
            from megaenc.model.encoder import build_encoder
            from megaenc.training.checkpoint.manager import CheckpointManager

            # Rotary angles are not weights, so that the sequence length does not matter.
            encoder = build_encoder(
                model, model.vocab_size, 1, backend.ParallelConfig(), weights, seed=None
            )
            _load_weights(encoder, hf_source, model, mask, vocabulary.size)
            CheckpointManager(directory / "checkpoints").save_weights(encoder, identity)
        finally:
            backend.destroy_distributed()
    return hf_source, mask


def write_run_files(
    directory: Path,
    output: Path,
    tokenizer: Any,
    model: ModelConfig,
    *,
    seq_length: int,
    dtype: torch.dtype,
    objective: str,
    source: dict[str, Any],
    before: tuple[Ancestor, ...],
    special_tokens: SpecialTokens | None = None,
) -> tuple[Vocabulary, dict[str, Any]]:
    """Write tokenizer, config.yaml and run.json for weights that no run has trained.

    It returns (vocabulary of the tokenizer, field `identity` of run.json). `seq_length` (of a pack,
    in tokens), `dtype` (of the weights) and `objective` (a schedule) are for config.yaml.

    Args:
        directory: Existing directory to write to; OSErrors pass.
        output: Path that the directory will have, which config.yaml names.
        model: Model whose `vocab_size` is set, to the rows of the embedding.
        source: Origin of the weights, for the field `source` of run.json.
        before: Earlier runs and models that the weights come from, the oldest first.
        special_tokens: Tokens around each document in their training here; None: unknown.
    """
    write_tokenizer(tokenizer, directory / TOKENIZER_DIR)
    vocabulary = read_vocabulary(load_tokenizer(directory / TOKENIZER_DIR))
    config = {name: value for name, value in flags.flatten(model).items() if value is not None}
    config |= {
        "seq_length": seq_length,
        "bf16": dtype == torch.bfloat16,
        "objective_schedule": objective,
        "tokenizer": str((output / TOKENIZER_DIR).resolve()),
    }
    identity = {
        **vars(model),
        # As a run has it.
        "vocab_size": None if model.vocab_size == vocabulary.size else model.vocab_size,
        "tokenizer": vocabulary.fingerprint,
        "bf16": config["bf16"],
        "source": hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:16],
    }
    facts = {
        "format": RUN_FORMAT,
        "megaenc": __version__,
        "vocab_size": model.vocab_size,
        "parameters": model.parameter_count(model.vocab_size),
        "reading": [],
        "start": dataclasses.asdict(RunInit(before=before)),
        "source": source,
        "identity": identity,
    }
    if special_tokens is not None:
        facts["special_tokens"] = special_tokens.to_json()
    (directory / CONFIG_FILE).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    (directory / RUN_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return vocabulary, identity


def _is_row_untrained(source: HFSource, row: int) -> bool:
    """Return whether a row of the embedding was never trained.

    Weight decay alone leaves it close to zero.
    """
    embedding, _ = vocabulary_names(source.model, source.family.model_type)
    norms = torch.cat(
        [part.float().norm(dim=1) for part in source.directory.iter_row_chunks(embedding, _ROWS)]
    )
    return bool(norms[row] < norms.median() / 100)


@torch.no_grad()
def _load_weights(
    encoder: torch.nn.Module, source: HFSource, model: ModelConfig, mask: MaskToken, ids: int
) -> None:
    """Copy the source's weights into `encoder` one by one.

    Rows that pad the vocabulary are zero. An untrained or added mask token gets the mean of the
    other rows of the tokenizer's `ids`.
    """
    parameters = dict(encoder.named_parameters())
    for mapping, core, names in iter_mappings(model, source.family.model_type):
        parameter = parameters[core]
        if core in VOCABULARY_ROWS:
            done = 0
            for part in source.directory.iter_row_chunks(*names, _ROWS):
                parameter[done : done + len(part)] = part
                done += len(part)
            parameter[done:] = 0
            if mask.origin in ("untrained", "added"):
                other_rows = (
                    *parameter[: mask.id].split(_ROWS),
                    *parameter[mask.id + 1 : ids].split(_ROWS),
                )
                parameter[mask.id] = sum(
                    part.sum(dim=0, dtype=torch.float32) for part in other_rows
                ) / (ids - 1)
        else:
            parameter.copy_(
                mapping.to_core(tuple(source.directory.tensor(name) for name in names), model)
            )
