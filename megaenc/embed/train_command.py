"""Train an embedding model on pairs of queries and documents by InfoNCE, and write it for sentence-transformers.

megaenc embed train --model demo/hf --data pairs.jsonl --output demo/embedder
torchrun --nproc-per-node 2 -m megaenc embed train --model demo/hf --data pairs.jsonl --output demo/embedder
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megaenc import __version__, flags
from megaenc.atomic_io import atomic_write, find_stale_temp_files, remove_path
from megaenc.console import ProgressLine, format_duration, print_rank_0, silence_libraries
from megaenc.dist_env import get_rank, get_world_size
from megaenc.embed.config import TRAINING_DETAILS, ContrastiveConfig
from megaenc.errors import InputError, handle_command_errors
from megaenc.flags import check_minimums
from megaenc.json_files import read_json_object, read_json_or_empty
from megaenc.locks import try_lock
from megaenc.machine import check_process_count
from megaenc.output_paths import check_parent_writable, create_parent_with_rollback, refuse_existing
from megaenc.processes import exit_on_sigterm
from megaenc.torchelastic import die_with_launcher, exit_if_restart_forbidden, exit_without_restart

if TYPE_CHECKING:
    from megaenc.embed.embedder import EmbeddingConfig
    from megaenc.embed.pairs import PairData

Result = TypeVar("Result")
_SETTINGS = "settings.json"
_CONTENTS = {"model": "weights or config.json", "tokenizer": "tokenizer", "data": "pairs"}
"""Contents that fingerprints identify, by the fingerprint's name."""


@dataclass(frozen=True)
class EmbedTrainConfig:
    """Options of `megaenc embed train`: base model, pairs, output folder, contrastive training, and saving."""

    config: str = ""
    """YAML file of flags; flags on the command line override it"""
    model: str = ""
    """Hugging Face or sentence-transformers folder, or a model of the Hub as ORG/NAME"""
    data: tuple[str, ...] = ()
    """files or data sets of pairs of a query and a document, maybe with hard negatives"""
    output: str = ""
    """new folder for the trained model; OUTPUT.state keeps an unfinished training, which the same command resumes"""
    contrastive: ContrastiveConfig = field(default_factory=ContrastiveConfig)
    save_interval: int = 100
    """steps between saved states, from which the same command resumes"""
    log_interval: int = 1
    """steps between rows of training.jsonl; the last step always has one"""


