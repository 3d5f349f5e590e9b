"""Pretraining with one fault: `fault_at_step.py FAULT:RANK:STEP:FILE FLAGS...`.

RANK may be `any`; FILE is made when the fault happens, and tells later attempts not to repeat it.
`dawdle` is no fault: a node by itself takes half a second for each step from STEP on.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from megaenc.training import engine, micro_batches
from megaenc.training.command import main


def stand_still() -> None:
    """Hang as a read from a lost file system does."""
    threading.Event().wait()


def hold_the_lock() -> None:
    """Hang in C as a call that never releases the interpreter."""
    ctypes.PyDLL(None).pause()


def die() -> None:
    """End as the kernel ends a process when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    """Raise SIGINT as Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    """Raise SIGTERM as a scheduler or a launcher does."""
    os.kill(os.getpid(), signal.SIGTERM)


def lose_launcher() -> None:
    """End torchrun and with it this process, as if the node were lost."""
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


def pause() -> None:
    """Give a test the time to do something to the machine in this step."""
    time.sleep(5)


def strike(fault: str, step: int, mark: Path) -> None:
    """Cause `fault` once, where this rank reads its packs for `step`."""
    now = []
    update = engine.Engine.train_step
    read = micro_batches.build_micro_batch

    def update_and_tell(self, number, *rest):
        now[:] = [number]
        return update(self, number, *rest)

    def read_or_fail(*arguments):
        if now == [step] and not mark.exists():
            mark.touch()
            globals()[fault]()
        return read(*arguments)

    engine.Engine.train_step = update_and_tell
    micro_batches.build_micro_batch = read_or_fail


def dawdle(first: int) -> None:
    """Give a node time to join."""
    update = engine.Engine.train_step

    def update_slowly(self, number, *rest):
        if number >= first:
            time.sleep(0.5)
        return update(self, number, *rest)

    if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
        engine.Engine.train_step = update_slowly


if __name__ == "__main__":
    fault, rank, step, mark = sys.argv.pop(1).split(":")
    if fault == "dawdle":
        dawdle(int(step))
    elif rank in ("any", os.environ.get("RANK", "0")):
        strike(fault, int(step), Path(mark))
    main(prog="pretrain_encoder.py")
