"""What a run tells about itself besides its folder and the console; none of it changes the run."""

from dataclasses import dataclass
from typing import Literal

from megaenc.errors import InputError


@dataclass(frozen=True)
class MonitoringSettings:
    """Where rows go, and what is measured."""

    tensorboard_dir: str = ""
    """folder for TensorBoard's event files, with every number of metrics.jsonl and validation.jsonl"""
    wandb_project: str = ""
    """project of Weights & Biases to log every number to; offline, to be sent later, where there is no key or no network"""
    wandb_exp_name: str = ""
    """name of the run there; that of the --save folder unless given"""
    wandb_entity: str = ""
    """user or team that the project belongs to; your own unless given"""
    wandb_save_dir: str = ""
    """folder in which Weights & Biases keeps its files, in a folder wandb; that of --save unless given"""
    timing_log_level: Literal[0, 1, 2] = 0
    """megatron-core's timers, as `timers` in each row. 1: each part of a step, 2: each micro-batch too; both wait for the
    device and for other ranks, so the run is slower"""

    def check(self, save: str) -> None:
        """InputError, naming the flag, for a combination that says nothing; `save`: the run folder."""
        for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir"):
            if getattr(self, name) and not self.wandb_project:
                raise InputError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: found no --wandb-project, expected the project to log to"
                )
        if self.wandb_project and not (save or self.wandb_save_dir):
            raise InputError(
                f"--wandb-project {self.wandb_project}: found neither --save nor --wandb-save-dir, "
                "expected a folder for its files"
            )
