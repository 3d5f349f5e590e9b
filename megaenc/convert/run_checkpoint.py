"""Reader of run directories for exports: model, training history, and weights."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaenc import backend, flags
from megaenc.convert.architectures import FAMILIES, KNOWN_FAMILIES
from megaenc.convert.merge.methods import MergedCheckpoint, MergeRecord
from megaenc.convert.tokenizer_io import MaskToken
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.model.config import ModelConfig
from megaenc.objectives import Schedule
from megaenc.training.checkpoint_dir import CheckpointDir, CheckpointReadError
from megaenc.training.config import PretrainConfig, read_config_file
from megaenc.training.run_dir import CONFIG_FILE, RUN_FILE, TOKENIZER_DIR
from megaenc.training.run_init import Ancestor, RunInit, read_run_metadata

if TYPE_CHECKING:
    from megaenc.model.encoder import Encoder


@dataclass(frozen=True)
class RunCheckpoint:
    """Run directory `directory` with its model, configuration and records.

    Built by `open_run_checkpoint`. `dtype` is that of the run's weights.

    Args:
        model: Model of the last phase.
        vocab_size: Rows of the embedding, without padding for tensor parallelism.
        seq_length: Pack length in tokens, of the last phase.
        identity: Field `identity` of run.json.
        settings: Flags of config.yaml, as a PretrainConfig.
        start: Starting point of the run, a RunInit.
        facts: Content of run.json.
    """

    directory: Path
    model: ModelConfig
    vocab_size: int
    seq_length: int
    dtype: torch.dtype
    identity: dict[str, Any]
    settings: PretrainConfig
    start: RunInit
    facts: dict[str, Any]

    def at_step(self, step: int | None) -> "RunCheckpoint":
        """Return a copy with the model as it is at `step` of a run with --phases.

        The rotary base is that of the phase of `step`, the pack length the longest up to there. A
        run without phases is returned itself.

        Args:
            step: Step of the checkpoint. The last step of a phase belongs to that phase, a step
                after the run to the last one. None: return `self`, as it was opened.
        """
        phases = self.settings.phase_configs
        if len(phases) == 1 or step is None:
            return self
        current = self.settings.phase_at(step)
        longest = max(
            phase.settings.data.seq_length
            for phase in phases
            if phase.first_step <= current.first_step
        )
        model = dataclasses.replace(self.model, rotary_base=current.settings.shape.rotary_base)
        return dataclasses.replace(self, model=model, seq_length=longest)

    @property
    def origin(self) -> Ancestor | None:
        """Return the Hugging Face model that the weights come from, None without one."""
        return next((stage for stage in self.start.before if stage.family), None)

    @property
    def context(self) -> int:
        """Return the model's context length in tokens.

        It is the pack length, or the context of the original Hugging Face model if longer.
        """
        return max(self.seq_length, self.origin.context if self.origin else 0)

    @property
    def generation(self) -> dict[str, Any]:
        """Return the generation config of the original Hugging Face model, {} without one."""
        return self.origin.generation if self.origin else {}

    @property
    def config_fields(self) -> dict[str, Any]:
        """Return the recorded config.json fields of the original model; {} if none are.

        They are the classifier pooling and special token ids of a Hugging Face model, as its file
        has them.
        """
        return self.origin.config_fields if self.origin else {}

    @property
    def converted(self) -> bool:
        """Return whether no run has trained the weights of this directory.

        They are then a converted Hugging Face model or a merge.
        """
        return "source" in self.facts

    @property
    def merge(self) -> MergeRecord | None:
        """Return the record of the merge that wrote the directory; None for others.

        `open_run_checkpoint` has checked it.
        """
        merge = self.facts.get("source", {}).get("merge")
        return None if merge is None else MergeRecord.parse(merge)

    @property
    def added_token(self) -> str:
        """Return the mask token that was added when the model was converted.

        It is its text, empty if none was added.
        """
        mask = self.facts.get("source", {}).get("mask_token", {})
        return mask["token"] if mask.get("origin") == "added" else ""

    @property
    def special_tokens(self) -> SpecialTokens | None:
        """Return the special tokens around each document in training.

        None if run.json has none, as for a converted model.

        Raises:
            InputError: They are invalid in run.json.
        """
        values = self.facts.get("special_tokens")
        return (
            None
            if values is None
            else SpecialTokens.from_json(
                values, f"{self.directory / RUN_FILE}: field `special_tokens`"
            )
        )

    @property
    def has_seeded_step_0(self) -> bool:
        """Return whether the weights of step 0 follow from the seed without a checkpoint.

        They do not in a run that starts from other weights or from a Hugging Face model.
        """
        return self.start.kind == "new" and not self.origin

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Check the vocabulary of the tokenizer in the directory.

        Raises:
            InputError: It is not the run's, or too large for the model.
        """
        where = self.directory / TOKENIZER_DIR
        expected = str(self.identity.get("tokenizer"))
        if vocabulary.fingerprint != expected:
            raise InputError(
                f"{where}: found another tokenizer than the run's (fingerprint "
                f"{vocabulary.fingerprint[:12]}, run.json says "
                f"{expected[:12]}); put the one back that the run wrote there"
            )
        if vocabulary.size > self.vocab_size:
            rows = f"the {self.vocab_size} rows that run.json says"
            raise InputError(f"{where}: found {vocabulary.size} ids, expected at most {rows}")

    def schedule(self, vocabulary: Vocabulary) -> Schedule:
        """Return the run's schedule of objectives, built with `vocabulary`.

        Raises:
            InputError: It cannot be built, for example as an objective is not installed.
        """
        try:
            return Schedule.build(
                self.settings.schedule_text,
                self.settings.total_iters,
                vocabulary,
                self.settings.seed,
            )
        except InputError as error:
            raise InputError(
                f"--load {self.directory}: its model card cannot be written, "
                f"as its schedule cannot be read ({error}); install the package of the objective"
            ) from None

    def exportable_steps(self) -> list[int]:
        """Return, sorted, the steps of all checkpoints, and 0 if it follows from the seed.

        Checkpoints after the newest complete one are left out.

        Raises:
            InputError: There is no complete checkpoint, even if step 0 follows from the seed, or a
                file of one is missing or cut short.
        """
        checkpoints = CheckpointDir(self.directory / "checkpoints")
        self.newest_step(checkpoints)
        steps = checkpoints.steps_up_to_tracker()
        for step in steps:
            checkpoints.read_state(step)
        return sorted({*steps, *([0] if self.has_seeded_step_0 else [])})

    def newest_step(self, checkpoints: CheckpointDir, flag: str = "--load") -> int:
        """Return the step of the newest complete checkpoint by the tracker file.

        The checkpoint may have been removed since.

        Args:
            checkpoints: Directory `checkpoints` of this run.
            flag: Flag that errors name.

        Raises:
            InputError: No checkpoint is complete yet, or the tracker file cannot be read or has no
                number.
        """
        newest = checkpoints.tracked_step()
        if newest is None:
            unfinished = any(checkpoints.directory.glob(".iter_*"))
            reason = "only an unfinished checkpoint" if unfinished else "no checkpoint yet"
            raise InputError(
                f"{flag} {self.directory}: {reason}; give the run's command again to continue to "
                "its next checkpoint"
            )
        return newest

    @contextlib.contextmanager
    def load_encoder(self, step: int | None, length: int = 1) -> "Iterator[tuple[int, Encoder]]":
        """Load a checkpoint in this one process and yield its step and encoder.

        It is a context manager, with a process group within the block. The encoder has this
        object's `model` and `dtype`, is on the accelerator if there is one, and requires no
        gradients. Step 0 without a checkpoint is drawn from the seed if `has_seeded_step_0`.

        Args:
            step: Step of the checkpoint (with --phases call `at_step` before); None: the newest.
            length: Maximum number of tokens of the documents that the encoder accepts.

        Raises:
            InputError: The checkpoint is missing, damaged, or removed while it is read.
        """
        backend.init_distributed(backend.ParallelConfig(), seed=0)
        try:
            from megaenc.model.encoder import build_encoder
            from megaenc.training.checkpoint.loader import CheckpointLoader, load_model_weights

            checkpoints = CheckpointLoader(self.directory / "checkpoints")
            loaded_step = self.newest_step(checkpoints) if step is None else step
            drawn = loaded_step == 0 and self.has_seeded_step_0 and not checkpoints.path(0).exists()
            seed = self.settings.seed if drawn else None
            encoder = build_encoder(
                self.model, self.vocab_size, length, backend.ParallelConfig(), self.dtype, seed=seed
            )
            if not drawn:
                with report_removal(checkpoints, loaded_step):
                    load_model_weights(checkpoints, loaded_step, encoder, identity=self.identity)
            yield loaded_step, encoder.requires_grad_(False)
        finally:
            backend.destroy_distributed()


