"""The folder of a run: one process group at a time, one run for ever, its metrics without a gap or an overlap."""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megaenc import flags
from megaenc.backend.kernels import Kernels
from megaenc.console import say
from megaenc.errors import InputError, LocalInputError
from megaenc.files import left_behind, remove, whole_folder, write_whole
from megaenc.launcher import started_by_torchrun

if TYPE_CHECKING:  # whoever reads a run folder needs the names below and not torch
    from megaenc.training.plan import Plan

_PATIENCE, _SILENT = 120.0, 5.0  # a network file system gives a lost machine's locks free after a minute or two
CONFIG, FACTS, TOKENIZER, LOCK = "config.yaml", "run.json", "tokenizer", ".lock"
METRICS, VALIDATION, STRAGGLERS = "metrics.jsonl", "validation.jsonl", "stragglers.jsonl"


class RunFolder:
    """What rank 0 keeps in `--save`; construct it on rank 0 alone.

    `config.yaml` holds the flags (and can be given to --config), `run.json` what was found out about data, tokenizer and kernels,
    `tokenizer/` a copy of it, `metrics.jsonl` an object a logged step, `validation.jsonl` one a validation (step 0 included),
    `stragglers.jsonl` one a report, where asked for, `checkpoints/` the checkpoints.
    """

    def __init__(self, path: Path, plan: "Plan"):
        """Lock the folder and check that it is empty or holds this very run. InputError otherwise."""
        self.path = path
        self._computed_by: dict[str, Any] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"--save {path}: {error.strerror}; expected a folder to write to") from None
        try:
            self._begin(plan)
        except BaseException:
            self.close()
            raise

    def _begin(self, plan: "Plan") -> None:
        path = self.path
        take_lock(self._lock, path, patience=_PATIENCE if started_by_torchrun() else 0.0)
        if (path / FACTS).exists():
            facts = _same_run(path, plan)
            self._computed_by = {name: facts[name] for name in ("kernels",) if name in facts}
        elif found := sorted(file.name for file in path.iterdir() if file.name != LOCK and not file.name.endswith(".tmp")):
            raise InputError(f"--save {path}: holds {found[0]} and no {FACTS}, so no run; expected a new or empty folder")
        for stale in left_behind(*(path / name for name in (FACTS, CONFIG, TOKENIZER, METRICS, VALIDATION, STRAGGLERS))):
            remove(stale)  # what a start that was killed has left
        self.record(plan)
        if not (path / TOKENIZER).exists():
            with whole_folder(path / TOKENIZER) as temporary:
                plan.tokenizer.save_pretrained(temporary)

    def record(self, plan: "Plan", kernels: Kernels | None = None, fused: dict[str, bool] | None = None) -> None:
        """Write what `plan` is to run.json and config.yaml, and by which kernels the run computes, once they are chosen.

        `fused`: whether each fused kernel is used, by name.
        """
        path = self.path
        if kernels:
            self._computed_by = {"kernels": dataclasses.asdict(kernels) | {"fused": fused or {}}}
        # First: it is what makes the folder a run.
        write_whole(path / FACTS, json.dumps(plan.facts | self._computed_by, indent=1))
        given = {name: value for name, value in flags.flatten(plan.settings).items() if value is not None and name != "config"}
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        write_whole(path / CONFIG, yaml.safe_dump(given, sort_keys=False))

    def close(self) -> None:
        """Give the folder free; the end of the process, however it comes, does so too."""
        os.close(self._lock)

    def cut(self, step: int) -> None:
        """Drop the rows beyond `step` from all files of rows: steps that are about to be made again."""
        for file in (METRICS, VALIDATION, STRAGGLERS):
            if (self.path / file).exists():
                with self._one_line(file):
                    rows = (self.path / file).read_text(encoding="utf-8").splitlines()
                    write_whole(self.path / file, "".join(row + "\n" for row in rows if _step_of(row) <= step))

    def log(self, file: str, row: dict[str, Any]) -> None:
        """Append one object to a file of rows; a number that is none (NaN, infinity) becomes null, as JSON has it."""
        row = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        with self._one_line(file), open(self.path / file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Put the rows on the disk, before a checkpoint says that they are there."""
        for file in (METRICS, VALIDATION, STRAGGLERS):
            with contextlib.suppress(FileNotFoundError), self._one_line(file), open(self.path / file, "rb") as stream:
                os.fsync(stream.fileno())

    @contextlib.contextmanager
    def _one_line(self, file: str) -> Iterator[None]:
        """A full disk is noticed by rank 0 alone: LocalInputError."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise LocalInputError(f"{self.path / file}: cannot be written to: {error.strerror}") from None
        except InputError as error:  # of `write_whole`
            raise LocalInputError(str(error)) from None


def take_lock(descriptor: int, path: Path, patience: float) -> None:
    """Lock the folder `path` by a file of it. InputError if another process holds the lock for `patience` seconds more.

    Those that torchrun replaces may be on their way out still, on another machine.
    """
    deadline, said = time.monotonic() + patience, time.monotonic() + _SILENT
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise InputError(
                    f"--save {path}: another process is training in this folder; wait for it or choose another"
                ) from None
            if time.monotonic() >= said:
                said = deadline
                say(f"--save {path}: another process holds it; waiting up to {patience:.0f} s for that to end")
            time.sleep(0.1)
        except OSError as error:
            raise InputError(f"--save {path}: cannot be locked ({error.strerror}); expected a file system with locks") from None


def _step_of(row: str) -> float:
    """The step of a row; a row that was cut off by a kill counts as beyond any step."""
    try:
        return json.loads(row)["step"]
    except (ValueError, KeyError):
        return float("inf")


def _same_run(path: Path, plan: "Plan") -> dict[str, Any]:
    """What its run.json holds."""
    try:
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
        kept, rewinds = facts["identity"], tuple(facts.get("rewinds", ()))
    except (ValueError, KeyError, OSError) as error:
        raise InputError(f"{path / FACTS}: {error}; expected what a run wrote there") from None
    if other := difference(kept, plan.identity):
        raise InputError(f"--save {path} holds a different run: {other}; give the same value or choose another folder")
    if rewinds != plan.rewinds:  # by the process whose lock was waited for
        raise InputError(f"--save {path}: went back at a spike while this command was starting; give it again")
    return facts


def difference(kept: dict[str, Any], identity: dict[str, Any], names: tuple[str, str] = ("there", "here")) -> str | None:
    """The first field that has one value in `kept` and another in `identity`, with both; None if it is the same run."""
    there, here = names
    for name in dict.fromkeys((*identity, *kept)):
        if kept.get(name) != identity.get(name):
            return f"{name} is {_short(kept.get(name))} {there}, {_short(identity.get(name))} {here}"
    return None


def _short(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
