"""Logging backends for TensorBoard and Weights & Biases.

Background threads feed them, whose errors do not stop the run. `log(group, row)` logs a row under
names that begin with `group`/. `drop_rows_after(step)`, also called before the first row,
invalidates rows of later steps.
"""

import json
import os
import queue
import secrets
import threading
from collections.abc import Callable
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from megaenc import flags
from megaenc.atomic_io import atomic_write
from megaenc.console import print_rank_0
from megaenc.dist_env import get_rank
from megaenc.errors import InputError, format_error
from megaenc.training.config_groups import MonitoringConfig
from megaenc.training.plan import Plan
from megaenc.training.run_dir import RunDir
from megaenc.training.run_init import identity_digest

WANDB_ID = "wandb_run_id"
"""File of the run directory with the id of the run at Weights & Biases, under which it is
resumed."""

TENSORBOARD_RUN = "megaenc_run"
"""File of the TensorBoard directory with the digest of the run that writes to it."""


def open_loggers(plan: Plan, run_dir: RunDir | None) -> list["BackgroundLogger"]:
    """Return the started loggers that flags of `plan` request, on rank 0.

    They are for --tensorboard-dir and --wandb-project; the list is empty without these flags and on
    other ranks. Call `submit` of each to log, first with "drop_rows_after", and `close` at the end.

    Args:
        run_dir: Directory that keeps the id of the Weights & Biases run; None without --save, for a
            new id.
    """
    monitoring = plan.settings.monitoring
    save = plan.settings.output.save
    if get_rank():
        return []
    config = json.loads(json.dumps(flags.flatten(plan.settings) | plan.run_metadata))
    loggers = []
    if monitoring.tensorboard_dir:
        build = partial(
            TensorBoardLogger, monitoring.tensorboard_dir, identity_digest(plan.identity), config
        )
        loggers.append(BackgroundLogger("TensorBoard", build))
    if monitoring.wandb_project:
        loggers.append(
            BackgroundLogger(
                "Weights & Biases",
                lambda: WandbLogger(monitoring, save, _read_wandb_id(run_dir), config),
            )
        )
    return loggers


class TensorBoardLogger:
    """Logger that writes a run's rows and flags to TensorBoard event files.

    Numbers are float64. `TensorBoardLogger(directory, run, config)` creates the directory of all
    files and raises InputError if another run has written there: `run` is the run's
    `identity_digest`, `config` its flags and metadata, JSON-ready. `drop_rows_after`, which opens
    the first file, must be called before `log`, `flush` and `close`.
    """

    def __init__(self, directory: str, run: str, config: dict[str, Any]):
        """Claim `directory`, which is created if missing, for one run.

        Args:
            directory: Directory of the event files.
            run: `identity_digest` of the run, written to a file there.
            config: Flags and metadata of the run, JSON-ready, which each event file begins with.

        Raises:
            InputError: Another run has written to the directory.
        """
        marker = Path(directory) / TENSORBOARD_RUN
        if marker.exists() and marker.read_text(encoding="utf-8").strip() != run:
            raise InputError(
                f"--tensorboard-dir {directory}: holds the events of another run, expected a "
                "separate directory"
            )
        marker.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(marker, run + "\n")
        self._directory = directory
        self._config = config
        self._writer = None
        self._texts: dict[str, str] = {}

    def drop_rows_after(self, step: int) -> None:
        """Start an event file that makes TensorBoard ignore earlier rows after `step`.

        The file begins with the flags and metadata of the run. Pass -1 for a new run.
        """
        from torch.utils.tensorboard import SummaryWriter

        if self._writer:
            self._writer.close()
        self._writer = SummaryWriter(self._directory, purge_step=step + 1)
        self._texts = {}
        lines = yaml.safe_dump(self._config, sort_keys=False).splitlines()
        # Indented lines are code in Markdown.
        self._writer.add_text("config", "\n".join("    " + line for line in lines), step + 1)

    def log(self, group: str, row: dict[str, Any]) -> None:
        """Write the numbers and changed texts of `row` as events of its `step`.

        Args:
            group: Beginning of their names, such as train for train/loss (`flatten_row`).
            row: Values by name, with `step`. A text is written if it differs from the last one of
                its name.
        """
        step = row["step"]
        for name, value in flatten_row(row, group).items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)
            elif self._texts.get(name) != value:
                self._texts[name] = value
                self._writer.add_text(name, value, step)

    def flush(self) -> None:
        """Write buffered events to the event file on the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Write buffered events and close the event file."""
        self._writer.close()


