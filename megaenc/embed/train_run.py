"""Run of `megaenc embed train`: check of its records, training, and export."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megaenc import __version__
from megaenc.atomic_io import atomic_write, find_stale_temp_files, remove_path, try_lock
from megaenc.backend.device import Backend, detect_backend
from megaenc.backend.initialize import init_process_group, retain_freed_memory
from megaenc.console import ProgressLine, format_duration, print_rank_0
from megaenc.dist_env import get_rank, get_world_size
from megaenc.embed.config import (
    TRAINING_DETAILS,
    ContrastiveConfig,
    EmbedTrainConfig,
    NonFiniteTrainingError,
    TrainedEmbedder,
)
from megaenc.embed.contrastive import ContrastiveData
from megaenc.embed.embedder import (
    Embedder,
    EmbeddingConfig,
    fetch_model,
    override_config,
    read_embedding_config,
)
from megaenc.embed.export import check_exportable, export_embedder
from megaenc.embed.pairs import load_pairs
from megaenc.embed.train import (
    ContrastiveTrainer,
    StateDirectory,
    TrainingProgress,
    train,
)
from megaenc.errors import InputError
from megaenc.finetune.model.fingerprint import (
    compute_model_fingerprints,
    compute_tokenizer_fingerprint,
)
from megaenc.finetune.train import make_deterministic
from megaenc.json_files import read_json_object

Result = TypeVar("Result")
_SETTINGS = "settings.json"
_CONTENTS = {"model": "weights or config.json", "tokenizer": "tokenizer", "data": "pairs"}
"""Contents that fingerprints identify, by the fingerprint's name."""


def run_training(settings: EmbedTrainConfig, output: Path) -> TrainedEmbedder:
    """Train a model, from its saved state if there is one, and export it to `output`.

    All ranks call it together; if there are several, it makes their process group. If `output` has
    a model of the same settings, it is only reported. The state is in OUTPUT.state until the end.

    Raises:
        InputError: The output or the state is of other settings, or the model or data cannot be
            used.
        NonFiniteTrainingError: The loss or gradient norm is NaN or inf; the state is removed.
    """
    backend = detect_backend()
    state = output.with_name(f"{output.name}.state")
    directory = fetch_model(settings.model)
    embedding = override_config(read_embedding_config(directory), settings.contrastive)
    is_plain = not (Path(directory) / "modules.json").exists()
    if embedding.special_tokens == "own" and is_plain:
        embedding = dataclasses.replace(embedding, special_tokens="")
    pairs = load_pairs(settings.data)
    config = dataclasses.replace(
        settings.contrastive,
        precision=settings.contrastive.precision or ("bf16" if backend.has_bf16 else "fp32"),
        pooling=embedding.pooling,
        max_length=embedding.max_length,
        query_prefix=embedding.query_prefix,
        document_prefix=embedding.document_prefix,
        attention=embedding.attention or "",
    )
    fingerprints = {
        "model": compute_model_fingerprints([directory], "")[0],
        "tokenizer": compute_tokenizer_fingerprint(directory),
        "data": pairs.digest,
    }
    record = json.loads(
        json.dumps({"config": dataclasses.asdict(config), "fingerprints": fingerprints})
    )
    if (output / TRAINING_DETAILS).is_file():
        details = read_json_object(output / TRAINING_DETAILS)
        _check_same_settings(output / TRAINING_DETAILS, details, record)
        print_rank_0(
            f"{output}: finished before, {details['steps']:,} steps, loss {details['loss']:.4f}"
        )
        return TrainedEmbedder(output, details["steps"], details["loss"])
    if state.exists() and not state.is_dir():
        raise InputError(
            f"{state}: found a file, expected the directory of a training's state; choose another "
            "--output"
        )
    if state.is_dir() and any(state.iterdir()):
        if not (state / _SETTINGS).is_file():
            raise InputError(
                f"{state}: no {_SETTINGS}, expected the state of a training or no such directory; "
                "choose another --output"
            )
        _check_same_settings(state / _SETTINGS, read_json_object(state / _SETTINGS), record)

    if get_world_size() > 1:
        if not backend.is_cpu:
            torch.cuda.set_device(backend.device)
        init_process_group(backend)
    with _hold_lock(output), _end_process_group():
        embedder = _load_embedder(settings, directory, embedding, config, backend)
        with ProgressLine("tokenizing", total=None, closing=False) as line:
            data = ContrastiveData.build(
                pairs.pairs,
                lambda texts: embedder.tokenize(texts, lambda done: line.update(done, texts=done)),
                prefixes=(embedding.query_prefix, embedding.document_prefix),
                negatives=config.negatives,
            )
        trainer = ContrastiveTrainer(embedder, data, config)
        print_rank_0(
            f"{settings.model}: {embedding.pooling} pooling, {embedder.backbone.attention} "
            "attention, "
            f"at most {embedder.max_length} tokens, {config.precision}"
        )
        texts = len(data.rows)
        tokens = int(data.lengths.sum())
        print_rank_0(
            f"{len(pairs.pairs):,} pairs, {texts:,} distinct texts, {tokens:,} tokens: "
            f"{trainer.steps:,} steps"
        )
        progress = _train(settings, trainer, state, record)
        details = {
            "megaenc": __version__,
            "base_model": settings.model,
            "data": list(settings.data),
            **record,
            "pairs": len(pairs.pairs),
            "texts": texts,
            "max_length": embedder.max_length,
            "embedding_size": embedder.backbone.hidden_size,
            "attention": embedder.backbone.attention,
            "steps": progress.step,
            "tokens": progress.tokens,
            "loss": progress.loss,
            "masked": progress.masked,
            "seconds": round(progress.seconds, 1),
            "processes": get_world_size(),
        }
        _call_on_rank_0(lambda: export_embedder(output, embedder, data, details, progress.rows))
        if not get_rank():
            # The lock is held: temporary directories are of killed processes.
            for leftover in (state, *find_stale_temp_files(output)):
                remove_path(leftover)
    print_rank_0(
        f"written: {output}: loss {progress.loss:.4f} after {progress.step:,} steps in "
        f"{format_duration(progress.seconds)}; "
        f"{progress.masked:,} scores masked as false negatives"
    )
    return TrainedEmbedder(output, progress.step, progress.loss)


