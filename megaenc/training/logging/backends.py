"""TensorBoard and Weights & Biases, each fed by a thread of its own; whatever one raises is reported once, and the run continues.

`log(group, row)` shows a row under names that begin with `group`/; `drop_rows_after(step)`, called before the first row too, lets later steps
that were shown count no more.
"""

import json
import os
import queue
import secrets
import threading
from collections.abc import Callable
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
"""File of the run folder: under which id Weights & Biases knows the run, so that it goes on there."""

TENSORBOARD_RUN = "megaenc_run"
"""File of TensorBoard's folder: which run writes there."""


def open_loggers(plan: Plan, folder: RunDir | None) -> list["BackgroundLogger"]:
    """Open those that `plan` asks for, on rank 0; `folder` keeps the id of the run at Weights & Biases."""
    monitoring, save = plan.settings.monitoring, plan.settings.output.save
    if get_rank():
        return []
    # Every flag and what was found out about data and tokenizer, JSON-ready.
    config = json.loads(json.dumps(flags.flatten(plan.settings) | plan.run_metadata))
    makers = {}
    if monitoring.tensorboard_dir:
        makers["TensorBoard"] = lambda: TensorBoardLogger(monitoring.tensorboard_dir, identity_digest(plan.identity), config)
    if monitoring.wandb_project:
        makers["Weights & Biases"] = lambda: WandbLogger(monitoring, save, _read_wandb_id(folder), config)
    return [BackgroundLogger(name, make) for name, make in makers.items()]


class TensorBoardLogger:
    """Event files in `folder`, of one run. Numbers are float64, as in metrics.jsonl; the usual scalars (float32) would round."""

    def __init__(self, folder: str, run: str, config: dict[str, Any]):
        """`run` tells it from others: what another has written there is not to be hidden by a cut. InputError if one has."""
        marker = Path(folder) / TENSORBOARD_RUN
        if marker.exists() and marker.read_text(encoding="utf-8").strip() != run:
            raise InputError(f"--tensorboard-dir {folder}: holds the events of another run, expected a folder of its own")
        marker.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(marker, run + "\n")
        self._folder, self._config = folder, config
        self._writer = None
        self._texts: dict[str, str] = {}

    def drop_rows_after(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer:
            self._writer.close()
        self._writer = SummaryWriter(self._folder, purge_step=step + 1)  # readers leave out what older files say from there on
        self._texts = {}
        lines = yaml.safe_dump(self._config, sort_keys=False).splitlines()
        self._writer.add_text("config", "\n".join("    " + line for line in lines), step + 1)  # Markdown: as it stands

    def log(self, group: str, row: dict[str, Any]) -> None:
        step = row["step"]
        for name, value in flatten_row(row, group).items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)
            elif self._texts.get(name) != value:  # where it changes
                self._texts[name] = value
                self._writer.add_text(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of `--wandb-project`, drawn over `step`. Without a key or a network it is kept in its folder, for `wandb sync`."""

    def __init__(self, monitoring: MonitoringConfig, save: str, run_id: str, config: dict[str, Any], patience: int = 30):
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        folder = Path(monitoring.wandb_save_dir or save)
        folder.mkdir(parents=True, exist_ok=True)

        def start(mode: str | None):
            return wandb.init(
                project=monitoring.wandb_project,
                entity=monitoring.wandb_entity or None,
                name=monitoring.wandb_exp_name or Path(save or ".").resolve().name,
                id=run_id,
                resume="allow" if mode is None else None,
                dir=folder,
                config=config,
                mode=mode,
                settings=wandb.Settings(console="off", silent=True, init_timeout=90 if mode else patience, finish_timeout=30),
            )

        if os.environ.get("WANDB_MODE"):
            self._run = start(os.environ["WANDB_MODE"])
        elif not wandb.api.api_key:  # it would ask for one, and wait
            self._run = start("offline")
            print_rank_0(f"Weights & Biases: no key (wandb login), so kept in {folder / 'wandb'}; `wandb sync` sends it")
        else:
            try:
                self._run = start(None)
            except Exception as error:
                wandb.teardown()  # its server still holds the id
                self._run = start("offline")
                print_rank_0(f"Weights & Biases: {format_error(error)}; kept in {folder / 'wandb'}, `wandb sync` sends it")
        self._run.define_metric("*", step_metric="step")

    def log(self, group: str, row: dict[str, Any]) -> None:
        self._run.log({"step": row["step"], **flatten_row(row, group)})

    def drop_rows_after(self, step: int) -> None:
        """Do nothing: steps that are made again stand there twice, and the later row counts."""

    def flush(self) -> None:
        """Do nothing: its own process writes, a moment later."""

    def close(self) -> None:
        self._run.finish()


class BackgroundLogger:
    """A board that a thread of its own opens and feeds: neither its import nor its network holds the run up."""

    def __init__(self, name: str, make: Callable[[], Any]):
        self._name, self._make, self._todo = name, make, queue.SimpleQueue()
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, method: str, *arguments: Any) -> None:
        """Call `method` of the board, some time."""
        self._todo.put((method, arguments, threading.Event()))

    def flush(self, seconds: float = 5.0) -> None:
        """Wait until everything so far is on the disk, but not for a board that is still looking for its network."""
        done = threading.Event()
        if self._opened.is_set():
            self._todo.put(("flush", (), done))
            done.wait(seconds)

    def close(self, seconds: float = 90.0) -> None:
        """Let the board end; one that does not in `seconds` is left to itself."""
        self.submit("close")
        self._thread.join(seconds)
        if self._thread.is_alive():
            print_rank_0(f"{self._name}: not done after {seconds:.0f} seconds, left to itself")

    def _work(self) -> None:
        board, method = None, ""
        try:
            board = self._make()
            self._opened.set()
        except Exception as error:
            self._give_up(error)
        while method != "close":
            method, arguments, done = self._todo.get()
            try:
                if board:
                    getattr(board, method)(*arguments)
            except Exception as error:
                self._give_up(error)
                board = None
            done.set()

    def _give_up(self, error: Exception) -> None:
        print_rank_0(f"{self._name}: {format_error(error)}; the run goes on without it")


def flatten_row(row: dict[str, Any], group: str) -> dict[str, float | str]:
    """The numbers and texts of `row` but for its step, by names like validation/mlm/loss; what JSON has as null is left out."""
    found: dict[str, float | str] = {}
    for name, value in row.items():
        path = group if name == "objectives" else f"{group}/{name}"
        if isinstance(value, dict):
            found |= flatten_row(value, path)
        elif name != "step" and isinstance(value, (int, float, str)) and not (isinstance(value, float) and not isfinite(value)):
            found[path] = value
    return found


def _read_wandb_id(folder: RunDir | None) -> str:
    """Return the one that is kept in `folder`, or a new one, which then is."""
    if not folder:
        return secrets.token_hex(4)
    file = folder.path / WANDB_ID
    if not file.exists():
        atomic_write(file, secrets.token_hex(4) + "\n")
    return file.read_text(encoding="utf-8").strip()
