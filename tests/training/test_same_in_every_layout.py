"""The same run in every layout: all steps and the last validation are equal."""

import numpy as np
import pytest
import runs
from runs import Job

from megaenc.data.indexed.indexed_dataset import IndexedWriter
from megaenc.data.packing.block_stream import MOST_SHUFFLED
from megaenc.objectives import registry
from megaenc.training.callbacks.backends import flatten_row
from megaenc.training.command import main

pytestmark = pytest.mark.multiprocess

TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
PP3 = ["--pipeline-model-parallel-size", "3"]
SP = [*TP2, "--sequence-parallel"]
INTERLEAVED = [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]
UNEVEN = [*PP2, "--pipeline-model-parallel-layout", "Ett|t|t|L"]
SPLIT = ["--use-distributed-optimizer"]
RECOMPUTED = ["--recompute-granularity", "full"]

# Both phases, warm-up, decay and a clip that bites.
RUN = [
    *runs.SHORT_RUN,
    "--train-iters",
    "6",
    "--lr-warmup-iters",
    "2",
    "--lr-wsd-decay-iters",
    "2",
    "--eval-interval",
    "6",
]
RUN += ["--no-bf16"]
FOUR_LAYERS = [*RUN, "--num-layers", "4"]
DROPOUT = [*RUN, "--attention-output-dropout", "0.1"]
# One matrix for the embedding and the output layer, and ModernBERT's layers around it.
TIED = [
    *FOUR_LAYERS, "--no-untie-embeddings-and-output-weights", "--num-query-groups", "4",
    "--normalization", "LayerNorm", "--norm-bias", "--activation", "gelu", "--embedding-norm",
    "--prediction-head", "--output-layer-bias",
    "--window-size", "5", "--global-attn-every-n-layers", "3", "--local-rotary-base", "1000",
]  # fmt: skip
# Second moments that last make StableAdamW clip; and there are two groups of parameters.
OPTIMIZER = [
    *RUN,
    "--clip-grad",
    "0",
    "--adam-beta2",
    "0.99",
    "--no-weight-decay-norm-bias",
    "--optimizer",
]
# 3, 3, 10, then 17 packs of 63 tokens: neither a batch nor a row divides evenly.
UNEQUAL = [
    *FOUR_LAYERS,
    "--global-batch-size",
    "17",
    "--rampup-batch-size",
    "3",
    "7",
    "12",
    "--seq-length",
    "63",
]
UNEQUAL += ["--init-method", "full_megatron"]
OBJECTIVES = "mlm(mask=0.4->0.15):3,mix(clm:0.3,mlm:0.7):3,2x(clm:1,mntp:1)"
# Each in a run of its own.
ALONE = [
    "clm", "mlm", "mlm(mask=0.3,span=3)", "mntp", "prefix_lm", "diffusion", "gpt_bert(causal=0.3)",
    "span_corruption", "mlm(mask=0.3,unit=word)", "sum(clm:3,mlm(mask=0.3):10)",
    "distill(teacher={teacher},mask=0.3,top_k=8)",
]  # fmt: skip
# With these flags the last layer computes all rows, not only those that are predicted.
ALL_ROWS = {"--sequence-parallel", "--pipeline-model-parallel-layout"}
PSEUDO = ["--eval-pseudo-perplexity-passes", "2"]

# Of four ranks several share a weight; padded, two of them have parts of the embedding alone, and
# none of the norms.
OF_OPTIMIZERS = {
    "TP2": (2, TP2),
    "PP2": (2, PP2),
    "DP2": (2, []),
    "SP, DP2": (4, [*SP, *SPLIT]),
    "DP4": (4, SPLIT),
    "DP4, padded": (4, [*SPLIT, "--make-vocab-size-divisible-by", "4096"]),
}

# By name: (flags, {layout: (processes, flags)}).
RUNS = {
    "usual": (
        FOUR_LAYERS,
        {"TP2 PP2": (4, [*TP2, *PP2]), "DP2": (2, SPLIT), "uneven chunks": (2, UNEVEN)},
    ),
    "dropout": (
        DROPOUT,
        {
            "SP": (2, SP),
            "PP2": (2, PP2),
            "DP2, other rows": (2, ["--micro-batch-size", "4"]),
            "recomputed": (1, RECOMPUTED),
        },
    ),
    "bfloat16": ([*RUN, "--bf16"], {"TP2": (2, TP2), "DP2": (2, SPLIT)}),
}  # fmt: skip
SLOW = {
    "stages": (
        FOUR_LAYERS,
        {
            "uneven": (3, PP3),
            "embedding and head alone": (3, [*PP3, "--pipeline-model-parallel-layout", "E|t*4|L"]),
            "everything at once": (8, [*INTERLEAVED, *SP, *SPLIT, *RECOMPUTED]),
        },
    ),
    "tied": (
        TIED,
        {
            "SP": (2, SP),
            "interleaved": (2, INTERLEAVED),
            "TP2 PP2": (4, [*TP2, *PP2]),
            "interleaved, DP2": (4, [*INTERLEAVED, *SPLIT]),
        },
    ),
    "stable_adamw": ([*OPTIMIZER, "stable_adamw"], OF_OPTIMIZERS),
    "muon": ([*OPTIMIZER, "muon"], OF_OPTIMIZERS),
    "unequal batches": (
        UNEQUAL,
        {
            "DP3": (3, SPLIT),
            "SP, odd rows": (2, [*SP, "--micro-batch-size", "5"]),
            "DP7": (7, SPLIT),
            "interleaved, DP3": (6, [*INTERLEAVED, "--micro-batch-size", "3"]),
            "SP, PP2, DP2": (8, [*SP, *PP2, *SPLIT]),
        },
    ),
    "objectives": (
        [*RUN, "--train-iters", "10", "--objective-schedule", OBJECTIVES, "--lr", "5e-4"],
        {"TP2": (2, TP2), "PP2": (2, PP2)},
    ),
}  # fmt: skip


