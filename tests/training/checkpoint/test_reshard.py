"""Saved in one layout, continued in another, with the optimizer's state: all 25 ways among five layouts.

What each rank holds after a load is compared with the files, bit by bit, also under the other optimizers.
"""

import json
import math
import re
from collections import Counter
from itertools import product

import pytest
import runs
from runs import Job

from megaenc.training.checkpoint.loader import CheckpointLoader

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
LAYOUTS = {
    "one process": (1, []),
    "TP2, SP": (2, [TP, "2", "--sequence-parallel"]),
    "PP2, interleaved": (2, [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"]),
    "DP2, distributed optimizer": (2, ["--use-distributed-optimizer"]),
    "TP2, PP2 unevenly": (4, [TP, "2", PP, "2", "--pipeline-model-parallel-layout", "Ettt|tL"]),
}
WAYS = list(product(LAYOUTS, LAYOUTS))
STOP = 6  # of 12 steps; after it still two of clm, then mlm, and the rate falls
RUN = [*runs.SHORT_RUN, "--num-layers", "4", "--train-iters", "12", "--objective-schedule", "clm:8,mlm:4"]
RUN += ["--no-bf16", "--eval-interval", "0"]


@pytest.fixture(scope="module")
def folders(small_corpus, tmp_path_factory):
    """By how it was saved and how continued; under `None`, the run of one process that was never stopped."""
    root, flags = tmp_path_factory.mktemp("reshard"), [*small_corpus.flags, *RUN]
    names = {layout: f"layout{number}" for number, layout in enumerate(LAYOUTS)}
    saved = {layout: root / name for layout, name in names.items()}
    run_dirs = {way: root / f"{names[way[0]]}_{names[way[1]]}" for way in WAYS} | {None: root / "whole"}
    jobs = [Job(run_dirs[None], flags)]
    for layout, (processes, more) in LAYOUTS.items():
        jobs.append(Job(saved[layout], [*flags, *more, "--exit-interval", str(STOP)], processes))
    for before, after in WAYS:
        processes, more = LAYOUTS[after]
        jobs.append(Job(run_dirs[before, after], [*flags, *more], processes, copy_of=saved[before]))
    output = runs.in_turn(jobs, root).stdout
    assert output.count(f"resuming after step {STOP}") == len(WAYS)
    return run_dirs | saved


def test_all_25_ways_follow_the_run_that_never_stopped(folders):
    """Every step after the stop, its loss and the norm of its gradient."""
    differences = {
        way: [runs.largest_difference(name, folders[way], folders[None], after=STOP) for name in ("loss", "grad_norm")]
        for way in WAYS
    }
    print(f"\n{'saved in':28}{'continued in':28}{'loss':>10}{'grad. norm':>12}")
    for (before, after), (loss, norm) in differences.items():
        print(f"{before:28}{after:28}{loss:10.1e}{norm:12.1e}")
    assert len(differences) == 25
    far = {way: distances for way, distances in differences.items() if max(distances) > 1e-6}
    assert not far


def test_nothing_but_the_layout_differs(folders):
    """Each has made every step once, and has saved the stop and the end."""
    for way in WAYS:
        actual, expected = (
            [(row["step"], row["objective"], row["learning_rate"], row["tokens"], row["predicted_tokens"]) for row in rows]
            for rows in (runs.metrics(folders[way]), runs.metrics(folders[None]))
        )
        assert actual == expected, way
        assert CheckpointLoader(folders[way] / "checkpoints").steps() == [STOP, 12], way


def assert_held(flags, processes, folders, step, twice=False):
    """Each rank holds what is in the checkpoint of `step`, and all together have read each byte of it once.

    `twice`: the last pipeline stage may have read a tied embedding as well.
    """
    names = ",".join(map(str, folders))
    output = runs.script(runs.WORKERS / "loaded_state.py", [names, str(step), *flags], processes=processes).stdout
    assert output.count("elements as saved") == len(folders) * processes
    for folder in folders:
        index = json.loads((folder / f"checkpoints/iter_{step:07d}/index.json").read_text())
        sizes = Counter()
        for chunk in index["chunks"]:
            sizes[chunk["key"]] += math.prod(chunk["shape"]) * (2 if chunk["dtype"] == "bfloat16" else 4)
        padding = sum(size for key, size in sizes.items() if "embedding" in key or "output_layer" in key)
        read = sum(map(int, re.findall(rf"^{folder.name}: rank .* has read (\d+) bytes", output, re.MULTILINE)))
        # 80 of 480 rows may be there in one layout only.
        assert 0.95 * sum(sizes.values()) <= read <= sum(sizes.values()) + twice * padding, folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_holds_what_was_saved(layout, folders, small_corpus):
    """In float32 by AdamW, from all five layouts."""
    processes, flags = LAYOUTS[layout]
    assert_held([*small_corpus.flags, *RUN, *flags], processes, [folders[saved] for saved in LAYOUTS], STOP)


DISTRIBUTED = "--use-distributed-optimizer"
INTERLEAVED = [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"]
OTHER_LAYOUTS = {
    "one process": (1, []),
    "DP2": (2, []),
    "DP2, distributed optimizer": (2, [DISTRIBUTED]),
    "DP3, distributed optimizer": (3, [DISTRIBUTED]),
    "TP2, DP2, distributed optimizer": (4, [TP, "2", DISTRIBUTED]),
    "PP2, interleaved, DP2, distributed optimizer": (4, [*INTERLEAVED, DISTRIBUTED]),
}
OTHER_WAYS = {  # by what it is loaded in, what it was saved in
    "one process": ["TP2, DP2, distributed optimizer"],
    "DP2": ["DP3, distributed optimizer"],
    "DP3, distributed optimizer": ["DP2, distributed optimizer", "DP2"],
    "TP2, DP2, distributed optimizer": ["one process", "PP2, interleaved, DP2, distributed optimizer"],
    "PP2, interleaved, DP2, distributed optimizer": ["DP2", "TP2, DP2, distributed optimizer"],
}
# 400 ids are padded to 400 rows, 480 for two tensor-parallel ranks; the matrices have odd sizes.
OTHER_RUN = [*RUN, "--bf16", "--global-batch-size", "12", "--micro-batch-size", "1"]
OTHER_RUN += ["--make-vocab-size-divisible-by", "80", "--ffn-hidden-size", "152"]


@pytest.mark.parametrize("tied", [[], ["--no-untie-embeddings-and-output-weights"]], ids=["untied", "tied"])
@pytest.mark.parametrize("optimizer", ["adamw", "stable_adamw", "muon"])
def test_each_rank_holds_what_was_saved_by_other_optimizers(optimizer, tied, small_corpus, tmp_path):
    """In bf16, with float32 master weights."""
    flags = [*small_corpus.flags, *OTHER_RUN, "--optimizer", optimizer, *tied]
    saved = {layout: tmp_path / f"layout{number}" for number, layout in enumerate(OTHER_LAYOUTS)}
    stop = ["--exit-interval", "2"]
    runs.in_turn(
        [Job(saved[name], [*flags, *more, *stop], processes) for name, (processes, more) in OTHER_LAYOUTS.items()], tmp_path
    )
    for layout, sources in OTHER_WAYS.items():
        processes, more = OTHER_LAYOUTS[layout]
        assert_held([*flags, *more], processes, [saved[source] for source in sources], 2, twice=bool(tied) and PP in more)