@handle_command_errors
def train_main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc embed train`: train unless finished before, write the model; exit with 1 if the loss is NaN or inf."""
    die_with_launcher()
    exit_if_restart_forbidden()
    silence_libraries()
    settings = flags.parse_with_config(EmbedTrainConfig, argv, prog="megaenc embed train", description=__doc__)
    for name in ("model", "data", "output"):
        if not getattr(settings, name):
            raise InputError(f"--{name}: missing; see `megaenc embed train --help`")
    settings.contrastive.check()
    check_process_count("--threads", settings.contrastive.threads)
    check_minimums(settings, save_interval=1, log_interval=1)
    output = Path(settings.output)
    if not os.path.isfile(output / TRAINING_DETAILS):  # False for a name that is too long too
        refuse_existing(output, "--output")
    check_parent_writable(output, "--output")
    with exit_on_sigterm(), create_parent_with_rollback(output, "--output"):
        _run(settings, output)


def _run(settings: EmbedTrainConfig, output: Path) -> None:
    """Compare with what is recorded at the output, then train, or report that the training is finished."""
    print_rank_0("importing torch and transformers")
    from megaenc.backend.device import detect_backend
    from megaenc.backend.initialize import init_process_group
    from megaenc.embed.embedder import fetch_model, override_config, read_embedding_config
    from megaenc.embed.pairs import load_pairs
    from megaenc.finetune.model.fingerprint import compute_model_fingerprints, compute_tokenizer_fingerprint

    backend, state = detect_backend(), output.with_name(f"{output.name}.state")
    folder = fetch_model(settings.model)
    embedding = override_config(read_embedding_config(folder), settings.contrastive)
    is_old_state = "special_tokens" not in read_json_or_empty(state / _SETTINGS).get("config", {"special_tokens": ""})
    is_plain = not (Path(folder) / "modules.json").exists()
    if embedding.special_tokens == "own" and is_plain and not is_old_state:  # a begun training goes on with its texts
        embedding = dataclasses.replace(embedding, special_tokens="")
    precision = settings.contrastive.precision or ("bf16" if backend.has_bf16 else "fp32")
    pairs = load_pairs(settings.data)
    names = ("pooling", "max_length", "query_prefix", "document_prefix")
    resolved = {name: getattr(embedding, name) for name in names} | {"attention": embedding.attention or ""}
    contrastive = dataclasses.replace(settings.contrastive, precision=precision, **resolved)
    fingerprints = {"model": compute_model_fingerprints([folder], "")[0]}
    fingerprints |= {"tokenizer": compute_tokenizer_fingerprint(folder), "data": pairs.digest}
    record = json.loads(json.dumps({"config": dataclasses.asdict(contrastive), "fingerprints": fingerprints}))
    if (output / TRAINING_DETAILS).is_file():
        details = read_json_object(output / TRAINING_DETAILS)
        _check_same_settings(output / TRAINING_DETAILS, details, record)
        print_rank_0(f"{output}: finished before, {details['steps']:,} steps, loss {details['loss']:.4f}")
        return
    if state.is_dir() and any(state.iterdir()):
        if not (state / _SETTINGS).is_file():
            raise InputError(
                f"{state}: no {_SETTINGS}, expected the state of a training or no such folder; choose another --output"
            )
        _check_same_settings(state / _SETTINGS, read_json_object(state / _SETTINGS), record)
    elif state.exists() and not state.is_dir():
        raise InputError(f"{state}: found a file, expected the folder of a training's state; choose another --output")
    if get_world_size() > 1:
        if not backend.is_cpu:
            import torch

            torch.cuda.set_device(backend.device)
        init_process_group(backend)
    with _hold_lock(output), _end_process_group():
        _train(settings, output, state, folder, embedding, contrastive, pairs, record)


def _train(
    settings: EmbedTrainConfig,
    output: Path,
    state: Path,
    folder: str,
    embedding: "EmbeddingConfig",
    contrastive: ContrastiveConfig,
    pairs: "PairData",
    record: dict[str, Any],
) -> None:
    """Train the model in `folder`, resuming from the folder `state`, and export it to `output`."""
    import torch

    from megaenc.backend.device import detect_backend
    from megaenc.backend.initialize import retain_freed_memory
    from megaenc.embed.contrastive import ContrastiveData
    from megaenc.embed.embedder import Embedder
    from megaenc.embed.export import check_exportable, export_embedder
    from megaenc.embed.train import ContrastiveTrainer, NonFiniteTrainingError, StateFolder, train
    from megaenc.finetune.train import make_deterministic

    backend = detect_backend()
    make_deterministic(contrastive.threads)
    if backend.is_cpu:
        retain_freed_memory()
    dtype = torch.bfloat16 if contrastive.precision == "bf16" else torch.float32
    embedder = Embedder(folder, embedding, device=backend.device, dtype=dtype, check=check_exportable)
    if settings.contrastive.max_length > embedder.max_length:
        raise InputError(
            f"--max-length: found {settings.contrastive.max_length}, expected at most the {embedder.max_length} tokens that the "
            "model reads"
        )
    with ProgressLine("tokenizing", total=None, closing=False) as line:
        data = ContrastiveData.build(
            pairs.pairs,
            lambda texts: embedder.tokenize(texts, lambda done: line.update(done, texts=done)),
            prefixes=(embedding.query_prefix, embedding.document_prefix),
            negatives=contrastive.negatives,
        )
    trainer = ContrastiveTrainer(embedder, data, contrastive)
    print_rank_0(
        f"{settings.model}: {embedding.pooling} pooling, {embedder.backbone.attention} attention, "
        f"at most {embedder.max_length} tokens, {contrastive.precision}"
    )
    texts, tokens = len(data.rows), int(data.lengths.sum())
    print_rank_0(f"{len(pairs.pairs):,} pairs, {texts:,} distinct texts, {tokens:,} tokens: {trainer.steps:,} steps")

    def write_settings() -> None:
        state.mkdir(exist_ok=True)
        if not (state / _SETTINGS).exists():
            atomic_write(state / _SETTINGS, json.dumps(record, indent=2) + "\n")

    _call_on_rank_0(write_settings)
    try:
        progress = train(trainer, StateFolder(state), save_interval=settings.save_interval, log_interval=settings.log_interval)
    except NonFiniteTrainingError as error:
        _call_on_rank_0(lambda: remove_path(state))  # the same settings would fail again
        if not get_rank():
            print(f"error: {error}; choose a smaller --learning-rate or --precision fp32", file=sys.stderr, flush=True)
        exit_without_restart(1)
        sys.exit(1)
    trainer.finish()
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
        # The lock is held: temporary folders are of killed processes.
        for leftover in (state, *find_stale_temp_files(output)):
            remove_path(leftover)
    print_rank_0(
        f"written: {output}: loss {progress.loss:.4f} after {progress.step:,} steps in {format_duration(progress.seconds)}; "
        f"{progress.masked:,} scores masked as false negatives"
    )


def _check_same_settings(file: Path, recorded: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise InputError, naming the flag, unless `file` records the settings, model and data of this command."""
    advice = "expected the same command, another --output, or this folder removed"
    config, fingerprints = (recorded.get(part) for part in ("config", "fingerprints"))
    if not isinstance(config, dict) or not isinstance(fingerprints, dict):
        raise InputError(f"{file}: no settings of `megaenc embed train`, {advice}")
    for name, value in current["config"].items():
        recorded_value = config.get(name, getattr(ContrastiveConfig(), name))  # absent in files of earlier versions
        if recorded_value != value:
            raise InputError(f"--{name.replace('_', '-')}: found {value!r}, but {recorded_value!r} in {file}; {advice}")
    for name, value in current["fingerprints"].items():
        if fingerprints.get(name) != value:
            flag = "--data" if name == "data" else "--model"
            raise InputError(f"{flag}: the content of its {_CONTENTS[name]} is not that recorded in {file}; {advice}")


def _call_on_rank_0(function: Callable[[], Result]) -> Result:
    """Call `function` on rank 0 only; return its result, or raise its InputError, on every rank."""
    if get_world_size() == 1:
        return function()
    from megaenc.training.distributed.collectives import broadcast_call

    return broadcast_call(function)


@contextlib.contextmanager
def _hold_lock(output: Path) -> Iterator[None]:
    """Hold the lock of an output folder during the block, on rank 0; InputError on every rank if another process holds it."""
    with contextlib.ExitStack() as stack:
        if not _call_on_rank_0(lambda: stack.enter_context(try_lock(output.with_name(f".{output.name}.lock")))):
            raise InputError(f"--output {output}: another process trains this model; wait for it or choose another --output")
        yield


@contextlib.contextmanager
def _end_process_group() -> Iterator[None]:
    """Destroy the process group after the block, also if all ranks raise InputError together."""
    import torch.distributed as dist

    try:
        yield
    except InputError:
        if dist.is_initialized() and get_world_size() > 1:
            dist.destroy_process_group()
        raise
    if dist.is_initialized() and get_world_size() > 1:
        dist.destroy_process_group()
