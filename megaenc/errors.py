"""Wrong input is one line and exit code 2; everything else is a bug and keeps its traceback."""

import functools
import os
import sys
from collections.abc import Callable


class InputError(Exception):
    """What the user gave cannot be used. The message is one line: the file, line or field, what was found, what was expected."""


def one_line_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Wrap the `main` of a command: an InputError becomes one line on stderr, printed by rank 0 alone, and exit code 2.

    torchrun turns the 2 into its own 1 and adds a summary; the line above it is the same.
    """

    @functools.wraps(main)
    def run(*args, **kwargs) -> None:
        try:
            main(*args, **kwargs)
        except InputError as error:
            if os.environ.get("RANK", "0") == "0":
                print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
            sys.exit(2)

    return run
