"""What an export needs of a run folder: its model, its history, and the weights of one of its steps."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaenc import backend, flags
from megaenc.convert.architectures import FAMILIES, KNOWN_FAMILIES
from megaenc.convert.tokenizer_io import MaskToken
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_regular_file
from megaenc.model.config import ModelConfig
from megaenc.objectives import Schedule
from megaenc.training.checkpoint_dir import CheckpointDir
from megaenc.training.config import PretrainConfig, read_config_file
from megaenc.training.run_dir import CONFIG_FILE, RUN_FILE, TOKENIZER_DIR
from megaenc.training.run_init import Ancestor, RunInit

if TYPE_CHECKING:
    from megaenc.model.encoder import Encoder


@dataclass(frozen=True)
class RunCheckpoint:
    """What a run folder says of its model."""

    folder: Path
    model: ModelConfig
    vocab_size: int
    seq_length: int
    dtype: torch.dtype
    identity: dict[str, Any]
    settings: PretrainConfig
    start: RunInit
    facts: dict[str, Any]

    @property
    def origin(self) -> Ancestor | None:
        """The Hugging Face model that the weights once came from, if any."""
        return next((stage for stage in self.start.before if stage.family), None)

    @property
    def context(self) -> int:
        """Tokens that the model can read: those of its packs, or what its Hugging Face model could, if that is more."""
        return max(self.seq_length, self.origin.context if self.origin else 0)

    @property
    def generation(self) -> dict[str, Any]:
        """How that model wrote text; nothing if it said nothing, or there is none."""
        return self.origin.generation if self.origin else {}

    @property
    def converted(self) -> bool:
        """Whether this is no run but a Hugging Face model that came in, as it was."""
        return "source" in self.facts

    @property
    def added_token(self) -> str:
        """The mask token that this model was given a row for as it came in, if so."""
        mask = self.facts.get("source", {}).get("mask_token", {})
        return mask["token"] if mask.get("origin") == "added" else ""

    @property
    def has_seeded_step_0(self) -> bool:
        """Whether the weights of step 0 follow from the seed, so that no checkpoint of them is needed."""
        return self.start.kind == "new" and not self.origin

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Raise InputError if the tokenizer in the run folder is not the one that the run was trained with."""
        where, expected = self.folder / TOKENIZER_DIR, str(self.identity.get("tokenizer"))
        if vocabulary.fingerprint != expected:
            raise InputError(
                f"{where}: found another tokenizer than the run's (fingerprint {vocabulary.fingerprint[:12]}, run.json says "
                f"{expected[:12]}); put the one back that the run wrote there"
            )
        if vocabulary.size > self.vocab_size:
            rows = f"the {self.vocab_size} rows that run.json says"
            raise InputError(f"{where}: found {vocabulary.size} ids, expected at most {rows}")

    def schedule(self, vocabulary: Vocabulary) -> Schedule:
        """What the run trained. Raises InputError where one of its objectives is not installed here."""
        try:
            return Schedule.build(self.settings.objective_schedule, self.settings.total_iters, vocabulary, self.settings.seed)
        except InputError as error:
            raise InputError(
                f"--load {self.folder}: its card cannot be written, for its schedule cannot be read here ({error}); install the "
                "package that offers the objective"
            ) from None

    def exportable_steps(self) -> list[int]:
        """Return the steps that can be exported: those of the checkpoints up to the newest, and 0 if that can be drawn.

        InputError if there is no checkpoint, or a file of one is missing or cut short.
        """
        checkpoints = CheckpointDir(self.folder / "checkpoints")
        self._newest(checkpoints)
        kept = checkpoints.steps_up_to_tracker()
        for step in kept:
            checkpoints.read_state(step)
        return sorted({*kept, *([0] if self.has_seeded_step_0 else [])})

    def _newest(self, checkpoints: CheckpointDir) -> int:
        newest = checkpoints.tracked_step()
        if newest is None:
            unfinished = any(checkpoints.folder.glob(".iter_*"))
            what = "only a save that was not finished" if unfinished else "no checkpoint there yet"
            raise InputError(f"--load {self.folder}: {what}; give the run's command again, and it goes on to its next save")
        return newest

    @contextlib.contextmanager
    def load_encoder(self, step: int | None, length: int = 1) -> "Iterator[tuple[int, Encoder]]":
        """The step (None: the newest) and megatron-core's model with its weights, in this one process, while the block lasts.

        It reads documents of `length` tokens at most. Memory holds the weights once.
        """
        backend.init_distributed(backend.ParallelConfig(), seed=0)
        try:
            from torch.distributed.checkpoint.api import CheckpointException

            from megaenc.model.encoder import build_encoder
            from megaenc.training.checkpoint.loader import CheckpointLoader, load_model_weights

            checkpoints = CheckpointLoader(self.folder / "checkpoints")
            found = self._newest(checkpoints) if step is None else step
            drawn = found == 0 and self.has_seeded_step_0 and not checkpoints.path(0).exists()
            seed = self.settings.seed if drawn else None
            encoder = build_encoder(self.model, self.vocab_size, length, backend.ParallelConfig(), self.dtype, seed=seed)
            if not drawn:
                try:
                    load_model_weights(checkpoints, found, encoder, identity=self.identity)
                except InputError:
                    raise
                except (Exception, CheckpointException):  # as many types as there are files and readers of them
                    if checkpoints.is_complete(found):
                        raise
                    raise InputError(
                        f"{checkpoints.path(found)}: was removed while it was read, as a run does with its old checkpoints; "
                        "expected one that stays (--ckpt-step, or wait for the end of the run)"
                    ) from None
            yield found, encoder.requires_grad_(False)
        finally:
            backend.destroy_distributed()


