"""The resolved plan of a run, from its settings and data.

It has objective schedule, learning rate, starting point and identity.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megaenc import __version__, flags
from megaenc.data.packing.blended_dataset import BlendedDataset
from megaenc.data.packing.builder import CorpusUsage, RunData, chain_data
from megaenc.data.packing.packed_dataset import PackedDataset
from megaenc.data.packing.validation_sets import ValidationSet
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.model.freezing import canonical_freeze
from megaenc.objectives import (
    CausalLanguageModeling,
    MaskedLanguageModeling,
    Objective,
    Schedule,
    build_pseudo_perplexities,
)
from megaenc.objectives.schedule import parse_objective
from megaenc.training.config import PretrainConfig
from megaenc.training.lr_schedule import LearningRate
from megaenc.training.phases import phase_field_names
from megaenc.training.run_init import NEW_WEIGHTS, RUN_FORMAT, RunInit
from megaenc.training.skip_ranges import NOTHING_SKIPPED, SkippedPacks


@dataclass(frozen=True)
class Plan:
    """Resolved run: settings, data, schedules, starting point and skipped packs.

    `build_plan` makes it, equal on all ranks. `settings` has the flags, `schedule` the objectives
    by step; `vocabulary` and `tokenizer` (of transformers) are those of the corpora,
    `learning_rate` is a function of the step, and `start` a RunInit. `data` is that of the last
    phase, `earlier_data` those of the phases before, if phases have different data;
    `validation_sets` are the corpora of --valid-data-path. `skipped` has the packs that the run
    skips, `rewinds` those that each rewind has added to them, as text. Steps count from 1, samples
    (packs in the data order) from 0.
    """

    settings: PretrainConfig
    vocabulary: Vocabulary
    tokenizer: Any  # transformers' PreTrainedTokenizerFast
    data: RunData
    """Data of the last phase."""
    schedule: Schedule
    learning_rate: LearningRate
    start: RunInit = NEW_WEIGHTS
    skipped: SkippedPacks = NOTHING_SKIPPED
    rewinds: tuple[str, ...] = ()
    """The packs that each rewind has added to `skipped`, as text."""
    earlier_data: tuple[RunData, ...] = ()
    """Data of each phase before the last."""
    validation_sets: tuple[ValidationSet, ...] = ()
    """Corpora of --valid-data-path; with --eval-interval 0 they are not opened."""

    @property
    def packs(self) -> PackedDataset:
        """Return the data set of the first phase's training packs, by sample index."""
        return self.data_at(1).train

    @cached_property
    def _data_by_phase(self) -> tuple[RunData, ...]:
        """Return the data of each phase, with its training packs by sample number."""
        phases = self.settings.phase_configs
        parts = (*self.earlier_data, self.data)
        if len(parts) == 1:
            return parts * len(phases)
        # The next phase's samples begin after this one's, unless both have the same packs.
        firsts = [
            self._first_sample_after(phase.first_step - 1) if phase.first_step > 1 else 0
            for phase in phases
        ]
        kept = [
            index for index, part in enumerate(parts) if not index or part is not parts[index - 1]
        ]
        chained = dict(
            zip(kept, chain_data([(firsts[index], parts[index]) for index in kept]), strict=True)
        )
        return tuple(
            chained[max(start for start in kept if start <= index)] for index in range(len(parts))
        )

    def data_at(self, step: int) -> RunData:
        """Return the data of the phase that trains `step` (1, 2, ...); of 0, the first.

        After the run it is the last phase. `train[s]` of the result is the pack of sample s of the
        run, for the samples of the phase.
        """
        return self._data_by_phase[self.settings.phase_configs.index(self.settings.phase_at(step))]

    def _first_sample_after(self, step: int) -> int:
        """Return the number of the first sample after those of steps 1 to `step`."""
        return self.skipped.end_sample(self.start.skip_samples, self.samples_read(step))

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding, without padding.

        It is --vocab-size, or without it the number of ids of the tokenizer. Tensor parallelism may
        pad the rows further.
        """
        return self.settings.shape.vocab_size or self.vocabulary.size

    @property
    def has_validation(self) -> bool:
        """Return whether any phase is validated.

        It is False if --eval-interval is 0, or if no phase has held-out text and there is no
        --valid-data-path.
        """
        has_text = any(data.held_out for data in (*self.earlier_data, self.data))
        return bool(self.settings.eval_every and (self.validation_sets or has_text))

    def validation_packs(self, step: int) -> dict[str, BlendedDataset]:
        """Return the packs to validate on in the phase of `step` (1, 2, ...), by set name.

        For step 0 it is the first phase. Sets are those of --valid-data-path, else the held-out
        text of the phase's own data, with an empty name. Without text, or with validation turned
        off, the dictionary is empty.
        """
        if not self.settings.eval_every:
            return {}
        if self.validation_sets:
            length = self.settings.phase_at(step).settings.data.seq_length
            return {
                validation_set.name: validation_set.pack(length)
                for validation_set in self.validation_sets
            }
        held_out = self.data_at(step).held_out
        return {"": held_out} if held_out else {}

    @cached_property
    def validation_objectives(self) -> dict[str, Objective]:
        """Return the objectives to validate under, by text such as mlm(mask=0.3).

        They include the pseudo-perplexities that the flags request. `build_plan` has reported
        errors in them.
        """
        output = self.settings.output
        return validation_objectives(
            self.schedule,
            self.vocabulary,
            output.eval_pseudo_perplexity_passes,
            output.valid_objective,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type that layers compute in: bfloat16 with --bf16, else float32."""
        return torch.bfloat16 if self.settings.bf16 else torch.float32

    def first_sample(self, step: int) -> int:
        """Return the index of the first sample that `step` (1, 2, ...) reads.

        It is an index in the data order, in which skipped samples count.
        """
        return self.sample_at(self.samples_read(step - 1))

    def samples_read(self, step: int) -> int:
        """Return the number of samples (packs) that steps 1 to `step` read, on all ranks.

        Packs left out by --skip-packs, --skip-samples and rewinds do not count. In a branch the
        first steps, up to --branch-at, are those of its parent.
        """
        return self.settings.samples_after(step)

    def sample_at(self, position: int) -> int:
        """Return the index in the data order of the sample that is read at `position`.

        Positions 0, 1, ... count the samples read from step 1 on, over all ranks; skipped samples
        have none.
        """
        return self.skipped.sample_at(self.start.skip_samples, position)

    def batch_size(self, step: int) -> int:
        """Return the global batch size of `step` (1, 2, ...) in packs."""
        return self.samples_read(step) - self.samples_read(step - 1)

    def step_tokens(self, step: int) -> int:
        """Return the number of tokens that `step` (1, 2, ...) reads on all ranks.

        It is the global batch size in packs times the --seq-length of its phase.
        """
        return self.settings.tokens_after(step) - self.settings.tokens_after(step - 1)

    def with_skipped(self, skipped: SkippedPacks, rewinds: tuple[str, ...]) -> "Plan":
        """Return a copy that skips exactly `skipped`, also in its --skip-packs.

        Whether enough packs are left is not checked.

        Args:
            rewinds: Packs that each rewind of the run has added, earlier ones too, as text, such as
                ("1200-1215",).
        """
        data = dataclasses.replace(self.settings.data, skip_packs=skipped.texts)
        settings = dataclasses.replace(self.settings, data=data)
        return dataclasses.replace(self, settings=settings, skipped=skipped, rewinds=rewinds)

    @property
    def log_interval(self) -> int:
        """Return the number of steps between rows of metrics.jsonl.

        Without --log-interval it is 10 if the run has over 1,000 steps and no phase of its
        objective schedule is shorter than 10, else 1.
        """
        interval = self.settings.output.log_interval
        shortest = min(len(phase) for phase in self.schedule.phases)
        return interval or (10 if self.settings.total_iters > 1000 and shortest >= 10 else 1)

    @property
    def corpus_usage(self) -> list[CorpusUsage]:
        """Return packs and epochs of each corpus in the whole run, as planned.

        Steps of a branch's parent count, skipped packs do not. A corpus has one row, with the last
        of the paths by which phases reach it, and with the mean of `dropped` over its epochs.
        """
        rows: dict[str, CorpusUsage] = {}
        for first, end, data in self._data_ranges():
            usage = data.corpus_usage(end, first, without=self.skipped.clip(first, end).ranges)
            for corpus, row in zip(data.corpora, usage, strict=True):
                earlier = rows.get(
                    corpus.fingerprint, dataclasses.replace(row, packs=0, epochs=0.0)
                )
                epochs = earlier.epochs + row.epochs
                dropped = row.dropped
                if epochs and earlier.dropped != dropped:  # packing or length have changed
                    dropped_epochs = earlier.dropped * earlier.epochs + row.dropped * row.epochs
                    dropped = dropped_epochs / epochs
                rows[corpus.fingerprint] = dataclasses.replace(
                    row, packs=earlier.packs + row.packs, epochs=epochs, dropped=dropped
                )
        if self.earlier_data:  # by weights only in a run of one blend
            total = sum(row.packs for row in rows.values())
            return [dataclasses.replace(row, share=row.packs / total) for row in rows.values()]
        return list(rows.values())

    def check_supply(self) -> None:
        """Raise InputError if --blend-max-epochs ends all corpora before a phase does.

        The error names the last step with enough packs.
        """
        for _, end, data in self._data_ranges():
            if data.train.samples is None or end <= data.train.first_sample + data.train.samples:
                continue
            steps = range(1, self.settings.total_iters + 1)
            possible = bisect_right(
                steps, data.train.first_sample + data.train.samples, key=self._first_sample_after
            )
            raise InputError(
                f"--blend-max-epochs {data.max_epochs}: all corpora end after "
                f"{data.train.samples:,} packs, in step "
                f"{possible + 1:,} of {self.settings.total_iters:,}; expected a run or phase that "
                f"ends with step {possible:,}, "
                "more text or more epochs"
            )

    def _data_ranges(self) -> list[tuple[int, int, RunData]]:
        """Return the samples of each group of consecutive phases with the same packs.

        Returns:
            First sample, end sample and data of each group.
        """
        ranges: list[tuple[int, int, RunData]] = []
        for phase, data in zip(self.settings.phase_configs, self._data_by_phase, strict=True):
            end = self._first_sample_after(phase.last_step)
            first = ranges[-1][1] if ranges else self.start.skip_samples
            if ranges and ranges[-1][2] is data:
                first = ranges.pop()[0]
            ranges.append((first, end, data))
        return ranges

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings and data on which the weights after each step depend.

        They are JSON-ready, by name, and equal for one run: a resume compares them. Flags have the
        names of their fields; other entries are such as `data` and `tokenizer` (fingerprints),
        `objective_schedule`, `train_iters` and those of the learning rate. Values are those of the
        last phase; if any changes by phase, `phases` has rows with those of each phase. Layout,
        kernels, intervals, micro-batch and paths, which change weights by rounding at most, are
        left out. Skipped packs are compared separately, by what has been read (`saw_same_data`).
        """
        settings = self.settings.phase_configs[-1].settings
        values = {
            name: list(value) if isinstance(value, tuple) else value  # like JSON
            for name, value in _identity_fields(settings).items()
        }
        rows = self._phase_rows()
        values["freeze"] = rows[-1]["freeze"]
        if len(rows) > 1:
            values["phases"] = rows
        # Runs of earlier versions have neither entry.
        if not any(row["freeze"] for row in rows):
            for entries in (values, *rows):
                del entries["freeze"]
        if len({row["packing"] for row in rows}) == 1:
            for row in rows:
                del row["packing"]
        has_blocks = any(data.has_blocks for data in (*self.earlier_data, self.data))
        return values | {
            "special_tokens": self.data.special_tokens.to_json(),
            # The same for a small corpus with either flag.
            "data_order": "blocks" if has_blocks else "documents",
            "train_iters": self.settings.total_iters,
            "objective_schedule": self.schedule.canonical,
            "objective_packages": self.schedule.packages(),
            **self.learning_rate.identity,
            "data": self.data.fingerprint,
            "tokenizer": self.vocabulary.fingerprint,
            # None with and without the flag if it is the tokenizer's number of ids.
            "vocab_size": None if self.vocab_size == self.vocabulary.size else self.vocab_size,
            **self.start.identity,
        }

    def _phase_rows(self) -> list[dict[str, Any]]:
        """Return the values that differ between phases, by name, in a row per phase.

        Rows have the last step of their phase; equal neighbors are one row.
        """
        rows: list[dict[str, Any]] = []
        for index, phase in enumerate(self.settings.phase_configs):
            values = flags.flatten(phase.settings)
            data = (*self.earlier_data, self.data)[index if self.earlier_data else 0]
            row = {name: values[name] for name in phase_identity(phase.settings) if name != "data"}
            row["data"] = data.fingerprint
            row["rampup_batch_size"] = list(row["rampup_batch_size"] or ()) or None
            row["freeze"] = canonical_freeze(row["freeze"], phase.settings.shape)
            if (
                rows
                and not row["rampup_batch_size"]
                and rows[-1] == row | {"last_step": rows[-1]["last_step"]}
            ):
                rows.pop()
            rows.append(row | {"last_step": phase.last_step})
        return rows

    @property
    def run_metadata(self) -> dict[str, Any]:
        """Return the content of run.json but the kernels, JSON-ready.

        It has `format`, `megaenc` (version), `vocab_size`, `parameters` (their number),
        `special_tokens`, `reading` (usage of corpora), `start`, `skip_packs`, `rewinds` and
        `identity`.
        """
        return {
            "format": RUN_FORMAT,
            "megaenc": __version__,
            "vocab_size": self.vocab_size,
            "parameters": self.settings.shape.parameter_count(self.vocab_size),
            "special_tokens": self.data.special_tokens.to_json(),
            "reading": [dataclasses.asdict(row) for row in self.corpus_usage],
            "start": dataclasses.asdict(self.start),
            "skip_packs": list(self.skipped.texts),
            "rewinds": list(self.rewinds),
            "identity": self.identity,
        }


def phase_identity(settings: PretrainConfig) -> tuple[str, ...]:
    """Return the names of the entries of a run's identity that may change by phase.

    They are the same for any `settings`. If any of them changes in a run, each row of the entry
    `phases` of `Plan.identity` has all of them, except an unused `freeze`.
    """
    entries = _identity_fields(settings)
    return ("data", *(name for name in phase_field_names(settings) if name in entries))


def _identity_fields(settings: Any, is_part: bool = True) -> dict[str, Any]:
    """Return the fields of `settings` that are part of a run's identity.

    Their metadata decides it; `is_part` is for fields without such metadata.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        rule = field.metadata.get("identity", is_part)
        if dataclasses.is_dataclass(value):
            values |= _identity_fields(value, rule)
        elif rule:
            values[field.name] = value
    return values