def _load_embedder(
    settings: EmbedTrainConfig,
    directory: str,
    embedding: EmbeddingConfig,
    config: ContrastiveConfig,
    backend: Backend,
) -> Embedder:
    """Return the Embedder of a directory, with an attention that can be exported.

    Raises:
        InputError: --max-length is beyond the model's.
    """
    make_deterministic(config.threads)
    if backend.is_cpu:
        retain_freed_memory()
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    embedder = Embedder(
        directory, embedding, device=backend.device, dtype=dtype, check=check_exportable
    )
    if settings.contrastive.max_length > embedder.max_length:
        raise InputError(
            f"--max-length: found {settings.contrastive.max_length}, expected at most the "
            f"{embedder.max_length} tokens that the "
            "model reads"
        )
    return embedder


def _train(
    settings: EmbedTrainConfig, trainer: ContrastiveTrainer, state: Path, record: dict[str, Any]
) -> TrainingProgress:
    """Train to the last step; remove the state if the loss becomes NaN or inf."""

    def write_settings() -> None:
        state.mkdir(exist_ok=True)
        if not (state / _SETTINGS).exists():
            atomic_write(state / _SETTINGS, json.dumps(record, indent=2) + "\n")

    _call_on_rank_0(write_settings)
    try:
        progress = train(
            trainer,
            StateDirectory(state),
            save_interval=settings.save_interval,
            log_interval=settings.log_interval,
        )
    except NonFiniteTrainingError:
        _call_on_rank_0(lambda: remove_path(state))  # the same settings would fail again
        raise
    trainer.finish()
    return progress


def _check_same_settings(file: Path, recorded: dict[str, Any], current: dict[str, Any]) -> None:
    """Check that `file` records the settings, model and data of this command.

    Raises:
        InputError: One of them differs; the message names its flag.
    """
    advice = "expected the same command, another --output, or this directory removed"
    config = recorded.get("config")
    fingerprints = recorded.get("fingerprints")
    if not isinstance(config, dict) or not isinstance(fingerprints, dict):
        raise InputError(f"{file}: no settings of `megaenc embed train`, {advice}")
    for name, value in current["config"].items():
        if config.get(name) != value:
            raise InputError(
                f"--{name.replace('_', '-')}: found {value!r}, but {config.get(name)!r} in {file}; "
                f"{advice}"
            )
    for name, value in current["fingerprints"].items():
        if fingerprints.get(name) != value:
            flag = "--data" if name == "data" else "--model"
            raise InputError(
                f"{flag}: the content of its {_CONTENTS[name]} is not that recorded in {file}; "
                f"{advice}"
            )


def _call_on_rank_0(function: Callable[[], Result]) -> Result:
    """Call `function` on rank 0 only; return its result on every rank.

    Raises:
        InputError: `function` raised it; every rank does.
    """
    if get_world_size() == 1:
        return function()
    from megaenc.training.distributed.collectives import broadcast_call

    return broadcast_call(function)


@contextlib.contextmanager
def _hold_lock(output: Path) -> Iterator[None]:
    """Hold the lock of an output directory on rank 0 during the block.

    Raises:
        InputError: Another process holds it; every rank raises.
    """
    with contextlib.ExitStack() as stack:
        if not _call_on_rank_0(
            lambda: stack.enter_context(try_lock(output.with_name(f".{output.name}.lock")))
        ):
            raise InputError(
                f"--output {output}: another process trains this model; wait for it or choose "
                "another --output"
            )
        yield


@contextlib.contextmanager
def _end_process_group() -> Iterator[None]:
    """Destroy the process group after the block, also after an error of all ranks."""
    try:
        yield
    except (InputError, NonFiniteTrainingError):
        if dist.is_initialized() and get_world_size() > 1:
            dist.destroy_process_group()
        raise
    if dist.is_initialized() and get_world_size() > 1:
        dist.destroy_process_group()