@contextlib.contextmanager
def report_removal(
    checkpoints: CheckpointDir, step: int, flag: str = "--ckpt-step"
) -> Iterator[None]:
    """Convert errors in the block to an InputError if the checkpoint was removed.

    It is a context manager around reading: a run may remove an old checkpoint meanwhile. Then all
    errors are converted except InputErrors that are no CheckpointReadError; else all pass.

    Args:
        step: Step of the checkpoint that is read.
        flag: Flag that the error names.
    """
    try:
        yield
    except Exception as error:  # as many types as there are files and readers of them
        if (
            isinstance(error, InputError) and not isinstance(error, CheckpointReadError)
        ) or checkpoints.is_complete(step):
            raise
        raise InputError(
            f"{checkpoints.path(step)}: was removed while it was read, "
            "as runs remove old checkpoints; "
            f"expected one that stays ({flag}, or wait for the end of the run)"
        ) from None


def open_run_checkpoint(directory: Path, flag: str = "--load") -> RunCheckpoint:
    """Open a run directory by its config.yaml and run.json; no checkpoint is read.

    Args:
        flag: Flag that errors name.

    Raises:
        InputError: A file is missing or invalid, or the two do not fit each other.
    """
    if not os.path.isfile(directory / CONFIG_FILE):
        raise InputError(
            f"{flag} {directory}: no {CONFIG_FILE} there, "
            "expected the directory that a pretraining run got as --save"
        )
    facts, start = _read_facts(directory / RUN_FILE)
    settings = read_config_file(str(directory / CONFIG_FILE))
    vocab_size = facts["vocab_size"]
    identity = facts["identity"]
    _check_config_matches(settings, identity, directory / CONFIG_FILE)
    if settings.shape.parameter_count(vocab_size) != facts["parameters"]:
        expected = f"the rows of a model of {facts['parameters']} parameters"
        raise InputError(
            f"{directory / RUN_FILE}: field `vocab_size`: found {vocab_size}, expected {expected}"
        )
    if (configured := settings.shape.vocab_size) not in (None, vocab_size):
        raise InputError(
            f"{directory / CONFIG_FILE}: field `vocab_size`: found {configured}, "
            f"expected {vocab_size} as in {RUN_FILE}"
        )
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    final = settings.phase_configs[-1].settings
    return RunCheckpoint(
        directory,
        final.shape,
        vocab_size,
        final.data.seq_length,
        dtype,
        identity,
        settings,
        start,
        facts,
    )


