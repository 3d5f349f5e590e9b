"""`megaenc pretrain` and examples/pretrain_encoder.py."""

import sys
from collections.abc import Sequence

from megaenc.console import quiet
from megaenc.errors import InputError, LocalInputError, one_line_errors
from megaenc.processes import die_with_launcher


@one_line_errors
def main(argv: Sequence[str] | None = None, prog: str = "megaenc pretrain") -> None:
    """Read the flags, work the run out, join the process groups, train."""
    die_with_launcher()
    quiet()
    from megaenc.training.settings import read_settings

    settings = read_settings(sys.argv[1:] if argv is None else argv, prog)
    from megaenc.training.plan import make_plan

    plan = make_plan(settings)
    if settings.output.dry_run:
        from megaenc.training.dry_run import describe

        describe(plan)
        return
    from megaenc import backend

    device = backend.start(settings.layout, settings.seed, settings.layout.chunks(settings.shape.num_layers))
    from megaenc.training.loop import pretrain
    from megaenc.training.stopping import STOPPED

    try:
        complete = pretrain(plan, device)
    except InputError as error:
        if not isinstance(error, LocalInputError):  # then every rank is on its way out
            backend.stop()
        raise
    backend.stop()
    if not complete:
        sys.exit(STOPPED)
