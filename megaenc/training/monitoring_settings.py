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
    log_straggler: bool = False
    """compare the ranks' own time, without waiting for others: stragglers.jsonl, and a line when one is slow repeatedly"""
    straggler_interval: int = 100
    """steps between two such reports"""
    profile: bool = False
    """write a trace of some steps by torch's profiler, and a table of the costliest operations, to SAVE/profile"""
    profile_step_start: int = 10
    """first step of the trace"""
    profile_step_end: int = 12
    """last step of the trace"""
    profile_ranks: tuple[int, ...] = (0,)
    """ranks that write one"""

    def check(self, save: str, steps: int, world_size: int) -> None:
        """InputError, naming the flag, for what says nothing or cannot be; `save`: the run folder, `steps`: those of the run."""
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
        if self.profile:
            self._check_profile(save, steps, world_size)

    def _check_profile(self, save: str, steps: int, world_size: int) -> None:
        if not save:
            raise InputError("--profile: found no --save, expected the run folder that the trace goes to")
        if not 1 <= self.profile_step_start <= self.profile_step_end <= steps:
            raise InputError(
                f"--profile-step-start {self.profile_step_start} --profile-step-end {self.profile_step_end}: expected first and "
                f"last step of a trace, within the run's 1 to {steps}"
            )
        if not self.profile_ranks or not 0 <= min(self.profile_ranks) <= max(self.profile_ranks) < world_size:
            found = " ".join(map(str, self.profile_ranks))
            raise InputError(f"--profile-ranks {found}: expected ranks of this run, from 0 to {world_size - 1}")
