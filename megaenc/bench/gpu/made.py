"""Made work, and the training engine set up for it: documents of varying length in packs, a model of a given shape.

The packs are cut by the run's own packing out of documents in memory; the engine is the run's own.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megaenc import backend as processes
from megaenc import randomness
from megaenc.backend import Backend, Kernels, Layout, prepare_megatron
from megaenc.bench.documents import EOS, MASK
from megaenc.data.packs import ConcatPacks
from megaenc.data.run_data import RunData
from megaenc.data.vocabulary import Vocabulary
from megaenc.model.config import ModelConfig
from megaenc.objectives import Objective, Schedule
from megaenc.training.engine import Engine
from megaenc.training.learning_rate import LearningRate
from megaenc.training.plan import Plan
from megaenc.training.settings import PretrainSettings

CORPUS = 1 << 21
"""Tokens of the made documents, about."""
UPDATES = 1 << 20
"""More than any benchmark makes."""


@dataclass(frozen=True)
class MadeCorpus:
    """Documents of random tokens, their lengths uniform in shortest..longest, the last token EOS; megaenc.data.stream.Documents.

    A few ids are far more frequent than most, as in text: u^3 of the vocabulary for a uniform u. That can be learnt, and the
    gradient of the embedding meets the same row again and again.
    """

    shortest: int
    longest: int
    vocab_size: int
    tokens_about: int = CORPUS
    seed: int = 0
    document_lengths: np.ndarray = field(init=False, repr=False)
    _tokens: np.ndarray = field(init=False, repr=False)
    _starts: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        count = max(8, 2 * self.tokens_about // (self.shortest + self.longest))
        draws = randomness.uniforms(self.seed, "benchmark lengths", count)
        lengths = self.shortest + (draws * (self.longest - self.shortest + 1)).astype(np.int64)
        draws = randomness.uniforms(self.seed, "benchmark tokens", int(lengths.sum()))
        tokens = (MASK + 1 + draws**3 * (self.vocab_size - MASK - 1)).astype(np.int64)
        tokens[np.cumsum(lengths) - 1] = EOS
        for name, value in (
            ("document_lengths", lengths),
            ("_tokens", tokens),
            ("_starts", np.cumsum(lengths) - lengths),
        ):
            object.__setattr__(self, name, value)

    def joined(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """See megaenc.data.stream.Documents."""
        first = self._starts[documents]
        return np.concatenate([self._tokens[a:b] for a, b in zip(first + starts, first + stops, strict=True)])


@dataclass(frozen=True)
class Setup:
    """A model and what it reads, as JSON has it."""

    model: dict[str, Any]
    """fields of a ModelConfig"""
    vocab_size: int
    seq_length: int
    bf16: bool
    kernels: dict[str, Any] = field(default_factory=dict)
    """fields of Kernels that are not to be the default"""
    shortest: int = 12
    """tokens of a document; the longest has seq_length"""
    rate: float = 1e-6
    corpus: int = CORPUS

    @property
    def shape(self) -> ModelConfig:
        """Of the model."""
        return ModelConfig(**self.model)

    @property
    def vocabulary(self) -> Vocabulary:
        """What objectives know of the tokens."""
        return Vocabulary(self.vocab_size, EOS, MASK, (EOS, MASK), f"benchmark {self.vocab_size}")

    def objective(self, text: str) -> Objective:
        """The objective that a schedule calls `text`."""
        return self.schedule(text).objective(1)

    def schedule(self, *texts: str) -> Schedule:
        """Of one objective, or of several drawn by turns."""
        text = texts[0] if len(texts) == 1 else f"mix({','.join(f'{each}:1' for each in texts)})"
        return Schedule.build(text, UPDATES, self.vocabulary)

    def settings(self) -> PretrainSettings:
        """Those of a run."""
        default = PretrainSettings(bf16=self.bf16)
        settings = dataclasses.replace(
            default,
            train_iters=UPDATES,
            micro_batch_size=1,
            global_batch_size=1,
            shape=self.shape,
            kernels=Kernels(**self.kernels),
            data=dataclasses.replace(default.data, seq_length=self.seq_length),
            optimizer=dataclasses.replace(default.optimizer, lr=self.rate),
        )
        settings.check(1)
        return settings

    def packs(self) -> ConcatPacks:
        """What is read."""
        corpus = MadeCorpus(self.shortest, self.seq_length, self.vocab_size, self.corpus)
        return ConcatPacks(corpus, np.arange(len(corpus.document_lengths)), self.seq_length, 0)

    def plan(self, *objectives: str) -> Plan:
        """A run without end that trains `objectives`: an engine chooses attention that is right for all of them."""
        data = RunData((), (), (), self.packs(), None)
        rate = LearningRate(self.rate, 0, 0, UPDATES)
        return Plan(self.settings(), self.vocabulary, None, data, self.schedule(*objectives), rate)


def begin() -> Backend:
    """This process as a run's only one."""
    prepare_megatron()
    return processes.start(Layout(), 0)


def end() -> None:
    """Leave no trace for what is begun next in this process."""
    import gc

    processes.stop()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def lay(engine: Engine, setup: Setup, objective: str, packs: int, micro_batches: int) -> None:
    """Let the updates of `engine` train `objective` in `micro_batches` rows of `packs` packs."""
    batch = packs * micro_batches
    settings = dataclasses.replace(engine.plan.settings, micro_batch_size=packs, global_batch_size=batch)
    engine.plan = dataclasses.replace(engine.plan, settings=settings, schedule=setup.schedule(objective))
    engine.share = dataclasses.replace(engine.share, micro_batch_size=packs, global_batch_size=batch)


def chosen(engine: Engine) -> dict[str, Any]:
    """The fields of Kernels that it computes by: where the engine has chosen among them, what it chose."""
    return dataclasses.asdict(getattr(engine, "kernels", engine.plan.settings.kernels))


def fused(engine: Engine) -> dict[str, bool] | None:
    """Of each kernel that fused_kernels stands for, whether it is used; None where the engine does not say."""
    return getattr(engine, "fused", None)


def encoder_of(engine: Engine) -> torch.nn.Module:
    """The model inside the wrappers of megatron-core."""
    [model] = engine.chunks
    while hasattr(model, "module"):
        model = model.module
    return model


@torch.no_grad()
def fill(parameters: Iterator[tuple[str, torch.nn.Parameter]], deviation: float, device: torch.device) -> None:
    """Random weights made on the device, the same each time: drawing a billion by counters on the host takes a minute."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in parameters:
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            drawn = torch.randn(parameter.shape, generator=generator, device=device)
            parameter.copy_(drawn.mul_(deviation))


def filled(engine: Engine) -> Engine:
    """`engine`, which was made without weights, with those of `fill`."""
    fill(encoder_of(engine).named_parameters(), engine.plan.settings.shape.init_method_std, engine.device)
    engine.optimizer.reload_model_params()
    return engine


def wait() -> None:
    """Until the accelerator has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def numbers() -> Iterator[int]:
    """Of updates."""
    return itertools.count(1)
