"""Pretraining on bad packs: `bad_packs.py '{"97": "loss"}' FLAGS...`.

Micro-batches that hold sample 97 are spoiled. `loss`: it is NaN; `gradient`: it is infinite while
the loss is not; a number: the loss is multiplied by it. With KILLED in the environment the process
is killed once a rewind has written its list of skipped packs.
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable


def spoil(packs: dict[int, str | float], put: Callable = setattr) -> None:
    """Spoil `packs` for the engine of this process; `put` is a kind of setattr."""
    from megaenc.backend import prepare_megatron

    prepare_megatron()
    import torch

    from megaenc.model import encoder
    from megaenc.training import micro_batches

    make = micro_batches.build_micro_batch
    loss_of = encoder.linear_cross_entropy

    def marked(data, samples, *arguments):
        batch = make(data, samples, *arguments)
        batch.predictions.labels.spoiled = next(
            (packs[sample] for sample in samples if sample in packs), 1
        )
        return batch

    def spoiled(hidden_NH, weight_VH, predictions, *others, **options):
        labels = predictions.labels
        # Held-out packs have the same numbers, and stay as they are.
        how = labels.spoiled if torch.is_grad_enabled() else 1
        if how == "gradient":
            hidden_NH.register_hook(lambda gradient: gradient * float("inf"))
        elif how != 1:
            factors = torch.full(labels.shape, float("nan" if how == "loss" else how))
            predictions = dataclasses.replace(predictions, weights=factors)
        return loss_of(hidden_NH, weight_VH, predictions, *others, **options)

    put(micro_batches, "build_micro_batch", marked)
    put(encoder, "linear_cross_entropy", spoiled)


if __name__ == "__main__":
    from megaenc.training.command import main

    spoil({int(sample): how for sample, how in json.loads(sys.argv.pop(1)).items()})
    if "KILLED" in os.environ:
        from megaenc.training import trainer

        plan_rewind = trainer.Trainer.plan_rewind

        def plan_rewind_and_die(self, step):
            if plan_rewind(self, step):
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.Trainer.plan_rewind = plan_rewind_and_die
    main(prog="pretrain_encoder.py")
