"""Errors of user input, which commands print as one line with exit code 2.

Any other exception is a bug and keeps its traceback.
"""

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

from megaenc.console import discard_output, escape_unprintable, truncate_text
from megaenc.dist_env import forbid_restart, get_local_rank, get_rank, is_torchrun_worker

_REPORT_SECONDS = 3.0
_MAX_LENGTH = 4000  # characters of an error, which may quote a file of one line
_STOP_MESSAGE = "stopped\n"


class InputError(Exception):
    """Error in the user's input.

    Commands print it as one line (place, found and expected value) with exit code 2. All ranks of a
    run raise the same error, and rank 0 prints it.
    """


class LocalInputError(InputError):
    """InputError that maybe not all ranks raise; each rank that does prints it.

    It is for example about a rank's part of the data.
    """


class LostConnectionError(Exception):
    """Failed communication: other processes have ended or cannot be reached.

    Commands print it as one line with exit code 1, after which torchrun may restart them.
    """


def format_error(error: BaseException, max_length: int = 200) -> str:
    """Return the message of `error` as one line of at most `max_length` characters.

    It is the name of its type if the message is empty, and ends in `...` if it is cut.
    """
    return truncate_text(" ".join(str(error).split()) or type(error).__name__, max_length)


def closest_match(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the candidate most similar to the misspelled `word`.

    Empty if none reaches similarity `cutoff`, from 0 to 1 (`difflib`, case-sensitive).
    """
    return next(iter(difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff)), "")


def suggest_closest(word: str, candidates: Iterable[str]) -> str:
    """Return the end of an error, ``; did you mean `X`?``, for a misspelled `word`.

    X is the `closest_match` of `candidates`; the end is empty without one.
    """
    near = closest_match(word, candidates)
    return f"; did you mean `{near}`?" if near else ""


def first_error_line(error: BaseException, max_length: int = 200) -> str:
    """Return the first nonempty line of the error's message, of at most `max_length`.

    It is the name of its type if there is none, and ends in `...` if it is cut. `max_length` is in
    characters.
    """
    lines = (line.strip() for line in str(error).splitlines())
    return truncate_text(next(filter(None, lines), type(error).__name__), max_length)


def is_disk_full(error: BaseException) -> bool:
    """Return whether a write failed for want of space, or at a limit of sizes."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full


def handle_command_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Wrap the function of a command so that it reports errors and interrupts.

    An InputError prints one line on stderr and exits with 2, as a full disk does; Ctrl-C prints
    `stopped` there and exits with 130, and a reader that leaves, as `| head` does, ends the command
    with 141. A LostConnectionError is one line and exit code 1. Other exceptions pass. torchrun
    turns the 2 into 1 and adds a summary; it does not restart a command that calls
    `exit_if_restart_forbidden`. Called without arguments or with `argv=None`, `main` is the whole
    program, and Ctrl-C is handled until the process ends, otherwise only during the call.
    """

    @functools.wraps(main)
    def run(*args, **kwargs) -> None:
        _open_missing_streams()
        is_program = not args and kwargs.get("argv") is None
        if is_program:
            # It runs last, when Python would restore the default SIGINT handler.
            atexit.register(_ignore_interrupts)
        try:
            try:
                main(*args, **kwargs)
                sys.stdout.flush()  # or a full disk would be found at exit only, with code 120
            except InputError as error:
                _report_input_error(error)
                sys.exit(2)
            except LostConnectionError as error:
                _print_error(str(error))
                sys.exit(1)
            except BrokenPipeError:  # the reader closed the pipe, as `| head` does
                discard_output()
                sys.exit(141)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                discard_output()
                place = error.filename2 or error.filename or "standard output, or a temporary file"
                _print_error(f"{place}: cannot be written to: {error.strerror}")
                forbid_restart(2)
                sys.exit(2)
            finally:
                if is_program:
                    _exit_on_interrupt(_STOP_MESSAGE)
        except KeyboardInterrupt:
            if is_program:
                _exit_on_interrupt("")
                # Otherwise `python -m` kills itself with SIGINT if an `exec` of a library was
                # interrupted.
                exec("")
            if get_rank() == 0:
                print(_STOP_MESSAGE, end="", file=sys.stderr, flush=True)
            sys.exit(130)

    return run


def _open_missing_streams() -> None:
    """Replace closed standard streams, as services have them, by /dev/null."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            setattr(sys, name, open(descriptor, mode))  # noqa: SIM115  as long as the process


def _report_input_error(error: InputError) -> None:
    """Print an InputError on rank 0, and a LocalInputError on its own rank.

    Other ranks wait for the line to be printed.
    """
    where = f"rank {get_rank()}: " if get_rank() else ""
    if get_rank() == 0 or isinstance(error, LocalInputError):
        _print_error(where + " ".join(str(error).split()))
    elif is_torchrun_worker():
        time.sleep(_REPORT_SECONDS)  # torchrun kills the other ranks when the first one exits
    if get_local_rank() == 0 or isinstance(error, LocalInputError):
        forbid_restart(2)


def _print_error(text: str) -> None:
    """Print `error: TEXT` on stderr if possible, shortened in the middle if very long."""
    line = escape_unprintable(f"error: {text}")
    if len(line) > _MAX_LENGTH:
        line = f"{line[: _MAX_LENGTH // 2]}...{line[-_MAX_LENGTH // 2 :]}"
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # also on a full disk
        discard_output(sys.stderr)


def _exit_on_interrupt(message: str) -> None:
    """Install a SIGINT handler that exits at once with code 130.

    It writes `message` to stderr on rank 0.
    """

    def handle(signum: int, frame: object) -> None:
        # `print` itself may have been interrupted.
        os.write(2, b"" if get_rank() else message.encode())
        os._exit(130)

    with contextlib.suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(signal.SIGINT, handle)


def _ignore_interrupts() -> None:
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
