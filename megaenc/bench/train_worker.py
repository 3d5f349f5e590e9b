"""The sides of a training benchmark, and one turn of one of them in a process of its own."""

import contextlib
import dataclasses
import multiprocessing.connection
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megaenc.bench import report
from megaenc.bench.synthetic_docs import EOS, MASK, Setup, SyntheticDocuments
from megaenc.objectives import Attention
from megaenc.processes import peak_resident_bytes, python_environment, usable_core_count
from megaenc.training.config_groups import OptimizerConfig

if TYPE_CHECKING:
    from megaenc.training.engine import Engine

ADAM = OptimizerConfig()  # but for its rate, which is the work's
IGNORED = -100  # what transformers' losses leave out


@dataclass(frozen=True, kw_only=True)
class TrainingJob(Setup):
    """What is trained on what; the same for all sides but for the last two fields and the layout."""

    objective: str  # as a schedule spells it: clm or mlm(...)
    documents: int
    batch: int  # documents of an update; `documents` is a multiple of it
    passes: int  # times that all documents are read while the clock runs
    weights: str  # safetensors of the weights that all begin with, under transformers' names
    by_length: bool = False  # documents in batches of like lengths, for transformers
    kernel: str = "sdpa"  # transformers' attention

    def read(self) -> SyntheticDocuments:
        """Return the documents, in the order of this side."""
        found = self.documents_of(self.documents)
        return dataclasses.replace(found, order=found.by_length()) if self.by_length else found

    @property
    def updates(self) -> int:
        """While the clock runs."""
        return self.passes * self.documents // self.batch


@contextlib.contextmanager
def clock(found: dict[str, Any]) -> Iterator[None]:
    """Put into `found` the seconds that pass inside, those of processors in this process, and `peak_memory` so far."""
    wait()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    yield
    wait()
    found["seconds"] = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    found["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found["peak_memory"] = peak_memory()


def peak_memory() -> float:
    """Return the most bytes of tensors that the accelerator, if there is one, has held, else the most of the process."""
    import torch

    return float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else peak_resident_bytes()


def wait() -> None:
    """Wait until the accelerator, if there is one, has done what it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_weights(work: TrainingJob, fill: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Write the weights that megaenc begins with, under transformers' names: those of the seed, or what `fill` puts in."""
    import torch
    from safetensors.torch import save_file

    from megaenc import backend
    from megaenc.backend import ParallelConfig, prepare_megatron
    from megaenc.convert.param_mapping import iter_hf_tensors

    prepare_megatron()
    backend.init_distributed(ParallelConfig(), 0)
    from megaenc.model.encoder import build_encoder

    seed = None if fill else 0
    encoder = build_encoder(work.shape, work.vocab_size, work.seq_length, ParallelConfig(), torch.float32, seed=seed)
    if fill:
        fill(encoder)
    parameters = {name: parameter.detach().cpu() for name, parameter in encoder.named_parameters()}
    tensors = iter_hf_tensors(parameters, work.shape, work.vocab_size)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors}, work.weights)
    backend.destroy_distributed()
    return {}


def train_with_megaenc(work: TrainingJob) -> dict[str, Any]:
    """Train with the run's own engine, each batch a row of documents end to end; figures are of all processes together."""
    import torch
    import torch.distributed as dist

    from megaenc import backend
    from megaenc.backend import prepare_megatron

    prepare_megatron()
    plan = work.plan(work.read(), work.objective, batch=work.batch)
    device = backend.init_distributed(plan.settings.layout, plan.settings.seed)
    from megaenc.training.engine import Engine

    found = train_engine(Engine(plan, device), work)
    totals = torch.tensor([found["cpu_seconds"], found["peak_memory"]], dtype=torch.float64, device=device.device)
    dist.all_reduce(totals)
    found["cpu_seconds"], found["peak_memory"] = totals.tolist()
    backend.destroy_distributed()
    return found


