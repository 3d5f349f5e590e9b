"""The command `megaenc pretrain`, also examples/pretrain_encoder.py."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megaenc.console import silence_libraries
from megaenc.dist_env import die_with_launcher, exit_if_restart_forbidden, forbid_restart
from megaenc.errors import InputError, LocalInputError, handle_command_errors

if TYPE_CHECKING:
    from megaenc.training.callbacks import Callback
    from megaenc.training.config import PretrainConfig
    from megaenc.training.plan import Plan
    from megaenc.training.run_dir import PretrainResult
    from megaenc.training.trainer import Trainer


@handle_command_errors
def main(argv: Sequence[str] | None = None, prog: str = "megaenc pretrain") -> None:
    """Train by the flags `argv`, or print the plan with --dry-run.

    It is the command `megaenc pretrain`, in one process or as a worker of torchrun. It returns
    after the last step, or if --exit-interval or a callback ends the run. If a signal or time limit
    does, it exits with code 75. In both cases workers that torchrun starts again exit at once with
    the same code. InputErrors are printed on standard error and exit with code 2.

    Args:
        argv: Words of the command line after the command; None for sys.argv[1:].
        prog: Name of the command for --help and errors.
    """
    die_with_launcher()
    exit_if_restart_forbidden()
    silence_libraries()
    from megaenc import flags
    from megaenc.training.config import parse_config

    argv = sys.argv[1:] if argv is None else argv
    settings = parse_config(argv, prog)
    from megaenc.training.planning import build_plan

    given = flags.find_given_fields(
        flags.find_flag_names(argv),
        flags.find_flag_value(argv, "--config"),
        preset="model",
        without=parent_config(settings),
    )
    plan = build_plan(settings, given)
    if settings.output.dry_run:
        from megaenc.training.dry_run import print_dry_run

        print_dry_run(plan)
        return
    from megaenc.training.distributed.signals import EXIT_STOPPED

    if run_plan(plan).is_stopped:
        sys.exit(EXIT_STOPPED)


def parent_config(settings: "PretrainConfig") -> Path:
    """Return the config.yaml of --init-from, whose values need no decision."""
    from megaenc.training.run_dir import CONFIG_FILE

    return Path(settings.start.init_from or "") / CONFIG_FILE


def run_plan(
    plan: "Plan",
    callbacks: Sequence[Callable[["Trainer"], "Callback"]] = (),
    *,
    ends_process: bool = True,
) -> "PretrainResult":
    """Train or resume the run of `plan`, in process groups of its own.

    All ranks call this together.

    Args:
        plan: Run to train.
        callbacks: Functions that build callbacks of the trainer.
        ends_process: Whether the process ends with the run: torchrun may not restart it then, and
            signals stay ignored after one has ended the run.

    Raises:
        InputError: As `train_plan`; or the launcher's variables are wrong.
        LostConnectionError: Another rank has ended or cannot be reached.
    """
    from megaenc import backend
    from megaenc.backend.initialize import check_launcher_variables
    from megaenc.dist_env import get_rank, get_world_size
    from megaenc.machine import allow_open_files
    from megaenc.training.distributed.collectives import call_on_all, convert_connection_errors
    from megaenc.training.distributed.signals import EXIT_STOPPED
    from megaenc.training.distributed.watchdog import process_group_timeout
    from megaenc.training.trainer import train_plan

    check_launcher_variables()
    ranks = get_world_size()
    if get_rank() == 0:
        # The first node's store has two connections to each rank.
        allow_open_files(2 * ranks, f"{ranks:,} ranks")
    settings = plan.settings
    timeout = process_group_timeout(settings.output.distributed_timeout_minutes)
    device = backend.init_distributed(
        settings.layout,
        settings.seed,
        settings.layout.chunks_per_stage(settings.shape.num_layers),
        timeout,
    )
    try:
        with convert_connection_errors():
            result = train_plan(plan, device, callbacks, ends_process=ends_process)
            if ends_process:
                code = EXIT_STOPPED if result.is_stopped else 0
                # On every node before any rank exits, because an exit makes torchrun restart the
                # others.
                call_on_all(lambda: forbid_restart(code))
    except BaseException as error:
        is_common = isinstance(error, InputError) and not isinstance(error, LocalInputError)
        if is_common or ranks == 1:  # else other ranks may still communicate
            backend.destroy_distributed()
        raise
    backend.destroy_distributed()
    return result
