"""Runs killed at random moments, which must end as if undisturbed: `make faults`.

After each SIGKILL of a launcher or a worker, no process of the run may be alive a few seconds
later, and every visible checkpoint must be whole. When the same command has been given often enough
to finish, weights, optimizer and rows must equal those of an undisturbed run bit by bit, and
nothing half-written may be left.
"""

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import runs
from faults.life import Life
from faults.moments import FaultRun, Moment

STEPS = 24
MODEL = [
    "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "160",
    "--num-attention-heads", "4", "--num-query-groups", "2", "--seq-length", "64",
    "--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", str(STEPS),
    "--objective-schedule", "clm:0.5,mlm:0.5", "--lr-warmup-iters", "2",
    "--eval-interval", "5", "--eval-iters", "1", "--no-bf16",
]  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
LAYOUTS = {
    "TP2": ([*TORCHRUN, "2"], ["--tensor-model-parallel-size", "2"]),
    "one": ([], []),
    "DP2": ([*TORCHRUN, "2"], ["--use-distributed-optimizer"]),
    "one, torchrun": ([*TORCHRUN, "1"], []),
    "DP4": ([*TORCHRUN, "4"], ["--use-distributed-optimizer", "--micro-batch-size", "1"]),
}
SAVES = (
    ["--save-interval", "1", "--keep-last", "3"],
    ["--save-interval", "1", "--async-save"],
    ["--save-interval", "2"],
    ["--save-interval", "2", "--keep-last", "3", "--async-save"],
)


class Campaign:
    """Runs in the directory `root` on one corpus, and their `failures`.

    `data`: the flags that name the corpus.
    """

    def __init__(self, root: Path, data: list[str]):
        self.root = root
        self.data = data
        self.kills: list[str] = []
        self.failures: list[str] = []
        self.lives = 0
        self._undisturbed: dict[str, FaultRun] = {}

    def live(self, layout: str, saves: list[str], moments: list[Moment]) -> None:
        """Run once more, killed at `moments` or until it is over, finish it, and report."""
        reference = self._left_alone(layout)
        directory = self.root / f"life_{self.lives:03d}"
        life = Life(self._command(layout, saves, directory), directory, STEPS)
        for moment in moments:
            if not life.kill_at(moment):
                break
        life.finish(reference)
        print(
            f"life {self.lives} ({layout}; {' '.join(saves)}), killed at {', '.join(life.kills)}",
            *life.failures,
            sep="\n  ",
        )
        self.kills += life.kills
        self.failures += [f"{directory}: {failure}" for failure in life.failures]
        self.lives += 1

    def _command(self, layout: str, saves: list[str], directory: Path) -> list[str]:
        launcher, flags = LAYOUTS[layout]
        return [
            sys.executable,
            *launcher,
            str(runs.PRETRAIN),
            *self.data,
            *MODEL,
            *flags,
            *saves,
            "--save",
            str(directory),
        ]

    def _left_alone(self, layout: str) -> FaultRun:
        """Return the run without a kill, made when first needed."""
        if layout not in self._undisturbed:
            run = FaultRun(self.root / f"undisturbed_{len(self._undisturbed)}")
            runs.run(self._command(layout, SAVES[0], run.directory))
            self._undisturbed[layout] = run
        return self._undisturbed[layout]


def corpus(directory: Path) -> list[str]:
    """Make a small corpus; return the flags that name it."""
    runs.make_corpus(directory)
    return [
        "--data-path",
        str(directory / "small_text_document"),
        "--tokenizer",
        str(directory / "tokenizer"),
        "--split",
        "90,10,0",
    ]


def main() -> None:
    """Run the command; its directory is removed if all is well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=100, help="SIGKILLs, over as many runs as that takes"
    )
    parser.add_argument("--seed", type=int, default=0, help="which moments and which processes")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="faults_"))
    print(f"{arguments.kills} kills, seed {arguments.seed}, in {root}", flush=True)
    campaign = Campaign(root, corpus(root))
    random = Random(arguments.seed)
    while len(campaign.kills) < arguments.kills and len(campaign.failures) < 10:
        # All pairs of layouts and saves, one after the other.
        number = campaign.lives
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        saves = SAVES[(number + number // len(LAYOUTS)) % len(SAVES)]
        launcher, _ = LAYOUTS[layout]
        campaign.live(
            layout,
            saves,
            [Moment.draw(random, bool(launcher)) for _ in range(random.randint(3, 9))],
        )
    print(f"\n{len(campaign.kills)} kills in {campaign.lives} runs:", Counter(campaign.kills))
    if campaign.failures:
        sys.exit(
            "\n".join(
                [
                    f"{len(campaign.failures)} failures; directories and logs are kept",
                    *campaign.failures,
                ]
            )
        )
    shutil.rmtree(root)
    print("all finished equal to the runs that were left alone")


if __name__ == "__main__":
    main()
