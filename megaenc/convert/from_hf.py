"""A Hugging Face model as the checkpoint of step 0 of a run folder, from which runs can start in any layout."""

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
from megaenc.convert.architectures import ModelFamily, find_family, parse_hf_config, to_model_config, infer_objective
from megaenc.convert.hf_checkpoint import TrainableHFCheckpoint
from megaenc.convert.param_mapping import EMBEDDING, HEAD, VOCABULARY_ROWS, iter_mappings
from megaenc.convert.safetensors_writer import parse_dtype
from megaenc.convert.tokenizer_io import MaskToken, ensure_mask_token, read_tokenizer, write_tokenizer
from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, first_error_line
from megaenc.model.config import ModelConfig
from megaenc.output_paths import create_parent_dir, refuse_existing
from megaenc.training.checkpoint_dir import file_digests
from megaenc.training.run_dir import CONFIG_FILE, RUN_FILE, TOKENIZER_DIR
from megaenc.training.run_init import Ancestor, RunInit

MAX_SEQ_LENGTH = 2048  # tokens, the study's context: a source that reads more is given no longer packs unless asked for
_ROWS = 8192  # of the vocabulary that are in memory a second time: its matrices are by far the largest


@dataclass(frozen=True)
class HFSource:
    """What a Hugging Face folder holds, checked against what its config.json says."""

    folder: TrainableHFCheckpoint
    family: ModelFamily
    config: Any  # transformers'
    model: ModelConfig  # with as many rows of the vocabulary as the folder has

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest that holds every weight as it is."""
        return torch.bfloat16 if self.folder.dtypes == {"BF16"} else torch.float32

    @property
    def generation(self) -> dict[str, Any]:
        """How it writes text: its generation_config.json; without that, where it stops if that is at several tokens."""
        return self.folder.generation or ({"eos_token_id": ends} if isinstance(ends := self.config.eos_token_id, list) else {})

    @property
    def facts(self) -> dict[str, Any]:
        """Where the weights come from: family, name, context and the SHA-256 of each file."""
        files = [self.folder.config_file, *self.folder.files]
        return {
            "family": self.family.model_type,
            "name": self.folder.path.resolve().name,
            "context": self.config.max_position_embeddings,
            "files": {name: entry["sha256"] for name, entry in file_digests(files).items()},
        }


def open_hf_source(path: Path, *, tie: bool = False) -> HFSource:
    """The model in the Hugging Face folder `path`; `tie`: it has no output layer, and the embedding takes its place.

    InputError names the file, the field or the tensor that does not fit. No weight is read yet but the few that must be zero or
    equal to another.
    """
    folder = TrainableHFCheckpoint(path)
    where = str(folder.config_file)
    family = find_family(folder.config, where)
    config = parse_hf_config(folder.config, where)
    model = to_model_config(config, family, where)
    if tie and HEAD in folder.shapes:
        raise InputError(f"--tie-word-embeddings: {path} holds an output layer, `{HEAD}`; leave the flag out")
    if model.untie_embeddings_and_output_weights and HEAD not in folder.shapes:
        if not tie:
            raise InputError(
                f"{path}: no tensor `{HEAD}`: the model was saved without its output layer, which training needs; give "
                "--tie-word-embeddings to take the embedding for it"
            )
        model = dataclasses.replace(model, untie_embeddings_and_output_weights=False)
    model = dataclasses.replace(model, vocab_size=config.vocab_size)
    tied = not model.untie_embeddings_and_output_weights
    try:
        shapes = read_hf_shapes(config, family)
    except Exception as error:  # more numbers than 64 bits can count, and whatever else sizes may lead to
        raise InputError(f"{where}: {first_error_line(error)}; expected sizes as the weights have them") from None
    if tied:
        shapes.pop(HEAD, None)
    folder.check(shapes, optional={HEAD} if tied else set())
    for name in family.zero_bias_names(model):
        if folder.tensor(name).any():
            raise InputError(f"{path}: tensor `{name}`: found a bias of attention's output, expected none or zeros")
    if tied and HEAD in folder.shapes and not torch.equal(folder.tensor(HEAD), folder.tensor(EMBEDDING)):
        raise InputError(f"{where}: field `tie_word_embeddings`: found true, but `{HEAD}` is not `{EMBEDDING}`")
    return HFSource(folder, family, config, model)


def read_hf_shapes(config: Any, family: ModelFamily) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight that transformers' model of `config` has; a tied output layer is not there twice."""
    import transformers

    kind = getattr(transformers, family.export_family.architecture)
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
    """Write the model in the Hugging Face folder `source` as the run folder `output`, which holds one checkpoint: of step 0.

    It has the weights alone, in `dtype`. Runs start from it by `--init-from`, and config.yaml there has the flags that they
    share with it. Weights are read one by one, so that memory holds the model once. Raises InputError for anything that does not
    fit, and then leaves no folder.
    """
    refuse_existing(output, "--output")
    found = open_hf_source(source, tie=tie)
    tokenizer = read_tokenizer(source, found.config.vocab_size)
    mask = ensure_mask_token(tokenizer, add_mask_token)
    if mask.origin == "reserved" and _is_row_untrained(found.folder, mask.id):
        mask = dataclasses.replace(mask, origin="untrained")
    model = dataclasses.replace(found.model, vocab_size=max(found.model.vocab_size, mask.id + 1))
    weights = parse_dtype(dtype, "source", found.dtype)
    create_parent_dir(output, "--output")
    with atomic_dir(output) as folder:
        write_tokenizer(tokenizer, folder / TOKENIZER_DIR)
        vocabulary = read_vocabulary(load_tokenizer(folder / TOKENIZER_DIR))
        shared = {name: value for name, value in flags.flatten(model).items() if value is not None}
        shared |= {
            "seq_length": min(found.config.max_position_embeddings, MAX_SEQ_LENGTH),
            "bf16": weights == torch.bfloat16,
            "objective_schedule": infer_objective(found.config, found.family),
            "tokenizer": str((output / TOKENIZER_DIR).resolve()),
        }
        facts = _build_run_json(found, model, vocabulary, shared, mask)
        (folder / CONFIG_FILE).write_text(yaml.safe_dump(shared, sort_keys=False), encoding="utf-8")
        (folder / RUN_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        backend.init_distributed(backend.ParallelConfig(), seed=0)
        try:
            from megaenc.model.encoder import build_encoder
            from megaenc.training.checkpoint.manager import CheckpointManager

            # Rotary angles are no weights, so the length is of no account.
            encoder = build_encoder(model, model.vocab_size, 1, backend.ParallelConfig(), weights, seed=None)
            _load_weights(encoder, found, model, mask, vocabulary.size)
            CheckpointManager(folder / "checkpoints").save_weights(encoder, facts["identity"])
        finally:
            backend.destroy_distributed()
    return found, mask


def _build_run_json(
    source: HFSource, model: ModelConfig, vocabulary: Vocabulary, shared: dict[str, Any], mask: MaskToken
) -> dict[str, Any]:
    """Return what run.json holds, as of a run; `source` is in no run's."""
    origin = source.facts | {"mask_token": dataclasses.asdict(mask)}
    path, made_for = str(source.folder.path.resolve()), shared["objective_schedule"]
    stage = Ancestor(path, 0, made_for, 0, origin["family"], origin["context"], source.generation)
    return {
        "megaenc": __version__,
        "vocab_size": model.vocab_size,
        "parameters": model.parameter_count(model.vocab_size),
        "reading": [],
        "start": dataclasses.asdict(RunInit(before=(stage,))),
        "source": origin,
        "identity": {
            **flags.flatten(model),
            "vocab_size": None if model.vocab_size == vocabulary.size else model.vocab_size,  # as a run has it
            "tokenizer": vocabulary.fingerprint,
            "bf16": shared["bf16"],
            "source": hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:16],
        },
    }


