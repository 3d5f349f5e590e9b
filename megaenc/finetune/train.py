"""A fine-tuning run: training of one model, evaluation and result files."""

import contextlib
import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megaenc.backend.device import detect_backend
from megaenc.console import print_rank_0
from megaenc.counter_rng import permutation
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets.registry import find_dataset
from megaenc.finetune.examples import (
    Dataset,
    Examples,
    RetrievalExamples,
    SplitName,
    TaskFamily,
    hash_examples,
)
from megaenc.finetune.job import TOKENIZED_CACHE, FinetuneJob, RunProgress
from megaenc.finetune.kept_model import ModelKeeper, load_model
from megaenc.finetune.label_counts import describe_label_counts, describe_unseen_labels
from megaenc.finetune.model.fingerprint import compute_tokenizer_fingerprint
from megaenc.finetune.optimizer import MasterWeightOptimizer, check_warmup, count_training_steps
from megaenc.finetune.results import files as result_files
from megaenc.finetune.results.files import DatasetResult
from megaenc.finetune.tasks import TASKS, FinetuneTask, NonFinitePredictionError, Scores, TaskModel
from megaenc.finetune.tokenized import (
    TextEncoder,
    TokenizedSplit,
    choose_special_tokens,
    load_or_compute,
)
from megaenc.finetune.validation import ValidationHistory, Weights

ProgressCallback = Callable[[RunProgress], None]
_EVALUATION_SPLITS: tuple[SplitName, ...] = ("validation", "test")
_CONTEXT_FRACTION = 0.99  # the study's: 2,028 of 2,048 tokens
_DTYPES = {"bf16": torch.bfloat16, "paper-bf16": torch.bfloat16, "fp32": torch.float32}


def train_and_evaluate(job: FinetuneJob, report: ProgressCallback = lambda progress: None) -> bool:
    """Train a model, evaluate it, and write its result files; return True.

    At a NaN or inf it returns False: data sets evaluated before get results, the others
    failed.json, and no model is kept. The files are in the `job_directory` of each data set.
    `report` is called with each RunProgress. Equal jobs on a machine write equal results.json and
    failed.json if `job.protocol.deterministic` (`make_deterministic`). The caller must hold the
    run's lock (`try_lock_run`).

    Raises:
        InputError: The model or a data set is unusable.
        DataUnavailable: A download failed for a temporary reason.
    """
    run = FinetuneRun(job, report)
    results: list[DatasetResult] = []
    try:
        run.train()
        for held_out in run.held_out:
            result = run.evaluate(held_out)
            results.append(result)
            if run.keeper is None:
                result_files.write_result(job, result)
    except RunFailure as failure:
        if run.keeper is not None:
            for result in results:
                result_files.write_result(job, result)
        unscored = dataclasses.replace(job, evaluate_on=job.evaluate_on[len(results) :])
        result_files.write_failure(unscored, str(failure), step=failure.step, protocol=run.protocol)
        return False
    if run.keeper is not None:
        run.keep(results)
    return True


class RunFailure(ArithmeticError):
    """ArithmeticError that a loss, a gradient norm or a prediction is NaN or inf.

    It takes `reason`, a text for failed.json that becomes the message, and `step`, an attribute:
    the training step, from 1, of the loss or gradient norm; for a prediction, the last step before
    the evaluation.
    """

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(reason)
        self.step = step


@dataclass(frozen=True)
class HeldOutData:
    """Validation and test data of one data set, and its scores during training.

    `splits` has tokens and examples of "validation" and "test", `history` the scores. `task` serves
    all evaluations: it caches the baseline, and embeddings that both splits share; FinetuneRun
    drops the embeddings after each evaluation.
    """

    task: FinetuneTask
    """Task for all evaluations of the data set: it caches the baseline, and embeddings that
    validation and test share."""
    splits: Mapping[SplitName, tuple[TokenizedSplit, Examples]]
    history: ValidationHistory


