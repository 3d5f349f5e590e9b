"""What a run is, worked out: its packs, schedule, learning rate and start, and what makes it this run and no other."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from megaenc import __version__, flags
from megaenc.data.packing.builder import CorpusUsage, RunData
from megaenc.data.packing.packed_dataset import PackedDataset
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.objectives import CausalLanguageModeling, MaskedLanguageModeling, Objective, Schedule
from megaenc.training.config import PretrainConfig
from megaenc.training.lr_schedule import WSDSchedule
from megaenc.training.run_init import NEW_WEIGHTS, RunInit
from megaenc.training.skip_ranges import NOTHING_SKIPPED, SkippedPacks


@dataclass(frozen=True)
class Plan:
    """What `settings` amount to: packs to read, a schedule over updates 1..N, a learning rate, and what they start from."""

    settings: PretrainConfig
    vocabulary: Vocabulary
    tokenizer: Any  # transformers' PreTrainedTokenizerFast
    data: RunData
    schedule: Schedule
    learning_rate: WSDSchedule
    start: RunInit = NEW_WEIGHTS
    skipped: SkippedPacks = NOTHING_SKIPPED
    rewinds: tuple[str, ...] = ()
    """The packs that each rewind so far has added to `skipped`."""

    @property
    def packs(self) -> PackedDataset:
        """What is trained on."""
        return self.data.train

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: as many as the tokenizer has ids, or more."""
        return self.settings.shape.vocab_size or self.vocabulary.size

    @property
    def validation(self) -> PackedDataset | None:
        """What is held out; None where validation is turned off or the split leaves no text for it."""
        return self.data.held_out if self.settings.eval_every else None

    @property
    def dtype(self) -> torch.dtype:
        """What layers compute in."""
        return torch.bfloat16 if self.settings.bf16 else torch.float32

    def first_sample(self, step: int) -> int:
        """The sample that update number `step` begins with: the position in the data follows from the step."""
        return self.sample(self.samples_read(step - 1))

    def samples_read(self, step: int) -> int:
        """Packs that the updates up to number `step` read."""
        return self.settings.batch_sizes.first_sample(step + 1)

    def sample(self, position: int) -> int:
        """The sample that is read as number `position` (0, 1, ...) of the run."""
        return self.skipped.sample(self.start.skip_samples, position)

    def step_tokens(self, step: int) -> int:
        """What update number `step` reads."""
        return self.settings.batch_sizes.size(step) * self.settings.data.seq_length

    def with_skipped(self, skipped: SkippedPacks, rewinds: tuple[str, ...]) -> "Plan":
        """This plan with other packs left out."""
        data = dataclasses.replace(self.settings.data, skip_packs=skipped.texts)
        settings = dataclasses.replace(self.settings, data=data)
        return dataclasses.replace(self, settings=settings, skipped=skipped, rewinds=rewinds)

    @property
    def log_interval(self) -> int:
        """Steps between rows of metrics: by default 10 in a run of more than 1,000, unless phases change faster than that."""
        given, shortest = self.settings.output.log_interval, min(len(phase) for phase in self.schedule.phases)
        return given or (10 if self.settings.total_iters > 1000 and shortest >= 10 else 1)

    @property
    def reading(self) -> list[CorpusUsage]:
        """What the steps of the whole run read of each corpus; those of a branch's parent are its own too."""
        first = self.start.skip_samples
        end = self.skipped.end(first, self.samples_read(self.settings.total_iters))
        return self.data.corpus_usage(end, first, without=self.skipped.between(first, end).ranges)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes this the same run as another: everything that the weights after step N depend on, but for rounding.

        Layout, kernels, intervals and the micro-batch may differ, and paths that lead to the same. Packs that are left out are
        compared by what has been read (`with_skipped.read_alike`).
        """
        settings = self.settings
        free = {"train_tokens", "config", "model", "data_path", "skip_packs", "tokenizer", "micro_batch_size"}
        free |= {"objective_schedule", "lr_warmup_iters", "lr_warmup_fraction", "lr_wsd_decay_iters", "lr_wsd_decay_fraction"}
        for group in (settings.layout, settings.output, settings.kernels, settings.start, settings.health, settings.monitoring):
            free |= set(flags.flatten(group))
        free -= {"eval_iters", "fp8_format"}  # the latter rounds as coarsely as nothing else here
        values = {
            name: list(value) if isinstance(value, tuple) else value  # as JSON has it
            for name, value in flags.flatten(self.settings).items()
            if name not in free
        }
        return values | {
            "train_iters": self.settings.total_iters,
            "objective_schedule": self.schedule.canonical,
            "objective_packages": self.schedule.packages(),
            "lr_warmup_iters": self.learning_rate.warmup,
            "lr_wsd_decay_iters": self.learning_rate.decay,
            "data": self.data.fingerprint,
            "tokenizer": self.vocabulary.fingerprint,
            "vocab_size": None if self.vocab_size == self.vocabulary.size else self.vocab_size,  # given or not
            **self.start.identity,
        }

    @property
    def run_metadata(self) -> dict[str, Any]:
        """What a reader of the run folder needs beyond the flags, JSON-ready."""
        return {
            "megaenc": __version__,
            "vocab_size": self.vocab_size,
            "parameters": self.settings.shape.parameter_count(self.vocab_size),
            "reading": [dataclasses.asdict(row) for row in self.reading],
            "start": dataclasses.asdict(self.start),
            "skip_packs": list(self.skipped.texts),
            "rewinds": list(self.rewinds),
            "identity": self.identity,
        }


def validation_objectives(schedule: Schedule, vocabulary: Vocabulary) -> dict[str, Objective]:
    """Return by text `clm` and `mlm` (if there is a mask token), for any two runs to be compared, then the schedule's own."""
    always: list[Objective] = [CausalLanguageModeling(vocabulary)]
    if vocabulary.mask_id is not None:
        always.append(MaskedLanguageModeling(vocabulary))
    return {objective.describe(): objective for objective in always} | schedule.final_objectives()
