"""The flags of `megaenc pretrain` that a manifest may give, known without loading torch, and what the plan reads of them."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaenc import flags
from megaenc.data.packing.blended_dataset import parse_weight
from megaenc.data.packing.packed_dataset import check_two_chunks_fit
from megaenc.errors import InputError
from megaenc.training.config import PretrainConfig, apply_preset
from megaenc.training.config_groups import OptimizerConfig
from megaenc.training.lr_schedule import resolve_steps

RESERVED_FLAGS = {
    *("config", "objective_schedule", "train_iters", "train_tokens", "seed", "rampup_batch_size"),
    *("branch_from", "branch_at", "init_from", "init_at", "skip_samples", "skip_packs"),
    *("save", "save_steps", "keep_last", "keep_every", "exit_interval", "exit_duration_in_mins", "dry_run"),
}
"""Flags that follow from the models and from where runs are put."""


def check_pretrain_flags(source: str, given: Mapping[str, Any]) -> None:
    """Raise InputError for a flag that there is not, of another type, or that the study decides; `source` is the place."""
    for name in given:
        if name in RESERVED_FLAGS:
            raise InputError(f"{source}: field `{name}`: found here, expected nowhere: it follows from `models` and the run")
    build_run_config(given, source)


def build_run_config(given: Mapping[str, Any], source: str = "pretrain") -> PretrainConfig:
    """Return `given` over the preset of its `model` over the defaults of `megaenc pretrain`. Raises InputError.

    bf16 is on unless given, as if the processor had it: to ask takes torch, and another machine may do the run.
    """
    values = {str(name): value for name, value in given.items()}
    with prefix_errors(source):
        default = apply_preset(PretrainConfig(bf16=True), str(values.get("model", "tiny")))
    return flags.replace_fields(default, values, source=source)


def check_run_config(run: PretrainConfig) -> None:
    """Raise InputError, naming the flag, for a shape or a size of a step that cannot be: the plan computes with them."""
    run.shape.check()
    values = flags.flatten(run)
    for name in ("seq_length", "global_batch_size", "micro_batch_size", "vocab_size"):
        if values[name] is not None and values[name] < 1:
            raise InputError(f"--{name.replace('_', '-')}: found {values[name]}, expected 1 or more")
    if run.data.packing == "random-length":
        check_two_chunks_fit(run.data.seq_length)


def resolve_flag_paths(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return `given` with the corpora, and a tokenizer that is a folder there, where they are: paths begin in `folder`."""
    found = {str(name): value for name, value in given.items()}
    if words := found.get("data_path"):
        words = [words] if isinstance(words, str) else words
        found["data_path"] = [word if parse_weight(str(word)) is not None else str(folder / str(word)) for word in words]
    if (tokenizer := found.get("tokenizer")) and (folder / str(tokenizer)).exists():  # otherwise a name of the Hub
        found["tokenizer"] = str(folder / str(tokenizer))
    return found


def warmup_and_decay_steps(rate: OptimizerConfig, total: int) -> tuple[int, int]:
    """Return the steps of warm-up and of decay in a run of `total` steps. Raises InputError for what cannot be."""
    warmup = resolve_steps("lr-warmup", rate.lr_warmup_iters, rate.lr_warmup_fraction, total)
    decay = resolve_steps("lr-wsd-decay", rate.lr_wsd_decay_iters, rate.lr_wsd_decay_fraction, total)
    if decay < 1:
        raise InputError(f"a decay of {decay} steps, expected 1 or more (lr_wsd_decay_iters)")
    if warmup + decay > total:
        what = f"a decay of {decay} steps" if decay > total else f"a warm-up of {warmup} and a decay of {decay} steps"
        raise InputError(f"{what} in a run of {total}, expected to fit (lr_warmup_iters, lr_wsd_decay_iters)")
    return warmup, decay


@contextlib.contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Put `place`, where in the manifest it stands, before the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