class FinetuneRun:
    """Run of a job: training, evaluation, and the model that it keeps.

    The constructor loads data and model, which may raise InputError or DataUnavailable, and calls
    `make_deterministic`. Call `train` once, then `evaluate` for each of `held_out`, then `keep` if
    `keeper`, the ModelKeeper of a job that may keep its model, is not None. `train_and_evaluate`
    does all this, and writes the results.

    Args:
        job: Model, data sets and protocol.
        report: Function that is called with each RunProgress.
    """

    def __init__(self, job: FinetuneJob, report: ProgressCallback) -> None:
        """Load data and model of `job`.

        Raises:
            InputError: The model or a data set is unusable.
            DataUnavailable: A download failed for a temporary reason.
        """
        self.job = job
        self.report = _ProgressReporter(report)
        self.began = time.monotonic()
        self.report(RunProgress("loading"))
        datasets = [
            find_dataset(dataset.location, **dataclasses.asdict(job.data))
            for dataset in job.evaluate_on
        ]
        _check_fingerprints(job, datasets)
        make_deterministic(job.protocol.threads, kernels=job.protocol.deterministic)
        backend = detect_backend()
        precision = job.protocol.precision or ("bf16" if backend.has_bf16 else "fp32")
        self.task = TASKS[job.family](datasets[0], job.protocol)
        tokenizer = load_tokenizer(job.model.location, "--model")
        backbone, native_head = load_model(
            job, self.task, tokenizer, device=backend.device, dtype=_DTYPES[precision]
        )
        max_length = job.protocol.max_length or round(_CONTEXT_FRACTION * backbone.context_length)
        if max_length > backbone.context_length:
            raise InputError(
                f"--max-length: found {max_length}, expected at most the "
                f"{backbone.context_length} tokens that the model reads"
            )
        self.protocol = dataclasses.replace(
            job.protocol, precision=precision, max_length=max_length
        )
        self.task.protocol = self.protocol
        encoder = TextEncoder(
            tokenizer,
            max_length,
            choose_special_tokens(tokenizer, self.protocol),
            self.report.report_texts,
        )
        self.keeper = ModelKeeper(job, self.task, encoder) if job.keeps_model else None
        if self.keeper is not None:
            self.keeper.check_tokenizer(backbone.model.config)

        loader = SplitLoader(Path(job.output, TOKENIZED_CACHE), encoder, self.report)
        self.data = loader.load_training(self.task)
        # Evaluation data is read before training, so that an error in it wastes no training.
        self.held_out = []
        for dataset in datasets:
            task = TASKS[job.family](dataset, self.protocol)
            splits = {split: loader.load_evaluation(task, split) for split in _EVALUATION_SPLITS}
            self.held_out.append(HeldOutData(task, splits, ValidationHistory(self.protocol)))
        if job.family in (TaskFamily.SC, TaskFamily.TC, TaskFamily.MULTI_LABEL):
            counts = {"train": self.task.count_labels(self.data)}
            for split, (tokens, _) in self.held_out[0].splits.items():
                counts[split] = self.task.count_labels(tokens)
            # Texts with several labels have no classes whose numbers could be compared.
            is_multi_label = job.family is TaskFamily.MULTI_LABEL
            describe = describe_unseen_labels if is_multi_label else describe_label_counts
            for line in describe(job.train_on, self.task.label_names, counts):
                print_rank_0(line)
        if job.family is TaskFamily.REGRESSION:
            for held_out in self.held_out:
                for split, (tokens, _) in held_out.splits.items():
                    if not np.ptp(tokens.columns["labels"]):
                        print_rank_0(
                            f"{held_out.task.dataset.name}: warning: all labels of {split} are "
                            "equal: its correlations are undefined and count as 0"
                        )
        steps_per_epoch = math.ceil(self.task.count_examples(self.data) / self.protocol.batch_size)
        self.steps = count_training_steps(
            self.protocol.epochs, self.protocol.max_steps, steps_per_epoch
        )
        _print_steps(job.train_on, self.protocol, self.steps, steps_per_epoch)
        check_warmup(self.steps, self.protocol.warmup)

        torch.manual_seed(job.seed)
        if native_head is None:
            head = self.task.build_head(backbone.hidden_size)
        else:
            head = native_head
            native_head.reset_parameters()
        # The head is small enough to compute in float32.
        head_dtype = torch.bfloat16 if precision == "paper-bf16" else torch.float32
        self.model = TaskModel(backbone, head.to(backend.device, head_dtype))
        self.masters: Weights = {}
        """Float32 weights of the trained model to keep, of the parameters that have others."""
        self.digest = ""
        """Digest of the model's weights after training."""
        self.seconds = {"loading": time.monotonic() - self.began}

    def train(self) -> None:
        """Train to the last step or an early stop, with validations every --eval-interval.

        The interval is in steps. If it is 0, there is no validation, otherwise one after the last
        step too. An early stop needs `ValidationHistory.is_stopped` for all data sets. The model
        has the last weights afterwards; `evaluate` sets the best ones if the job uses them. No file
        is written.

        Raises:
            RunFailure: A loss, a gradient norm or a prediction is NaN or inf.
        """
        job = self.job
        protocol = self.protocol
        optimizer = MasterWeightOptimizer(
            self.model, learning_rate=job.learning_rate, steps=self.steps, protocol=protocol
        )
        order = iterate_batches(
            job.seed, self.task.count_examples(self.data), protocol.batch_size, self.steps
        )
        fields: dict[str, float] = {}
        with contextlib.closing(optimizer):
            self.model.train()
            for step, rows in enumerate(order, start=1):
                loss = self.task.backward(self.model, self.data, rows)
                norm = optimizer.step()
                for quantity, value in (("loss", loss), ("gradient norm", norm)):
                    if not math.isfinite(value):
                        raise RunFailure(f"the {quantity} is {value} in step {step}", step)
                self.report(RunProgress("training", step, self.steps, {"loss": loss, **fields}))
                if not protocol.eval_interval or (
                    step % protocol.eval_interval and step < self.steps
                ):
                    continue
                for held_out in self.held_out:
                    self._validate(held_out, step, optimizer)
                fields = {"validation": 100 * self.held_out[0].history.evaluations[-1][1]}
                if step < self.steps and all(
                    held_out.history.is_stopped for held_out in self.held_out
                ):
                    patience = protocol.early_stopping
                    print_rank_0(
                        f"{job.name}: stopped after {step:,} of {self.steps:,} steps: "
                        f"--early-stopping {patience}"
                    )
                    break
                self.model.train()
        if self.keeper is not None:
            self.masters = self.held_out[0].history.weights or optimizer.get_masters()
        self.seconds["training"] = time.monotonic() - self.began - sum(self.seconds.values())

    def _validate(self, held_out: HeldOutData, step: int, optimizer: MasterWeightOptimizer) -> None:
        """Add the validation score after `step` to the history of a data set.

        The history of a data set that has stopped does not change.

        Raises:
            RunFailure: A prediction is NaN or inf.
        """
        history = held_out.history
        if history.is_stopped:
            return
        held_out.task.progress = self.report.repeat
        try:
            held_out.task.calibrate(self.model, held_out.splits["validation"][0])
            scores = held_out.task.evaluate(self.model, *held_out.splits["validation"])
        except NonFinitePredictionError as error:
            raise RunFailure(f"{error} after step {step}", step) from None
        held_out.task.clear_cache()
        history.add(step, scores, optimizer.copy_weights)

    def evaluate(self, held_out: HeldOutData) -> DatasetResult:
        """Return the validation and test scores on a data set of `held_out`.

        Call it after `train`. If the job uses the best weights, those of this data set are first
        copied into the model, and stay there. No file is written.

        Raises:
            RunFailure: A prediction is NaN or inf.
        """
        began = time.monotonic()
        history = held_out.history
        if history.weights or not self.digest:
            history.restore()
            self.digest = hash_weights(self.model)
        last_step = history.evaluations[-1][0] if history.evaluations else self.steps
        try:
            held_out.task.calibrate(self.model, held_out.splits["validation"][0])
            scores = self._score(held_out, history.scores)
        except NonFinitePredictionError as error:
            raise RunFailure(f"{error} after step {last_step}, the last", last_step) from None
        return DatasetResult(
            dataset=held_out.task.dataset.name,
            scores=scores,
            steps=last_step,
            protocol=self.protocol,
            trained=self.digest,
            seconds=self.seconds | {"evaluation": time.monotonic() - began},
            evaluations=history.evaluations,
            best_step=history.best_step,
            threshold=held_out.task.threshold,
        )

    def _score(
        self, held_out: HeldOutData, validation: Scores | None = None
    ) -> dict[SplitName, Scores]:
        """Return the model's Scores by split, with those of `validation` if known.

        Raises:
            NonFinitePredictionError: A prediction is NaN or inf.
        """
        task = held_out.task
        task.progress = self.report.report_texts
        scores: dict[SplitName, Scores] = {}
        for split, data in held_out.splits.items():
            if split == "validation" and validation is not None:
                scores[split] = validation
                continue
            self.report(RunProgress(split, fields={"data set": task.dataset.name}))
            scores[split] = task.evaluate(self.model, *data)
        task.clear_cache()
        return scores

    def keep(self, results: Sequence[DatasetResult]) -> None:
        """Write the results, and the model in float32 if the job keeps it.

        See `ModelKeeper.keep`. The weights are those to use on the first data set of `held_out`;
        the model is converted to them in place. `keeper` must not be None.

        Args:
            results: Results of `evaluate` in the order of `held_out`.

        Raises:
            InputError: transformers computes other outputs; no results are written.
        """
        first = self.held_out[0]
        for parameter in self.model.parameters():
            parameter.data = self.masters.get(parameter, parameter.data).to(
                self.model.device, torch.float32
            )
        self.masters = {}

        def evaluate() -> Mapping[SplitName, Scores]:
            return results[0].scores if self.protocol.precision == "fp32" else self._score(first)

        self.keeper.keep(self.model, first.splits["test"][0], evaluate, results)


