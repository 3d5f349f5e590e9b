"""`megaenc pretrain` and examples/pretrain_encoder.py."""

import sys
from collections.abc import Sequence

from megaenc.console import quiet
from megaenc.errors import InputError, LocalInputError, one_line_errors
from megaenc.torchelastic import die_with_launcher, exit_without_restart, leave_if_told


@one_line_errors
def main(argv: Sequence[str] | None = None, prog: str = "megaenc pretrain") -> None:
    """Train by the flags in `argv`. torchrun does not restart what was stopped or refused."""
    die_with_launcher()
    leave_if_told()
    quiet()
    from megaenc.training.config import read_settings

    settings = read_settings(sys.argv[1:] if argv is None else argv, prog)
    from megaenc.training.planning import make_plan

    plan = make_plan(settings)
    if settings.output.dry_run:
        from megaenc.training.dry_run import describe

        describe(plan)
        return
    from megaenc import backend
    from megaenc.training.dist.watchdog import process_group_timeout

    timeout = process_group_timeout(settings.output.distributed_timeout_minutes)
    device = backend.init_distributed(settings.layout, settings.seed, settings.layout.chunks(settings.shape.num_layers), timeout)
    from megaenc.training.dist.collectives import all_gather_call
    from megaenc.training.dist.signals import STOPPED
    from megaenc.training.trainer import pretrain

    try:
        complete = pretrain(plan, device)
    except InputError as error:
        if not isinstance(error, LocalInputError):  # then every rank is on its way out
            backend.destroy_distributed()
        raise
    if not complete:
        all_gather_call(
            lambda: exit_without_restart(STOPPED)
        )  # on every machine, before the first to leave makes torchrun start others
    backend.destroy_distributed()
    if not complete:
        sys.exit(STOPPED)
