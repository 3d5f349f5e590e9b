r"""Train an embedding model on pairs of queries and documents by InfoNCE.

The model is written for sentence-transformers.

megaenc embed train --model demo/hf --data pairs.jsonl --output demo/embedder
torchrun --nproc-per-node 2 -m megaenc embed train --model demo/hf --data pairs.jsonl \
    --output demo/embedder
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaenc import flags
from megaenc.console import print_rank_0, silence_libraries
from megaenc.dist_env import (
    die_with_launcher,
    exit_if_restart_forbidden,
    forbid_restart,
    get_rank,
)
from megaenc.embed.config import TRAINING_DETAILS, ContrastiveConfig, NonFiniteTrainingError
from megaenc.errors import handle_command_errors
from megaenc.flags import PositiveInt
from megaenc.machine import check_process_count
from megaenc.output_paths import check_parent_writable, create_parent_with_rollback, refuse_existing
from megaenc.processes import exit_on_sigterm


@dataclass(frozen=True)
class EmbedTrainConfig:
    """Options of `megaenc embed train`: model, pairs, output, training and saving.

    Each field is a flag, read by `flags.parse_with_config`. `model`, `data`, a tuple of files or
    data sets of pairs, and `output` must not stay empty, which the constructor does not check.
    `output` is a new directory; an unfinished training is resumed from OUTPUT.state. `config` is a
    YAML file of flags, and `contrastive` has the flags of ContrastiveConfig. States are saved every
    `save_interval` steps, and a row logged every `log_interval`.
    """

    config: str = ""
    """YAML file of flags; flags on the command line override it"""
    model: str = ""
    """Hugging Face or sentence-transformers directory, or a model of the Hub as ORG/NAME"""
    data: tuple[str, ...] = ()
    """files or data sets of pairs of a query and a document, maybe with hard negatives"""
    output: str = ""
    """new directory for the trained model; OUTPUT.state keeps an unfinished training, which the
    same command resumes"""
    contrastive: ContrastiveConfig = field(default_factory=ContrastiveConfig)
    """contrastive training: batches, schedule, optimizer, loss and texts"""
    save_interval: PositiveInt = 100
    """steps between saved states, from which the same command resumes"""
    log_interval: PositiveInt = 1
    """steps between rows of training.jsonl; the last step always has one"""


@dataclass(frozen=True)
class TrainedEmbedder:
    """Trained embedding model: its directory for sentence-transformers, and its loss."""

    directory: Path
    steps: int
    """Steps of the training, with those before a resume."""
    loss: float
    """InfoNCE loss of the last step, over its whole batch."""


@handle_command_errors
def train_main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc embed train`: train or resume unless finished, and write the model.

    All ranks call it. An unfinished training is resumed from OUTPUT.state, a finished one only
    reported. The process exits with 1 if the loss or gradient norm is NaN or inf, with 2 at wrong
    input, such as an output of something else or of other settings.

    Args:
        argv: The flags; None: those of this process.
    """
    die_with_launcher()
    exit_if_restart_forbidden()
    silence_libraries()
    settings = flags.parse_with_config(
        EmbedTrainConfig, argv, prog="megaenc embed train", description=__doc__
    )
    flags.check_given(settings, "embed train", "model", "data", "output")
    with exit_on_sigterm():
        try:
            train_embedding_model(settings)
        except NonFiniteTrainingError as error:
            if not get_rank():
                print(
                    f"error: {error}; choose a smaller --learning-rate or --precision fp32",
                    file=sys.stderr,
                    flush=True,
                )
            forbid_restart(1)
            sys.exit(1)


def train_embedding_model(settings: EmbedTrainConfig) -> TrainedEmbedder:
    """Train or resume an embedding model unless it is finished, and write it.

    All ranks call it together.

    Raises:
        InputError: Settings, model, data or output are unusable.
        NonFiniteTrainingError: The loss or gradient norm is NaN or inf; the state is removed.
    """
    settings.contrastive.check()
    check_process_count("--threads", settings.contrastive.threads)
    output = Path(settings.output)
    if not os.path.isfile(output / TRAINING_DETAILS):  # False for a name that is too long too
        refuse_existing(output, "--output")
    check_parent_writable(output, "--output")
    with create_parent_with_rollback(output, "--output"):
        print_rank_0("importing torch and transformers")
        from megaenc.embed.train_run import run_training

        return run_training(settings, output)