def _check_fingerprints(job: FinetuneJob, datasets: Sequence[Dataset]) -> None:
    """Check that data sets and tokenizer are unchanged since the job was planned.

    Raises:
        InputError: A data set or the tokenizer has changed.
    """
    fingerprints = job.fingerprints
    for source, current, planned in (
        *(
            (dataset.name, dataset.fingerprint, fingerprints.datasets[dataset.name])
            for dataset in datasets
        ),
        (datasets[0].train_on, datasets[0].train_fingerprint, fingerprints.train_on),
        (
            f"the tokenizer in {job.model.location}",
            compute_tokenizer_fingerprint(job.model.location),
            fingerprints.tokenizer,
        ),
    ):
        if current != planned:
            raise InputError(
                f"{source}: has changed since the run was planned; run the same command again"
            )


def _print_steps(train_on: str, protocol: FinetuneConfig, steps: int, steps_per_epoch: int) -> None:
    """Print which of --epochs and --max-steps limits a training.

    Nothing is printed if both are as in the study and --max-steps limits it.
    """
    if steps < protocol.max_steps:
        print_rank_0(
            f"{train_on}: {steps:,} steps instead of --max-steps {protocol.max_steps:,}: "
            f"--epochs {protocol.epochs:g}"
        )
    elif (
        steps == protocol.max_steps < protocol.epochs * steps_per_epoch
        and protocol.epochs != FinetuneConfig.epochs
    ):
        print_rank_0(
            f"{train_on}: {steps / steps_per_epoch:.2g} epochs instead of "
            f"--epochs {protocol.epochs:g}: --max-steps {protocol.max_steps:,}; "
            "--max-steps 0 lifts this limit"
        )


