"""Wrong input is one line and exit code 2; everything else is a bug and keeps its traceback."""

import functools
import os
import sys
import time
from collections.abc import Callable

from megaenc.console import printable
from megaenc.launcher import for_good, started_by_torchrun
from megaenc.ranks import local_rank, rank

_TIME_TO_SAY = 3.0
_LONGEST = 4000  # letters of an error: what was found may be a file's only line


class InputError(Exception):
    """What the user gave cannot be used. The message is one line: the file, line or field, what was found, what was expected.

    All ranks of a run find the same error and rank 0 prints it.
    """


class LocalInputError(InputError):
    """An InputError that one rank may find alone, say in a part of the data that only it reads: that rank prints it."""


def one_line_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Wrap the `main` of a command: an InputError becomes one line on stderr and exit code 2, Ctrl-C one word and 130.

    torchrun turns the 2 into its own 1 and adds a summary; the line above it is the same. A command that asks `leave_if_told` is
    not tried again by it.
    """

    @functools.wraps(main)
    def run(*args, **kwargs) -> None:
        try:
            main(*args, **kwargs)
        except InputError as error:
            where = f"rank {rank()}: " if rank() else ""
            if rank() == 0 or isinstance(error, LocalInputError):
                line = printable(f"error: {where}" + " ".join(str(error).split()))
                print(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...", file=sys.stderr, flush=True)
            elif started_by_torchrun():
                time.sleep(_TIME_TO_SAY)  # torchrun ends the others when the first leaves
            if local_rank() == 0 or isinstance(error, LocalInputError):
                for_good(2)
            sys.exit(2)
        except BrokenPipeError:  # whoever read the output has seen enough, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        except KeyboardInterrupt:
            if rank() == 0:
                print("stopped", file=sys.stderr, flush=True)
            sys.exit(130)

    return run
