"""Checkpoints of one layout, loaded and continued in another.

After a load, the state of each rank is compared with the files bit by bit, also under optimizers
with other state than AdamW's.
"""

import json
import math
import re
from collections import Counter

import pytest
import runs
from runs import Job

from megaenc.training.checkpoint.loader import CheckpointLoader

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
DISTRIBUTED = "--use-distributed-optimizer"
INTERLEAVED = [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"]
LAYOUTS = {
    "one": (1, []),
    "tensor": (2, [TP, "2", "--sequence-parallel"]),
    "interleaved": (2, INTERLEAVED),
    "data": (2, [DISTRIBUTED]),
    "uneven": (4, [TP, "2", PP, "2", "--pipeline-model-parallel-layout", "Ettt|tL"]),
}
STOP = 6  # of 12 steps; after it still two of clm, then mlm, and the rate falls
RUN = [
    *runs.SHORT_RUN,
    "--num-layers",
    "4",
    "--train-iters",
    "12",
    "--objective-schedule",
    "clm:8,mlm:4",
    "--eval-interval",
    "0",
]


def save_in_all(layouts: dict, flags: list[str], stop: int, root, others: list[Job]) -> dict:
    """Save a run after step `stop` in each layout, run `others`, return all paths."""
    jobs = []
    for name, (processes, more) in layouts.items():
        jobs.append(Job(root / name, [*flags, *more, "--exit-interval", str(stop)], processes))
    runs.in_turn([*jobs, *others], root)
    return {name: root / name for name in layouts}


@pytest.fixture(scope="module")
def directories(small_corpus, tmp_path_factory):
    """Runs saved in each layout, each resumed in the next one, and one without a stop."""
    root = tmp_path_factory.mktemp("reshard")
    flags = [*small_corpus.flags, *RUN, "--no-bf16"]
    continued = {}
    jobs = [Job(root / "whole", flags)]
    names = list(LAYOUTS)
    for saved, then in zip(names, [*names[1:], names[0]], strict=True):
        processes, more = LAYOUTS[then]
        continued[saved, then] = root / f"{saved}_{then}"
        jobs.append(Job(continued[saved, then], [*flags, *more], processes, copy_of=root / saved))
    return save_in_all(LAYOUTS, flags, STOP, root, jobs) | continued | {"whole": root / "whole"}


def test_each_way_follows_the_run_that_never_stopped(directories):
    """Each run has every step once, and checkpoints of the stop and the end."""
    layouts = [name for name in directories if isinstance(name, tuple)]
    assert len(layouts) == len(LAYOUTS)
    for layout in layouts:
        runs.assert_same_curve(directories[layout], directories["whole"], tolerance=1e-6)
        assert CheckpointLoader(directories[layout] / "checkpoints").steps() == [STOP, 12], layout


def assert_held(flags, processes, directories, step, twice=False):
    """Assert that ranks hold checkpoint `step` and have read each of its bytes once.

    `twice`: the last pipeline stage may have read a tied embedding as well.
    """
    names = ",".join(map(str, directories))
    output = runs.script(
        runs.WORKERS / "loaded_state.py", [names, str(step), *flags], processes=processes
    ).stdout
    assert output.count("elements as saved") == len(directories) * processes
    for directory in directories:
        index = json.loads((directory / f"checkpoints/iter_{step:07d}/index.json").read_text())
        sizes = Counter()
        for chunk in index["chunks"]:
            sizes[chunk["key"]] += math.prod(chunk["shape"]) * (
                2 if chunk["dtype"] == "bfloat16" else 4
            )
        padding = sum(
            size for key, size in sizes.items() if "embedding" in key or "output_layer" in key
        )
        read = sum(
            map(
                int,
                re.findall(
                    rf"^{directory.name}: rank .* has read (\d+) bytes", output, re.MULTILINE
                ),
            )
        )
        # 80 of 480 rows may be there in one layout only.
        assert 0.95 * sum(sizes.values()) <= read <= sum(sizes.values()) + twice * padding, (
            directory
        )


REPLICAS = {
    "one": (1, []),
    "data": (2, []),
    "data3": (3, [DISTRIBUTED]),
    "tensor": (4, [TP, "2", DISTRIBUTED]),
    "interleaved": (4, [*INTERLEAVED, DISTRIBUTED]),
}
# By what it is loaded in: what it was saved in.
SOURCES = {
    "one": ["tensor"],
    "data": ["data3"],
    "data3": ["data"],
    "tensor": ["interleaved", "one"],
    "interleaved": ["data"],
}
# 400 ids are padded to 400 rows, 480 for two tensor-parallel ranks; the matrices have odd sizes.
ODD = [
    "--global-batch-size",
    "12",
    "--micro-batch-size",
    "1",
    "--make-vocab-size-divisible-by",
    "80",
    "--ffn-hidden-size",
    "152",
]


@pytest.mark.parametrize(
    ("optimizer", "tied"),
    [("stable_adamw", []), ("muon", ["--no-untie-embeddings-and-output-weights"])],
    ids=["untied", "tied"],
)
def test_each_rank_holds_what_was_saved(optimizer, tied, small_corpus, tmp_path):
    """The model is in bfloat16, with float32 master weights."""
    flags = [*small_corpus.flags, *RUN, *ODD, "--bf16", "--optimizer", optimizer, *tied]
    saved = save_in_all(REPLICAS, flags, 2, tmp_path, [])
    for layout, sources in SOURCES.items():
        processes, more = REPLICAS[layout]
        assert_held(
            [*flags, *more],
            processes,
            [saved[source] for source in sources],
            2,
            twice=bool(tied) and PP in more,
        )
