"""Merge of checkpoints of one or several runs to a run directory.

The directory has a checkpoint of step 0 without optimizer state.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megaenc import backend
from megaenc.atomic_io import atomic_dir
from megaenc.console import print_rank_0
from megaenc.convert.from_hf import write_run_files
from megaenc.convert.merge.methods import (
    METHODS,
    MergedCheckpoint,
    MergeRecord,
    magnitudes,
    merge_linear,
    merge_slerp,
    merge_ties,
    trim_threshold,
)
from megaenc.convert.model_card import last_objectives
from megaenc.convert.param_mapping import ParamMapping, drop_padding_rows, iter_mappings
from megaenc.convert.run_checkpoint import RunCheckpoint, open_run_checkpoint, report_removal
from megaenc.convert.safetensors_writer import parse_dtype
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
from megaenc.errors import InputError
from megaenc.output_paths import create_parent_dir, refuse_existing
from megaenc.training.checkpoint_dir import CheckpointDir, json_digest
from megaenc.training.parent_run import WEIGHT_FIELDS
from megaenc.training.run_dir import TOKENIZER_DIR, describe_difference
from megaenc.training.run_init import Ancestor, identity_digest

if TYPE_CHECKING:
    from megaenc.training.checkpoint.loader import WeightReader

_STEPS = re.compile(r"[0-9]{1,18}(,[0-9]{1,18})*")


@dataclass(frozen=True)
class MergeSource:
    """Checkpoint to merge.

    `run` is its RunCheckpoint, as it is at `step`, and `flag` the one that named it, for errors.
    """

    run: RunCheckpoint
    step: int
    flag: str

    @property
    def name(self) -> str:
        """Return RUN@STEP for messages, such as `runs/a@1000`, also if no step was given."""
        return f"{self.run.directory}@{self.step}"

    @property
    def history(self) -> tuple[Ancestor, ...]:
        """Return the runs and models that the weights come from, the oldest first.

        This run is the last, unless no run has trained its weights.
        """
        run = self.run
        settings = self.run.settings
        if run.converted:
            return run.start.before
        current_run = Ancestor(
            str(run.directory),
            self.step,
            settings.schedule_text,
            settings.tokens_after(self.step),
            total=settings.total_iters,
        )
        return (*run.start.before, current_run)

    def record(self, state: dict[str, Any], weight: float | None = None) -> MergedCheckpoint:
        """Return the entry of this checkpoint for run.json; nothing is written.

        Args:
            state: Content of the checkpoint's state.json, of which the entry has a digest.
            weight: See `MergedCheckpoint`.
        """
        identity = identity_digest(self.run.identity)
        return MergedCheckpoint(
            str(self.run.directory.resolve()), self.step, identity, json_digest(state), weight
        )


def merge(
    load: Sequence[str],
    output: Path,
    *,
    method: str = "linear",
    weights: Sequence[float] = (),
    base: str = "",
    density: float | None = None,
    dtype: str = "source",
) -> MergeRecord:
    """Merge two or more checkpoints into a new run directory; return its MergeRecord.

    A checkpoint's float32 master weights are merged if it has any. The most trained gives tokenizer
    and objective. One process calls it, without a process group. InputErrors leave no `output`.

    Args:
        load: Checkpoints as RUN (its newest), RUN@STEP or RUN@STEP,STEP; RUN is a run directory.
        method: linear, slerp (of two checkpoints) or ties, which requires `base` and `density`.
        weights: One of each checkpoint (linear; default: equal), or one from 0 to 1 (slerp; 0.5).
        base: Only for ties: checkpoint from which all others were trained, as RUN or RUN@STEP.
        density: Only for ties: fraction of each checkpoint's changes, the largest, that is merged.
        dtype: Dtype of the result: bf16, fp32, or source: bf16 if all checkpoints have it.
    """
    refuse_existing(output, "--output")
    sources = [source for text in load for source in _open_sources(text, "--load")]
    source_weights = _check_options(method, len(sources), weights, base, density)
    bases = _open_sources(base, "--base") if base else []
    if len(bases) > 1:
        raise InputError(f"--base {base}: found {len(bases)} steps, expected one")
    for source in (*sources[1:], *bases):
        _check_same_model(sources[0], source)
    furthest = max(sources, key=lambda source: source.step)  # the first of them
    run = furthest.run
    tokenizer = load_tokenizer(run.directory / TOKENIZER_DIR, "--load")
    vocabulary = read_vocabulary(tokenizer)
    run.check_vocabulary(vocabulary)
    objective = last_objectives(run.schedule(vocabulary), furthest.step, run.settings.total_iters)[
        0
    ].describe()
    model = dataclasses.replace(run.model, vocab_size=run.vocab_size)
    default = (
        torch.bfloat16
        if all(source.run.dtype == torch.bfloat16 for source in sources)
        else torch.float32
    )
    result_dtype = parse_dtype(dtype, "source", default)
    backend.init_distributed(backend.ParallelConfig(), seed=0)
    try:
        from megaenc.model.encoder import build_encoder
        from megaenc.training.checkpoint.loader import (
            CheckpointLoader,
            WeightReader,
            verify_weights,
        )
        from megaenc.training.checkpoint.manager import CheckpointManager

        loaders = [
            CheckpointLoader(source.run.directory / "checkpoints") for source in (*sources, *bases)
        ]
        states = [
            verify_weights(loader, source.step, source.run.identity, f"{source.flag} RUN@STEP")
            for loader, source in zip(loaders, (*sources, *bases), strict=True)
        ]
        records = [
            source.record(*values)
            for source, *values in zip(sources, states[: len(sources)], source_weights, strict=True)
        ]
        base_record = bases[0].record(states[-1]) if bases else None
        record = MergeRecord(method, tuple(records), base_record, density)
        create_parent_dir(output, "--output")
        with atomic_dir(output) as directory:
            _, identity = write_run_files(
                directory,
                output,
                tokenizer,
                model,
                seq_length=min(source.run.seq_length for source in sources),
                dtype=result_dtype,
                objective=objective,
                source={"merge": record.as_dict()},
                before=_merge_histories(sources, furthest, record),
                special_tokens=_choose_special_tokens([furthest, *sources]),
            )
            encoder = build_encoder(
                model, model.vocab_size, 1, backend.ParallelConfig(), torch.float32, seed=None
            )
            with contextlib.ExitStack() as stack:
                readers = []
                for loader, source in zip(loaders, (*sources, *bases), strict=True):
                    stack.enter_context(
                        report_removal(loader, source.step, f"{source.flag} RUN@STEP")
                    )
                    _, reader = loader.open_verified(source.step)
                    readers.append(WeightReader(reader, encoder))
                _merge_weights(encoder, run, readers, record)
            for parameter in encoder.parameters():
                parameter.data = parameter.data.to(result_dtype)
            CheckpointManager(directory / "checkpoints").save_weights(encoder, identity)
    finally:
        backend.destroy_distributed()
    return record


def _open_sources(text: str, flag: str) -> list[MergeSource]:
    """Return the checkpoints of RUN (the newest), RUN@STEP or RUN@STEP,STEP.

    Raises:
        InputError: It is no run or has no such step.
    """
    name, separator, steps = text.rpartition("@")
    if not separator or os.path.isdir(text):
        name = text
        steps = ""
    elif not _STEPS.fullmatch(steps):
        raise InputError(
            f"{flag} {text}: found {steps!r} after the @, expected a step or steps, "
            f"such as {name}@1000,1200"
        )
    run = open_run_checkpoint(Path(name), flag)
    checkpoints = CheckpointDir(run.directory / "checkpoints")
    selected_steps = (
        [int(step) for step in steps.split(",")] if steps else [run.newest_step(checkpoints, flag)]
    )
    for step in selected_steps:
        if not checkpoints.path(step).is_dir():
            existing = (
                ", ".join(map(str, checkpoints.steps()))
                or "one with a checkpoint, and there is none"
            )
            raise InputError(
                f"{flag} {text}: no checkpoint of step {step}, expected one of {existing}"
            )
    return [MergeSource(run.at_step(step), step, flag) for step in selected_steps]


def _check_options(
    method: str, count: int, weights: Sequence[float], base: str, density: float | None
) -> Sequence[float | None]:
    """Return the weight of each of `count` checkpoints, None with TIES.

    Raises:
        InputError: An option does not fit `method`.
    """
    if method not in METHODS:
        raise InputError(f"--method: found {method!r}, expected one of {', '.join(METHODS)}")
    if count < 2 or (method == "slerp" and count > 2):
        expected = "2" if method == "slerp" else "2 or more"
        raise InputError(
            f"--load: found {count} checkpoint{'s' * (count != 1)}, "
            f"expected {expected} for --method {method}"
        )
    for flag, value in (("--base", base), ("--density", density)):
        if value not in ("", None) and method != "ties":
            raise InputError(f"{flag} {value}: only for --method ties, found --method {method}")
    text = " ".join(f"{weight:g}" for weight in weights)
    if method == "ties":
        if weights:
            raise InputError(
                f"--weights {text}: not for --method ties, which counts all checkpoints alike; "
                "leave the flag out"
            )
        if not base:
            raise InputError(
                "--base: missing, expected for --method ties the RUN@STEP from which all "
                "checkpoints were trained"
            )
        if density is None:
            raise InputError(
                "--density: missing, expected for --method ties a fraction, such as 0.2"
            )
        return [None] * count
    if method == "slerp":
        if len(weights) > 1 or max(weights, default=0) > 1:
            raise InputError(
                f"--weights {text}: expected for --method slerp one number from 0 (first) to 1 "
                "(second checkpoint)"
            )
        t = weights[0] if weights else 0.5
        return [1 - t, t]
    if weights and len(weights) != count:
        raise InputError(
            f"--weights {text}: found {len(weights)}, expected {count}, one for each checkpoint"
        )
    if weights and not 0 < sum(weights) < math.inf:
        raise InputError(f"--weights {text}: expected numbers with a finite sum above 0")
    return weights or [1.0] * count


def _check_same_model(first: MergeSource, second: MergeSource) -> None:
    """Raise InputError if shape, tokenizer or vocabulary of two checkpoints differ."""
    fields = [
        {name: source.run.identity.get(name) for name in WEIGHT_FIELDS}
        | {"rows of the embedding": source.run.vocab_size}
        for source in (first, second)
    ]
    if mismatch := describe_difference(
        *fields, names=(f"in {first.run.directory}", f"in {second.run.directory}")
    ):
        raise InputError(
            f"{second.flag} {second.name}: {mismatch}; "
            "only weights of one shape and tokenizer can be merged"
        )


def _choose_special_tokens(sources: Sequence[MergeSource]) -> SpecialTokens | None:
    """Return the recorded special tokens of the first of `sources` that has any.

    Prints a line if others have different ones.
    """
    recorded = [
        (source, source.run.special_tokens)
        for source in sources
        if source.run.special_tokens is not None
    ]
    if not recorded:
        return None
    first, special = recorded[0]
    for source, tokens in recorded:
        if not special.is_same(tokens):
            print_rank_0(
                f"{source.name} was trained with --special-tokens {tokens.mode}, "
                f"{first.name} with {special.mode}: exports have the latter"
            )
            break
    return special


def _merge_histories(
    sources: list[MergeSource], furthest: MergeSource, record: MergeRecord
) -> tuple[Ancestor, ...]:
    """Return the ancestors of a merge.

    These are the ones that all sources share, and one for what the sources were trained on since.
    That one has the names of all checkpoints, and step, schedule and tokens of the furthest
    trained. Different Hugging Face models of one family, which decides on exports, become one
    ancestor, with the config fields that all of them have.
    """
    histories = [source.history for source in sources]
    same = itertools.takewhile(
        lambda stages: all(stage == stages[0] for stage in stages), zip(*histories, strict=False)
    )
    shared = tuple(stages[0] for stages in same)
    if all(history == shared for history in histories):
        return shared
    name = " + ".join(checkpoint.label for checkpoint in record.checkpoints)
    origins = [source.run.origin for source in sources]
    if (
        all(origins)
        and len({origin.family for origin in origins}) == 1
        and origins[0] not in shared
    ):
        generation = (
            origins[0].generation
            if all(origin.generation == origins[0].generation for origin in origins)
            else {}
        )
        context = min(origin.context for origin in origins)
        fields = {
            field: value
            for field, value in origins[0].config_fields.items()
            if all((field, value) in origin.config_fields.items() for origin in origins)
        }
        origin = dataclasses.replace(
            origins[0], run=name, context=context, generation=generation, config_fields=fields
        )
        shared = (origin, *shared)
    last = furthest.history[-1] if furthest.history else None
    return shared if last is None or last.family else (*shared, dataclasses.replace(last, run=name))


@torch.no_grad()
def _merge_weights(
    encoder: torch.nn.Module, run: RunCheckpoint, readers: "list[WeightReader]", record: MergeRecord
) -> None:
    """Set the weights of `encoder`, one by one, to the merged ones.

    Rows that pad the vocabulary are zero. A tensor is one of the export: query, key and value, and
    gate and up projection, are merged separately.

    Args:
        readers: Readers of the record's checkpoints, and then of its base.
    """
    parameters = dict(encoder.named_parameters())
    weights = [checkpoint.weight for checkpoint in record.checkpoints]
    if record.method == "linear":
        combine = partial(merge_linear, weights=weights)
    elif record.method == "slerp":
        combine = partial(merge_slerp, t=weights[1])
    else:
        thresholds = _find_thresholds(run, readers, record.density, parameters)

        def combine(tensors: Sequence[Tensor]) -> Tensor:
            return merge_ties(tensors[-1], tensors[:-1], thresholds)

    for mapping, core in _iter_weights(run, parameters):
        tensors = [mapping.to_hf(_read_rows(reader, core, run), run.model) for reader in readers]
        merged = mapping.to_core(
            tuple(combine(parts) for parts in zip(*tensors, strict=True)), run.model
        )
        parameters[core].zero_()[: len(merged)] = merged


def _iter_weights(run: RunCheckpoint, names: Iterable[str]) -> Iterator[tuple[ParamMapping, str]]:
    """Yield the mapping and the name of each of the weights `names` of a run.

    Weights that no family has, such as a head's norm, are mapped to themselves.
    """
    mapped = {core: mapping for mapping, core, _ in iter_mappings(run.model)}
    for core in dict.fromkeys((*mapped, *names)):
        yield mapped.get(core, ParamMapping(core, (core,))), core


def _find_thresholds(
    run: RunCheckpoint, readers: "list[WeightReader]", density: float, names: Collection[str]
) -> list[float]:
    """Return the magnitude from which on TIES keeps the changes of each checkpoint.

    Changes are differences to the base; a threshold is over all weights at once.
    """
    *checkpoint_readers, base_reader = readers
    values = np.empty(run.model.parameter_count(run.vocab_size), dtype=np.float32)
    thresholds = []
    for reader in checkpoint_readers:
        done = 0
        for _, core in _iter_weights(run, names):
            part = magnitudes(_read_rows(base_reader, core, run), _read_rows(reader, core, run))
            values[done : done + len(part)] = part
            done += len(part)
        thresholds.append(trim_threshold(values, density))
    return thresholds


def _read_rows(reader: "WeightReader", core: str, run: RunCheckpoint) -> Tensor:
    """Return a checkpoint's weight in float32, without rows that pad the vocabulary."""
    return drop_padding_rows(core, reader.read(core), run.vocab_size)