def _is_row_untrained(folder: TrainableHFCheckpoint, row: int) -> bool:
    """Whether a row of the embedding is next to nothing, which no training left as it is: weight decay alone did."""
    norms = torch.cat([part.float().norm(dim=1) for part in folder.iter_row_chunks(EMBEDDING, _ROWS)])
    return bool(norms[row] < norms.median() / 100)


@torch.no_grad()
def _load_weights(encoder: torch.nn.Module, source: HFSource, model: ModelConfig, mask: MaskToken, ids: int) -> None:
    """Put the weights into `encoder` one after the other; rows that pad the vocabulary are zero.

    A mask token without a row of its own gets the mean of the rows of the tokenizer's other `ids`.
    """
    parameters = dict(encoder.named_parameters())
    for rule, core, names in iter_mappings(model):
        parameter = parameters[core]
        if core in VOCABULARY_ROWS:
            done = 0
            for part in source.folder.iter_row_chunks(*names, _ROWS):
                parameter[done : done + len(part)] = part
                done += len(part)
            parameter[done:] = 0
            if mask.origin in ("untrained", "added"):
                others = (*parameter[: mask.id].split(_ROWS), *parameter[mask.id + 1 : ids].split(_ROWS))
                parameter[mask.id] = sum(part.sum(dim=0, dtype=torch.float32) for part in others) / (ids - 1)
        else:
            parameter.copy_(rule.to_core(tuple(source.folder.tensor(name) for name in names), model))