def open_run_checkpoint(folder: Path) -> RunCheckpoint:
    """Read config.yaml and run.json of a run folder. InputError if one is missing, or is not what the run wrote."""
    if not os.path.isfile(folder / CONFIG_FILE):
        raise InputError(f"--load {folder}: no {CONFIG_FILE} there, expected the folder that a pretraining run got as --save")
    settings = read_config_file(str(folder / CONFIG_FILE))
    facts, start = _read_facts(folder / RUN_FILE)
    vocab_size, identity = facts["vocab_size"], facts["identity"]
    _check_config_matches(settings, identity, folder / CONFIG_FILE)
    if settings.shape.parameter_count(vocab_size) != facts["parameters"]:
        expected = f"the rows of a model of {facts['parameters']} parameters"
        raise InputError(f"{folder / RUN_FILE}: field `vocab_size`: found {vocab_size}, expected {expected}")
    if (given := settings.shape.vocab_size) not in (None, vocab_size):
        raise InputError(f"{folder / CONFIG_FILE}: field `vocab_size`: found {given}, expected {vocab_size} as in {RUN_FILE}")
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    return RunCheckpoint(folder, settings.shape, vocab_size, settings.data.seq_length, dtype, identity, settings, start, facts)


def _read_facts(file: Path) -> tuple[dict[str, Any], RunInit]:
    """What run.json holds, each part of the kind that a run writes, and the start in it."""
    try:
        facts = parse_json(read_regular_file(file))
        start, identity = RunInit.from_run_metadata(facts), facts["identity"]
        numbers = {name: facts[name] for name in ("vocab_size", "parameters")}
        if not isinstance(identity, dict):
            raise TypeError(f"identity is a {type(identity).__name__}")
        mask = facts.get("source", {}).get("mask_token")
        parts = [start, *start.before, *([] if mask is None else [MaskToken(**mask)])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: {error!r}; expected what a pretraining run wrote there") from None
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise InputError(f"{file}: field `{name}`: found {value!r}, expected a number of 1 or more")
    for part in parts:
        plain = {name: value for name, value in vars(part).items() if not isinstance(value, tuple | dict)}
        flags.replace_fields(part, plain, source=f"{file}: start")  # which looks at the kind of each
    for stage in start.before:
        if stage.family and stage.family not in FAMILIES:
            raise InputError(f"{file}: start: field `family`: found {stage.family!r}, expected one of {KNOWN_FAMILIES}")
    return facts, start


def _check_config_matches(settings: PretrainConfig, identity: dict[str, Any], file: Path) -> None:
    """InputError names the first flag in config.yaml, `file`, that is not what the weights were made with."""
    here = flags.flatten(settings.shape) | {"bf16": settings.bf16}
    del here["vocab_size"]  # run.json says how many rows there are, whether or not that was given
    further = {"seed": settings.seed, "seq_length": settings.data.seq_length}
    here |= {name: value for name, value in further.items() if name in identity}  # what came in was made without them
    for name, found in here.items():
        if found != (expected := identity.get(name)):
            raise InputError(f"{file}: field `{name}`: found {found}, expected {expected}, which {RUN_FILE} has")
