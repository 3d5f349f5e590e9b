"""The work of one rank at start, step, save and load, among few and many ranks.

It does not grow with their number, except that rank 0 reads the index of each rank's chunks to
publish a checkpoint and sends all of them when it is loaded, and that a straggler report gathers
the seconds of all ranks.
"""

import json

import pytest
import runs

pytestmark = pytest.mark.slow

NODE = 8
STEPS = {"first": 3, "resumed": 4}
# Of the model, whatever the number of ranks: gradients, and weights.
RINGS = {"step": {"all-gather calls": 1, "reduce-scatter calls": 1}}
LOADED = RINGS | {"load": {"all-gather calls": 1}}
REPORT = ("first", "step 2")  # of stragglers
GATHERS = ("all-gather calls", "gather calls", "scatter calls", "reduce-scatter calls")
# What the first rank does for each rank: it publishes the chunks of all, sends their places and
# looks at all files.
LINEAR = ("file open", "file stat", "file remove", "chunks", "index bytes")
GATHERED = (("resumed", "start", "broadcast bytes"), (*REPORT, "all-gather bytes"))


def run_rank(rank, ranks, name, small_corpus, directory):
    """Return one rank's counts by phase, and its output."""
    flags = [
        *small_corpus.flags, *runs.SHORT_RUN, "--use-distributed-optimizer",
        "--global-batch-size", str(ranks), "--micro-batch-size", "1", "--train-iters", "6",
        "--objective-schedule", "mlm",
        "--lr", "1e-9", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1",
        "--eval-interval", "0", "--log-interval", "1", "--max-skipped-updates", "100",
        "--log-straggler", "--straggler-interval", "2", "--exit-interval", str(STEPS[name]),
    ]  # fmt: skip
    variables = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank % NODE,
        "LOCAL_WORLD_SIZE": NODE,
    }
    environment = {variable: str(value) for variable, value in variables.items()} | {
        "MASTER_ADDR": "none",
        "MASTER_PORT": "1",
    }
    result = runs.script(
        runs.WORKERS / "many_ranks.py", [str(directory), name, *flags], environment=environment
    )
    return json.loads(
        (directory / f"{name}_{rank}.json").read_text()
    ), result.stdout + result.stderr


# A few ranks, and many: twice the logarithm.
SIZES = (64, 4096)


def test_nothing_grows_with_the_ranks_but_messages_with_their_logarithm(small_corpus, tmp_path):
    """Counted are the first and the last rank, of a new and of a resumed run."""
    for name in STEPS:
        for rank_index in (0, -1):
            records = []
            for ranks in SIZES:
                directory = tmp_path / str(ranks)
                directory.mkdir(exist_ok=True)
                phases, text = run_rank(rank_index % ranks, ranks, name, small_corpus, directory)
                assert ("saved in" in text) == (rank_index == 0), "only rank 0 prints"
                assert rank_index == 0 or not text
                records.append(phases)
            compare(name, rank_index, *records)
            if rank_index:
                check_files_of_the_last_rank(records[1])


def compare(name, rank_index, phases_of_few, phases):
    few, many = SIZES
    assert phases_of_few.keys() == phases.keys() >= {"start", "load", f"step {STEPS[name]}"}
    rings = LOADED if name == "resumed" else RINGS
    for phase, counts in phases.items():
        calls = {key: counts[key] for key in counts if key in GATHERS}
        expected = rings.get(phase.split()[0], {})
        if (name, phase) == REPORT:
            expected = expected | {"all-gather calls": 2}
        assert calls == expected, (name, rank_index, phase)
        for key, now in counts.items():
            place = (name, rank_index, phase, key)
            before = phases_of_few[phase].get(key, 0)
            if key == "log messages":
                assert now == 2 * before, place  # 8 instead of 4 a collective, or 12 instead of 6
            elif (rank_index == 0 and key in LINEAR) or (name, phase, key) in GATHERED:
                assert now / many <= before / few, place
            elif key.endswith("bytes"):  # parts of buffers are padded, and numbers have more digits
                assert now <= 1.05 * before + 50, place
            else:
                assert now <= before, place
    assert "gloo connections" not in phases["start"]


def check_files_of_the_last_rank(phases):
    """Assert that the last rank opens few files, and none in a step."""
    for phase, counts in phases.items():
        files = sum(count for key, count in counts.items() if key.startswith("file "))
        assert files <= (0 if phase.startswith(("step", "end")) else 24), phase