def validation_objectives(
    schedule: Schedule,
    vocabulary: Vocabulary,
    pseudo_perplexity_passes: int = 0,
    texts: Sequence[str] = (),
) -> dict[str, Objective]:
    """Return the objectives to validate under, by text such as mlm(mask=0.3).

    They are those of `texts` or, if it is empty, clm, mlm (if there is a mask token) and those of
    the schedule with the last values of their options; after either, pseudo-perplexities, if any.

    Args:
        schedule: Objectives of the run.
        pseudo_perplexity_passes: Passes of each pseudo-perplexity; 0 for none.
        texts: Values of --valid-objective, such as "mlm(mask=0.15)".

    Raises:
        InputError: An objective in `texts` is wrong, or a pseudo-perplexity has no mask token.
    """
    always: list[Objective] = [CausalLanguageModeling(vocabulary)]
    if vocabulary.mask_id is not None:
        always.append(MaskedLanguageModeling(vocabulary))
    trained = schedule.final_objectives()
    measures = build_pseudo_perplexities(trained.values(), vocabulary, pseudo_perplexity_passes)
    if texts:
        objectives = [parse_objective(text, vocabulary, "--valid-objective") for text in texts]
        return {objective.describe(): objective for objective in objectives} | measures
    return {objective.describe(): objective for objective in always} | trained | measures
