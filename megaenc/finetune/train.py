"""A fine-tuning run: training of one model, evaluation and result files."""

import dataclasses
import functools
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from megaenc.finetune.examples import Dataset, Examples, RetrievalExamples, SplitName, hash_examples
from megaenc.finetune.grid.jobs import TOKENIZED_CACHE, FinetuneJob, RunProgress
from megaenc.finetune.kept_model import ModelKeeper, load_model
from megaenc.finetune.model.fingerprint import compute_tokenizer_fingerprint
from megaenc.finetune.optimizer import MasterWeightOptimizer, check_warmup
from megaenc.finetune.results import files as result_files
from megaenc.finetune.tasks import TASKS, FinetuneTask, NonFinitePredictionError, Scores, TaskModel
from megaenc.finetune.tokenized import TextEncoder, TokenizedSplit, load_or_compute

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
    tokenizer = load_tokenizer(job.model.location)
    backbone, native_head = load_model(job, task, tokenizer, device=backend.device, dtype=_DTYPES[precision])
    max_length = job.protocol.max_length or round(_CONTEXT_FRACTION * backbone.context_length)
    if max_length > backbone.context_length:
        raise InputError(
            f"--max-length: found {max_length}, expected at most the {backbone.context_length} tokens that the model reads"
        )
    protocol = dataclasses.replace(job.protocol, precision=precision, max_length=max_length)
    encoder = TextEncoder(tokenizer, max_length, protocol.add_bos, protocol.add_eos, reporter.report_texts)
    reader = _TokenizedSplitLoader(Path(job.output, TOKENIZED_CACHE), encoder, reporter)
    task.protocol = protocol
    keeper = ModelKeeper(job, task, encoder) if job.keeps_model else None
    if keeper is not None:
        keeper.check_tokenizer(backbone.model.config)
    data = reader.load_training(task, datasets[0])
    # Evaluation data is read before training, so that an error in it wastes no training.
    held_out = [{split: reader.load_evaluation(task, dataset, split) for split in _EVALUATION_SPLITS} for dataset in datasets]
    steps = count_training_steps(protocol, task.count_examples(data))
    if steps < protocol.max_steps:
        print_rank_0(
            f"{job.train_on}: {steps:,} steps instead of --max-steps {protocol.max_steps:,}: --epochs {protocol.epochs:g}"
        )
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
    model.train()
    for step, rows in enumerate(order, start=1):
        loss = task.backward(model, data, rows)
        norm = optimizer.step()
        for quantity, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                result_files.write_failure(job, f"the {quantity} is {value} in step {step}", step=step, protocol=protocol)
                optimizer.close()
                return False
        reporter(RunProgress("training", step, steps, {"loss": loss}))
    optimizer.close()
    masters = optimizer.get_masters() if keeper is not None else {}
    del optimizer  # frees memory for the evaluation
    trained = hash_weights(model)
    seconds["training"] = time.monotonic() - began - sum(seconds.values())
    writes: list[Callable[[], None]] = []
    for at, (dataset, splits) in enumerate(zip(datasets, held_out, strict=True)):
        evaluation_start = time.monotonic()
        try:
            scores = _evaluate(model, job, dataset, splits, protocol, reporter)
        except NonFinitePredictionError as error:
            for write in writes:
                write()
            failed_job = dataclasses.replace(job, evaluate_on=job.evaluate_on[at:])
            result_files.write_failure(failed_job, f"{error} after step {steps}, the last", step=steps, protocol=protocol)
            return False
        seconds["evaluation"] = time.monotonic() - evaluation_start
        identity = {"steps": steps, "trained": trained, "protocol": protocol}
        writes.append(functools.partial(result_files.write_result, job, dataset.name, scores, **identity, seconds={**seconds}))
        if at == 0:
            first_scores = scores
        if keeper is None:
            writes.pop()()
    if keeper is not None:
        for parameter in model.parameters():
            parameter.data = masters.pop(parameter, parameter.data).float()

        def evaluate() -> dict[str, Scores]:
            if precision == "fp32":
                return first_scores
            return _evaluate(model, job, datasets[0], held_out[0], protocol, reporter)

        # The results come last: they mark the run as finished.
        keeper.keep(
            model, held_out[0]["test"][0], first_scores["validation"].score, evaluate, writes, steps=steps, trained=trained
        )
    return True


def _evaluate(
    model: TaskModel,
    job: FinetuneJob,
    dataset: Dataset,
    splits: Mapping[SplitName, tuple[TokenizedSplit, Examples]],
    protocol: FinetuneConfig,
    reporter: "_ProgressReporter",
) -> dict[SplitName, Scores]:
    """Return the model's Scores on the splits of a data set; NonFinitePredictionError for a NaN or inf."""
    task, scores = TASKS[job.family](dataset, protocol), {}  # one for both splits: it caches embeddings that they share
    task.progress = reporter.report_texts
    for split, loaded_split in splits.items():
        reporter(RunProgress(split, fields={"data set": dataset.name}))
        scores[split] = task.evaluate(model, *loaded_split)
    return scores


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
    """Return the number of optimizer steps on `examples` training examples: `epochs` epochs, at most `max_steps` steps."""
    return min(protocol.max_steps, math.ceil(protocol.epochs * math.ceil(examples / protocol.batch_size)))


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


def hash_weights(model: torch.nn.Module) -> str:
    """Return the hexadecimal SHA-256 of the bytes of all weights of `model`; it is equal only if they agree bit by bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
