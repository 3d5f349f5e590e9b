"""Training by megaenc and by transformers on the same synthetic documents."""

import contextlib
import dataclasses
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import common
from synthetic import EOS, MASK, BenchSetup, SyntheticDocuments

from megaenc.objectives import Attention
from megaenc.training.config_groups import OptimizerConfig

if TYPE_CHECKING:
    from megaenc.training.engine import Engine

ADAM = OptimizerConfig()  # except for the learning rate, which is the job's
IGNORED = -100  # label that transformers' losses ignore


@dataclass(frozen=True, kw_only=True)
class TrainingJob(BenchSetup):
    """Training job of one contender."""

    objective: str  # in the notation of --objective-schedule: clm or mlm(...)
    documents: int
    batch: int  # documents per step; divides `documents`
    passes: int  # timed passes over all documents
    weights: str  # safetensors file of the initial weights, with transformers' names
    by_length: bool = False  # sort documents by length, for transformers
    kernel: str = "sdpa"  # transformers' attention implementation

    def read_documents(self) -> SyntheticDocuments:
        """Return the job's synthetic documents, in order of length if `by_length`."""
        documents = self.build_documents(self.documents)
        return (
            dataclasses.replace(documents, order=documents.order_by_length())
            if self.by_length
            else documents
        )

    @property
    def timed_steps(self) -> int:
        """Return the number of timed steps, which is that of `passes` over all documents."""
        return self.passes * self.documents // self.batch


@contextlib.contextmanager
def measure_usage(results: dict[str, Any]) -> Iterator[None]:
    """Measure time and memory of the block into `results`.

    They are `seconds` and `cpu_seconds` of the block, and `peak_memory` of the process in bytes.
    """
    synchronize_device()
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    yield
    synchronize_device()
    results["seconds"] = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    results["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    results["peak_memory"] = peak_memory()


def peak_memory() -> float:
    """Return the peak bytes of tensors on the accelerator.

    Without one they are the peak resident bytes of the process.
    """
    import torch

    return (
        float(torch.cuda.max_memory_allocated())
        if torch.cuda.is_available()
        else common.peak_resident_bytes()
    )


def synchronize_device() -> None:
    """Wait for the accelerator, if any, to finish its queued work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_weights(job: TrainingJob, fill: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Write initial weights to `job.weights` with transformers' names; return {}.

    They are random with seed 0, or those that `fill` sets.
    """
    import torch
    from safetensors.torch import save_file

    from megaenc import backend
    from megaenc.backend import ParallelConfig, prepare_megatron
    from megaenc.convert.param_mapping import iter_hf_tensors

    prepare_megatron()
    backend.init_distributed(ParallelConfig(), 0)
    from megaenc.model.encoder import build_encoder

    seed = None if fill else 0
    encoder = build_encoder(
        job.shape, job.vocab_size, job.seq_length, ParallelConfig(), torch.float32, seed=seed
    )
    if fill:
        fill(encoder)
    parameters = {name: parameter.detach().cpu() for name, parameter in encoder.named_parameters()}
    tensors = iter_hf_tensors(parameters, job.shape, job.vocab_size)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors}, job.weights)
    backend.destroy_distributed()
    return {}


def train_with_megaenc(job: TrainingJob) -> dict[str, Any]:
    """Train by megaenc; return loss, predictions, seconds, CPU seconds and memory.

    The loss is the initial one. CPU seconds and memory are sums over all ranks.
    """
    import torch
    import torch.distributed as dist

    from megaenc import backend
    from megaenc.backend import prepare_megatron

    prepare_megatron()
    plan = job.build_plan(job.read_documents(), job.objective, batch=job.batch)
    device = backend.init_distributed(plan.settings.layout, plan.settings.seed)
    from megaenc.training.engine import Engine

    results = train_engine(Engine(plan, device), job)
    totals = torch.tensor(
        [results["cpu_seconds"], results["peak_memory"]], dtype=torch.float64, device=device.device
    )
    dist.all_reduce(totals)
    results["cpu_seconds"], results["peak_memory"] = totals.tolist()
    backend.destroy_distributed()
    return results


