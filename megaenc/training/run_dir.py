"""The folder of a run: one process group at a time, one run for ever, its metrics without a gap or an overlap."""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import yaml

from megaenc import flags
from megaenc.atomic_io import atomic_dir, atomic_files, atomic_write, remove_path, find_stale_temp_files
from megaenc.backend.parallel_config import KernelConfig
from megaenc.console import truncate_text
from megaenc.errors import InputError, LocalInputError
from megaenc.json_files import parse_json, read_json_object, read_regular_file
from megaenc.torchelastic import is_torchrun_worker
from megaenc.training.run_lock import LOCK_FILE, RunLock

if TYPE_CHECKING:  # whoever reads a run folder needs the names below and not torch
    from megaenc.training.plan import Plan

_PATIENCE = 120.0  # seconds; a network file system gives a lost machine's locks free after a minute or two
CONFIG_FILE, RUN_FILE, TOKENIZER_DIR = "config.yaml", "run.json", "tokenizer"
METRICS_FILE, VALIDATION_FILE, STRAGGLERS_FILE = "metrics.jsonl", "validation.jsonl", "stragglers.jsonl"


class RunDir:
    """What rank 0 keeps in `--save`; construct it on rank 0 alone.

    `config.yaml` holds the flags (and can be given to --config), `run.json` what was found out about data, tokenizer and kernels,
    `tokenizer/` a copy of it, `metrics.jsonl` an object a logged step, `validation.jsonl` one a validation (step 0 included),
    `stragglers.jsonl` one a report, where asked for, `checkpoints/` the checkpoints.
    """

    def __init__(self, path: Path, plan: "Plan"):
        """Lock the folder and check that it is empty or holds this very run. InputError otherwise."""
        self.path = path
        self._computed_by: dict[str, Any] = {}
        self._started = False
        self._original_contents: dict[Path, bytes | None] = {}  # what was there when this process came, None where nothing was
        self.lock = RunLock(path, patience=_PATIENCE if is_torchrun_worker() else 0.0)
        try:
            self._open(plan)
        except BaseException:
            self.restore()
            self.lock.close()
            raise

    def _open(self, plan: "Plan") -> None:
        path = self.path
        if (path / RUN_FILE).exists():
            facts = _check_same_run(path, plan)
            self._computed_by = {name: facts[name] for name in ("kernels",) if name in facts}
        elif found := sorted(file.name for file in path.iterdir() if file.name != LOCK_FILE and not file.name.endswith(".tmp")):
            raise InputError(f"--save {path}: holds {found[0]} and no {RUN_FILE}, so no run; expected a new or empty folder")
        for stale in find_stale_temp_files(*(path / name for name in (RUN_FILE, CONFIG_FILE, TOKENIZER_DIR, METRICS_FILE, VALIDATION_FILE, STRAGGLERS_FILE))):
            remove_path(stale)  # what a start that was killed has left
        for file in (path / RUN_FILE, path / CONFIG_FILE):
            try:
                self._original_contents[file] = read_regular_file(file)
            except FileNotFoundError:
                self._original_contents[file] = None
            except OSError as error:
                raise InputError(f"{file}: {error.strerror}; expected what a run wrote there") from None
        self.write_plan(plan)
        if not (path / TOKENIZER_DIR).exists():
            self._original_contents[path / TOKENIZER_DIR] = None
            with atomic_dir(path / TOKENIZER_DIR) as temporary:
                plan.tokenizer.save_pretrained(temporary)

    def write_plan(self, plan: "Plan", kernels: KernelConfig | None = None, fused: dict[str, bool] | None = None) -> None:
        """Write `plan` to run.json and config.yaml, with the kernels once chosen; `fused`: whether each is used, by name."""
        path = self.path
        self.lock.check()
        if kernels:
            self._computed_by = {"kernels": dataclasses.asdict(kernels) | {"fused": fused or {}}}
        # First: it is what makes the folder a run.
        atomic_write(path / RUN_FILE, json.dumps(plan.run_metadata | self._computed_by, indent=1))
        given = {name: value for name, value in flags.flatten(plan.settings).items() if value is not None and name != "config"}
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        atomic_write(path / CONFIG_FILE, yaml.safe_dump(given, sort_keys=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Undo what an InputError has left without effect, and release the lock; the end of the process releases it too."""
        if isinstance(error, InputError):
            self.restore()
        self.lock.close()

    def restore(self) -> None:
        """Put the folder back to what it was before this process came to it, unless rows were written or dropped since."""
        if self._started or not self.lock.is_held():
            return
        for file, content in reversed(self._original_contents.items()):
            with contextlib.suppress(InputError, OSError):  # the error that led here is the one to report
                if content is None:
                    remove_path(file)
                    continue
                with atomic_files(file) as [temporary]:
                    temporary.write_bytes(content)
        self.lock.restore()

    def drop_rows_after(self, step: int) -> None:
        """Drop the rows beyond `step` from all files: those steps are about to be made again.

        LocalInputError, naming the line, for a row that no run writes before one up to `step`; a kill may cut off the last.
        """
        rows = {file: _read_rows(self.path / file, step) for file in (METRICS_FILE, VALIDATION_FILE, STRAGGLERS_FILE)}
        self._started = True
        for file, kept in rows.items():
            if kept is not None:
                with self._convert_write_errors(file):
                    atomic_write(self.path / file, "".join(row + "\n" for row in kept))

    def append_row(self, file: str, row: dict[str, Any]) -> None:
        """Append one object to a file of rows; a number that is none (NaN, infinity) becomes null, as JSON has it."""
        self._started = True
        row = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        with self._convert_write_errors(file), open(self.path / file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Put the rows on the disk, before a checkpoint says that they are there."""
        for file in (METRICS_FILE, VALIDATION_FILE, STRAGGLERS_FILE):
            with contextlib.suppress(FileNotFoundError), self._convert_write_errors(file), open(self.path / file, "rb") as stream:
                os.fsync(stream.fileno())

    @contextlib.contextmanager
    def _convert_write_errors(self, file: str) -> Iterator[None]:
        """A full disk or a lost lock is noticed by rank 0 alone: LocalInputError."""
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
    """Return the rows of steps up to `step`; None if there is no file."""
    try:
        lines = read_regular_file(file, file.stat().st_size).splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalInputError(f"{file}: {error.strerror}; expected the rows of a run") from None
    steps = [_row_step(line) for line in lines]
    kept = [number for number, found in enumerate(steps) if found is not None and found <= step]
    odd = steps.index(None) if None in steps else len(lines)
    if kept and odd < kept[-1]:
        raise LocalInputError(
            f"{file}: line {odd + 1}: found {lines[odd][:60]!r}, expected an object with a `step` as a run writes it; "
            "put it right or remove the line"
        )
    return [lines[number].decode("utf-8") for number in kept]


def _row_step(row: bytes) -> int | None:
    """Return the step of a row; None for one that was cut off or that no run writes."""
    try:
        step = parse_json(row)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def _check_same_run(path: Path, plan: "Plan") -> dict[str, Any]:
    """What its run.json holds."""
    expected = "what a run wrote there"
    facts = read_json_object(path / RUN_FILE, expected)
    kept, rewinds = facts.get("identity"), facts.get("rewinds", [])
    if not isinstance(kept, dict) or not isinstance(rewinds, list):
        raise InputError(f"{path / RUN_FILE}: found no `identity` or `rewinds` of a run; expected {expected}")
    if other := describe_difference(kept, plan.identity):
        raise InputError(f"--save {path} holds a different run: {other}; give the same value or choose another folder")
    if tuple(rewinds) != plan.rewinds:  # by the process whose lock was waited for
        raise InputError(f"--save {path}: went back at a spike while this command was starting; give it again")
    return facts


def describe_difference(kept: dict[str, Any], identity: dict[str, Any], names: tuple[str, str] = ("there", "here")) -> str | None:
    """Return the first field that differs between `kept` and `identity`, with both values; None if it is the same run."""
    for name in dict.fromkeys((*identity, *kept)):
        values = kept.get(name), identity.get(name)
        if values[0] != values[1]:
            there, here = (truncate_text("not given" if value is None else str(value), 60) for value in values)
            return f"{name} is {there} {names[0]}, {here} {names[1]}"
    return None
