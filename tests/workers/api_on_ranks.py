"""Python functions under torchrun: `api_on_ranks.py TEXT DIRECTORY`.

Each rank prints errors and results.
"""

import sys
from pathlib import Path

import megaenc
from megaenc.api import _call_on_rank_0
from megaenc.data.worker_pool import WorkerProcessDied
from megaenc.dist_env import get_rank


class SayStep(megaenc.Callback):
    """Callback that prints its rank after the last step."""

    def after_validation(self, step, scores):
        if step == 2:
            print(f"rank {get_rank()} validates")


def lose_worker() -> None:
    """Raise an error of `preprocess` whose class has arguments of its own."""
    raise WorkerProcessDied(7, "ended")


if __name__ == "__main__":
    text = sys.argv[1]
    directory = Path(sys.argv[2])
    tokenizer = megaenc.train_tokenizer(input=text, vocab_size=300, output=directory / "tokenizer")
    try:
        megaenc.train_tokenizer(input=text, vocab_size=300, output=tokenizer)
    except megaenc.InputError as error:
        print(f"rank {get_rank()}: {error}")
    try:
        _call_on_rank_0(lose_worker)
    except megaenc.InputError as error:
        print(f"rank {get_rank()}: {error}")
    output = {"output_prefix": directory / "corpus", "workers": 1}
    [prefix] = megaenc.preprocess(input=text, tokenizer=tokenizer, **output)
    run = megaenc.pretrain(
        data_path=prefix,
        tokenizer=tokenizer,
        objective_schedule="mlm",
        train_iters=2,
        eval_interval=2,
        seq_length=64,
        num_layers=1,
        save=directory / "run",
        callbacks=[SayStep],
    )
    [model] = megaenc.export(load=run.directory, output=directory / "hf")
    print(f"rank {get_rank()}: loss {run.loss:.4f}, {model.directory.name}", flush=True)
