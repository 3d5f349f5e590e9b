"""A fine-tuning run: training of one model, evaluation and result files."""

import dataclasses
import functools
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from megaenc.backend.device import detect_backend
from megaenc.console import print_rank_0
from megaenc.counter_rng import permutation
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets.registry import find_dataset
from megaenc.finetune.examples import Dataset, Examples, RetrievalExamples, SplitName, TaskFamily, hash_examples
from megaenc.finetune.grid.jobs import TOKENIZED_CACHE, FinetuneJob, RunProgress
from megaenc.finetune.kept_model import ModelKeeper, load_model
from megaenc.finetune.label_counts import describe_label_counts
from megaenc.finetune.model.fingerprint import compute_tokenizer_fingerprint
from megaenc.finetune.optimizer import MasterWeightOptimizer, check_warmup
from megaenc.finetune.results import files as result_files
from megaenc.finetune.tasks import TASKS, FinetuneTask, NonFinitePredictionError, Scores, TaskModel
from megaenc.finetune.tokenized import TextEncoder, TokenizedSplit, choose_special_tokens, load_or_compute
from megaenc.finetune.validation import ValidationHistory

ProgressCallback = Callable[[RunProgress], None]
_EVALUATION_SPLITS: tuple[SplitName, ...] = ("validation", "test")
_CONTEXT_FRACTION = 0.99  # the study's: 2,028 of 2,048 tokens
_DTYPES = {"bf16": torch.bfloat16, "paper-bf16": torch.bfloat16, "fp32": torch.float32}


