"""One turn of a training benchmark in a process of its own: `python -m megaenc.bench.turns SIDE WORK.json RESULT.json`.

SIDE is `weights` (write the weights that all sides begin with), `megaenc`, or `transformers` with the attention and the order of
the documents in the work.
"""

import contextlib
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc.bench.documents import EOS, MASK, Documents
from megaenc.console import quiet
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention
from megaenc.processes import highest_resident

LEARNING_RATE, DECAY, BETAS, EPSILON, CLIP = 1e-4, 0.1, (0.9, 0.95), 1e-5, 1.0
IGNORED = -100  # what transformers' losses leave out


@dataclass(frozen=True)
class Work:
    """What is trained on what; the same for all sides but for the last three fields."""

    model: dict[str, Any]
    """fields of a ModelConfig"""
    vocab_size: int
    objective: str
    """as a schedule spells it: clm or mlm(...)"""
    documents: int
    shortest: int
    longest: int
    batch: int
    """documents of an update; `documents` is a multiple of it"""
    passes: int
    """times that all documents are read while the clock runs"""
    bf16: bool
    weights: str
    """safetensors of the weights that all begin with, under transformers' names"""
    layout: tuple[str, ...] = ()
    """flags of the layout, for megaenc"""
    by_length: bool = False
    """documents in batches of like lengths, for transformers"""
    kernel: str = "sdpa"
    """transformers' attention"""

    @property
    def shape(self) -> ModelConfig:
        """Of the model."""
        return ModelConfig(**self.model)

    def read(self) -> Documents:
        """The documents, in the order of this side."""
        found = Documents(self.documents, self.shortest, self.longest, self.vocab_size, seed=0)
        return dataclasses.replace(found, order=found.by_length()) if self.by_length else found

    @property
    def updates(self) -> int:
        """While the clock runs."""
        return self.passes * self.documents // self.batch


