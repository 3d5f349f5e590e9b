"""One fine-tuning run: a model, a data set, a rate and a seed become a result file."""

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
from megaenc.finetune.model.fingerprint import compute_tokenizer_fingerprint
from megaenc.finetune.model.load import load_backbone
from megaenc.finetune.optimizer import MasterWeightOptimizer, check_warmup
from megaenc.finetune.results import files as result_files
from megaenc.finetune.tasks import TASKS, FinetuneTask, NonFinitePredictionError, TaskModel
from megaenc.finetune.tokenized import TextEncoder, TokenizedSplit, load_or_compute

ProgressCallback = Callable[[RunProgress], None]
_EVALUATION_SPLITS: tuple[SplitName, ...] = ("validation", "test")
_CONTEXT_FRACTION = 0.99  # the study's: 2,028 of 2,048 tokens
_DTYPES = {"bf16": torch.bfloat16, "paper-bf16": torch.bfloat16, "fp32": torch.float32}


def train_and_evaluate(job: FinetuneJob, report: ProgressCallback = lambda progress: None) -> bool:
    """Train and evaluate `job`, and write its results, or that its rate makes the loss NaN, and return False then.

    The bytes of a result depend on the job alone. InputError for a model or data that cannot be used.
    """
    began, told = time.monotonic(), _ProgressReporter(report)
    told(RunProgress("loading"))
    datasets = [find_dataset(dataset.location, **dataclasses.asdict(job.data)) for dataset in job.evaluate_on]
    _check_fingerprints(job, datasets)
    _make_deterministic(job.protocol)
    backend = detect_backend()
    precision = job.protocol.precision or ("bf16" if backend.has_bf16 else "fp32")
    backbone = load_backbone(job.model.location, job.protocol.attention, device=backend.device, dtype=_DTYPES[precision])
    max_length = job.protocol.max_length or round(_CONTEXT_FRACTION * backbone.context_length)
    if max_length > backbone.context_length:
        raise InputError(
            f"--max-length: found {max_length}, expected at most the {backbone.context_length} tokens that the model reads"
        )
    protocol = dataclasses.replace(job.protocol, precision=precision, max_length=max_length)
    encoder = TextEncoder(load_tokenizer(job.model.location), max_length, protocol.add_bos, protocol.add_eos, told.report_texts)
    reader = _TokenizedSplitLoader(Path(job.output, TOKENIZED_CACHE), encoder, told)
    task = TASKS[job.family](datasets[0], protocol)
    data = reader.load_training(task, datasets[0])
    # Read before anything is trained: what is wrong with them costs no training.
    held_out = [{split: reader.load_evaluation(task, dataset, split) for split in _EVALUATION_SPLITS} for dataset in datasets]
    steps = count_training_steps(protocol, task.count_examples(data))
    if steps < protocol.max_steps:
        print_rank_0(f"{job.train_on}: {steps:,} updates, fewer than --max-steps: --epochs {protocol.epochs:g} takes no more")
    check_warmup(steps, protocol.warmup)
    torch.manual_seed(job.seed)
    # The head computes in float32 where its weights are kept in it: it is small.
    head = task.build_head(backbone.hidden_size).to(
        backend.device, torch.bfloat16 if precision == "paper-bf16" else torch.float32
    )
    model = TaskModel(backbone, head)
    seconds = {"loading": time.monotonic() - began}
    order = iterate_batches(job.seed, task.count_examples(data), protocol.batch_size, steps)
    optimizer = MasterWeightOptimizer(model, learning_rate=job.learning_rate, steps=steps, protocol=protocol)
    model.train()
    for step, rows in enumerate(order, start=1):
        loss = task.backward(model, data, rows)
        norm = optimizer.step()
        for what, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                result_files.write_failure(job, f"the {what} is {value} in step {step}", step=step, protocol=protocol)
                optimizer.close()
                return False
        told(RunProgress("training", step, steps, {"loss": loss}))
    optimizer.close()
    del optimizer  # the memory is for the evaluation
    trained = hash_weights(model)
    seconds["training"] = time.monotonic() - began - sum(seconds.values())
    for at, (dataset, splits) in enumerate(zip(datasets, held_out, strict=True)):
        began_here, scores = time.monotonic(), {}
        evaluated = TASKS[job.family](dataset, protocol)  # one for both splits: it keeps what they share
        evaluated.progress = told.report_texts
        try:
            for split, read in splits.items():
                told(RunProgress(split, fields={"data set": dataset.name}))
                scores[split] = evaluated.evaluate(model, *read)
        except NonFinitePredictionError as error:
            left = dataclasses.replace(job, evaluate_on=job.evaluate_on[at:])
            result_files.write_failure(left, f"{error} after step {steps}, the last", step=steps, protocol=protocol)
            return False
        seconds["evaluation"] = time.monotonic() - began_here
        result_files.write_result(job, dataset.name, scores, steps=steps, trained=trained, protocol=protocol, seconds=seconds)
    return True