def train_and_evaluate(job: FinetuneJob, report: ProgressCallback = lambda progress: None) -> bool:
    """Train a model, evaluate it, write its result files and return True; at a NaN or inf write failed.json, return False.

    Result files are a deterministic function of `job`. Raises InputError for an unusable model or data set.
    """
    began, reporter = time.monotonic(), _ProgressReporter(report)
    reporter(RunProgress("loading"))
    datasets = [find_dataset(dataset.location, **dataclasses.asdict(job.data)) for dataset in job.evaluate_on]
    _check_fingerprints(job, datasets)
    make_deterministic(job.protocol.threads, kernels=job.protocol.deterministic)
    backend = detect_backend()
    precision = job.protocol.precision or ("bf16" if backend.has_bf16 else "fp32")
    task = TASKS[job.family](datasets[0], job.protocol)
    tokenizer = load_tokenizer(job.model.location, "--model")
    backbone, native_head = load_model(job, task, tokenizer, device=backend.device, dtype=_DTYPES[precision])
    max_length = job.protocol.max_length or round(_CONTEXT_FRACTION * backbone.context_length)
    if max_length > backbone.context_length:
        raise InputError(
            f"--max-length: found {max_length}, expected at most the {backbone.context_length} tokens that the model reads"
        )
    protocol = dataclasses.replace(job.protocol, precision=precision, max_length=max_length)
    encoder = TextEncoder(tokenizer, max_length, choose_special_tokens(tokenizer, protocol), reporter.report_texts)
    reader = _TokenizedSplitLoader(Path(job.output, TOKENIZED_CACHE), encoder, reporter)
    task.protocol = protocol
    keeper = ModelKeeper(job, task, encoder) if job.keeps_model else None
    if keeper is not None:
        keeper.check_tokenizer(backbone.model.config)
    data = reader.load_training(task, datasets[0])
    # Evaluation data is read before training, so that an error in it wastes no training.
    held_out = [{split: reader.load_evaluation(task, dataset, split) for split in _EVALUATION_SPLITS} for dataset in datasets]
    if job.family in (TaskFamily.SC, TaskFamily.TC):
        counts = {split: task.count_labels(part) for split, (part, _) in held_out[0].items()}
        for line in describe_label_counts(job.train_on, task.label_names, {"train": task.count_labels(data), **counts}):
            print_rank_0(line)
    steps = count_training_steps(protocol, task.count_examples(data))
    _print_steps(job.train_on, protocol, steps, math.ceil(task.count_examples(data) / protocol.batch_size))
    check_warmup(steps, protocol.warmup)
    torch.manual_seed(job.seed)
    # The head is small enough to compute in float32.
    head_dtype = torch.bfloat16 if precision == "paper-bf16" else torch.float32
    head = task.build_head(backbone.hidden_size) if native_head is None else native_head
    if native_head is not None:
        native_head.reset_parameters()
    head = head.to(backend.device, head_dtype)
    model = TaskModel(backbone, head)
    seconds = {"loading": time.monotonic() - began}
    order = iterate_batches(job.seed, task.count_examples(data), protocol.batch_size, steps)
    optimizer = MasterWeightOptimizer(model, learning_rate=job.learning_rate, steps=steps, protocol=protocol)
    # One for all evaluations of a data set: it caches the baseline, and embeddings that validation and test share.
    evaluators = [TASKS[job.family](dataset, protocol) for dataset in datasets]
    histories = [ValidationHistory(protocol) for _ in datasets]
    fields: dict[str, float] = {}
    model.train()
    for step, rows in enumerate(order, start=1):
        loss = task.backward(model, data, rows)
        norm = optimizer.step()
        for quantity, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                result_files.write_failure(job, f"the {quantity} is {value} in step {step}", step=step, protocol=protocol)
                optimizer.close()
                return False
        progress = RunProgress("training", step, steps, {"loss": loss, **fields})
        reporter(progress)
        if not protocol.eval_interval or (step % protocol.eval_interval and step < steps):
            continue
        try:
            fields = _validate(model, evaluators, held_out, histories, step, optimizer, functools.partial(reporter, progress))
        except NonFinitePredictionError as error:
            result_files.write_failure(job, f"{error} after step {step}", step=step, protocol=protocol)
            optimizer.close()
            return False
        if step < steps and all(history.is_stopped for history in histories):
            print_rank_0(f"{job.name}: stopped after {step:,} of {steps:,} steps: --early-stopping {protocol.early_stopping}")
            break
        model.train()
    optimizer.close()
    masters = optimizer.get_masters() if keeper is not None and not protocol.uses_best_weights else {}
    del optimizer  # frees memory for the evaluation
    trained = hash_weights(model)
    seconds["training"] = time.monotonic() - began - sum(seconds.values())
    writes: list[Callable[[], None]] = []
    for at, (dataset, splits, history) in enumerate(zip(datasets, held_out, histories, strict=True)):
        evaluation_start = time.monotonic()
        if history.weights:
            history.restore()
            trained = hash_weights(model)
        known = {} if history.scores is None else {"validation": history.scores}
        last_step = history.evaluations[-1][0] if history.evaluations else steps
        try:
            scores = _evaluate(evaluators[at], model, splits, reporter, known)
        except NonFinitePredictionError as error:
            for write in writes:
                write()
            failed_job = dataclasses.replace(job, evaluate_on=job.evaluate_on[at:])
            result_files.write_failure(failed_job, f"{error} after step {last_step}, the last", step=last_step, protocol=protocol)
            return False
        seconds["evaluation"] = time.monotonic() - evaluation_start
        identity = {"steps": last_step, "trained": trained, "protocol": protocol}
        if history.evaluations:
            identity |= {"evaluations": history.evaluations, "best_step": history.best_step}
        writes.append(functools.partial(result_files.write_result, job, dataset.name, scores, **identity, seconds={**seconds}))
        if at == 0:
            first_scores, first_training = scores, {"steps": last_step, "trained": trained}
        if keeper is None:
            writes.pop()()
    if keeper is not None:
        if histories[0].weights:
            masters, first_training["best_step"] = {**histories[0].weights}, histories[0].step
        for parameter in model.parameters():
            parameter.data = masters.pop(parameter, parameter.data).to(model.device, torch.float32)

        def evaluate() -> dict[str, Scores]:
            if precision == "fp32":
                return first_scores
            return _evaluate(evaluators[0], model, held_out[0], reporter)

        # The results come last: they mark the run as finished.
        keeper.keep(model, held_out[0]["test"][0], first_scores["validation"].score, evaluate, writes, first_training)
    return True


