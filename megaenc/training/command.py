"""The command `megaenc pretrain`, also examples/pretrain_encoder.py."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megaenc.console import silence_libraries
from megaenc.dist_env import die_with_launcher, exit_if_restart_forbidden, forbid_restart
from megaenc.errors import InputError, LocalInputError, handle_command_errors


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
    from megaenc.training.run_dir import CONFIG_FILE

    argv = sys.argv[1:] if argv is None else argv
    settings = parse_config(argv, prog)
    from megaenc.training.planning import build_plan

    # This file has the values that need no decision.
    parent_config = Path(settings.start.init_from or "") / CONFIG_FILE
    plan = build_plan(
        settings, flags.find_given_fields(argv, preset="model", without=parent_config)
    )
    if settings.output.dry_run:
        from megaenc.training.dry_run import print_dry_run

        print_dry_run(plan)
        return
    from megaenc import backend
    from megaenc.backend.initialize import check_launcher_variables
    from megaenc.dist_env import get_rank, get_world_size
    from megaenc.machine import allow_open_files
    from megaenc.training.distributed.watchdog import process_group_timeout

    check_launcher_variables()
    if get_rank() == 0:
        ranks = get_world_size()
        # The first node's store has two connections to each rank.
        allow_open_files(2 * ranks, f"{ranks:,} ranks")
    timeout = process_group_timeout(settings.output.distributed_timeout_minutes)
    device = backend.init_distributed(
        settings.layout,
        settings.seed,
        settings.layout.chunks_per_stage(settings.shape.num_layers),
        timeout,
    )
    from megaenc.training.distributed.collectives import call_on_all
    from megaenc.training.distributed.signals import EXIT_STOPPED
    from megaenc.training.trainer import pretrain

    try:
        complete = pretrain(plan, device)
    except InputError as error:
        if not isinstance(error, LocalInputError):  # raised on all ranks together
            backend.destroy_distributed()
        raise
    code = 0 if complete else EXIT_STOPPED
    # On every node before any rank exits, because an exit makes torchrun restart the others.
    call_on_all(lambda: forbid_restart(code))
    backend.destroy_distributed()
    if code:
        sys.exit(code)
