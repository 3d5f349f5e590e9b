"""The resolved plan of a run: data, objective schedule, learning rate, starting point and identity."""

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
    """Resolved run: settings, tokenizer, packs, objective schedule, learning rate, start, skipped packs and rewinds."""

    settings: PretrainConfig
    vocabulary: Vocabulary
    tokenizer: Any  # transformers' PreTrainedTokenizerFast
    data: RunData
    schedule: Schedule
    learning_rate: WSDSchedule
    start: RunInit = NEW_WEIGHTS
    skipped: SkippedPacks = NOTHING_SKIPPED
    rewinds: tuple[str, ...] = ()
    """The packs that each rewind has added to `skipped`, as text."""

    @property
    def packs(self) -> PackedDataset:
        """Return the data set of training packs, by sample number."""
        return self.data.train

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding: --vocab-size, or without it the number of ids of the tokenizer."""
        return self.settings.shape.vocab_size or self.vocabulary.size

    @property
    def validation(self) -> PackedDataset | None:
        """Return the data set of held-out packs; None if validation is turned off or the split leaves no text for it."""
        return self.data.held_out if self.settings.eval_every else None

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type that layers compute in: torch.bfloat16 with --bf16, else torch.float32."""
        return torch.bfloat16 if self.settings.bf16 else torch.float32

    def first_sample(self, step: int) -> int:
        """Return the number, in the data order, of the first unskipped sample that `step` (1, 2, ...) reads."""
        return self.sample_at(self.samples_read(step - 1))

    def samples_read(self, step: int) -> int:
        """Return the number of samples (packs) that steps 1 to `step` read; packs left out of the data do not count."""
        return self.settings.batch_sizes.first_sample(step + 1)

    def sample_at(self, position: int) -> int:
        """Return the number, in the data order, of the unskipped sample that the run reads at `position` (0, 1, ...)."""
        return self.skipped.sample_at(self.start.skip_samples, position)

    def step_tokens(self, step: int) -> int:
        """Return the number of tokens that `step` reads: its global batch size in packs times --seq-length."""
        return self.settings.batch_sizes.size(step) * self.settings.data.seq_length

    def with_skipped(self, skipped: SkippedPacks, rewinds: tuple[str, ...]) -> "Plan":
        """Return a copy that skips exactly `skipped`, also in --skip-packs; `rewinds`: packs added by each rewind."""
        data = dataclasses.replace(self.settings.data, skip_packs=skipped.texts)
        settings = dataclasses.replace(self.settings, data=data)
        return dataclasses.replace(self, settings=settings, skipped=skipped, rewinds=rewinds)

    @property
    def log_interval(self) -> int:
        """Return --log-interval; without it 10 if the run has over 1,000 steps and no phase below 10 steps, else 1."""
        interval, shortest = self.settings.output.log_interval, min(len(phase) for phase in self.schedule.phases)
        return interval or (10 if self.settings.total_iters > 1000 and shortest >= 10 else 1)

    @property
    def corpus_usage(self) -> list[CorpusUsage]:
        """Return each corpus's share, packs, epochs, dropped share in the whole run, with steps of a branch's parent."""
        first = self.start.skip_samples
        end = self.skipped.end_sample(first, self.samples_read(self.settings.total_iters))
        return self.data.corpus_usage(end, first, without=self.skipped.clip(first, end).ranges)

    @property
    def identity(self) -> dict[str, Any]:
        """Return by name, JSON-ready, the settings and data on which the weights after each step depend, equal for one run.

        Layout, kernels, intervals, micro-batch and paths may differ in the same run, and weights by rounding. Skipped packs are
        compared separately, by what has been read (`saw_same_data`).
        """
        settings = self.settings
        free = {"train_tokens", "config", "model", "data_path", "skip_packs", "tokenizer", "micro_batch_size"}
        free |= {"objective_schedule", "lr_warmup_iters", "lr_warmup_fraction", "lr_wsd_decay_iters", "lr_wsd_decay_fraction"}
        free |= {"lr_decay_style", "lr_wsd_decay_style", "min_lr"}
        optimizer = settings.optimizer.optimizer  # absent if it is the default, as in runs of earlier versions
        free |= {"optimizer"} if optimizer == "adamw" else set()
        free |= {"muon_momentum", "muon_num_ns_steps"} if optimizer != "muon" else set()
        for group in (settings.layout, settings.output, settings.kernels, settings.start, settings.health, settings.monitoring):
            free |= set(flags.flatten(group))
        free -= {"eval_iters", "fp8_format"}  # FP8 rounds too coarsely to be exchangeable
        free |= vars(settings.shape).keys() - settings.shape.identity.keys()
        values = {
            name: list(value) if isinstance(value, tuple) else value  # like JSON
            for name, value in flags.flatten(self.settings).items()
            if name not in free
        }
        return values | {
            "train_iters": self.settings.total_iters,
            "objective_schedule": self.schedule.canonical,
            "objective_packages": self.schedule.packages(),
            **self.learning_rate.identity,
            "data": self.data.fingerprint,
            "tokenizer": self.vocabulary.fingerprint,
            "vocab_size": None
            if self.vocab_size == self.vocabulary.size
            else self.vocab_size,  # the same with and without the flag
            **self.start.identity,
        }

    @property
    def run_metadata(self) -> dict[str, Any]:
        """Return the content of run.json: version, model size, corpus usage, start, skipped packs, rewinds, identity."""
        return {
            "megaenc": __version__,
            "vocab_size": self.vocab_size,
            "parameters": self.settings.shape.parameter_count(self.vocab_size),
            "reading": [dataclasses.asdict(row) for row in self.corpus_usage],
            "start": dataclasses.asdict(self.start),
            "skip_packs": list(self.skipped.texts),
            "rewinds": list(self.rewinds),
            "identity": self.identity,
        }


def validation_objectives(schedule: Schedule, vocabulary: Vocabulary) -> dict[str, Objective]:
    """Return the objectives to validate under, by text: clm, mlm if there is a mask token, and all of the schedule.

    clm and mlm are always among them, so that any two runs can be compared.
    """
    always: list[Objective] = [CausalLanguageModeling(vocabulary)]
    if vocabulary.mask_id is not None:
        always.append(MaskedLanguageModeling(vocabulary))
    return {objective.describe(): objective for objective in always} | schedule.final_objectives()