def iterate_batches(seed: int, examples: int, batch_size: int, steps: int) -> Iterator[np.ndarray]:
    """Yield the example indices of each batch, reshuffled by `seed` every epoch.

    There are `steps` batches, int64[<= batch_size]; the last batch of an epoch may be smaller.
    Indices are from 0 to `examples` - 1; there must be an example.
    """
    steps_per_epoch = math.ceil(examples / batch_size)
    for step in range(steps):
        epoch, batch_index = divmod(step, steps_per_epoch)
        if not batch_index:
            order = permutation(seed, "fine-tuning order", examples, counters=(epoch,))
        yield order[batch_index * batch_size : (batch_index + 1) * batch_size]


class _ProgressReporter:
    """Reporter of a run's stage and of the texts done in it.

    A grid kills a run that reports nothing for long.
    """

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report
        self._stage = RunProgress("loading")

    def __call__(self, progress: RunProgress) -> None:
        self._stage = progress
        self._report(progress)

    def repeat(self, done: int, total: int) -> None:
        """Report the current stage again; `done` and `total`, of a part, are ignored."""
        self._report(self._stage)

    def report_texts(self, done: int, total: int) -> None:
        """Report that `done` of `total` texts of the current stage are processed."""
        self._report(dataclasses.replace(self._stage, done=done, total=total))


