"""AdamW, its rate and clipping, as Hugging Face's Trainer has them, on float32 master weights where a model is in bfloat16."""

import math
import re

import torch
from torch import Tensor, nn

from megaenc.errors import InputError
from megaenc.finetune.options import Protocol

# The names that transformers.Trainer spares from weight decay, besides all of torch's LayerNorms.
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """The rate of update `step` (the first is 0) of `steps`: from 0 up to `peak` over ceil(warmup * steps) updates, then to 0.

    As transformers.get_linear_schedule_with_warmup: the first update of a warm-up has rate 0.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return peak * (step / rising)
    return peak * max(0.0, (steps - step) / max(1, steps - rising))


def check_schedule(steps: int, warmup: float) -> None:
    """InputError where the rate of every update is 0, so that nothing would be trained."""
    if not any(learning_rate(step, steps, 1.0, warmup) for step in range(steps)):
        raise InputError(
            f"--warmup: found {warmup} and {steps} {'update' if steps == 1 else 'updates'}, whose rate is 0, "
            "expected more updates (a smaller --batch-size, more --epochs) or --warmup 0"
        )


class Optimizer:
    """Updates the parameters of `model` from the gradients that `backward` left; several calls of it before a step add up.

    16-bit parameters have float32 masters, which are what is updated, and their gradients add up in float32 (`precision`
    paper-bf16: neither; the optimizer's state is 16-bit too). A master starts as the parameter's `unrounded`, where the model was
    loaded from more exact weights (see `megaenc.finetune.backbone`).
    """

    def __init__(self, model: nn.Module, *, learning_rate: float, steps: int, protocol: Protocol):
        self._peak, self._steps, self._protocol = learning_rate, steps, protocol
        self._done = 0
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._masters = [self._master(parameter) for parameter in self._parameters]
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._add)
            for parameter, master in zip(self._parameters, self._masters, strict=True)
            if master is not parameter
        ]
        spared = _spared(model)
        decayed, plain = (
            [m for (n, _), m in zip(named, self._masters, strict=True) if (n in spared) == no] for no in (False, True)
        )
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": protocol.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            betas=(protocol.adam_beta1, protocol.adam_beta2),
            eps=protocol.adam_eps,
            fused=True,
        )

    def _master(self, parameter: nn.Parameter) -> Tensor:
        """What is updated in place of `parameter`, or itself."""
        unrounded = parameter.__dict__.pop("unrounded", None)
        if parameter.dtype == torch.float32 or self._protocol.precision == "paper-bf16":
            return parameter
        return parameter.detach().float() if unrounded is None else unrounded

    def _add(self, parameter: nn.Parameter) -> None:
        """Take the 16-bit gradient of one backward pass; only a second one has to be added, and that in float32."""
        held, new = self._sums.get(parameter), parameter.grad
        parameter.grad = None
        if held is None:
            self._sums[parameter] = new
        elif held.dtype == torch.float32:
            held.add_(new)
        else:
            self._sums[parameter] = held.float().add_(new)

    def close(self) -> None:
        """Let go of the model, whose parameters else hold this and its state, several times their size, as long as they live."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def step(self) -> float:
        """Clip the gradients, update with the rate of this step, clear the gradients; the norm before clipping.

        A norm that is nan or inf changes no weight, and the step does not count.
        """
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                held = self._sums.pop(parameter, None)
                master.grad = None if held is None else held.float()
        grads = [master.grad for master in self._masters if master.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        total = norm.item()
        if math.isfinite(total):
            if 0 < self._protocol.clip_grad < total + 1e-6:  # else the factor is 1
                torch.nn.utils.clip_grads_with_norm_(
                    [m for m in self._masters if m.grad is not None], self._protocol.clip_grad, norm
                )
            for group in self._adam.param_groups:
                group["lr"] = learning_rate(self._done, self._steps, self._peak, self._protocol.warmup)
            self._adam.step()
            copied = [(p, m) for p, m in zip(self._parameters, self._masters, strict=True) if m is not p and m.grad is not None]
            if copied:
                torch._foreach_copy_([p for p, _ in copied], [m for _, m in copied])
            self._done += 1
        for master in self._masters:
            master.grad = None
        return total


def _spared(model: nn.Module) -> set[str]:
    """Names of the parameters without weight decay, by transformers.Trainer's rule: norms and biases."""
    norms = tuple(name + "." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    names = (name for name, _ in model.named_parameters())
    return {name for name in names if _NOT_DECAYED.search(name.lower()) or (norms and name.startswith(norms))}
