"""The run directory: configuration, metadata, tokenizer and metrics of one run.

A lock protects it.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import yaml

from megaenc import flags
from megaenc.atomic_io import (
    atomic_dir,
    atomic_files,
    atomic_write,
    convert_write_errors,
    find_stale_temp_files,
    remove_path,
)
from megaenc.console import truncate_text
from megaenc.dist_env import is_torchrun_worker
from megaenc.errors import InputError, LocalInputError
from megaenc.json_files import parse_json, read_regular_file
from megaenc.model.config import get_preset
from megaenc.output_paths import remove_new_parents_on_error
from megaenc.training.run_init import read_run_metadata
from megaenc.training.run_lock import LOCK_FILE, RunLock

if TYPE_CHECKING:  # readers of a run directory import this module without torch
    from megaenc.training.plan import Plan

# Seconds; a network file system releases the locks of a lost machine after a minute or two.
_PATIENCE = 120.0
CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
TOKENIZER_DIR = "tokenizer"
METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
STRAGGLERS_FILE = "stragglers.jsonl"
STACKS_DIR = "stacks"
"""Directory of the stacks of a hang, possibly of one before the run began."""


@dataclass(frozen=True)
class PretrainResult:
    """End of a pretraining run: its directory, last step and losses.

    Losses are means over predictions, in nats; they are None or missing if there was none. Those of
    a run that was complete before are read from its directory.
    """

    directory: Path | None
    """Run directory (--save), from which the run resumes; None without one."""
    step: int
    """Last trained step."""
    loss: float | None
    """Training loss of the last step, over its whole batch."""
    validation: dict[str, float | None]
    """Losses of the last validation by objective, or NAME/OBJECTIVE of --valid-data-path."""
    stop_reason: str = ""
    """Reason of an end before the last step of the run, such as SIGTERM; empty without one."""
    is_stopped: bool = False
    """True if a signal or the time limit ended the run before its last step; the same call
    resumes it."""


def list_losses(scores: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the losses in a row of validation.jsonl by objective; {} for {}."""
    return {name: values["loss"] for name, values in scores.get("objectives", {}).items()}


