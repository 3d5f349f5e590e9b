"""Contrastive training of an embedding model: steps, resuming, data parallelism."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megaenc.atomic_io import atomic_files, fsync_path
from megaenc.console import ProgressLine
from megaenc.counter_rng import permutation, random_words
from megaenc.dist_env import get_rank, get_world_size
from megaenc.embed.config import TRAINING_LOG, ContrastiveConfig, NonFiniteTrainingError
from megaenc.embed.contrastive import ContrastiveBatch, ContrastiveData, divide_texts
from megaenc.embed.embedder import Embedder
from megaenc.errors import InputError, first_error_line
from megaenc.finetune.model.backbone import batch_by_tokens, pack_texts
from megaenc.finetune.model.gradient_caching import backward_by_packs
from megaenc.finetune.optimizer import MasterWeightOptimizer, check_warmup, count_training_steps

STATE = "state.pt"


def compute_batch_boundaries(pairs: int, batch_size: int) -> list[int]:
    """Return the boundaries of an epoch's batches, in pairs, from 0 to `pairs`.

    Batch i has the pairs from boundary i up to boundary i + 1. A last batch of one pair joins the
    one before, as it may have no negative. `pairs` is at least 1.
    """
    boundaries = [*range(0, pairs, batch_size), pairs]
    if boundaries[-1] - boundaries[-2] == 1 and len(boundaries) > 2:
        del boundaries[-2]
    return boundaries


def iterate_contrastive_batches(
    data: ContrastiveData, config: ContrastiveConfig, first_step: int = 0
) -> Iterator[ContrastiveBatch]:
    """Yield the batch of each step from `first_step`, counted from 0, to the last.

    Pairs are shuffled in every epoch by the seed, the same on all ranks. A batch without a
    negative, whose loss would be constant, has the pairs of its neighbours in the epoch too; the
    neighbours keep them.

    Raises:
        InputError: From the iterator; there is no negative in a whole epoch.
    """
    boundaries = compute_batch_boundaries(len(data.queries), config.batch_size)
    batches = len(boundaries) - 1
    shuffled_epoch = -1
    for step in range(first_step, count_training_steps(config.epochs, config.max_steps, batches)):
        epoch, low = divmod(step, batches)
        if epoch != shuffled_epoch:
            order = permutation(
                config.seed, "fine-tuning order", len(data.queries), counters=(epoch,)
            )
            shuffled_epoch = epoch
        high = low + 1
        batch = data.build_batch(order[boundaries[low] : boundaries[high]])
        while not batch.has_negatives:
            if high - low == batches:
                raise InputError(
                    "--data: found no negative, as every document answers every query or is the "
                    "query itself; "
                    "expected documents of other queries, or hard negatives with --negatives above "
                    "0"
                )
            if low:
                low -= 1
            else:
                high += 1
            batch = data.build_batch(order[boundaries[low] : boundaries[high]])
        yield batch


class ContrastiveTrainer:
    """Model, data and optimizer of a contrastive training.

    All ranks, in a process group if there are several, build it from `embedder`, which it sets to
    training mode, `data` and `config`, call `step` with the same batch, `steps` times in all, then
    `finish`. Each rank embeds its part of a batch's texts; the loss is that of the whole batch, and
    the gradients of the weights are summed over ranks. `step` returns a loss or norm that is NaN or
    inf; `train` raises for it.

    Raises:
        InputError: There is no negative in a whole epoch, a size is larger than the embeddings, or
            the only step has learning rate 0.
    """

    def __init__(
        self, embedder: Embedder, data: ContrastiveData, config: ContrastiveConfig
    ) -> None:
        self.embedder = embedder
        self.data = data
        self.config = config
        batches = len(compute_batch_boundaries(len(data.queries), config.batch_size)) - 1
        self.steps = count_training_steps(config.epochs, config.max_steps, batches)
        check_warmup(self.steps, config.warmup)
        # Refuses pairs without a negative before any training
        next(iterate_contrastive_batches(data, config))
        full = embedder.backbone.hidden_size
        if wrong := [size for size in config.matryoshka_dims if size > full]:
            raise InputError(
                f"--matryoshka-dims: found {wrong[0]}, expected at most {full}, the size of the "
                "embeddings"
            )
        embedder.backbone.train()
        self.optimizer = MasterWeightOptimizer(
            embedder.backbone, learning_rate=config.learning_rate, steps=self.steps, protocol=config
        )

    def step(self, step: int, batch: ContrastiveBatch) -> tuple[float, float]:
        """Take step `step`, counted from 1; return (loss, unclipped gradient norm).

        All ranks call it with the same batch, and get the same numbers. No weight changes if either
        number is NaN or inf; nothing is raised. The norm is NaN if the loss is not finite. It seeds
        torch by step and rank.
        """
        words = random_words(
            self.config.seed, "contrastive dropout", 1, counters=(step, get_rank())
        )
        torch.manual_seed(int(words[0]) >> 1)  # so that no random state is saved
        loss = self.backward(batch)
        return (loss, self.optimizer.step()) if math.isfinite(loss) else (loss, math.nan)

    def backward(self, batch: ContrastiveBatch) -> float:
        """Add the gradients of a batch's loss to the parameters, and return the loss.

        All ranks call it with the same batch. The loss is that of the whole batch, and gradients
        are summed over ranks. No step is taken.
        """
        embedder = self.embedder
        ranks = get_world_size()
        device = embedder.backbone.device
        lengths = self.data.lengths[batch.texts]
        local_places = (
            divide_texts(lengths, ranks)[get_rank()] if ranks > 1 else np.arange(len(lengths))
        )
        parts = [
            local_places[part]
            for part in batch_by_tokens(lengths[local_places], self.config.tokens_per_forward)
        ]
        packs = [
            pack_texts([self.data.rows[text] for text in batch.texts[part]], device)
            for part in parts
        ]
        places = torch.from_numpy(np.concatenate([local_places[:0], *parts])).to(device)

        def compute_loss(vectors: Tensor) -> Tensor:
            all_vectors = vectors.new_zeros(len(lengths), vectors.shape[1])
            if ranks > 1:
                all_vectors[places] = vectors.detach()
                dist.all_reduce(all_vectors)
            return batch.compute_loss(all_vectors.index_copy(0, places, vectors), self.config)

        if packs:
            loss = backward_by_packs(packs, embedder.pool, compute_loss)
        else:  # fewer texts than ranks
            loss = compute_loss(torch.zeros(0, embedder.backbone.hidden_size, device=device))
        if ranks > 1:
            self.optimizer.all_reduce_gradients()
        return loss.item()

    def finish(self) -> None:
        """Replace the parameters by their float32 master weights, and leave training mode.

        No step can be taken afterwards.
        """
        self.optimizer.close()
        masters = self.optimizer.get_masters()
        for parameter in self.embedder.backbone.parameters():
            parameter.data = masters.pop(parameter, parameter.data).float()
        self.embedder.backbone.eval()


@dataclass
class TrainingProgress:
    """Numbers of a training up to its last step, and the rows of its log.

    They are over all ranks, and include those before a resume; by default nothing has been trained.
    `loss` is that of step `step`, NaN before the first; in `seconds` of training, `tokens` were
    embedded, and `masked` scores left out as false negatives. `rows` are JSON-ready.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    """Tokens that were embedded, each distinct text of a batch counted once."""
    masked: int = 0
    """Scores that were masked as false negatives."""
    loss: float = math.nan
    rows: list[dict[str, Any]] = field(default_factory=list)


