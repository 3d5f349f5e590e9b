"""What a rank does at the start, in a step, at a save and at a load is as much among 1,024 ranks as among 32.

But rank 0 reads the index of each rank's chunks to publish a checkpoint, and sends that of all when it is loaded.
"""

import json

import pytest
import runs

FEW, MANY = 32, 1024
NODE = 8
STEPS = {"first": 3, "resumed": 4}
# Of the model, whatever the number of ranks: gradients, and weights.
RINGS = {"step": {"all-gather calls": 1, "reduce-scatter calls": 1}}
LOADED = RINGS | {"load": {"all-gather calls": 1}}
OPENED_BY_LAST = {"open", "stat", "mkdir", "rmdir", "scandir", "remove"}


def run_rank(rank, ranks, name, small_corpus, folder):
    """Of each phase of one rank's run: how much of everything; and what it printed."""
    flags = [
        *small_corpus.flags, *runs.SHORT_RUN, "--global-batch-size", str(ranks), "--micro-batch-size", "1", "--train-iters", "6",
        "--objective-schedule", "mlm", "--lr", "1e-9", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1",
        "--eval-interval", "0", "--log-interval", "1", "--max-skipped-updates", "100", "--use-distributed-optimizer",
        "--log-straggler", "--straggler-interval", "2", "--timing-log-level", "1", "--exit-interval", str(STEPS[name]),
    ]  # fmt: skip
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % NODE, "LOCAL_WORLD_SIZE": NODE}
    environment = {variable: str(value) for variable, value in variables.items()} | {"MASTER_ADDR": "none", "MASTER_PORT": "1"}
    result = runs.script(runs.WORKERS / "many_ranks.py", [str(folder), name, *flags], environment=environment)
    return json.loads((folder / f"{name}_{rank}.json").read_text()), result.stdout + result.stderr


@pytest.fixture(scope="module")
def records(small_corpus, tmp_path_factory):
    """By number of ranks, run and rank (the first and the last): phases and printed lines."""
    folders = {ranks: tmp_path_factory.mktemp(str(ranks)) for ranks in (FEW, MANY)}
    return {
        (ranks, name, at): run_rank(at % ranks, ranks, name, small_corpus, folders[ranks])
        for ranks in folders
        for name in STEPS
        for at in (0, -1)
    }


@pytest.mark.parametrize("at", [0, -1], ids=["first rank", "last rank"])
@pytest.mark.parametrize("name", STEPS)
def test_nothing_grows_with_the_ranks_but_messages_with_their_logarithm(name, at, records):
    few, _ = records[FEW, name, at]
    many, _ = records[MANY, name, at]
    assert few.keys() == many.keys() >= {"start", "load", "step 4" if name == "resumed" else "step 3"}
    rings = LOADED if name == "resumed" else RINGS
    for phase, counts in many.items():
        calls = [key for key in counts if key in ("all-gather calls", "gather calls", "scatter calls", "reduce-scatter calls")]
        assert {key: counts[key] for key in calls} == rings.get(phase.split()[0], {}), phase
        for key in counts.keys() | few[phase].keys():
            before = few[phase].get(key, 0)
            now = counts.get(key, 0)
            if key == "log messages":
                assert now == 2 * before, (phase, key)  # 10 instead of 5 a collective
            elif (name, phase, key) == ("resumed", "start", "broadcast bytes"):
                assert now <= 2000 * MANY, "the places of all chunks"
            elif key.endswith("bytes") and key != "index bytes":  # parts of buffers are padded, and numbers have more digits
                assert now <= 1.05 * before + 50, (phase, key)
            elif not is_linear(phase, key, at):
                assert now <= before if "file" in key and at else now == before, (phase, key)
    assert "gloo connections" not in many["start"]


def is_linear(phase, key, at) -> bool:
    """Whether rank 0 does it for each rank or file: it publishes the chunks of all, and looks at all files."""
    published = phase.startswith("save") and key in ("file remove", "index bytes", "chunks")
    return at == 0 and (published or key in ("file stat", "file open"))


def test_one_rank_publishes_what_the_others_have_written(records):
    """Of a save: files and bytes on rank 0 grow with the ranks, on the last rank they do not."""
    for ranks in (FEW, MANY):
        first, _ = records[ranks, "first", 0]
        save = first["save 3"]
        assert save["chunks"] <= 9 * (ranks + 30)
        assert save["file open"] <= 2 * ranks + 100
        assert save["index bytes"] <= 1000 * save["chunks"]


def test_each_rank_opens_its_own_files_and_those_with_its_share(records):
    for name in STEPS:
        phases, _ = records[MANY, name, -1]
        for phase, counts in phases.items():
            files = {key.removeprefix("file "): count for key, count in counts.items() if key.startswith("file ")}
            if phase == "start":  # run.json, for the run's data order and for what it skips; a file to verify
                assert files.keys() <= {"open", "stat"}
                assert files["open"] <= 6, "two opens are counted twice"
            elif phase == "load" or phase.startswith("save"):
                assert files.keys() <= OPENED_BY_LAST
                assert files.get("open", 0) <= 16
            else:
                assert not files, phase


def test_only_rank_0_prints(records):
    for (_, _, at), (_, text) in records.items():
        assert ("saved in" in text) == (at == 0)
        assert at == 0 or not text
