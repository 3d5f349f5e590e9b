"""The GPU benchmark's speed: micro-batches that fill the card, updates that are timed, waits that are counted."""

import itertools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch

from megaenc.backend import KernelConfig
from megaenc.bench.gpu import breakdown, speed
from megaenc.training.distributed import largest_batch
from megaenc.training.engine import StepMetrics, TrainStepResult


@pytest.fixture
def card(monkeypatch):
    """A card of 84 bytes for the trials, of which a micro-batch takes 10 and 3 a pack, or 4 with the objective `mlm`."""
    tried: list[int] = []
    fits = {"most": 1000}

    def peak(engine, objective, samples, data):
        packs = len(samples)
        tried.append(packs)
        if packs > fits["most"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 10.0 + {"clm": 3.0, "mlm": 4.0}[objective] * packs

    monkeypatch.setattr(largest_batch, "measure_peak", peak)
    monkeypatch.setattr(largest_batch, "discard_batch", lambda engine: None)
    monkeypatch.setattr(largest_batch, "reduce_over_ranks", lambda values, operation: values)
    monkeypatch.setattr(speed.synthetic, "configure_batches", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80.0, 90.0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 4.0)
    return SimpleNamespace(tried=tried, fits=fits)


def filled(*objectives, seq_length=2**20) -> int:
    engine = SimpleNamespace(train_step=lambda step: None, device=torch.device("cuda"))
    shape = SimpleNamespace(ffn_hidden_size=16, query_size=16)
    setup = SimpleNamespace(seq_length=seq_length, shape=shape, parse_objective=lambda text: text)
    return speed.fill_memory(engine, setup, objectives, itertools.count(1))


def test_the_largest_micro_batch_is_one_that_was_tried(card):
    most = int((largest_batch.MEMORY_FRACTION * 84 - 10) / 3)
    assert filled("clm") == most and {most, most + 1} <= set(card.tried) and len(card.tried) <= 7
    assert filled("clm", "mlm") == int((largest_batch.MEMORY_FRACTION * 84 - 10) / 4), "every objective has to fit"
    card.fits["most"] = 7
    assert filled("clm") == 7
    assert filled("clm", seq_length=2**24) == 3, "kernels that count in 32 bits go no further"


def test_a_card_for_nothing_is_tried_with_one_pack(card):
    card.fits["most"] = 0
    assert filled("clm") == 1


class Memory:
    """An engine whose updates take memory: more than there is above `most` packs, the third of them a little more."""

    def __init__(self, most: int, refused: tuple[int, ...] = ()):
        self.most, self.refused, self.packs, self.made = most, refused, [], 0
        self.kernels, self.fused_kernels = KernelConfig(), None

    def lay(self, engine, setup, objective, packs, micro_batches):
        self.packs.append(packs)
        self.made = 0

    def attention_flops(self, step):
        return 0

    def train_step(self, step):
        self.made += 1
        if self.packs[-1] > self.most and self.made == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return TrainStepResult(StepMetrics(5.0, 10, 1, 100.0, 10), 1.0, is_applied=self.made not in self.refused)


def timed(monkeypatch, engine: Memory, deadline: float) -> speed.SpeedMeasurement:
    monkeypatch.setattr(speed.synthetic, "configure_batches", engine.lay)
    monkeypatch.setattr(speed, "discard_batch", lambda engine: None)
    setup = SimpleNamespace(seq_length=8, bf16=True)
    host = SimpleNamespace(is_cpu=True, peak_flops=lambda dtype: 0.0)
    return speed.SpeedMeasurement(engine, setup, host, packs=10, micro_batches=2, seconds=0.0, deadline=deadline)


def test_memory_that_ends_while_the_clock_runs_costs_packs(monkeypatch):
    engine = Memory(most=8)
    timing = timed(monkeypatch, engine, deadline=math.inf)
    row = timing.measure("clm")
    assert engine.packs == [10, 9, 8] and timing.packs == row["packs"] == 8
    assert row["updates"] == 3 and row["finite"] and row["loss"] == 0.5
    assert row["num_alloc_retries"] is None and row["fused"] is None


def test_after_the_deadline_nothing_is_tried_again(monkeypatch):
    engine = Memory(most=8)
    engine.train_step = lambda step: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        timed(monkeypatch, engine, deadline=0.0).measure("clm")
    assert engine.packs == [10]


def test_one_update_that_was_not_made_is_told(monkeypatch):
    row = timed(monkeypatch, Memory(most=10, refused=(3,)), deadline=math.inf).measure("clm")
    assert row["updates"] == 3 and not row["finite"]


def test_waits_of_a_micro_batch_are_told_from_those_of_an_update(monkeypatch):
    modes: list[str] = []

    class Engine:
        device = torch.device("cuda")
        sampler = type("Sampler", (), {"micro_batch_size": 2})

        def zero_grad(self):
            pass

        def forward_and_backward(self, rows, objective):
            if modes and modes[-1] == "warn":
                for _ in rows:
                    warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, "/a/b/c/attention.py", 7)
                warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, "/a/b/c/engine.py", 9)
                warnings.warn_explicit("something else", UserWarning, "/a/b/c/engine.py", 10)

    def begin(mode):  # which says that it is new
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature and is incomplete", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", begin)
    results = breakdown.count_synchronizations(Engine(), None)
    assert results == {"of_an_update": 1.0, "of_a_micro_batch": 1.0, "places": {"b/c/attention.py:7": 1.0}}
    assert modes[-1] == "default"
