"""Synthetic documents, and engines that train on them, for all contenders."""

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from megaenc import counter_rng
from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import ConcatPackedDataset, Pack, PackedDataset
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention, Objective, Schedule, Targets

if TYPE_CHECKING:
    import torch

    from megaenc.backend import Backend
    from megaenc.training.engine import Engine
    from megaenc.training.plan import Plan

EOS = 0
MASK = 1
MAX_STEPS = 1 << 20  # more than any benchmark runs
CORPUS_TOKENS = 1 << 21  # approximate tokens of the packs of concatenated documents


@dataclass(frozen=True)
class SyntheticDocuments:
    """Data set of random documents that end with EOS, one per pack.

    There are `count` documents of `shortest` to `longest` tokens. The class implements
    `PackedDataset` with one document per pack, repeated after `count`, and
    `token_stream.DocumentSource` for packs of several documents. Lengths, tokens and masks depend
    only on seed and document number, so any order and batching has the same predictions. Ids follow
    a skewed distribution as in text (u^3 of the vocabulary for a uniform u), which is learnable and
    repeats rows of the embedding's gradient.
    """

    count: int
    shortest: int
    longest: int
    vocab_size: int
    seed: int = 0
    order: Sequence[int] | None = None  # document number of each sample

    @cached_property
    def document_lengths(self) -> np.ndarray:
        """Return the documents' lengths in tokens, int64[count].

        They are uniform between the limits.
        """
        draws = [
            counter_rng.uniforms(self.seed, "benchmark lengths", 1, counters=(number,))
            for number in range(self.count)
        ]
        return self.shortest + (np.concatenate(draws) * (self.longest - self.shortest + 1)).astype(
            np.int64
        )

    @cached_property
    def _tokens(self) -> list[np.ndarray]:
        """Return the tokens of each document, int64[length]."""
        documents = []
        for number, length in enumerate(self.document_lengths.tolist()):
            draws = counter_rng.uniforms(self.seed, "benchmark tokens", length, counters=(number,))
            documents.append((MASK + 1 + draws**3 * (self.vocab_size - MASK - 1)).astype(np.int64))
            documents[-1][-1] = EOS
        return documents

    def read_spans(
        self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> np.ndarray:
        """Return tokens `starts[i]` to `stops[i]` of document `documents[i]`, int64.

        They are concatenated.
        """
        return np.concatenate(
            [
                self._tokens[number][a:b]
                for number, a, b in zip(documents, starts, stops, strict=True)
            ]
        )

    @property
    def seq_length(self) -> int:
        """Return the minimum length of a pack.

        The engine fills shorter rows to this length: none is filled.
        """
        return self.shortest

    def __getitem__(self, sample: int) -> Pack:
        number = sample % self.count if self.order is None else self.order[sample % self.count]
        tokens = self._tokens[number]
        return Pack(number, 0, tokens, np.array([0, len(tokens)], dtype=np.int32))

    @property
    def tokens(self) -> int:
        """Return the total number of tokens of all documents."""
        return int(self.document_lengths.sum())

    def targets(self, objective: Objective, sample: int) -> tuple[Pack, Targets]:
        """Return the pack of a sample, one document, and its targets under an objective."""
        pack = self[sample]
        return pack, objective.targets(pack, SampleRandomness(self.seed, pack.sample, pack.epoch))

    def spans(self, attention: Attention) -> list[tuple[int, int, int]]:
        """Return (start 0, prefix end, stop) of each document.

        The prefix end is the document's length if attention is bidirectional, else 0.
        """
        is_bidirectional = attention == Attention.BIDIRECTIONAL
        return [
            (0, length if is_bidirectional else 0, length)
            for length in self.document_lengths.tolist()
        ]

    def order_by_length(self) -> tuple[int, ...]:
        """Return the document numbers in ascending order of length."""
        return tuple(np.argsort(self.document_lengths, kind="stable").tolist())


@dataclass(frozen=True, kw_only=True)
class BenchSetup:
    """Model and options shared by the runs of a benchmark."""

    shape: ModelConfig
    vocab_size: int
    seq_length: int  # of a pack, and maximum document length
    shortest: int = 12  # minimum document length
    bf16: bool = False
    learning_rate: float = 1e-4
    # Fields of KernelConfig that differ from the defaults
    kernels: dict[str, Any] = field(default_factory=dict)
    tensor_model_parallel_size: int = 1

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the Vocabulary of the synthetic documents, with EOS 0 and MASK 1."""
        return Vocabulary(self.vocab_size, EOS, MASK, (EOS, MASK), f"benchmark {self.vocab_size}")

    def build_documents(self, count: int) -> SyntheticDocuments:
        """Return `count` synthetic documents of `shortest` to `seq_length` tokens."""
        return SyntheticDocuments(count, self.shortest, self.seq_length, self.vocab_size)

    def build_schedule(self, *texts: str) -> Schedule:
        """Return a schedule of a million steps of objectives in equal parts.

        Raises:
            InputError: An objective is invalid.
        """
        text = texts[0] if len(texts) == 1 else f"mix({','.join(f'{each}:1' for each in texts)})"
        return Schedule.build(text, MAX_STEPS, self.vocabulary)

    def parse_objective(self, text: str) -> Objective:
        """Return the objective that a text such as "mlm(mask=0.4)" describes.

        Raises:
            InputError: The text is invalid.
        """
        return Schedule.build(text, 1, self.vocabulary).objective(1)

    def build_plan(self, packs: PackedDataset, *objectives: str, batch: int = 1) -> "Plan":
        """Return the Plan of a run of about a million steps on `packs`.

        A step has `batch` packs; objectives have equal parts.
        """
        from megaenc.backend import KernelConfig
        from megaenc.data.packing.builder import RunData
        from megaenc.dist_env import get_world_size
        from megaenc.training.config import PretrainConfig
        from megaenc.training.lr_schedule import LearningRateSchedule
        from megaenc.training.plan import Plan

        default = PretrainConfig(bf16=self.bf16)
        settings = dataclasses.replace(
            default,
            train_iters=MAX_STEPS,
            micro_batch_size=batch,
            global_batch_size=batch,
            seed=0,
            shape=self.shape,
            kernels=KernelConfig(**self.kernels),
            data=dataclasses.replace(default.data, seq_length=self.seq_length),
            layout=dataclasses.replace(
                default.layout, tensor_model_parallel_size=self.tensor_model_parallel_size
            ),
            learning_rate=dataclasses.replace(default.learning_rate, lr=self.learning_rate),
        )
        settings.check(get_world_size())
        data = RunData((), (), (), packs, None)
        rate = LearningRateSchedule(self.learning_rate, 0, 0, MAX_STEPS)
        return Plan(settings, self.vocabulary, None, data, self.build_schedule(*objectives), rate)


def build_packed_plan(setup: BenchSetup, *objectives: str, tokens: int = CORPUS_TOKENS) -> "Plan":
    """Return the Plan of a run on packs of concatenated synthetic documents.

    They have about `tokens` tokens.
    """
    count = max(8, 2 * tokens // (setup.shortest + setup.seq_length))
    packs = ConcatPackedDataset(setup.build_documents(count), np.arange(count), setup.seq_length, 0)
    return setup.build_plan(packs, *objectives)


def init_process() -> "Backend":
    """Initialize megatron-core and torch.distributed in this process alone."""
    from megaenc import backend

    backend.prepare_megatron()
    return backend.init_distributed(backend.ParallelConfig(), 0)


def free_memory() -> None:
    """Collect garbage, and free accelerator memory that torch caches without use."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def reset_peak_memory() -> None:
    """Reset the accelerator's peak memory statistics; do nothing without one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def destroy_process() -> None:
    """Destroy the process groups and free memory.

    This process can then be initialized again.
    """
    from megaenc import backend

    backend.destroy_distributed()
    free_memory()


def configure_batches(
    engine: "Engine", setup: BenchSetup, objective: str, packs: int, micro_batches: int
) -> None:
    """Set objective and batch of an engine's next steps.

    A step has `micro_batches` micro-batches of `packs` packs.
    """
    sizes = {"micro_batch_size": packs, "global_batch_size": packs * micro_batches}
    settings = dataclasses.replace(engine.plan.settings, **sizes)
    engine.plan = dataclasses.replace(
        engine.plan, settings=settings, schedule=setup.build_schedule(objective)
    )
    engine.sampler = dataclasses.replace(engine.sampler, **sizes)


def unwrap_encoder(engine: "Engine") -> "torch.nn.Module":
    """Return the engine's encoder module without megatron-core's wrappers."""
    [model] = engine.chunks
    while hasattr(model, "module"):
        model = model.module
    return model


def fill_random_weights(encoder: "torch.nn.Module", deviation: float) -> None:
    """Draw weights from N(0, deviation^2); set biases to 0 and norms to 1.

    The seed is 0, and numbers are drawn on the device.
    """
    import torch

    from megaenc.backend import detect_backend

    device = detect_backend().device
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator, device=device).mul_(deviation)
                )


def build_random_engine(
    plan: "Plan", backend: "Backend", kind: "type[Engine] | None" = None
) -> "Engine":
    """Return an engine for `plan` with random weights of seed 0.

    They are drawn on the device. `kind` is the engine's class; None: Engine.
    """
    from megaenc.training.engine import Engine

    engine = (kind or Engine)(plan, backend, init_weights=False)
    fill_random_weights(unwrap_encoder(engine), plan.settings.shape.init_method_std)
    engine.optimizer.reload_model_params()
    return engine