def _read_facts(file: Path) -> tuple[dict[str, Any], RunInit]:
    """Read run.json and return its content and the `RunInit` in it.

    Raises:
        InputError: A field has a wrong type or value.
    """
    facts, start = read_run_metadata(file)
    try:
        sizes = {name: facts[name] for name in ("vocab_size", "parameters")}
        mask = facts.get("source", {}).get("mask_token")
        parts = [] if mask is None else [MaskToken(**mask)]
        if (merge := facts.get("source", {}).get("merge")) is not None:
            record = MergeRecord.parse(merge)
            parts += [record, *record.checkpoints, *([record.base] if record.base else [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: {error!r}; expected the run.json of a pretraining run") from None
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise InputError(
                f"{file}: field `{name}`: found {value!r}, expected a number of 1 or more"
            )
    for part in parts:
        plain = {
            name: value
            for name, value in vars(part).items()
            if not isinstance(value, tuple | dict | MergedCheckpoint)
        }
        flags.replace_fields(part, plain, source=f"{file}: start")  # checks the type of each field
    for stage in start.before:
        if stage.family and stage.family not in FAMILIES:
            raise InputError(
                f"{file}: start: field `family`: found {stage.family!r}, "
                f"expected one of {KNOWN_FAMILIES}"
            )
    return facts, start


def _check_config_matches(settings: PretrainConfig, identity: dict[str, Any], file: Path) -> None:
    """Check that config.yaml (`file`) agrees with the weights' identity in run.json.

    Raises:
        InputError: A field differs; the message names the first one.
    """
    settings = settings.phase_configs[-1].settings
    config = flags.flatten(settings.shape) | {"bf16": settings.bf16}
    # It is checked against `vocab_size` of run.json, as it is optional in the config.
    del config["vocab_size"]
    training_fields = {"seed": settings.seed, "seq_length": settings.data.seq_length}
    # Converted models have neither.
    config |= {name: value for name, value in training_fields.items() if name in identity}
    for name, value in config.items():
        if value != (expected := identity.get(name)):
            raise InputError(
                f"{file}: field `{name}`: found {value}, expected {expected}, which {RUN_FILE} has"
            )
