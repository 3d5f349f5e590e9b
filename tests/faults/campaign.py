"""Runs that are killed at random moments, again and again, and must end as if nothing had happened: `make faults`.

After each SIGKILL of a launcher or a worker, no process of the run may be alive a few seconds later, and every checkpoint that
can be seen must be whole. When the same command has been given often enough to finish, weights, optimizer and rows must equal
those of a run that was left alone, bit by bit, and nothing half-written may be there.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import runs
from faults.life import Kill, Life
from faults.moments import KINDS, FaultRun, Moment, Pace
from faults.processes import start

STEPS = 24
MODEL = [
    "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "160", "--num-attention-heads", "4",
    "--num-query-groups", "2", "--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "4",
    "--train-iters", str(STEPS), "--objective-schedule", "clm:0.5,mlm:0.5", "--lr-warmup-iters", "2", "--eval-interval", "5",
    "--eval-iters", "1", "--no-bf16",
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
    """`kills` SIGKILLs over as many lives as that takes, in the folder `root`, on the corpus that `data` (flags) names."""

    def __init__(self, root: Path, data: list[str], kills: int, seed: int, layout: str | None = None, kind: str | None = None):
        """`layout`: the only one; `kind`: of all moments, at which each worker is killed in turn."""
        self.root, self.data, self.wanted, self.seed = root, data, kills, seed
        self.layout, self.kind = layout, kind
        self.kills: list[Kill] = []
        self.failures: list[str] = []
        self.lives = 0
        self._undisturbed: dict[str, tuple[FaultRun, Pace]] = {}

    def run(self) -> None:
        """Say each kill in a line. What is wrong is in `failures` at the end."""
        while len(self.kills) < self.wanted and len(self.failures) < 10:
            self._life(self.lives)

    def _life(self, number: int) -> None:
        random = Random(f"{self.seed} {number}")
        # All pairs, one after the other.
        layout, saves = self.layout or list(LAYOUTS)[number % len(LAYOUTS)], SAVES[(number + number // len(LAYOUTS)) % len(SAVES)]
        kills = min(random.randint(3, 9), self.wanted - len(self.kills))
        moments = [Moment.draw(random, bool(LAYOUTS[layout][0])) for _ in range(kills)]
        if self.kind:
            turns = [(len(self.kills) + turn) % 4 / 4 + 0.01 for turn in range(kills)]
            pairs = zip(moments, turns, strict=True)
            moments = [Moment(self.kind, moment.ahead, moment.into, which=turn) for moment, turn in pairs]
        self.live(layout, saves, moments)

    def live(self, layout: str, saves: list[str], moments: list[Moment]) -> None:
        """One more run, killed at these `moments` or until it is over."""
        reference, pace = self._left_alone(layout)
        folder = self.root / f"life_{self.lives:03d}"
        life = Life(self.lives, self._command(layout, saves, folder), folder, STEPS, pace)
        for kill in life.live(moments, reference):
            self.kills.append(kill)
            at = f"kill {len(self.kills):3} of {self.wanted}  life {life.number} ({layout}; {' '.join(saves)})"
            left = f", left: {kill.left}" if kill.left else ""
            print(f"{at}: {kill.target} at {kill.moment}{left}; all gone after {kill.gone_after:.1f} s", flush=True)
        for failure in life.failures:
            print(f"FAILED  life {life.number}: {failure}", flush=True)
        self.failures += [f"life {life.number} in {folder}: {failure}" for failure in life.failures]
        self.lives += 1

    def _command(self, layout: str, saves: list[str], folder: Path) -> list[str]:
        launcher, flags = LAYOUTS[layout]
        return [sys.executable, *launcher, str(runs.PRETRAIN), *self.data, *MODEL, *flags, *saves, "--save", str(folder)]

    def _left_alone(self, layout: str) -> tuple[FaultRun, Pace]:
        """The run without a kill, made when first needed, and how long its parts take here."""
        if layout in self._undisturbed:
            return self._undisturbed[layout]
        run = FaultRun(self.root / f"undisturbed_{len(self._undisturbed)}")
        log = run.folder.with_suffix(".log")
        began, first, saves = time.monotonic(), 0.0, {}
        process = start(self._command(layout, SAVES[0], run.folder), str(run.folder), log)
        while process.poll() is None:
            now = time.monotonic()
            first = first or (now if run.rows()[1] else 0.0)
            for attempt in run.attempts():
                saves.setdefault(attempt, [now, now])[1] = now
            time.sleep(0.002)
        if process.returncode:
            raise SystemExit(f"a run that was left alone ended with exit code {process.returncode}: {log}")
        lengths = sorted(end - begin for begin, end in saves.values())
        pace = Pace(first - began, (time.monotonic() - first) / STEPS, lengths[len(lengths) // 2])
        print(f"{layout}: the first step after {pace.start:.1f} s, then {pace.step:.2f} s each, {pace.save:.2f} s of it a save")
        self._undisturbed[layout] = run, pace
        return self._undisturbed[layout]

    def table(self) -> str:
        """A line for each moment and kind of target."""
        head = (
            "moment",
            "target",
            "kills",
            "attempt left",
            "no tracker yet",
            "scratch",
            "checkpoint",
            "complete",
            "killed again",
        )
        lines = [f"{head[0]:9}{head[1]:10}" + "".join(f"{name:>16}" for name in head[2:]) + f"{'finished equal':>16}"]
        groups: dict[tuple[str, str], list[Kill]] = {}
        for kill in self.kills:
            groups.setdefault((kill.moment, kill.target.rstrip(" 0123456789")), []).append(kill)
        for moment, target in sorted(groups, key=lambda group: (list(KINDS).index(group[0]), group[1])):
            lines.append(f"{moment:9}{target:10}" + _counts(groups[moment, target]))
        return "\n".join([*lines, f"{'all':19}" + _counts(self.kills)])


def _counts(kills: list[Kill]) -> str:
    nexts = Counter(kill.next_start for kill in kills)
    numbers = [len(kills), sum("attempt" in kill.left for kill in kills), sum("tracker" in kill.left for kill in kills)]
    numbers += [nexts[name] for name in ("scratch", "checkpoint", "complete", "killed again")]
    return "".join(f"{number:16}" for number in [*numbers, sum(kill.finished_equal for kill in kills)])


def corpus(folder: Path) -> list[str]:
    """Make a small one; returns the flags that name it."""
    from megaenc.data.preprocess import command as preprocess
    from megaenc.data.tokenizer import train_command

    text, tokenizer, prefix = runs.write_text(folder / "text.jsonl"), folder / "tokenizer", folder / "small"
    train_command.main(["--input", str(text), "--vocab-size", "400", "--output", str(tokenizer)])
    preprocess.main(["--input", str(text), "--output-prefix", str(prefix), "--tokenizer", str(tokenizer), "--append-eod"])
    return ["--data-path", f"{prefix}_text_document", "--tokenizer", str(tokenizer), "--split", "90,10,0"]


def main() -> None:
    """The command; its folder is removed when all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs, over as many runs as that takes")
    parser.add_argument("--seed", type=int, default=0, help="which moments and which processes")
    parser.add_argument("--layout", choices=LAYOUTS, help="the only one")
    parser.add_argument("--moment", choices=KINDS, help="kill each worker in turn at moments of this kind only")
    arguments = parser.parse_args()
    root, began = Path(tempfile.mkdtemp(prefix="faults_")), time.monotonic()
    campaign = Campaign(root, corpus(root), arguments.kills, arguments.seed, arguments.layout, arguments.moment)
    print(f"{arguments.kills} kills, seed {arguments.seed}, in {root}", flush=True)
    campaign.run()
    minutes = (time.monotonic() - began) / 60
    print(f"\n{campaign.table()}\n\n{len(campaign.kills)} kills in {campaign.lives} runs, {minutes:.0f} minutes", flush=True)
    if campaign.failures:
        sys.exit("\n".join([f"{len(campaign.failures)} failures; folders and logs are kept", *campaign.failures]))
    shutil.rmtree(root)
    print("all finished equal to the runs that were left alone")


if __name__ == "__main__":
    main()