class RunDir:
    """Context of the run directory `path` (--save) of `plan`; only on rank 0.

    `config.yaml` holds the flags (for --config), `run.json` metadata of data, tokenizer and
    kernels, `tokenizer/` a copy of the tokenizer, `metrics.jsonl` a row per logged step,
    `validation.jsonl` one per validation (including step 0), `stragglers.jsonl` one per straggler
    report, `checkpoints/` the checkpoints. The constructor acquires `lock`, which the end of the
    context releases; under torchrun it waits up to two minutes for another holder. It raises
    InputError if another process keeps the lock, or the directory has files but not those of the
    run of `plan`. If the run is refused before `begin`, a new lock file and new, empty directories
    are removed. `begin` writes the files of the run, `append_row` adds a row of metrics.
    """

    def __init__(self, path: Path, plan: "Plan"):
        """Lock the directory `path` and check that it is empty or holds the run of `plan`.

        It is created if missing. Under torchrun the lock is waited for, up to two minutes, as the
        processes that a restart replaces may still hold it.

        Raises:
            InputError: Another process holds the lock, or the directory holds something else.
        """
        self.path = path
        self._has_begun = False
        with contextlib.ExitStack() as stack:
            stack.enter_context(remove_new_parents_on_error(path / LOCK_FILE))
            self.lock = RunLock(path, patience=_PATIENCE if is_torchrun_worker() else 0.0)
            stack.callback(self._release)
            _check_contents(path, plan)
            self._resources = stack.pop_all()

    def _release(self) -> None:
        """Release the lock.

        Its file is removed if it is new and the run has not begun.
        """
        if not self._has_begun and self.lock.is_held():
            self.lock.remove()
        self.lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.__exit__(kind, error, trace)

    def begin(self, plan: "Plan", kernels: dict[str, Any], step: int) -> None:
        """Write configuration, metadata and tokenizer of a run that is ready to train.

        Rows of steps after `step` are dropped first, as by `drop_rows_after`, and temporary files
        of a killed start removed; the rest is `write_plan`.

        Args:
            kernels: Kernels in use, for run.json (`Engine.kernel_metadata`).
            step: Step before the first one to train, whose rows stay; -1 to drop all rows.

        Raises:
            InputError: A metrics file is invalid, a file cannot be written, or the lock is lost.
        """
        files = (
            RUN_FILE,
            CONFIG_FILE,
            TOKENIZER_DIR,
            METRICS_FILE,
            VALIDATION_FILE,
            STRAGGLERS_FILE,
        )
        for stale in find_stale_temp_files(*(self.path / name for name in files)):
            remove_path(stale)
        self.drop_rows_after(step)
        self.write_plan(plan, kernels)
        self._has_begun = True

    def write_plan(self, plan: "Plan", kernels: dict[str, Any]) -> None:
        """Write run.json, config.yaml and a missing tokenizer.

        `begin` does it; call it again after a rewind. Existing files are replaced, an existing
        tokenizer is kept. If one cannot be written, none is changed.

        Args:
            kernels: Kernels in use, for run.json (`Engine.kernel_metadata`).

        Raises:
            InputError: A file cannot be written, or the lock is lost.
        """
        self.lock.check()
        preset = flags.flatten(get_preset(plan.settings.model))  # of which null overrides a value
        values = {
            name: value
            for name, value in flags.flatten(plan.settings).items()
            if name != "config" and (value is not None or preset.get(name) is not None)
        }
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }
        if values["phases"]:
            del values["objective_schedule"]
            values["phases"] = [yaml.safe_load(text) for text in values["phases"]]
        # Its contexts end, and give the names, in reverse order.
        with contextlib.ExitStack() as stack:
            if not (self.path / TOKENIZER_DIR).exists():
                directory = stack.enter_context(atomic_dir(self.path / TOKENIZER_DIR))
                plan.tokenizer.save_pretrained(directory)
            [config_file] = stack.enter_context(atomic_files(self.path / CONFIG_FILE))
            config_file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
            # Named first, because it marks the directory as a run.
            [run_file] = stack.enter_context(atomic_files(self.path / RUN_FILE))
            run_file.write_text(
                json.dumps(plan.run_metadata | {"kernels": kernels}, indent=1), encoding="utf-8"
            )

    def drop_rows_after(self, step: int) -> None:
        """Delete rows of steps after `step`, and a cut-off last row, from metrics files.

        These are metrics.jsonl, validation.jsonl and stragglers.jsonl; missing ones stay missing.
        All are read before the first is replaced.

        Raises:
            InputError: A line before the last row to keep is invalid, and the error names it; a
                file cannot be read or written; or the lock is lost.
        """
        rows = {
            file: _read_rows(self.path / file, step)
            for file in (METRICS_FILE, VALIDATION_FILE, STRAGGLERS_FILE)
        }
        for file, lines in rows.items():
            if lines is not None:
                with convert_write_errors(self.path / file):
                    self.lock.check()
                    atomic_write(self.path / file, "".join(line + "\n" for line in lines))

    def read_result(self, step: int) -> PretrainResult:
        """Return the result of the complete run, whose last step is `step`.

        Raises:
            InputError: A metrics file cannot be read, or has an invalid line.
        """
        rows = []
        for file in (METRICS_FILE, VALIDATION_FILE):
            lines = _read_rows(self.path / file, step)
            rows.append(parse_json(lines[-1].encode()) if lines else {})
        metrics, scores = rows
        return PretrainResult(self.path, step, metrics.get("loss"), list_losses(scores))

    def append_row(self, file: str, row: dict[str, Any]) -> None:
        """Append `row` as a JSON line to a metrics file, which is created if missing.

        NaN and infinity are written as null, at any depth. The row is not flushed to the disk
        (`sync`).

        Args:
            file: Name of the file in the directory, such as METRICS_FILE.
            row: Values by name, JSON-ready, with the `step`.

        Raises:
            LocalInputError: The file cannot be written, or the lock is lost.
        """
        line = json.dumps(_replace_nonfinite(row), allow_nan=False) + "\n"
        with convert_write_errors(self.path / file, kind=LocalInputError):
            self.lock.check()
            with open(self.path / file, "a", encoding="utf-8") as stream:
                stream.write(line)

    def sync(self) -> None:
        """Flush the existing metrics files to the disk, before a checkpoint is saved.

        Raises:
            LocalInputError: A file cannot be flushed, or the lock is lost.
        """
        for file in (METRICS_FILE, VALIDATION_FILE, STRAGGLERS_FILE):
            path = self.path / file
            if path.exists():
                with convert_write_errors(path, kind=LocalInputError):
                    self.lock.check()
                    with open(path, "rb") as stream:
                        os.fsync(stream.fileno())