class StateDirectory:
    """Directory with the state of an unfinished training and the log of its losses.

    `StateDirectory(directory)` takes its Path; it must exist. state.pt has weights, AdamW's
    moments, schedule and step; training.jsonl is the log. All ranks call `load`, which sets a
    ContrastiveTrainer to the state, if there is one, and returns its TrainingProgress. Only rank 0
    calls `save`, for the state, and `append`, for a row of the log.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, trainer: ContrastiveTrainer) -> TrainingProgress:
        """Set the trainer to the saved state and return its progress.

        All ranks call it and read the file. Without a state the trainer stays as it is, and the
        progress is that of step 0. Rank 0 cuts rows of later steps off the log.

        Raises:
            InputError: The state cannot be read.
        """
        path = self.directory / STATE
        log = self.directory / TRAINING_LOG
        progress = TrainingProgress()
        if path.exists():
            try:
                state = torch.load(
                    path, map_location=trainer.embedder.backbone.device, weights_only=True
                )
                trainer.optimizer.load_state_dict(state["optimizer"])
                progress = TrainingProgress(**state["progress"])
                rows = map(
                    json.loads, log.read_text(encoding="utf-8").splitlines()[: state["rows"]]
                )
                progress.rows = [row for row in rows if row["step"] <= progress.step]
                if len(progress.rows) != state["rows"]:
                    raise ValueError(
                        f"{TRAINING_LOG} has {len(progress.rows)} of {state['rows']} rows"
                    )
            except Exception as error:  # a damaged file may fail in any way
                raise InputError(
                    f"{path}: cannot be read ({first_error_line(error, 80)}); remove "
                    f"{self.directory} "
                    "to start over"
                ) from None
        if not get_rank():
            with atomic_files(log) as [temporary]:
                temporary.write_text(
                    "".join(json.dumps(row) + "\n" for row in progress.rows), encoding="utf-8"
                )
        return progress

    def append(self, row: dict[str, Any]) -> None:
        """Append a row, a line of JSON, to the log; only rank 0 calls it.

        Args:
            row: Values by name, with "step".
        """
        with open(self.directory / TRAINING_LOG, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    def save(self, trainer: ContrastiveTrainer, progress: TrainingProgress) -> None:
        """Replace the saved state, atomically, after the log is on disk.

        Only rank 0 calls it.
        """
        fsync_path(self.directory / TRAINING_LOG)
        numbers = {name: value for name, value in vars(progress).items() if name != "rows"}
        state = {
            "optimizer": trainer.optimizer.state_dict(),
            "progress": numbers,
            "rows": len(progress.rows),
        }
        with atomic_files(self.directory / STATE) as [temporary]:
            torch.save(state, temporary)


def train(
    trainer: ContrastiveTrainer, state: StateDirectory, *, save_interval: int, log_interval: int
) -> TrainingProgress:
    """Train from the saved state, if there is one, to the last step.

    All ranks call it together and get the progress at the last step; it does not call `finish`. It
    saves a state to `state` every `save_interval` steps, logs a row there (step, loss,
    gradient_norm, learning_rate) every `log_interval` steps, and does both at the last step. A
    progress line is shown.

    Raises:
        NonFiniteTrainingError: A loss or gradient norm is NaN or inf.
        InputError: The saved state cannot be read.
    """
    progress = state.load(trainer)
    data = trainer.data
    is_writer = not get_rank()
    began = time.monotonic() - progress.seconds
    with ProgressLine("training", total=trainer.steps) as line:
        if progress.step:
            line.print_line(f"resuming after step {progress.step:,} of {trainer.steps:,}")
            line.update(progress.step)
        batches = iterate_contrastive_batches(data, trainer.config, progress.step)
        for step, batch in enumerate(batches, start=progress.step + 1):
            rate = trainer.optimizer.learning_rate
            loss, norm = trainer.step(step, batch)
            for quantity, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    raise NonFiniteTrainingError(f"the {quantity} is {value} in step {step}")
            progress.step = step
            progress.loss = loss
            progress.seconds = time.monotonic() - began
            progress.tokens += int(data.lengths[batch.texts].sum())
            progress.masked += len(batch.masked_rows)
            if step % log_interval == 0 or step == trainer.steps:
                row = {"step": step, "loss": loss, "gradient_norm": norm, "learning_rate": rate}
                progress.rows.append(row)
                if is_writer:
                    state.append(row)
            if is_writer and (step % save_interval == 0 or step == trainer.steps):
                state.save(trainer, progress)
            line.update(step, loss=loss)
    return progress