@contextlib.contextmanager
def clock(found: dict[str, Any], wait: Callable[[], None]) -> Iterator[None]:
    """Put into `found` the seconds that pass inside, those of processors in this process, and its most memory so far in bytes."""
    wait()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    yield
    wait()
    found["seconds"] = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    found["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found["peak_memory"] = _peak_memory()


def _peak_memory() -> float:
    """Of the accelerator, if there is one, else of the process."""
    import torch

    return float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else highest_resident()


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_weights(work: Work) -> dict[str, Any]:
    """The weights that megaenc begins with, under transformers' names."""
    import torch

    from megaenc import backend
    from megaenc.backend import Layout, prepare_megatron

    prepare_megatron()
    backend.start(Layout(), 0)
    from megaenc.model.encoder import build_encoder

    encoder = build_encoder(work.shape, work.vocab_size, work.longest, Layout(), torch.float32, seed=0)
    save_for_peer(dict(encoder.named_parameters()), work)
    backend.stop()
    return {}


def save_for_peer(parameters: dict[str, Any], work: Work) -> None:
    """An encoder's `parameters`, of one process, in the file of `work` under transformers' names."""
    from safetensors.torch import save_file

    from megaenc.convert.mapping import VOCABULARY_ROWS, lines

    found = {}
    for rule, core, names in lines(work.shape):
        tensor = parameters[core].detach().cpu()
        tensor = tensor[: work.vocab_size] if core in VOCABULARY_ROWS else tensor
        found.update(zip(names, rule.to_hf(tensor, work.shape), strict=True))
    save_file({name: tensor.clone().contiguous() for name, tensor in found.items()}, work.weights)


def train_with_megaenc(work: Work) -> dict[str, Any]:
    """The run's own engine on the documents, each batch a row of them end to end."""
    import torch
    import torch.distributed as dist

    from megaenc import backend
    from megaenc.backend import prepare_megatron
    from megaenc.data.run_data import RunData
    from megaenc.objectives import Schedule
    from megaenc.training.learning_rate import LearningRate
    from megaenc.training.plan import Plan
    from megaenc.training.settings import read_settings

    documents, updates = work.read(), work.updates + 1
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in _numbers(work.model)]
    flags += [f"--{'' if value else 'no-'}{name.replace('_', '-')}" for name, value in _switches(work.model)]
    flags += ["--seq-length", str(work.longest), "--micro-batch-size", str(work.batch), "--global-batch-size", str(work.batch)]
    flags += ["--train-iters", str(updates), "--lr", str(LEARNING_RATE), "--weight-decay", str(DECAY), "--seed", "0"]
    flags += ["--adam-beta1", str(BETAS[0]), "--adam-beta2", str(BETAS[1]), "--adam-eps", str(EPSILON), "--clip-grad", str(CLIP)]
    flags += ["--bf16" if work.bf16 else "--no-bf16", "--objective-schedule", work.objective, *work.layout]
    settings = read_settings(flags, "megaenc bench pretrain")
    prepare_megatron()
    device = backend.start(settings.layout, settings.seed)
    from megaenc.training.engine import Engine

    vocabulary = documents.vocabulary()
    schedule = Schedule.build(work.objective, updates, vocabulary)
    data = RunData((), (), (), documents, None)
    engine = Engine(Plan(settings, vocabulary, None, data, schedule, LearningRate(LEARNING_RATE, 0, 0, updates)), device)
    result = engine.evaluate(documents, work.documents // work.batch, schedule.objective(1))
    found = {"loss": result.loss_sum / result.predicted, "predicted": result.predicted}
    engine.update(1)  # what is made once is made here
    with clock(found, _wait):
        for step in range(2, updates + 1):
            engine.update(step)
    totals = torch.tensor([found["cpu_seconds"], found["peak_memory"]], dtype=torch.float64, device=device.device)
    dist.all_reduce(totals)
    found["cpu_seconds"], found["peak_memory"] = totals.tolist()
    backend.stop()
    return found


def _numbers(model: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in model.items() if value is not None and not isinstance(value, bool))


def _switches(model: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    return ((name, value) for name, value in model.items() if isinstance(value, bool))


def train_with_transformers(work: Work) -> dict[str, Any]:
    """A plain loop: a padded batch, bfloat16 by autocast, the model's own loss, torch's fused AdamW."""
    import torch

    model, documents = peer(work), work.read()
    device = next(model.parameters()).device
    objective = documents.objective(work.objective)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True)

    def loss_of(update: int) -> tuple[torch.Tensor, int]:
        inputs, predicted = padded(work, documents, objective, update, device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=work.bf16):
            return model(**inputs).loss, predicted

    def train(update: int) -> None:
        loss, _ = loss_of(update)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    with torch.no_grad():
        losses = [(float(loss) * predicted, predicted) for loss, predicted in map(loss_of, range(work.documents // work.batch))]
    total, predicted = (sum(column) for column in zip(*losses, strict=True))
    found = {"loss": total / predicted, "predicted": predicted}
    train(0)
    with clock(found, _wait):
        for update in range(1, work.updates + 1):
            train(update)
    return found


def peer(work: Work) -> Any:
    """transformers' model with the weights that all begin with: EuroBERT to look both ways, else Llama."""
    import torch
    from safetensors.torch import load_file
    from transformers import EuroBertForMaskedLM, LlamaForCausalLM

    from megaenc.convert.families import FAMILIES, config_of

    attention = work.read().objective(work.objective).attention
    both = attention == Attention.BIDIRECTIONAL
    config = config_of(
        FAMILIES["eurobert" if both else "llama"],
        attention,
        work.shape,
        vocab_size=work.vocab_size,
        context=work.longest,
        tokenizer=_Ids(),
        dtype=torch.float32,
    )
    config._attn_implementation = work.kernel
    model = (EuroBertForMaskedLM if both else LlamaForCausalLM)(config)
    missing, unexpected = model.load_state_dict(load_file(work.weights), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights of the peer: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.train().to("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class _Ids:
    """What a config wants to know of a tokenizer."""

    mask_token_id: int = MASK
    pad_token_id: int | None = None
    eos_token_id: int = EOS
    bos_token_id: int | None = None


def padded(work: Work, documents: Documents, objective: Any, update: int, device: Any) -> tuple[dict[str, Any], int]:
    """A batch for transformers, padded to its longest document, and how many tokens it predicts."""
    import torch

    read = [documents.targets(objective, update * work.batch + number) for number in range(work.batch)]
    longest = max(len(pack.tokens) for pack, _ in read)
    ids = torch.full((work.batch, longest), EOS)
    labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for row, (pack, targets) in enumerate(read):
        ids[row, : len(pack.tokens)] = torch.from_numpy(targets.inputs)
        mask[row, : len(pack.tokens)] = 1
        # A causal model of transformers moves the labels itself.
        labels[row, torch.from_numpy(targets.predict_at + objective.shift)] = torch.from_numpy(targets.labels)
    tensors = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in tensors.items()}, sum(len(targets.labels) for _, targets in read)


SIDES = {"weights": write_weights, "megaenc": train_with_megaenc, "transformers": train_with_transformers}


def main(side: str, work: str, result: str) -> None:
    from megaenc.launcher import die_with_launcher
    from megaenc.ranks import rank

    die_with_launcher()
    quiet()
    fields = json.loads(Path(work).read_text())
    found = SIDES[side](Work(**fields | {"layout": tuple(fields["layout"])}))
    if rank() == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
