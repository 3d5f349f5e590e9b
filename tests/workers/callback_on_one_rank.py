"""Pretraining with a callback on rank 1: `callback_on_one_rank.py HOW FLAGS...`.

After step 3 it requests a stop (HOW is `stop`) or raises an InputError (`fail`).
"""

import sys

from megaenc.dist_env import get_rank
from megaenc.errors import InputError
from megaenc.training.callbacks import Callback
from megaenc.training.callbacks.registry import CALLBACKS
from megaenc.training.command import main


class OnOneRank(Callback):
    """Callback with the argument of the command."""

    def __init__(self, trainer, how: str):
        super().__init__(trainer)
        self.how = how

    def after_step(self, report):
        if report.step == 3 and get_rank() == 1:
            if self.how == "fail":
                raise InputError("found no disk")
            self.trainer.request_stop("rank 1")


if __name__ == "__main__":
    how = sys.argv.pop(1)
    CALLBACKS.register("on_one_rank", OnOneRank)
    sys.argv += ["--callbacks", f"{{name: on_one_rank, how: {how}}}"]
    main(prog="pretrain_encoder.py")
