"""A run's checkpoint, saved in any layout, as a Hugging Face folder that loads without custom code."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaenc import backend
from megaenc.convert.card import Provenance, card
from megaenc.convert.families import FAMILIES, config_of
from megaenc.convert.mapping import core_to_hf
from megaenc.data.tokenizer import load_tokenizer, vocabulary_of
from megaenc.data.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.files import make_parent, refuse_existing, whole_folder
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention, Schedule
from megaenc.training.run_folder import CONFIG, FACTS, TOKENIZER
from megaenc.training.settings import PretrainSettings, settings_from
from megaenc.training.start import Start

ATTENTION = {"eurobert": Attention.BIDIRECTIONAL, "llama": Attention.CAUSAL}


@dataclass(frozen=True)
class SavedRun:
    """What a run folder says of its model."""

    folder: Path
    model: ModelConfig
    vocab_size: int
    seq_length: int
    dtype: torch.dtype
    identity: dict[str, Any]
    settings: PretrainSettings
    start: Start

    def schedule(self, vocabulary: Vocabulary) -> Schedule:
        """What the run trained. Raises InputError where one of its objectives is not installed here."""
        try:
            return Schedule.build(self.settings.objective_schedule, self.settings.total_iters, vocabulary, self.settings.seed)
        except InputError as error:
            raise InputError(
                f"--load {self.folder}: its card cannot be written, for its schedule cannot be read here ({error}); install the "
                "package that offers the objective"
            ) from None

    def provenance(self, schedule: Schedule, step: int) -> Provenance:
        """What the checkpoint of `step` was trained on."""
        settings = self.settings
        tokens = settings.tokens_after(step)
        return Provenance(settings.objective_schedule, schedule, step, settings.total_iters, tokens, self.start)


def open_run(folder: Path) -> SavedRun:
    """Read config.yaml and run.json of a run folder. Raises InputError where one is missing or no run wrote it."""
    if not (folder / CONFIG).is_file():
        raise InputError(f"--load {folder}: no {CONFIG} there, expected the folder that a pretraining run got as --save")
    settings = settings_from(str(folder / CONFIG))
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        vocab_size, identity, start = int(facts["vocab_size"]), dict(facts["identity"]), Start.read(facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / FACTS}: {error}; expected what a pretraining run wrote there") from None
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    return SavedRun(folder, settings.shape, vocab_size, settings.data.seq_length, dtype, identity, settings, start)


def load_weights(run: SavedRun, step: int | None) -> tuple[int, dict[str, Tensor]]:
    """The step (None: the newest) and all weights of its checkpoint under megatron-core's names, in this one process."""
    backend.start(backend.Layout(), seed=0)
    try:
        from megaenc.model.encoder import build_encoder
        from megaenc.training.checkpoint import Checkpoints, load_model

        checkpoints = Checkpoints(run.folder / "checkpoints")
        found = checkpoints.latest() if step is None else step
        if found is None:
            raise InputError(f"--load {run.folder}: no checkpoint there yet")
        encoder = build_encoder(run.model, run.vocab_size, run.seq_length, backend.Layout(), run.dtype, seed=None)
        load_model(checkpoints, found, encoder, identity=run.identity)
        return found, {name: parameter.detach().cpu() for name, parameter in encoder.named_parameters()}
    finally:
        backend.stop()


def hf_config(run: SavedRun, architecture: str, tokenizer: Any) -> Any:
    """transformers' config of the model; `architecture` is eurobert (bidirectional) or llama (causal)."""
    return config_of(
        FAMILIES[architecture],
        ATTENTION[architecture],
        run.model,
        vocab_size=run.vocab_size,
        context=run.seq_length,
        tokenizer=tokenizer,
        dtype=run.dtype,
    )


def to_hf(load: Path, output: Path, *, architecture: str = "eurobert", step: int | None = None) -> int:
    """Write the checkpoint of `step` (None: the newest) of run `load` to folder `output`; returns the step.

    The folder holds config.json, safetensors, the tokenizer and a card (README.md): `EuroBertForMaskedLM` or `LlamaForCausalLM`
    loads it. `prediction_shift` in config.json says how far before its token a prediction stands. Raises InputError for anything
    missing, and then leaves no folder.
    """
    refuse_existing(output, "--output")
    make_parent(output, "--output")
    run = open_run(load)
    from transformers import EuroBertForMaskedLM, LlamaForCausalLM

    tokenizer = load_tokenizer(run.folder / TOKENIZER)
    tokenizer.model_max_length = run.seq_length
    schedule, attention = run.schedule(vocabulary_of(tokenizer)), ATTENTION[architecture]
    found, state = load_weights(run, step)
    provenance = run.provenance(schedule, found)
    config = hf_config(run, architecture, tokenizer)
    config.prediction_shift = provenance.read_as(attention).shift
    kind = {"eurobert": EuroBertForMaskedLM, "llama": LlamaForCausalLM}[architecture]
    with torch.device("meta"):  # no weights are drawn only to be replaced
        model = kind(config)
    weights = core_to_hf(state, run.model, run.vocab_size)
    weights.update(
        {name: torch.zeros(run.model.hidden_size, dtype=run.dtype) for name in FAMILIES[architecture].zero_biases(run.model)}
    )
    if not run.model.untie_embeddings_and_output_weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True, strict=True)
    model.tie_weights()
    with whole_folder(output) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card(output.name, provenance, attention), encoding="utf-8")
    return found