@dataclass(frozen=True)
class SplitLoader:
    """Loader of tokenized splits, with a cache on disk that all runs share.

    `load_training` and `load_evaluation` load a split. `cache` is the directory of the cache,
    `encoder` tokenizes. While another process tokenizes the same split, `report` is called with
    RunProgress("loading") five times a second.
    """

    cache: Path
    encoder: TextEncoder
    report: ProgressCallback

    def load_training(self, task: FinetuneTask) -> TokenizedSplit:
        """Return the tokenized training split of the task's data set.

        It comes from the cache if it is there, under the fingerprint of the data set; else examples
        are read, tokenized and cached.

        Raises:
            InputError: The data is invalid.
            DataUnavailable: A download failed for a temporary reason.
        """
        dataset = task.dataset
        key = {"data": dataset.train_fingerprint, "split": "train"}
        return self._load_tokens(
            task, key, f"{dataset.train_on}, train", lambda: dataset.load_split("train")
        )

    def load_evaluation(
        self, task: FinetuneTask, split: SplitName
    ) -> tuple[TokenizedSplit, Examples]:
        """Return the tokens and the examples of the validation or test split.

        Examples are always read; tokens come from the cache if they are there.

        Raises:
            InputError: The data is invalid.
            DataUnavailable: A download failed for a temporary reason.
        """
        examples = task.dataset.load_split(split)
        if not isinstance(examples, RetrievalExamples):
            return self._load_examples(task, examples, split), examples
        # Validation and test share their documents.
        documents = self._load_examples(
            task, dataclasses.replace(examples, queries={}, relevant={}), "documents"
        )
        queries = self._load_examples(task, dataclasses.replace(examples, documents={}), split)
        return {"queries": queries["queries"], "documents": documents["documents"]}, examples

    def _load_examples(self, task: FinetuneTask, examples: Examples, part: str) -> TokenizedSplit:
        """Return the tokens of examples of the data set.

        The cache key includes a digest of the examples, as the fingerprint of a Hub data set does
        not change with its data.
        """
        key = {"data": task.dataset.fingerprint, "examples": hash_examples(examples)}
        return self._load_tokens(task, key, f"{task.dataset.name}, {part}", lambda: examples)

    def _load_tokens(
        self,
        task: FinetuneTask,
        key: dict[str, str],
        description: str,
        read: Callable[[], Examples],
    ) -> TokenizedSplit:
        """Tokenize the examples returned by `read`, or load their tokens from the cache."""

        def tokenize() -> TokenizedSplit:
            tokens = task.encode(read(), self.encoder)
            parts = tokens.values() if isinstance(tokens, dict) else [tokens]
            truncated = sum(part.truncated_count for part in parts)
            if truncated:
                print_rank_0(
                    f"{description}: {truncated:,} texts are longer than "
                    f"{self.encoder.max_length} tokens and are cut"
                )
            return tokens

        full_key = {**key, "family": task.family, **self.encoder.cache_key}
        return load_or_compute(
            self.cache, full_key, tokenize, lambda: self.report(RunProgress("loading"))
        )


def make_deterministic(threads: int, *, kernels: bool = True) -> None:
    """Set torch's threads and deterministic GPU kernels, for the whole process.

    Equal runs on a machine then give equal bits, on a GPU only with `kernels`. No seed is set. Call
    it before the first use of cuBLAS, whose CUBLAS_WORKSPACE_CONFIG it sets unless it is set.

    Args:
        threads: CPU threads of an operation.
        kernels: Whether torch raises an error for GPU kernels that are not deterministic, and
            memory-efficient attention is off; False leaves torch's settings.
    """
    torch.set_num_threads(threads)
    if torch.cuda.is_available() and kernels:
        # Required by cuBLAS; read at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # warn_only would leave flash attention's gradients nondeterministic. Memory-efficient
        # attention has no such mode.
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        # A debugging aid that would write every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False


def hash_weights(model: torch.nn.Module) -> str:
    """Return the SHA-256 (hex) of the bytes of all parameters of `model`.

    They are in the order of `model.parameters()`; their names have no effect.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
