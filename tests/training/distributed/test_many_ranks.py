"""What a rank does at the start, in a step, at a save and at a load is as much among 4,096 ranks as among 64."""

import json

import pytest
import runs

FEW, MANY = 64, 4096
NODE = 8
STEPS = {"first": 3, "resumed": 4}
# Of the model, whatever the number of ranks: gradients, weights, and the optimizer's state, which is gathered to be saved.
RINGS = {
    "step": {"all-gather calls": 1, "reduce-scatter calls": 1},
    "save": {"all-gather calls": 3},
    "start": {},
    "load": {},
}


def run_rank(rank, ranks, name, small_corpus, folder):
    """Of each phase of one rank's run: how much of everything; and what it printed."""
    flags = [
        *small_corpus.flags, *runs.SHORT_RUN, "--global-batch-size", str(ranks), "--micro-batch-size", "1", "--train-iters", "6",
        "--objective-schedule", "mlm", "--lr", "1e-9", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1",
        "--eval-interval", "0", "--log-interval", "1", "--max-skipped-updates", "100", "--use-distributed-optimizer",
        "--log-straggler", "--straggler-interval", "2", "--timing-log-level", "1", "--exit-interval", str(STEPS[name]),
    ]  # fmt: skip
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % NODE, "LOCAL_WORLD_SIZE": NODE}
    environment = {variable: str(value) for variable, value in variables.items()}
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
    (few, _), (many, _) = (records[ranks, name, at] for ranks in (FEW, MANY))
    assert few.keys() == many.keys() >= {"start", "load", "step 4" if name == "resumed" else "step 3"}
    for phase, counts in many.items():
        rings = RINGS[phase.split()[0]]
        assert {key: counts[key] for key in counts if key.split()[0] in ("all-gather", "gather", "scatter", "reduce-scatter")
                and key.endswith("calls")} == rings, phase  # fmt: skip
        for key in counts.keys() | few[phase].keys():
            before, now = few[phase].get(key, 0), counts.get(key, 0)
            if key == "log messages":
                assert now == 2 * before, (phase, key)  # 12 instead of 6 a collective
            elif key.endswith("bytes"):  # parts of buffers are padded, and numbers have more digits
                assert now <= 1.05 * before + 50, (phase, key)
            elif key not in ("seconds", "linear messages", "groups called"):
                assert now == before, (phase, key)
    assert "gloo connections" not in many["start"]


def test_only_rank_0_touches_the_files_of_a_step_a_save_and_a_load(records):
    for name in STEPS:
        phases, _ = records[MANY, name, -1]
        for phase, counts in phases.items():
            files = {key.removeprefix("file "): count for key, count in counts.items() if key.startswith("file ")}
            files.pop("symlink", None)  # in a folder of its own, to the shards
            if phase == "start":  # run.json, for the run's data order and for what it skips
                assert files.keys() <= {"open", "stat"}
                assert files["open"] <= 4, "two opens are counted twice"
            else:
                assert not files, phase


def test_only_rank_0_prints(records):
    for (_, _, at), (_, text) in records.items():
        assert at == 0 or not text
        assert at or "saved in" in text