def check(flags, layouts, directory, tolerance=1e-5) -> str:
    """Run `flags` in one process and in each layout, compare, and return the output."""
    jobs = [Job(directory / "one", flags)]
    for name, (processes, more) in layouts.items():
        jobs.append(Job(directory / name, [*flags, *more], processes))
    printed = runs.in_turn(jobs, directory).stdout
    for name, (_, more) in layouts.items():
        runs.assert_same_curve(directory / name, directory / "one", tolerance)
        if not ALL_ROWS.intersection(more):
            assert (
                runs.metrics(directory / name)[-1]["flops"]
                == runs.metrics(directory / "one")[-1]["flops"]
            ), name
        assert last_scores(directory / name) == pytest.approx(
            last_scores(directory / "one"), rel=tolerance
        ), name
    return printed


def last_scores(directory) -> dict[str, float]:
    """Return the last validation's scores by text, objective and kind."""
    row = runs.validations(directory)[-1]
    return flatten_row(row["objectives"], row["held_out"])


@pytest.mark.parametrize("name", RUNS)
def test_a_run(name, small_corpus, tmp_path):
    flags, layouts = RUNS[name]
    check([*small_corpus.flags, *flags], layouts, tmp_path, 5e-3 if name == "bfloat16" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_run_in_more_layouts(name, small_corpus, tmp_path):
    flags, layouts = SLOW[name]
    printed = check([*small_corpus.flags, *flags], layouts, tmp_path)
    assert "PP 3 (layers 1 | 2 | 1)" in printed or name != "stages"


def test_every_objective_is_among_them():
    assert {text.partition("(")[0] for text in ALONE} - {"sum"} == set(
        registry.OBJECTIVES._registered
    )


@pytest.mark.slow
def test_twenty_steps_of_each_objective(short_run, teacher, tmp_path):
    """Without switches of objectives rounding stays ten times below this tolerance."""
    jobs = []
    for index, objective in enumerate(ALONE):
        schedule = ["--objective-schedule", objective.format(teacher=teacher), "--lr", "5e-4"]
        flags = [*short_run, *schedule, "--eval-interval", "20"]
        jobs.append(Job(tmp_path / f"{index} one", flags))
        jobs.append(Job(tmp_path / f"{index} TP2 PP2", [*flags, *TP2, *PP2], 4))
    runs.in_turn(jobs, tmp_path)
    for single, parallel in zip(jobs[::2], jobs[1::2], strict=True):
        runs.assert_same_curve(parallel.save, single.save, tolerance=1e-6)
        assert last_scores(parallel.save) == pytest.approx(last_scores(single.save), rel=1e-6), (
            single.flags
        )
        rows = runs.metrics(single.save)
        assert rows[-1]["loss"] < rows[0]["loss"] - 0.1, single.flags


@pytest.mark.parametrize(
    ("processes", "flags", "complaint"),
    [
        (1, ["--num-layers-per-virtual-pipeline-stage", "0"],
         "--num-layers-per-virtual-pipeline-stage: found 0"),
        (2, [*PP2, "--pipeline-model-parallel-layout", "Ettt|tL", *RECOMPUTED,
             "--recompute-num-layers", "2"],
         "found 2, expected a divisor of the 3 layers of a stage"),
        (1, ["--overlap-param-gather"],
         "--overlap-param-gather: needs --use-distributed-optimizer and --overlap-grad-reduce"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_refused(
    processes, flags, complaint, small_corpus, monkeypatch, refusal
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert complaint in refusal(main, [*small_corpus.flags, *FOUR_LAYERS, *flags])


@pytest.mark.parametrize("sets", ["held out", "named"])
def test_phases(sets, three_phases, small_corpus, second_corpus, tmp_path):
    """Lengths, micro-batches, blends and held-out text change."""
    flags = [*three_phases, "--exit-interval", "6"]
    if sets == "named":
        flags += ["--valid-data-path", f"own={small_corpus.prefix}", f"other={second_corpus}"]
    check(flags, {"PP2": (2, PP2), "DP2": (2, [])}, tmp_path)


@pytest.mark.slow
def test_a_teacher(distilled, tmp_path):
    check(
        distilled,
        {"TP2": (2, TP2), "PP2": (2, PP2), "other rows": (1, ["--micro-batch-size", "8"])},
        tmp_path,
    )


@pytest.mark.slow
def test_random_lengths_of_a_blend_with_a_corpus_in_blocks(small_corpus, tmp_path):
    """One corpus has so many documents of 1 to 5 tokens that it is shuffled in blocks.

    Losses are by position and corpus too.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, MOST_SHUFFLED + 1)
    tokens = rng.integers(8, 400, lengths.sum()).astype(np.uint16)
    tokens[lengths.cumsum() - 1] = 0
    writer = IndexedWriter(tmp_path / "large.bin", tmp_path / "large.idx", "uint16")
    writer.add_documents(tokens, lengths, np.ones(len(lengths), int))
    writer.finish()
    data = ["--data-path", "0.6", str(small_corpus.prefix), "0.4", str(tmp_path / "large")]
    flags = [
        *small_corpus.flags,
        *RUN,
        *data,
        "--packing",
        "random-length",
        "--seq-length",
        "192",
        *PSEUDO,
    ]
    check(flags, {"SP": (2, SP), "PP2": (2, PP2), "DP2": (2, [])}, tmp_path)
    scores = runs.validations(tmp_path / "one")[-1]["objectives"]["pseudo_perplexity(passes=2)"]
    assert len(scores["by_position"]) == len(scores["by_corpus"]) == 2
