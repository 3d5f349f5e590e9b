"""Graceful stop of all ranks at the same step, after a signal or a time limit."""

import signal
import time
from collections.abc import Sequence
from typing import Self

from megaenc.dist_env import is_multi_node

EXIT_STOPPED = 75  # sysexits.h: EX_TEMPFAIL, try again
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LAUNCHER_SECONDS = 5.0  # torchrun looks for new nodes ten times a second
_TIME_LIMIT = 1000  # above every signal number
_REQUESTS = (*_SIGNALS, _TIME_LIMIT)


class SignalHandler:
    """Context that records requests to stop: signals or a time limit.

    The signals are SIGTERM, SIGINT and SIGUSR1. Nothing is interrupted: after each step all ranks
    sum their `votes`, and `stop_reason` is the same for all. If the process ends with the run, a
    second SIGINT kills at once, and the signals are ignored after the context if there was a
    request. Otherwise the earlier handlers are restored, that of SIGINT at the first SIGINT, and
    the end of the context raises KeyboardInterrupt for it. It is for the main thread of each rank.
    It is made with `minutes`, from then to the time limit (None: no limit), `handle_signals`, False
    to leave signals alone, and `ends_process`.
    """

    def __init__(
        self, minutes: float | None, handle_signals: bool = True, *, ends_process: bool = True
    ) -> None:
        """Set up the time limit; signals are recorded from the context's begin on.

        Args:
            minutes: Time from now after which the end is requested, too; None for no limit.
            handle_signals: False to leave the handlers of signals unchanged.
            ends_process: Whether the process ends with the run.
        """
        self._ends_process = ends_process
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._minutes = minutes
        self._signals = _SIGNALS if handle_signals else ()
        self._requested_signal = 0
        self._reason = 0  # on which all ranks end the run

    def __enter__(self) -> Self:
        self._before = {signum: signal.signal(signum, self._on_signal) for signum in self._signals}
        return self

    def _on_signal(self, signum: int, frame: object) -> None:
        """Record the request; replace the handler for a second SIGINT."""
        self._requested_signal = signum
        if signum == signal.SIGINT:
            # The kernel's handler does not wait for a collective.
            signal.signal(signum, signal.SIG_DFL if self._ends_process else self._before[signum])

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for signum, before in self._before.items():
            if not (self._ends_process and (self._requested_signal or self._reason)):
                signal.signal(signum, before)
            elif signal.getsignal(signum) == self._on_signal:
                # Unlike a Python handler, this lasts until the end of the process.
                signal.signal(signum, signal.SIG_IGN)
        is_interrupted = signal.SIGINT in (self._requested_signal, self._reason)
        if is_interrupted and not self._ends_process and kind is None:
            raise KeyboardInterrupt

    def votes(self) -> list[int]:
        """Return this rank's request to stop as numbers, to be summed over all ranks.

        The four numbers are of SIGTERM, SIGINT, SIGUSR1 and the time limit, in this order: 1 for
        the reason of a request, if there is one, and else 0. Of several requests the last signal
        counts, else the time limit. The list is empty, on all ranks, if signals are left alone and
        there is no time limit.
        """
        if not self._signals and self._deadline is None:
            return []
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        request = self._requested_signal or (_TIME_LIMIT if is_late else 0)
        return [int(request == reason) for reason in _REQUESTS]

    def stop_reason(self, votes: Sequence[float]) -> str | None:
        """Return the signal or time limit that ends the run, the same on all ranks.

        Of several reasons the time limit counts, else SIGTERM before SIGUSR1 before SIGINT. The
        result is kept for `wait_for_launcher`.

        Args:
            votes: Sums over all ranks of their `votes`; may be empty.

        Returns:
            Name of the signal, such as SIGTERM, or `--exit-duration-in-mins N`; None if nothing
            ends the run.
        """
        self._reason = max(
            (reason for reason, count in zip(_REQUESTS, votes, strict=False) if count), default=0
        )
        if self._reason == _TIME_LIMIT:
            return f"--exit-duration-in-mins {self._minutes:g}"
        return signal.Signals(self._reason).name if self._reason else None

    def wait_for_launcher(self) -> None:
        """Wait for this rank's own SIGTERM if another node's SIGTERM ends the run.

        Call it inside the context. It takes a few seconds at most, and returns at once if the last
        `stop_reason` was not SIGTERM. When a node joins, the torchruns of the others send SIGTERM
        to their workers one shortly after the other. Workers that end before their torchrun has
        noticed the join would count as failed.
        """
        deadline = time.monotonic() + _LAUNCHER_SECONDS
        while (
            self._reason == signal.SIGTERM
            and is_multi_node()
            and not self._requested_signal
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
