"""The run directory: configuration, metadata, tokenizer and metrics files of one run, under a lock."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import yaml

from megaenc import flags
from megaenc.atomic_io import atomic_dir, atomic_files, atomic_write, find_stale_temp_files, remove_path
from megaenc.console import truncate_text
from megaenc.errors import InputError, LocalInputError
from megaenc.json_files import parse_json, read_json_object, read_regular_file
from megaenc.model.config import get_preset
from megaenc.torchelastic import is_torchrun_worker
from megaenc.training.run_init import check_run_format
from megaenc.training.run_lock import LOCK_FILE, RunLock

if TYPE_CHECKING:  # readers of a run directory import this module without torch
    from megaenc.training.plan import Plan

_PATIENCE = 120.0  # seconds; a network file system releases the locks of a lost machine after a minute or two
CONFIG_FILE, RUN_FILE, TOKENIZER_DIR = "config.yaml", "run.json", "tokenizer"
METRICS_FILE, VALIDATION_FILE, STRAGGLERS_FILE = "metrics.jsonl", "validation.jsonl", "stragglers.jsonl"


class RunDir:
    """Context for the run directory `--save`, locked and written by rank 0: configuration, metadata, tokenizer, metrics.

    `config.yaml` holds the flags (for --config), `run.json` metadata of data, tokenizer and kernels, `tokenizer/` a copy of the
    tokenizer, `metrics.jsonl` a row per logged step, `validation.jsonl` one per validation (including step 0),
    `stragglers.jsonl` one per straggler report, `checkpoints/` the checkpoints.
    """

    def __init__(self, path: Path, plan: "Plan"):
        """Lock the directory and check that it is empty or holds this run; InputError otherwise."""
        self.path = path
        self._kernels_entry: dict[str, Any] = {}
        self._has_rows_changed = False
        self._original_contents: dict[Path, bytes | None] = {}  # None for files that did not exist
        self.lock = RunLock(path, patience=_PATIENCE if is_torchrun_worker() else 0.0)
        try:
            self._open(plan)
        except BaseException:
            self.restore()
            self.lock.release()
            raise

    def _open(self, plan: "Plan") -> None:
        """Check the directory and write configuration, metadata and tokenizer of `plan` into it."""
        path = self.path
        if (path / RUN_FILE).exists():
            metadata = _check_same_run(path, plan)
            self._kernels_entry = {name: metadata[name] for name in ("kernels",) if name in metadata}
        elif other_files := sorted(
            file.name for file in path.iterdir() if file.name != LOCK_FILE and not file.name.endswith(".tmp")
        ):
            raise InputError(
                f"--save {path}: not a run directory: holds {other_files[0]} but no {RUN_FILE}; give a new or empty directory"
            )
        for stale in find_stale_temp_files(
            *(path / name for name in (RUN_FILE, CONFIG_FILE, TOKENIZER_DIR, METRICS_FILE, VALIDATION_FILE, STRAGGLERS_FILE))
        ):
            remove_path(stale)  # of a killed start
        for file in (path / RUN_FILE, path / CONFIG_FILE):
            try:
                self._original_contents[file] = read_regular_file(file)
            except FileNotFoundError:
                self._original_contents[file] = None
            except OSError as error:
                raise InputError(f"{file}: {error.strerror}; expected a file written by a run") from None
        self.write_plan(plan)
        if not (path / TOKENIZER_DIR).exists():
            self._original_contents[path / TOKENIZER_DIR] = None
            with atomic_dir(path / TOKENIZER_DIR) as temporary:
                plan.tokenizer.save_pretrained(temporary)

    def write_plan(self, plan: "Plan", kernels: dict[str, Any] | None = None) -> None:
        """Write run.json (metadata of `plan`, `kernels` in use) and config.yaml."""
        path = self.path
        self.lock.check()
        if kernels:
            self._kernels_entry = {"kernels": kernels}
        # First, because run.json marks the directory as a run.
        atomic_write(path / RUN_FILE, json.dumps(plan.run_metadata | self._kernels_entry, indent=1))
        preset = flags.flatten(get_preset(plan.settings.model))  # of which null overrides a value
        values = {
            name: value
            for name, value in flags.flatten(plan.settings).items()
            if name != "config" and (value is not None or preset.get(name) is not None)
        }
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        if values["phases"]:
            del values["objective_schedule"]
            values["phases"] = [yaml.safe_load(text) for text in values["phases"]]
        atomic_write(path / CONFIG_FILE, yaml.safe_dump(values, sort_keys=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release the lock, after an InputError also restore the directory as far as possible."""
        if isinstance(error, InputError):
            self.restore()
        self.lock.release()

    def restore(self) -> None:
        """Undo changes of run.json, config.yaml, tokenizer/ and lock, unless rows were written or the lock is lost."""
        if self._has_rows_changed or not self.lock.is_held():
            return
        for file, content in reversed(self._original_contents.items()):
            with contextlib.suppress(InputError, OSError):  # the original error is reported instead
                if content is None:
                    remove_path(file)
                    continue
                with atomic_files(file) as [temporary]:
                    temporary.write_bytes(content)
        self.lock.remove_created()

    def drop_rows_after(self, step: int) -> None:
        """Delete rows after `step`, and a cut-off last row, from metrics.jsonl, validation.jsonl and stragglers.jsonl.

        LocalInputError, naming the line, for an invalid row before one up to `step`.
        """
        rows = {file: _read_rows(self.path / file, step) for file in (METRICS_FILE, VALIDATION_FILE, STRAGGLERS_FILE)}
        self._has_rows_changed = True
        for file, lines in rows.items():
            if lines is not None:
                with self._convert_write_errors(file):
                    atomic_write(self.path / file, "".join(line + "\n" for line in lines))

    def append_row(self, file: str, row: dict[str, Any]) -> None:
        """Append `row` as a JSON line to the metrics file `file`, null for NaN and infinity; LocalInputError if it fails."""
        self._has_rows_changed = True
        row = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        with self._convert_write_errors(file), open(self.path / file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Flush metrics.jsonl, validation.jsonl and stragglers.jsonl to the disk (fsync), before a checkpoint is saved."""
        for file in (METRICS_FILE, VALIDATION_FILE, STRAGGLERS_FILE):
            with contextlib.suppress(FileNotFoundError), self._convert_write_errors(file), open(self.path / file, "rb") as stream:
                os.fsync(stream.fileno())

    @contextlib.contextmanager
    def _convert_write_errors(self, file: str) -> Iterator[None]:
        """Convert a full disk or a lost lock inside the context into LocalInputError, because only rank 0 notices it."""
        try:
            self.lock.check()
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise LocalInputError(f"{self.path / file}: cannot be written to: {error.strerror}") from None
        except InputError as error:  # of `atomic_write`
            raise LocalInputError(str(error)) from None


def _read_rows(file: Path, step: int) -> list[str] | None:
    """Return the lines of steps up to `step` in a metrics file; None if it does not exist."""
    try:
        lines = read_regular_file(file, file.stat().st_size).splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalInputError(f"{file}: {error.strerror}; expected a file of JSON lines written by a run") from None
    steps = [_row_step(line) for line in lines]
    numbers = [number for number, line_step in enumerate(steps) if line_step is not None and line_step <= step]
    invalid = steps.index(None) if None in steps else len(lines)
    if numbers and invalid < numbers[-1]:
        raise LocalInputError(
            f"{file}: line {invalid + 1}: found {lines[invalid][:60]!r}, expected a JSON object with a `step`; "
            "correct or remove the line"
        )
    return [lines[number].decode("utf-8") for number in numbers]


def _row_step(row: bytes) -> int | None:
    """Return the step of a JSON line; None for an incomplete or invalid line."""
    try:
        step = parse_json(row)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def _check_same_run(path: Path, plan: "Plan") -> dict[str, Any]:
    """Return the content of run.json; InputError if it belongs to a different run than `plan`."""
    expected = "a file written by a run"
    metadata = read_json_object(path / RUN_FILE, expected)
    check_run_format(metadata, path / RUN_FILE)
    identity, rewinds = metadata.get("identity"), metadata.get("rewinds", [])
    if not isinstance(identity, dict) or not isinstance(rewinds, list):
        raise InputError(f"{path / RUN_FILE}: found no `identity` or `rewinds` of a run; expected {expected}")
    if mismatch := describe_difference(identity, plan.identity):
        raise InputError(f"--save {path} holds a different run: {mismatch}; give the same value or choose another directory")
    if tuple(rewinds) != plan.rewinds:  # by the previous holder of the lock
        raise InputError(f"--save {path}: the run rewound at a loss spike while this command was starting; give it again")
    return metadata


def describe_difference(
    recorded: dict[str, Any], current: dict[str, Any], names: tuple[str, str] = ("there", "here")
) -> str | None:
    """Return text such as `seed is 1 there, 2 here` on the first differing field of two identities; None if they are equal.

    `names`: the words for `there` and `here`, such as ("on rank 0", "on rank 3").
    """
    for name in dict.fromkeys((*current, *recorded)):
        values = recorded.get(name), current.get(name)
        if values[0] != values[1]:
            recorded_text, current_text = (truncate_text("not given" if value is None else str(value), 60) for value in values)
            return f"{name} is {recorded_text} {names[0]}, {current_text} {names[1]}"
    return None