def _read_rows(file: Path, step: int) -> list[str] | None:
    """Return the lines of steps up to `step` in a metrics file.

    None if the file does not exist.

    Raises:
        InputError: The file cannot be read, or a line before one up to `step` is invalid.
    """
    try:
        lines = read_regular_file(file, file.stat().st_size).splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror}; expected a file of JSON lines written by a run"
        ) from None
    steps = [_row_step(line) for line in lines]
    indices = [
        index
        for index, line_step in enumerate(steps)
        if line_step is not None and line_step <= step
    ]
    invalid = steps.index(None) if None in steps else len(lines)
    if indices and invalid < indices[-1]:
        raise InputError(
            f"{file}: line {invalid + 1}: found {lines[invalid][:60]!r}, expected a JSON object "
            "with a `step`; "
            "correct or remove the line"
        )
    return [lines[index].decode("utf-8") for index in indices]


def _row_step(row: bytes) -> int | None:
    """Return the step of a JSON line; None for an incomplete or invalid line."""
    try:
        step = parse_json(row)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def _check_contents(path: Path, plan: "Plan") -> None:
    """Raise InputError unless the directory can be that of `plan`.

    It is empty, holds what a refused or killed start leaves, or the run of `plan`.
    """
    if not (path / RUN_FILE).exists():
        for name in sorted(file.name for file in path.iterdir()):
            if name not in (LOCK_FILE, STACKS_DIR) and not name.endswith(".tmp"):
                raise InputError(
                    f"--save {path}: not a run directory: holds {name} but no {RUN_FILE}; give a "
                    "new or empty directory"
                )
        return
    metadata, _ = read_run_metadata(path / RUN_FILE)
    rewinds = metadata.get("rewinds", [])
    if not isinstance(rewinds, list):
        raise InputError(
            f"{path / RUN_FILE}: field `rewinds`: found no list; expected a file written by a run"
        )
    if mismatch := describe_difference(metadata["identity"], plan.identity):
        raise InputError(
            f"--save {path} holds a different run: {mismatch}; give the same value or choose "
            "another directory"
        )
    if tuple(rewinds) != plan.rewinds:  # by the previous holder of the lock
        raise InputError(
            f"--save {path}: the run rewound at a loss spike while this command was starting; "
            "give it again"
        )


def describe_difference(
    recorded: dict[str, Any],
    current: dict[str, Any],
    names: tuple[str, str] = ("there", "here"),
    fields: Iterable[str] | None = None,
) -> str | None:
    """Return text on the first differing field of two identities; None if equal.

    It is such as `seed is 1 there, 2 here`. A missing field equals None, and its text is `not
    given`; values are cut to 60 characters.

    Args:
        recorded: Values by name, `there`.
        current: Values by name, `here`.
        names: Words for `there` and `here`, such as ("on rank 0", "on rank 3").
        fields: Names to compare; None for all, in the order of `current`, then those only in
            `recorded`.
    """
    for name in dict.fromkeys((*current, *recorded)) if fields is None else fields:
        if recorded.get(name) != current.get(name):
            texts = []
            for identity, place in zip((recorded, current), names, strict=True):
                value = identity.get(name)
                text = "not given" if value is None else str(value)
                texts.append(f"{truncate_text(text, 60)} {place}")
            return f"{name} is {', '.join(texts)}"
    return None


def _replace_nonfinite(value: Any) -> Any:
    """Return a JSON value with None in place of NaN and infinity, at any depth."""
    if isinstance(value, dict):
        return {name: _replace_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