def train_engine(engine: "Engine", work: TrainingJob) -> dict[str, Any]:
    """Return the loss of an engine's weights over all documents of its plan, and what its updates take."""
    result = engine.evaluate(engine.plan.packs, work.documents // work.batch, work.objective_of(work.objective))
    found = {"loss": result.loss, "predicted": result.predicted}
    engine.train_step(1)  # what is made once is made here
    with clock(found):
        for step in range(2, work.updates + 2):
            engine.train_step(step)
    return found


def train_with_transformers(work: TrainingJob) -> dict[str, Any]:
    """Train in a plain loop: a padded batch, bfloat16 by autocast, the model's own loss, torch's fused AdamW."""
    import torch

    model, documents = peer(work), work.read()
    device = next(model.parameters()).device
    objective = work.objective_of(work.objective)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=work.rate,
        betas=(ADAM.adam_beta1, ADAM.adam_beta2),
        eps=ADAM.adam_eps,
        weight_decay=ADAM.weight_decay,
        fused=True,
    )

    def loss_of(update: int) -> tuple[torch.Tensor, int]:
        inputs, predicted = padded(work, documents, objective, update, device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=work.bf16):
            return model(**inputs).loss, predicted

    def train(update: int) -> None:
        loss, _ = loss_of(update)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad)
        optimizer.step()

    with torch.no_grad():
        losses = [(float(loss) * predicted, predicted) for loss, predicted in map(loss_of, range(work.documents // work.batch))]
    total, predicted = (sum(column) for column in zip(*losses, strict=True))
    found = {"loss": total / predicted, "predicted": predicted}
    train(0)
    with clock(found):
        for update in range(1, work.updates + 1):
            train(update)
    return found


def peer(work: TrainingJob) -> Any:
    """Return transformers' model with the weights that all begin with: EuroBERT to look both ways, else Llama."""
    import torch
    from safetensors.torch import load_file
    from transformers import EuroBertForMaskedLM, LlamaForCausalLM

    from megaenc.convert.architectures import FAMILIES, build_export_config

    attention = work.objective_of(work.objective).attention
    family, kind = ("eurobert", EuroBertForMaskedLM) if attention == Attention.BIDIRECTIONAL else ("llama", LlamaForCausalLM)
    config = build_export_config(
        FAMILIES[family],
        attention,
        work.shape,
        vocab_size=work.vocab_size,
        context=work.seq_length,
        tokenizer=SimpleNamespace(mask_token_id=MASK, pad_token_id=None, eos_token_id=EOS, bos_token_id=None),
        dtype=torch.float32,
    )
    # Made without memory, so that no weights are drawn first.
    model, loaded = kind.from_pretrained(
        None,
        config=config,
        state_dict=load_file(work.weights),
        attn_implementation=work.kernel,
        dtype=torch.float32,
        output_loading_info=True,
    )
    if loaded["unexpected_keys"] or set(loaded["missing_keys"]) - {"lm_head.weight"}:
        raise ValueError(f"weights of the peer: {loaded}")
    return model.train().to("cuda" if torch.cuda.is_available() else "cpu")


def padded(
    work: TrainingJob, documents: SyntheticDocuments, objective: Any, update: int, device: Any
) -> tuple[dict[str, Any], int]:
    """Return a batch for transformers, padded to its longest document, and how many tokens it predicts."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    read = [documents.targets(objective, update * work.batch + number)[1] for number in range(work.batch)]
    inputs = [torch.from_numpy(targets.inputs) for targets in read]
    ids = pad_sequence(inputs, batch_first=True, padding_value=EOS)
    mask = pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True)
    labels = torch.full_like(ids, IGNORED)
    for row, targets in zip(labels, read, strict=True):
        # A causal model of transformers moves the labels itself.
        row[torch.from_numpy(targets.predict_at + objective.shift)] = torch.from_numpy(targets.labels)
    tensors = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in tensors.items()}, sum(len(targets.labels) for targets in read)


def peak_flops(work: TrainingJob) -> dict[str, Any]:
    """Return the FLOP/s of this machine: measured on a processor, from the makers' sheets for an accelerator; 0 if not known."""
    import torch

    from megaenc.backend import detect_backend

    return {"peak": detect_backend().peak_flops(torch.bfloat16 if work.bf16 else torch.float32)}


def turn(side: Callable[[TrainingJob], dict[str, Any]], work: TrainingJob) -> dict[str, Any]:
    """Call a function of this module in a process of its own, or in as many as share each layer, and return what it finds.

    RuntimeError with what it said last where it fails.
    """
    count = work.tensor_model_parallel_size
    threads = int(os.environ.get("OMP_NUM_THREADS", usable_core_count()))
    environment = python_environment() | {"OMP_NUM_THREADS": str(max(1, threads // count))}
    if count > 1:
        with socket.create_server(("localhost", 0)) as server:
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
        environment |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {} for rank in range(count)]
    try:
        with report.at_work(side, work, *(environment | rank for rank in ranks)) as workers:
            answers = multiprocessing.connection.wait([worker.connection for worker in workers])
            # All find the same; one that fails leaves the others waiting for it.
            return next(found for worker in workers if worker.connection in answers for found in worker.results())
    except Exception as error:  # of whichever library
        raise RuntimeError(f"{side.__name__}: {type(error).__name__}: {error}") from None
