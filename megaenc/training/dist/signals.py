"""Stopping in order: on a signal or after a time the step is finished and saved, by all ranks at the same step."""

import signal
import time
from typing import Self

import torch
import torch.distributed as dist

EXIT_STOPPED = 75  # sysexits.h: EX_TEMPFAIL, try again
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_TIME = 1000  # beyond every signal's number


class SignalHandler:
    """A context in which SIGTERM, SIGINT and SIGUSR1 ask for the end of the run, as `minutes` do; a second SIGINT at once.

    Once asked, other signals are ignored, also after the context. `by_signals=False` leaves signals alone. For the main thread.
    """

    def __init__(self, minutes: float | None, device: torch.device, by_signals: bool = True) -> None:
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._minutes, self._device = minutes, device
        self._signals = _SIGNALS if by_signals else ()
        self._requested_signal = 0
        self._ending = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in self._signals}
        return self

    def _on_signal(self, number: int, frame: object) -> None:
        self._requested_signal, self._ending = number, True
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the kernel's: it waits for no collective

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            if not self._ending:
                signal.signal(number, before)
            elif signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_IGN)  # a handler of Python's would not last to the end of the process

    def stop_reason(self) -> str | None:
        """Who asked for the end, on any rank; None if nobody has. All ranks call this together and get the same answer."""
        if not self._signals and self._deadline is None:  # on all ranks alike: there is nothing to agree on
            return None
        late = self._deadline is not None and time.monotonic() >= self._deadline
        asked = torch.tensor([self._requested_signal or (_TIME if late else 0)], device=self._device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        number = int(asked)
        self._ending |= bool(number)
        if number == _TIME:
            return f"--exit-duration-in-mins {self._minutes:g}"
        return signal.Signals(number).name if number else None
