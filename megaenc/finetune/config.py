"""The protocol of fine-tuning; each choice is a flag."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from megaenc.errors import InputError

LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)


@dataclass(frozen=True)
class FinetuneConfig:
    """How models are fine-tuned and read. The defaults are the study's."""

    batch_size: int = 32
    """examples of one update; in retrieval the other documents of the batch are the negatives"""
    max_steps: int = 1000
    """updates at most"""
    epochs: float = 1.0
    """passes over the training data at most; the shorter of the two counts"""
    warmup: float = 0.1
    """share of the updates in which the rate rises from 0; it falls to 0 over the rest"""
    weight_decay: float = 0.1
    """of matrices and embeddings, not of norms and biases"""
    adam_beta1: float = 0.9
    """AdamW's decay of the mean"""
    adam_beta2: float = 0.95
    """AdamW's decay of the square"""
    adam_eps: float = 1e-5
    """AdamW's epsilon"""
    clip_grad: float = 1.0
    """largest norm of the gradient; 0 does not clip"""
    max_length: int = 0
    """tokens of a text at most; 0: 99 in 100 of the model's context, 2,028 for the study's"""
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    """how models read, whatever they were pretrained with"""
    precision: Literal["", "bf16", "paper-bf16", "fp32"] = ""
    """bf16: computes in bfloat16, keeps and updates weights in float32; paper-bf16: weights and optimizer in bfloat16;
    unless given bf16 where the machine has it, else fp32"""
    add_bos: bool = False
    """begin each text with the tokenizer's BOS token"""
    add_eos: bool = True
    """end each text with the tokenizer's EOS token"""
    scale: float = 20.0
    """what cosines are multiplied with in retrieval's loss, 1 over the temperature"""
    tokens_per_forward: int = 16384
    """tokens that the model reads at once; less takes less memory"""
    deterministic: bool = True
    """accelerators compute the same bits in every run, some operations more slowly; processors do in any case"""
    threads: int = 1
    """threads of a run on processors; the last bits of a result depend on it"""

    def check(self) -> None:
        """Raise InputError for a value that no run can have."""
        for name, value in vars(self).items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{flag}: found {value}, expected a finite number")
            if name in ("epochs", "scale", "adam_eps") and value <= 0:
                raise InputError(f"{flag}: found {value}, expected more than 0")
            if name in ("warmup", "adam_beta1", "adam_beta2") and not 0 <= value < 1:
                raise InputError(f"{flag}: found {value}, expected at least 0 and less than 1")
        check_minimums(
            self, batch_size=1, max_steps=1, tokens_per_forward=1, threads=1, weight_decay=0, clip_grad=0, max_length=0
        )


def check_minimums(settings: Any, **least: int) -> None:
    """Raise InputError for a flag of `settings` that is less than its lower bound in `least`, or NaN."""
    for name, bound in least.items():
        if not (value := getattr(settings, name)) >= bound:
            raise InputError(f"--{name.replace('_', '-')}: found {value}, expected at least {bound}")


def format_learning_rate(rate: float) -> str:
    """Return a learning rate as result folders have it: 2e-05, 5e-04, 1.5e-05; no two rates share a name."""
    return next(name for digits in range(17) if float(name := f"{rate:.{digits}e}") == rate)
