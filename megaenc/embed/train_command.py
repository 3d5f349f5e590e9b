r"""Train an embedding model on pairs of queries and documents by InfoNCE.

The model is written for sentence-transformers.

megaenc embed train --model demo/hf --data pairs.jsonl --output demo/embedder
torchrun --nproc-per-node 2 -m megaenc embed train --model demo/hf --data pairs.jsonl \
    --output demo/embedder
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megaenc import flags
from megaenc.console import print_rank_0, silence_libraries
from megaenc.dist_env import (
    die_with_launcher,
    exit_if_restart_forbidden,
    forbid_restart,
    get_rank,
)
from megaenc.embed.config import (
    TRAINING_DETAILS,
    EmbedTrainConfig,
    NonFiniteTrainingError,
    TrainedEmbedder,
)
from megaenc.errors import handle_command_errors
from megaenc.machine import check_process_count
from megaenc.output_paths import check_parent_writable, create_parent_with_rollback, refuse_existing
from megaenc.processes import exit_on_sigterm


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