def train_engine(engine: "Engine", job: TrainingJob) -> dict[str, Any]:
    """Train with an engine; return loss, predictions, seconds and peak memory.

    The loss is the initial one, and seconds are those of the timed steps.
    """
    samples = job.documents // job.batch * job.batch
    result = engine.evaluate(engine.plan.packs, samples, job.parse_objective(job.objective))
    results = {"loss": result.loss, "predicted": result.predicted}
    engine.train_step(1)  # warm-up
    with measure_usage(results):
        for step in range(2, job.timed_steps + 2):
            engine.train_step(step)
    return results


def train_with_transformers(job: TrainingJob) -> dict[str, Any]:
    """Train by transformers on padded batches.

    Returns:
        Initial loss, number of predictions, timed seconds and memory.
    """
    import torch

    model = load_hf_model(job)
    documents = job.read_documents()
    device = next(model.parameters()).device
    objective = job.parse_objective(job.objective)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=job.learning_rate,
        betas=(ADAM.adam_beta1, ADAM.adam_beta2),
        eps=ADAM.adam_eps,
        weight_decay=ADAM.weight_decay,
        fused=True,
    )

    def compute_loss(step: int) -> tuple[torch.Tensor, int]:
        inputs, predicted = build_padded_batch(job, documents, objective, step, device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=job.bf16):
            return model(**inputs).loss, predicted

    def train(step: int) -> None:
        loss, _ = compute_loss(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad)
        optimizer.step()

    with torch.no_grad():
        losses = [
            (float(loss) * predicted, predicted)
            for loss, predicted in map(compute_loss, range(job.documents // job.batch))
        ]
    predicted = sum(count for _, count in losses)
    results = {"loss": sum(loss for loss, _ in losses) / predicted, "predicted": predicted}
    train(0)
    with measure_usage(results):
        for step in range(1, job.timed_steps + 1):
            train(step)
    return results


def build_hf_config(job: TrainingJob) -> tuple[Any, Any]:
    """Return transformers' (model class, config) of the job.

    It is EuroBERT for bidirectional attention, else Llama.
    """
    import torch
    from transformers import EuroBertForMaskedLM, LlamaForCausalLM

    from megaenc.convert.architectures import FAMILIES, build_export_config

    attention = job.parse_objective(job.objective).attention
    family, kind = (
        ("eurobert", EuroBertForMaskedLM)
        if attention == Attention.BIDIRECTIONAL
        else ("llama", LlamaForCausalLM)
    )
    return kind, build_export_config(
        FAMILIES[family],
        attention,
        job.shape,
        vocab_size=job.vocab_size,
        context=job.seq_length,
        tokenizer=SimpleNamespace(
            mask_token_id=MASK,
            pad_token_id=None,
            eos_token_id=EOS,
            bos_token_id=None,
            cls_token_id=None,
            sep_token_id=None,
        ),
        dtype=torch.float32,
    )


def load_hf_model(job: TrainingJob) -> Any:
    """Return transformers' model of `build_hf_config` with the initial weights.

    It is on the accelerator if there is one.
    """
    import torch
    from safetensors.torch import load_file

    kind, config = build_hf_config(job)
    # With a state dict, transformers builds on the meta device and assigns the mapped file's
    # tensors without a copy.
    model, loaded = kind.from_pretrained(
        None,
        config=config,
        state_dict=load_file(job.weights),
        attn_implementation=job.kernel,
        dtype=torch.float32,
        output_loading_info=True,
    )
    if loaded["unexpected_keys"] or set(loaded["missing_keys"]) - {"lm_head.weight"}:
        raise ValueError(f"weights of transformers' model: {loaded}")
    return model.train().to("cuda" if torch.cuda.is_available() else "cpu")


def build_padded_batch(
    job: TrainingJob, documents: SyntheticDocuments, objective: Any, step: int, device: Any
) -> tuple[dict[str, Any], int]:
    """Return the batch of `step` for transformers, and its number of predictions.

    Rows are padded to the longest document.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    samples = [
        documents.targets(objective, step * job.batch + number)[1] for number in range(job.batch)
    ]
    inputs = [torch.from_numpy(targets.inputs) for targets in samples]
    ids = pad_sequence(inputs, batch_first=True, padding_value=EOS)
    mask = pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True)
    labels = torch.full_like(ids, IGNORED)
    for row, targets in zip(labels, samples, strict=True):
        # Causal models of transformers shift the labels themselves.
        row[torch.from_numpy(targets.predict_at + objective.shift)] = torch.from_numpy(
            targets.labels
        )
    tensors = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in tensors.items()}, sum(
        len(targets.labels) for targets in samples
    )
