"""What an export needs of a run folder: its model, its history, and the weights of one of its steps."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaenc import backend
from megaenc.data.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.model.config import ModelConfig
from megaenc.objectives import Schedule
from megaenc.training.checkpoint_folder import CheckpointFolder
from megaenc.training.run_folder import CONFIG, FACTS
from megaenc.training.settings import PretrainSettings, settings_from
from megaenc.training.start import Stage, Start

if TYPE_CHECKING:
    from megaenc.model.encoder import Encoder


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
    facts: dict[str, Any]

    @property
    def source(self) -> Stage | None:
        """The Hugging Face model that the weights once came from, if any."""
        return next((stage for stage in self.start.before if stage.family), None)

    @property
    def context(self) -> int:
        """Tokens that the model can read: those of its packs, or what its Hugging Face model could, if that is more."""
        return max(self.seq_length, self.source.context if self.source else 0)

    @property
    def is_source(self) -> bool:
        """Whether this is no run but a Hugging Face model that came in, as it was."""
        return "source" in self.facts

    @property
    def added_token(self) -> str:
        """The mask token that this model was given a row for as it came in, if so."""
        mask = self.facts.get("source", {}).get("mask_token", {})
        return mask["token"] if mask.get("origin") == "added" else ""

    @property
    def draws_step_0(self) -> bool:
        """Whether the weights of step 0 follow from the seed, so that no checkpoint of them is needed."""
        return self.start.kind == "new" and not self.source

    def schedule(self, vocabulary: Vocabulary) -> Schedule:
        """What the run trained. Raises InputError where one of its objectives is not installed here."""
        try:
            return Schedule.build(self.settings.objective_schedule, self.settings.total_iters, vocabulary, self.settings.seed)
        except InputError as error:
            raise InputError(
                f"--load {self.folder}: its card cannot be written, for its schedule cannot be read here ({error}); install the "
                "package that offers the objective"
            ) from None

    def steps(self) -> list[int]:
        """The steps that can be exported: those of the checkpoints up to the newest, and 0 where that can be drawn.

        InputError where there is no checkpoint, or a file of one is missing or cut short.
        """
        checkpoints = CheckpointFolder(self.folder / "checkpoints")
        self._newest(checkpoints)
        kept = checkpoints.up_to_tracker()
        for step in kept:
            checkpoints.state(step)
        return sorted({*kept, *([0] if self.draws_step_0 else [])})

    def _newest(self, checkpoints: CheckpointFolder) -> int:
        newest = checkpoints.latest()
        if newest is None:
            unfinished = any(checkpoints.folder.glob(".iter_*"))
            what = "only a save that was not finished" if unfinished else "no checkpoint there yet"
            raise InputError(f"--load {self.folder}: {what}; give the run's command again, and it goes on to its next save")
        return newest

    @contextlib.contextmanager
    def loaded(self, step: int | None, length: int = 1) -> "Iterator[tuple[int, Encoder]]":
        """The step (None: the newest) and megatron-core's model with its weights, in this one process, while the block lasts.

        It reads documents of `length` tokens at most. Memory holds the weights once.
        """
        backend.start(backend.Layout(), seed=0)
        try:
            from megaenc.model.encoder import build_encoder
            from megaenc.training.checkpoint import Checkpoints, load_model

            checkpoints = Checkpoints(self.folder / "checkpoints")
            found = self._newest(checkpoints) if step is None else step
            drawn = found == 0 and self.draws_step_0 and not checkpoints.path(0).exists()
            seed = self.settings.seed if drawn else None
            encoder = build_encoder(self.model, self.vocab_size, length, backend.Layout(), self.dtype, seed=seed)
            if not drawn:
                load_model(checkpoints, found, encoder, identity=self.identity)
            yield found, encoder.requires_grad_(False)
        finally:
            backend.stop()


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
    return SavedRun(folder, settings.shape, vocab_size, settings.data.seq_length, dtype, identity, settings, start, facts)
