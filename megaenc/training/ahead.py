"""Micro-batches made in a thread while the accelerator computes with those before."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Key = TypeVar("Key")
Made = TypeVar("Made")

DEPTH = 2  # the next, and one more for when that takes longer than usual


class Ahead(Generic[Key, Made]):
    """Calls `make` in one thread: while one result is used, up to DEPTH of the next are made.

    What is asked for is what is given, whatever was begun: a wrong guess costs the time of making it. The thread waits for
    nobody, so that it ends with the interpreter, or when nobody has this object any more.
    """

    def __init__(self, make: Callable[[Key], Made], set_up: Callable[[], object] | None = None) -> None:
        """`set_up` is called in the thread before anything else."""
        self._make = make
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="micro-batches", initializer=set_up)
        self._begun: deque[tuple[Key, Future]] = deque()

    def over(self, keys: Sequence[Key], following: Sequence[Key] = ()) -> Iterator[Made]:
        """`make(key)` of each of `keys`, in order, and what it raises, in its place; `following` is what the next call will ask.

        To be taken to its end before the next call.
        """
        if [key for key, _ in self._begun] != list(keys[: len(self._begun)]):
            self._forget()
        left = deque([*keys, *following][len(self._begun) :])
        for _ in keys:
            while left and len(self._begun) < 1 + DEPTH:  # the one that is asked for now, and those ahead of it
                self._begun.append((left[0], self._pool.submit(self._make, left.popleft())))
            _, made = self._begun.popleft()
            yield made.result()

    def _forget(self) -> None:
        while self._begun:
            self._begun.popleft()[1].cancel()