def _evaluate(
    task: FinetuneTask,
    model: TaskModel,
    splits: Mapping[SplitName, tuple[TokenizedSplit, Examples]],
    reporter: "_ProgressReporter",
    known: Mapping[SplitName, Scores] = MappingProxyType({}),
) -> dict[SplitName, Scores]:
    """Return the model's Scores on the splits of the data set of `task`, those of `known` as they are.

    Raises NonFinitePredictionError for a NaN or inf.
    """
    scores: dict[SplitName, Scores] = {}
    task.progress = reporter.report_texts
    for split, loaded_split in splits.items():
        if split not in known:
            reporter(RunProgress(split, fields={"data set": task.dataset.name}))
        scores[split] = known[split] if split in known else task.evaluate(model, *loaded_split)
    task.clear_cache()
    return scores


def _validate(
    model: TaskModel,
    evaluators: Sequence[FinetuneTask],
    held_out: Sequence[Mapping[SplitName, tuple[TokenizedSplit, Examples]]],
    histories: Sequence[ValidationHistory],
    step: int,
    optimizer: MasterWeightOptimizer,
    report: Callable[[], None],
) -> dict[str, float]:
    """Add the validation scores after `step` to the histories of all data sets that have not stopped; return fields to display.

    `report` reports the training's progress again, as a sign of life. Raises NonFinitePredictionError for a NaN or inf.
    """
    copy_weights = functools.cache(optimizer.copy_weights)
    reporter = _ProgressReporter(lambda progress: report())
    for evaluator, splits, history in zip(evaluators, held_out, histories, strict=True):
        if not history.is_stopped:
            scores = _evaluate(evaluator, model, {"validation": splits["validation"]}, reporter)
            history.add(step, scores["validation"], copy_weights)
    return {"validation": 100 * histories[0].evaluations[-1][1]}


def _check_fingerprints(job: FinetuneJob, datasets: Sequence[Dataset]) -> None:
    """Raise InputError if the data sets or the tokenizer have changed since the job was planned."""
    fingerprints = job.fingerprints
    for source, current, planned in (
        *((dataset.name, dataset.fingerprint, fingerprints.datasets[dataset.name]) for dataset in datasets),
        (datasets[0].train_on, datasets[0].train_fingerprint, fingerprints.train_on),
        (f"the tokenizer in {job.model.location}", compute_tokenizer_fingerprint(job.model.location), fingerprints.tokenizer),
    ):
        if current != planned:
            raise InputError(f"{source}: has changed since the run was planned; run the same command again")


def count_training_steps(protocol: FinetuneConfig, examples: int) -> int:
    """Return the number of optimizer steps on `examples` training examples: `epochs` epochs, at most `max_steps` (0: any)."""
    steps = math.ceil(protocol.epochs * math.ceil(examples / protocol.batch_size))
    return min(protocol.max_steps or steps, steps)


def _print_steps(train_on: str, protocol: FinetuneConfig, steps: int, steps_per_epoch: int) -> None:
    """Print which of --epochs and --max-steps limits a training, unless both are as in the study and --max-steps does."""
    if steps < protocol.max_steps:
        print_rank_0(f"{train_on}: {steps:,} steps instead of --max-steps {protocol.max_steps:,}: --epochs {protocol.epochs:g}")
    elif steps == protocol.max_steps < protocol.epochs * steps_per_epoch and protocol.epochs != FinetuneConfig.epochs:
        print_rank_0(
            f"{train_on}: {steps / steps_per_epoch:.2g} epochs instead of --epochs {protocol.epochs:g}: "
            f"--max-steps {protocol.max_steps:,}; --max-steps 0 lifts this limit"
        )