class WandbLogger:
    """Logger of rows to a Weights & Biases run.

    It is made from the monitoring flags, the run directory, the id of the W&B run, which is resumed
    if it exists, and the flags and metadata to show there. Without API key or network it logs to
    files in --wandb-save-dir, or else the run directory, for `wandb sync`. Its methods are those of
    TensorBoardLogger.
    """

    def __init__(
        self,
        monitoring: MonitoringConfig,
        save: str,
        run_id: str,
        config: dict[str, Any],
        patience: int = 30,
    ):
        """Start or resume the Weights & Biases run `run_id`.

        It is offline without API key or if the server does not answer in time; WANDB_MODE in the
        environment overrides this. A line is printed if it is offline.

        Args:
            monitoring: Flags of project, name, entity and directory.
            save: Run directory, which gives default name and directory; empty without one.
            run_id: Id that Weights & Biases resumes the run by.
            config: Flags and metadata of the run, JSON-ready.
            patience: Seconds to wait for the server.
        """
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        directory = Path(monitoring.wandb_save_dir or save)
        directory.mkdir(parents=True, exist_ok=True)

        def init_run(mode: str | None):
            return wandb.init(
                project=monitoring.wandb_project,
                entity=monitoring.wandb_entity or None,
                name=monitoring.wandb_exp_name or Path(save or ".").resolve().name,
                id=run_id,
                resume="allow" if mode is None else None,
                dir=directory,
                config=config,
                mode=mode,
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    init_timeout=90 if mode else patience,
                    finish_timeout=30,
                ),
            )

        if os.environ.get("WANDB_MODE"):
            self._run = init_run(os.environ["WANDB_MODE"])
        elif not wandb.api.api_key:  # init would prompt for one
            self._run = init_run("offline")
            print_rank_0(
                f"Weights & Biases: no API key (wandb login); logging to {directory / 'wandb'}, "
                "`wandb sync` uploads it"
            )
        else:
            try:
                self._run = init_run(None)
            except Exception as error:
                wandb.teardown()  # releases the id
                self._run = init_run("offline")
                print_rank_0(
                    f"Weights & Biases: {format_error(error)}; logging to {directory / 'wandb'}, "
                    "`wandb sync` uploads it"
                )
        self._run.define_metric("*", step_metric="step")

    def log(self, group: str, row: dict[str, Any]) -> None:
        """Log the numbers and texts of `row` with its `step`.

        Args:
            group: Beginning of their names, such as train for train/loss (`flatten_row`).
            row: Values by name, with `step`.
        """
        self._run.log({"step": row["step"], **flatten_row(row, group)})

    def drop_rows_after(self, step: int) -> None:
        """Do nothing, because a later row of the same step overrides the earlier one."""

    def flush(self) -> None:
        """Do nothing, because a separate process of wandb writes."""

    def close(self) -> None:
        """Finish the Weights & Biases run, waiting for its last rows."""
        self._run.finish()


class BackgroundLogger:
    """Background thread that builds a logger and makes queued calls of its methods.

    The constructor starts it, `submit` queues a call, and `flush` and `close` wait for those that
    are queued. Errors, also of `build`, are printed; they end the logger, not the run, and later
    calls do nothing.

    Args:
        name: Name of the logger in messages.
        build: Returns the logger, such as a TensorBoardLogger; called in the thread.
    """

    def __init__(self, name: str, build: Callable[[], Any]):
        self._name = name
        self._build = build
        self._calls = queue.SimpleQueue()
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, method: str, *arguments: Any) -> None:
        """Queue the call `method(*arguments)` of the logger, without waiting for it.

        The arguments are not copied, so that the caller must not change them afterwards.

        Args:
            method: Name of the method, such as log.
        """
        self._calls.put((method, arguments, threading.Event()))

    def flush(self, seconds: float = 5.0) -> None:
        """Wait up to `seconds` until the logger has made and flushed all queued calls.

        Return at once if the logger is not built yet, and without a message after `seconds`.
        """
        is_done = threading.Event()
        if self._is_open.is_set():
            self._calls.put(("flush", (), is_done))
            is_done.wait(seconds)

    def close(self, seconds: float = 90.0) -> None:
        """Close the logger after its queued calls, waiting up to `seconds` for them.

        A warning is printed if it takes longer.
        """
        self.submit("close")
        self._thread.join(seconds)
        if self._thread.is_alive():
            print_rank_0(
                f"{self._name}: not closed after {seconds:.0f} seconds, its last rows may be lost"
            )

    def _work(self) -> None:
        """Build the logger and make the queued calls until it is closed.

        It is dropped after an error.
        """
        logger = None
        method = ""
        try:
            logger = self._build()
            self._is_open.set()
        except Exception as error:
            self._report(error)
        while method != "close":
            method, arguments, is_done = self._calls.get()
            try:
                if logger:
                    getattr(logger, method)(*arguments)
            except Exception as error:
                self._report(error)
                logger = None
            is_done.set()

    def _report(self, error: Exception) -> None:
        """Print that the run continues without this logger because of `error`."""
        print_rank_0(f"{self._name}: {format_error(error)}; the run continues without it")


def flatten_row(row: dict[str, Any], group: str) -> dict[str, float | str]:
    """Return the finite numbers and the texts of a nested row, by path.

    A path is such as validation/mlm/loss: the level `objectives` is elided, keeping its children,
    and `step` is skipped. Values of other types, such as None and lists, are left out.

    Args:
        row: Row of a metrics file; it is not changed.
        group: Beginning of each path, such as validation.
    """
    values: dict[str, float | str] = {}
    for name, value in row.items():
        path = group if name == "objectives" else f"{group}/{name}"
        if isinstance(value, dict):
            values |= flatten_row(value, path)
        elif (
            name != "step"
            and isinstance(value, (int, float, str))
            and not (isinstance(value, float) and not isfinite(value))
        ):
            values[path] = value
    return values


def _read_wandb_id(run_dir: RunDir | None) -> str:
    """Return the Weights & Biases id in the run directory, created if missing.

    It is random without a run directory.
    """
    if not run_dir:
        return secrets.token_hex(4)
    file = run_dir.path / WANDB_ID
    if not file.exists():
        atomic_write(file, secrets.token_hex(4) + "\n")
    return file.read_text(encoding="utf-8").strip()
