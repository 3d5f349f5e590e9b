"""`megaenc pretrain` and examples/pretrain_encoder.py."""

import sys
from collections.abc import Sequence

from megaenc.console import quiet
from megaenc.errors import one_line_errors


@one_line_errors
def main(argv: Sequence[str] | None = None, prog: str = "megaenc pretrain") -> None:
    """Read the flags, work the run out, join the process groups, train."""
    quiet()
    from megaenc.training.settings import read_settings

    settings = read_settings(sys.argv[1:] if argv is None else argv, prog)
    from megaenc.training.plan import make_plan

    plan = make_plan(settings)
    from megaenc import backend

    device = backend.start(settings.layout, settings.seed)
    try:
        from megaenc.training.loop import pretrain

        pretrain(plan, device)
    finally:
        backend.stop()
