"""Wrong input is one line and exit code 2; everything else is a bug and keeps its traceback."""

import atexit
import contextlib
import difflib
import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

from megaenc.console import escape_unprintable, truncate_text
from megaenc.dist_env import get_local_rank, get_rank
from megaenc.torchelastic import exit_without_restart, is_torchrun_worker

_TIME_TO_SAY = 3.0
_LONGEST = 4000  # letters of an error: what was found may be a file's only line
_STOPPED = "stopped\n"


class InputError(Exception):
    """What the user gave cannot be used. The message is one line: the file, line or field, what was found, what was expected.

    All ranks of a run find the same error and rank 0 prints it.
    """


class LocalInputError(InputError):
    """An InputError that one rank may find alone, say in a part of the data that only it reads: that rank prints it."""


def format_error(error: BaseException, most: int = 200) -> str:
    """Return the text of `error`, or its type's name where it has none, in one line of at most `most` characters."""
    return truncate_text(" ".join(str(error).split()) or type(error).__name__, most)


def closest_match(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the one of `known` that `word` may have been meant to be, empty if none is similar."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=cutoff)), "")


def first_error_line(error: BaseException, most: int = 200) -> str:
    """Return the first line of an error's message that says something, at most so long, or the error's type."""
    return truncate_text(next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__), most)


def handle_command_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Wrap the `main` of a command: an InputError becomes one line on stderr and exit code 2, Ctrl-C one word and 130.

    torchrun turns the 2 into its own 1 and adds a summary; the line above it is the same. A command that asks `leave_if_told` is
    not tried again by it. Called without arguments the command is the whole program: then that holds for Ctrl-C until the end of
    the process.
    """

    @functools.wraps(main)
    def run(*args, **kwargs) -> None:
        is_program = not args and kwargs.get("argv") is None
        if is_program:
            atexit.register(_ignore_interrupts)  # called last of all, when Python would give SIGINT back to the kernel
        try:
            try:
                main(*args, **kwargs)
            except InputError as error:
                _report(error)
                sys.exit(2)
            except BrokenPipeError:  # whoever read the output has seen enough, as `| head` does
                _drop_output()
                sys.exit(141)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                _drop_output()
                place = error.filename or "standard output, or a temporary file"
                _print_error(f"{place}: cannot be written to: {error.strerror}")
                sys.exit(2)
            finally:
                if is_program:
                    _end_at_interrupts(_STOPPED)
        except KeyboardInterrupt:
            if is_program:
                _end_at_interrupts("")
                exec("")  # or `python -m` would kill itself by SIGINT, if it was an `exec` in a library that was interrupted
            if get_rank() == 0:
                print(_STOPPED, end="", file=sys.stderr, flush=True)
            sys.exit(130)

    return run


def _report(error: InputError) -> None:
    """Print the line of an InputError, on rank 0 or on the rank that found it; the others wait for that."""
    where = f"rank {get_rank()}: " if get_rank() else ""
    if get_rank() == 0 or isinstance(error, LocalInputError):
        _print_error(where + " ".join(str(error).split()))
    elif is_torchrun_worker():
        time.sleep(_TIME_TO_SAY)  # torchrun ends the others when the first leaves
    if get_local_rank() == 0 or isinstance(error, LocalInputError):
        exit_without_restart(2)


def _print_error(text: str) -> None:
    line = escape_unprintable(f"error: {text}")
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]}...{line[-_LONGEST // 2 :]}"
    print(line, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Have what is still to be written to standard output go nowhere, or Python would complain of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_at_interrupts(word: str) -> None:
    """Have Ctrl-C print `word` and end the process at once from here on: nobody is left to catch a KeyboardInterrupt."""

    def end(number: int, frame: object) -> None:
        os.write(2, b"" if get_rank() else word.encode())  # `print` may be what was interrupted
        os._exit(130)

    with contextlib.suppress(ValueError):  # of another thread than the main one
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is under nohup
            signal.signal(signal.SIGINT, end)


def _ignore_interrupts() -> None:
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
