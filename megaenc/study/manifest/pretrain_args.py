"""Flags of `megaenc pretrain` in a manifest: checks and path resolution.

Nothing here loads torch.
"""

import contextlib
import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaenc import flags
from megaenc.data.packing.data_path import has_wildcard, is_pattern, parse_weight
from megaenc.data.packing.packed_dataset import check_two_chunks_fit
from megaenc.errors import InputError
from megaenc.model.freezing import parse_freeze
from megaenc.training.config import PretrainConfig, apply_preset
from megaenc.training.lr_schedule import (
    WSD,
    LearningRateConfig,
    LearningRateSchedule,
    resolve_steps,
)

RESERVED_FLAGS = {
    "callbacks",
    "config",
    "objective_schedule",
    "phases",
    "train_iters",
    "train_tokens",
    "seed",
    "rampup_batch_size",
    "branch_from",
    "branch_at",
    "init_from",
    "init_at",
    "skip_samples",
    "skip_packs",
    "save",
    "save_steps",
    "keep_last",
    "keep_every",
    "exit_interval",
    "exit_duration_in_mins",
    "dry_run",
    "gpu",
}
"""Flags that the study sets itself, from the models and the study directory."""

STEP_FLAGS = {
    "lr_warmup_iters",
    "lr_warmup_fraction",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_fraction",
}
"""Flags that the study replaces by the steps of each model's warm-up and decay."""


def check_pretrain_flags(source: str, flag_values: Mapping[str, Any]) -> None:
    """Check each flag of `megaenc pretrain` in a section of the manifest.

    Flags that contradict each other, and paths, are not checked.

    Args:
        source: Place of the section, such as `sizes: 610m`, for error messages.
        flag_values: Values by field name.

    Raises:
        InputError: A flag is unknown, has a wrong value, or is one that the study sets itself.
    """
    for name in flag_values:
        if name in RESERVED_FLAGS:
            raise InputError(
                f"{source}: field `{name}`: found here, expected nowhere: the study sets it"
            )
    build_run_config(flag_values, source)


def build_run_config(flag_values: Mapping[str, Any], source: str = "pretrain") -> PretrainConfig:
    """Return the PretrainConfig of flags over the preset that their `model` names.

    The preset is `tiny` without `model`. bf16 is on by default, as if the device supported it:
    detecting that takes torch, and the run may be on another machine. Flags that contradict each
    other are not detected.

    Args:
        flag_values: Values by field name.
        source: Place of the flags, for error messages.

    Raises:
        InputError: A flag is unknown or has a wrong value.
    """
    values = {str(name): value for name, value in flag_values.items()}
    with prefix_errors(source):
        default = apply_preset(PretrainConfig(bf16=True), str(values.get("model", "tiny")))
    return flags.replace_fields(default, values, source=source)


def check_run_config(run: PretrainConfig) -> None:
    """Check shape, frozen parts and sequence length of the model of a run.

    Raises:
        InputError: The model is impossible or lacks a part of `freeze`, or a random-length
            sequence is too short for two chunks.
    """
    run.shape.check()
    parse_freeze(run.optimizer.freeze or (), run.shape)
    if run.data.packing == "random-length":
        check_two_chunks_fit(run.data.seq_length)


def resolve_flag_paths(flag_values: Mapping[str, Any], data_dir: Path) -> dict[str, Any]:
    """Return a copy of flags of `megaenc pretrain` with `data_dir` before their paths.

    data_path and valid_data_path become lists of words. Paths are the words of the former except
    weights, what follows NAME= in those of the latter, and the tokenizer if it exists in
    `data_dir`; otherwise it is a name on the Hub. Absolute paths stay. Nothing else must exist.
    """
    resolved = {str(name): value for name, value in flag_values.items()}
    if "data_path" in resolved:
        words = resolved["data_path"]
        if not isinstance(words, list | tuple):
            words = [words]
        resolved["data_path"] = [_resolve_corpus(word, data_dir) for word in words if word != ""]
    if "valid_data_path" in resolved:
        words = resolved["valid_data_path"]
        if not isinstance(words, list | tuple):
            words = [words]
        parts = [str(word).partition("=") for word in words]
        resolved["valid_data_path"] = [
            f"{name}={data_dir / prefix}" if prefix else name for name, _, prefix in parts
        ]
    tokenizer = resolved.get("tokenizer")
    # Otherwise a name on the Hub. Unlike Path's, os.path.exists is False for too long a name.
    if tokenizer and os.path.exists(data_dir / str(tokenizer)):
        resolved["tokenizer"] = str(data_dir / str(tokenizer))
    return resolved


def _resolve_corpus(word: Any, data_dir: Path) -> Any:
    """Return a word of data_path, with `data_dir` before it unless it is a weight.

    A `[` in `data_dir` is no part of a pattern.
    """
    if parse_weight(str(word)) is not None:
        return word
    word = str(word)
    path = str(data_dir / word)
    if has_wildcard(word) and is_pattern(path):
        return str(Path(glob.escape(str(data_dir))) / word)
    return path


def warmup_and_decay_steps(rates: LearningRateConfig, total: int) -> tuple[int, int]:
    """Return (warm-up steps, decay steps) of a run of `total` steps.

    Raises:
        InputError: The two exceed `total`, decay is below 1, another flag of the schedule is wrong,
            or the decay style is not WSD: models share the steps before their decay.
    """
    if rates.lr_decay_style != WSD:
        remedy = "give lr_wsd_decay_style and a longer lr_wsd_decay_fraction instead"
        raise InputError(
            f"field `lr_decay_style`: found {rates.lr_decay_style}, expected WSD: {remedy}"
        )
    warmup = resolve_steps("lr-warmup", rates.lr_warmup_iters, rates.lr_warmup_fraction, total)
    decay = resolve_steps(
        "lr-wsd-decay", rates.lr_wsd_decay_iters, rates.lr_wsd_decay_fraction, total
    )
    if decay < 1:
        raise InputError(f"a decay of {decay} steps, expected 1 or more (lr_wsd_decay_iters)")
    if warmup + decay > total:
        steps = (
            f"a decay of {decay} steps"
            if decay > total
            else f"a warm-up of {warmup} and a decay of {decay} steps"
        )
        raise InputError(
            f"{steps} in a run of {total}, expected to fit (lr_warmup_iters, lr_wsd_decay_iters)"
        )
    LearningRateSchedule.from_config(rates, total)  # checks the other flags
    return warmup, decay


@contextlib.contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Put `PLACE: ` before the message of an InputError raised in the `with` block.

    `place` is a location in the manifest.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
