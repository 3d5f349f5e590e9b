"""Messages of each rank in a step, compared with those that shapes require."""

import json
from collections import Counter
from dataclasses import dataclass

import pytest
import runs

pytestmark = pytest.mark.multiprocess

TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
REDUCE = "--overlap-grad-reduce"
GATHER = "--overlap-param-gather"
STEP = 2
RUN = [
    *runs.SHORT_RUN, "--objective-schedule", "mlm", "--train-iters", "4",
    "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1",
    "--eval-interval", "0", "--log-interval", "4",
]  # fmt: skip
# Sizes of SHORT_RUN.
H = 64  # hidden size
F = 160  # inner size
Q = 64  # queries of a layer
K = 32  # keys of a layer
S = 128  # tokens of a micro-batch
BATCH = 8  # packs
MICRO = 2  # packs
V = 512  # rows of embedding and head: 400 tokens, to a multiple of 256
W = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    stages: int = 1
    data: int = 1
    sequence: bool = False
    shared: bool = False
    tied: bool = False
    muon: bool = False
    float8: bool = False
    layers: int = 2
    turns: int = 1
    more: tuple[str, ...] = ()

    @property
    def processes(self):
        return self.tensor * self.stages * self.data

    @property
    def flags(self):
        flags = [
            TP,
            str(self.tensor),
            PP,
            str(self.stages),
            "--num-layers",
            str(self.layers),
            *self.more,
        ]
        if self.muon:
            flags += ["--optimizer", "muon"]
        if self.sequence:
            flags.append("--sequence-parallel")
        if self.shared:
            flags.append("--use-distributed-optimizer")
        if self.tied:
            flags.append("--no-untie-embeddings-and-output-weights")
        if self.float8:
            flags += ["--fp8-format", "hybrid"]
        if self.turns > 1:
            flags += [
                "--num-layers-per-virtual-pipeline-stage",
                str(self.layers // self.stages // self.turns),
            ]
        return flags


LAYOUTS = {
    "TP2, the MLP is recomputed": Layout(
        tensor=2, more=("--recompute-granularity", "selective", "--recompute-modules", "mlp")
    ),
    "TP2 SP, all is recomputed": Layout(
        tensor=2, sequence=True, more=("--recompute-granularity", "full")
    ),
    "TP2 SP, float8": Layout(tensor=2, sequence=True, float8=True),
    "PP2, interleaved, tied": Layout(stages=2, layers=4, turns=2, tied=True),
    "DP2, overlapped": Layout(data=2, more=(REDUCE,)),
    "DP2, shared optimizer, overlapped": Layout(data=2, shared=True, more=(REDUCE, GATHER)),
    "DP2, Muon": Layout(data=2, muon=True),
    "DP2, shared optimizer, Muon": Layout(data=2, muon=True, shared=True),
    "TP2 PP2 SP": Layout(tensor=2, stages=2, sequence=True),
}


def necessary(layout: Layout, stage: int, predicted: int) -> dict:
    """Return {(kind, group): (times, bytes)} of one rank's step.

    The bytes of a collective are those of the whole tensor, counted once: a ring of n ranks sends
    (n - 1) / n of an all-gather or a reduce-scatter, and twice that of an all-reduce.
    """
    t = layout.tensor
    first = stage == 0
    last = stage == layout.stages - 1
    layers = layout.layers // layout.stages
    micro_batches = BATCH // MICRO // layout.data
    hidden = S * H * W
    again = 2 * ("full" in layout.more) + ("mlp" in layout.more)
    sums = Counter()
    times = Counter()

    def send(kind, group, ranks, size, number=1):
        if ranks > 1:
            times[kind, group] += number
            sums[kind, group] += number * size

    if layout.sequence:
        # Forward the rows are gathered before each pair of products and scattered after it; the
        # embedding scatters, the head gathers. Backward the same the other way round, but that each
        # first product gathers its rows, which it has not kept, once more for its weight's
        # gradient: memory for communication. The head's backward is a split.
        gathers = layers * (2 + again + 2 + 2) + first + last
        send("all-gather", "tensor", t, hidden, micro_batches * gathers)
        # Inputs of products are gathered as bytes, both times, and the largest maximum of their
        # parts is taken.
        if layout.float8:
            sums["all-gather", "tensor"] -= micro_batches * layers * (2 + 2) * hidden // 2
            send("all-reduce", "tensor", t, 4, micro_batches * layers * 2)
        send(
            "reduce-scatter",
            "tensor",
            t,
            hidden,
            micro_batches * (layers * (2 + again + 2) + first),
        )
        # Gradients of norms are of a part of the rows.
        send("all-reduce", "tensor", t, 4 * H * (2 * layers + last))
    else:
        send("all-reduce", "tensor", t, hidden, micro_batches * (layers * (2 + again + 2) + first))
        # After its attention the last layer computes only what is predicted; one exchange is
        # before.
        if last and t > 1:
            sums["all-reduce", "tensor"] -= (3 + again) * (micro_batches * S - predicted) * H * W
    # Each rank sends four float32 of the softmax for each prediction, and the gradient of its
    # hidden state.
    if last:
        times["all-gather", "tensor"] += micro_batches * (t > 1)
        times["all-reduce", "tensor"] += micro_batches * (t > 1)
        sums["all-gather", "tensor"] += (t > 1) * predicted * 4 * 4 * t
        sums["all-reduce", "tensor"] += (t > 1) * predicted * H * W
    ways = 2 * layout.turns - first - last  # forward and backward
    send(
        "send",
        "pipeline",
        layout.stages,
        hidden // (t if layout.sequence else 1),
        ways * micro_batches,
    )

    matrices = layers * (H * (Q + 2 * K) + Q * H + 3 * H * F) + (first + last) * V * H
    send("all-reduce", "embedding", layout.stages, 4 * V * H, int(layout.tied and (first or last)))
    parameters = matrices // t + H * (2 * layers + last)
    if layout.shared:
        padded = -(-parameters // 128) * 128
        send("reduce-scatter", "data", layout.data, 4 * padded)
        send("all-gather", "data", layout.data, W * padded)
        send("all-reduce", "optimizer", layout.processes, 4)  # the gradient's norm
    else:
        send("all-reduce", "data", layout.data, 4 * parameters)
        send("all-reduce", "data", layout.data, 4)  # whether all replicas have a finite norm
        send("all-reduce", "model", t * layout.stages, 4)  # the gradient's norm
    if layout.muon:
        layer = H * (Q + 2 * K) + Q * H + 3 * H * F  # four matrices
        # Momenta go to the rank that computes with a matrix, updates come back.
        if layout.shared:
            send("all-to-all", "data", layout.data, W * layers * layer, 1)
            send("all-to-all", "data", layout.data, W * layers * layer, 1)
            times["all-to-all", "data"] = 2 * 4 * layers // layout.data
        else:
            send("broadcast", "data", layout.data, 0, 4 * layers)
            sums["broadcast", "data"] += W * layers * layer
    # Loss, right predictions, predictions, divisor, operations; whether one of three signals or the
    # time ends the run.
    send("all-reduce", "world", layout.processes, 8 * (5 + 4))
    return {key: (number, sums[key]) for key, number in times.items() if number}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_sends_what_it_must_and_no_more(name, small_corpus, tmp_path):
    layout = LAYOUTS[name]
    arguments = [
        str(STEP),
        str(tmp_path),
        *small_corpus.flags,
        *RUN,
        *layout.flags,
        "--save",
        str(tmp_path / "run"),
    ]
    runs.script(runs.WORKERS / "communication.py", arguments, processes=layout.processes)
    records = [
        json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(layout.processes)
    ]
    for rank, record in enumerate(records):
        times = Counter()
        sums = Counter()
        for kind, group, size in record["calls"]:
            times[kind, group] += 1
            sums[kind, group] += size
        if layout.muon and layout.shared:  # of what all send to all, each rank has another share
            sums["all-to-all", "data"] = sum(
                size for peer in records for kind, _, size in peer["calls"] if kind == "all-to-all"
            )
        stage = rank // (layout.tensor * layout.data)
        sent = {key: (times[key], sums[key]) for key in times}
        assert sent == necessary(layout, stage, record["predicted"]), f"rank {rank}"


@pytest.mark.slow
def test_overlapped_communication_trains_the_same(small_corpus, tmp_path):
    """No buffer is reduced before products have added all weight gradients to it."""
    plain = Layout(data=2, shared=True)
    for name, more in (("plain", ()), ("overlapped", (REDUCE, GATHER))):
        flags = [
            *small_corpus.flags,
            *RUN,
            *plain.flags,
            *more,
            "--log-interval",
            "1",
            "--save",
            str(tmp_path / name),
        ]
        runs.script(runs.WORKERS / "communication.py", ["5", str(tmp_path), *flags], processes=2)
    runs.assert_same_curve(tmp_path / "overlapped", tmp_path / "plain", tolerance=1e-6)