def iterate_batches(seed: int, examples: int, batch_size: int, steps: int) -> Iterator[np.ndarray]:
    """Yield the example indices, int64[<= batch_size], of each of `steps` batches, reshuffled by `seed` every epoch."""
    steps_per_epoch = math.ceil(examples / batch_size)
    for step in range(steps):
        epoch, at = divmod(step, steps_per_epoch)
        if not at:
            order = permutation(seed, "fine-tuning order", examples, counters=(epoch,))
        yield order[at * batch_size : (at + 1) * batch_size]


class _ProgressReporter:
    """Reports of a run's stage and of the texts done in it; a grid kills a run that reports nothing for long."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report, self._stage = report, RunProgress("loading")

    def __call__(self, progress: RunProgress) -> None:
        self._stage = progress
        self._report(progress)

    def report_texts(self, done: int, total: int) -> None:
        """Report to the run's callback that `done` of `total` texts of the current stage are processed."""
        self._report(dataclasses.replace(self._stage, done=done, total=total))


@dataclasses.dataclass(frozen=True)
class _TokenizedSplitLoader:
    """Loader of tokenized splits, with a cache on disk that all runs share."""

    cache: Path
    encoder: TextEncoder
    report: ProgressCallback

    def load_training(self, task: FinetuneTask, dataset: Dataset) -> TokenizedSplit:
        """Return the tokenized training split from the cache on disk; without one, read, tokenize and cache the examples."""
        key = {"data": dataset.train_fingerprint, "split": "train"}
        return self._load_tokens(task, key, f"{dataset.train_on}, train", lambda: dataset.load_split("train"))

    def load_evaluation(self, task: FinetuneTask, dataset: Dataset, split: SplitName) -> tuple[TokenizedSplit, Examples]:
        """Return the tokens, from the cache if they are there, and the examples of the validation or test split `split`.

        The cache key includes a digest of the examples, as the fingerprint of a Hub data set does not change with its data.
        """
        examples = dataset.load_split(split)

        def tokens(subset: Examples, part: str) -> TokenizedSplit:
            key = {"data": dataset.fingerprint, "examples": hash_examples(subset)}
            return self._load_tokens(task, key, f"{dataset.name}, {part}", lambda: subset)

        if not isinstance(examples, RetrievalExamples):
            return tokens(examples, split), examples
        # Validation and test share their documents.
        documents = tokens(dataclasses.replace(examples, queries={}, relevant={}), "documents")
        queries = tokens(dataclasses.replace(examples, documents={}), split)
        return {"queries": queries["queries"], "documents": documents["documents"]}, examples

    def _load_tokens(
        self, task: FinetuneTask, key: dict[str, str], description: str, read: Callable[[], Examples]
    ) -> TokenizedSplit:
        """Tokenize the examples returned by `read`, or load their tokens from the cache."""

        def tokenize() -> TokenizedSplit:
            tokens = task.encode(read(), self.encoder)
            truncated = sum(part.truncated_count for part in (tokens.values() if isinstance(tokens, dict) else [tokens]))
            if truncated:
                print_rank_0(f"{description}: {truncated:,} texts are longer than {self.encoder.max_length} tokens and are cut")
            return tokens

        full_key = {**key, "family": task.family, **self.encoder.cache_key}
        return load_or_compute(self.cache, full_key, tokenize, lambda: self.report(RunProgress("loading")))


def make_deterministic(threads: int, *, kernels: bool = True) -> None:
    """Set torch's threads and, if `kernels`, deterministic kernels on GPUs, so that equal runs on a machine give equal bits."""
    torch.set_num_threads(threads)
    if torch.cuda.is_available() and kernels:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS; read at its first use
        # warn_only would leave flash attention's gradients nondeterministic. Memory-efficient attention has no such mode.
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that would write every new tensor


def hash_weights(model: torch.nn.Module) -> str:
    """Return the hexadecimal SHA-256 of the bytes of all weights of `model`; it is equal only if they agree bit by bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