def _check_fingerprints(job: FinetuneJob, datasets: Sequence[Dataset]) -> None:
    """Raise InputError for data or a tokenizer that have changed since the job was planned."""
    recorded = job.fingerprints
    for what, now, before in (
        *((dataset.name, dataset.fingerprint, recorded.datasets[dataset.name]) for dataset in datasets),
        (datasets[0].train_on, datasets[0].train_fingerprint, recorded.train_on),
        (f"the tokenizer in {job.model.location}", compute_tokenizer_fingerprint(job.model.location), recorded.tokenizer),
    ):
        if now != before:
            raise InputError(f"{what}: has changed since the run was planned; give the same command again")


def count_training_steps(protocol: FinetuneConfig, examples: int) -> int:
    """Return the updates of a run: `epochs` passes over `examples`, the last batch of each being smaller, or `max_steps`."""
    return min(protocol.max_steps, math.ceil(protocol.epochs * math.ceil(examples / protocol.batch_size)))


def iterate_batches(seed: int, examples: int, batch_size: int, steps: int) -> Iterator[np.ndarray]:
    """Yield int64[at most batch_size], the examples of each update: each pass in a new random order that follows from `seed`."""
    each = math.ceil(examples / batch_size)
    for step in range(steps):
        epoch, at = divmod(step, each)
        if not at:
            order = permutation(seed, "fine-tuning order", examples, counters=(epoch,))
        yield order[at * batch_size : (at + 1) * batch_size]


class _ProgressReporter:
    """Passes on how far a run is, from stage to stage and text by text within a stage: silence means that it hangs."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report, self._stage = report, RunProgress("loading")

    def __call__(self, progress: RunProgress) -> None:
        self._stage = progress
        self._report(progress)

    def report_texts(self, done: int, total: int) -> None:
        """Report `done` of `total` texts in the stage that was told last."""
        self._report(dataclasses.replace(self._stage, done=done, total=total))


@dataclasses.dataclass(frozen=True)
class _TokenizedSplitLoader:
    """Reads splits and tokenises them, once for all runs."""

    cache: Path
    encoder: TextEncoder
    report: ProgressCallback

    def load_training(self, task: FinetuneTask, dataset: Dataset) -> TokenizedSplit:
        """Return the tokens to train on; the examples are read only if no run has tokenised them yet."""
        key = {"data": dataset.train_fingerprint, "split": "train"}
        return self._load_tokens(task, key, f"{dataset.train_on}, train", lambda: dataset.load_split("train"))

    def load_evaluation(self, task: FinetuneTask, dataset: Dataset, split: SplitName) -> tuple[TokenizedSplit, Examples]:
        """Return a split and its tokens, those of these very examples: no fingerprint tells that data of the Hub have changed."""
        examples = dataset.load_split(split)

        def tokens(some: Examples, what: str) -> TokenizedSplit:
            key = {"data": dataset.fingerprint, "examples": hash_examples(some)}
            return self._load_tokens(task, key, f"{dataset.name}, {what}", lambda: some)

        if not isinstance(examples, RetrievalExamples):
            return tokens(examples, split), examples
        # Both splits are searched in the same documents.
        documents = tokens(dataclasses.replace(examples, queries={}, relevant={}), "documents")
        queries = tokens(dataclasses.replace(examples, documents={}), split)
        return {"queries": queries["queries"], "documents": documents["documents"]}, examples

    def _load_tokens(self, task: FinetuneTask, key: dict[str, str], what: str, read: Callable[[], Examples]) -> TokenizedSplit:
        def make() -> TokenizedSplit:
            made = task.encode(read(), self.encoder)
            truncated = sum(part.truncated_count for part in (made.values() if isinstance(made, dict) else [made]))
            if truncated:
                print_rank_0(f"{what}: {truncated:,} texts are longer than {self.encoder.max_length} tokens and are cut")
            return made

        whole_key = {**key, "family": task.family, **self.encoder.cache_key}
        return load_or_compute(self.cache, whole_key, make, lambda: self.report(RunProgress("loading")))


def _make_deterministic(protocol: FinetuneConfig) -> None:
    """Have every run on this machine compute the same bits, whatever else runs."""
    torch.set_num_threads(protocol.threads)
    if torch.cuda.is_available() and protocol.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for; read when it is first used
        # Strictly: with warnings instead, flash attention's gradients stay as they come. Its memory-saving sister has no way.
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_mem_efficient_sdp(False)


def hash_weights(model: torch.nn.Module) -> str:
    """Return SHA-256 in hex of all weights: runs that agree in it were trained alike, bit by bit."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return whole.hexdigest()
