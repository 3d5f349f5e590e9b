"""AdamW with the schedule and clipping of Hugging Face's Trainer, on float32 master weights where a model is in bfloat16."""

import math

import torch
from torch import Tensor, nn
from transformers.optimization import get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import get_parameter_names

from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig

# The names that transformers.Trainer spares from weight decay, besides all of torch's LayerNorms.
_NO_DECAY_PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def check_warmup(steps: int, warmup: float) -> None:
    """Raise InputError if the only update is the first of a warm-up, whose rate is 0."""
    if steps == 1 and warmup:
        raise InputError(
            f"--warmup: found {warmup} and 1 update, whose rate is 0, "
            "expected more updates (a smaller --batch-size, more --epochs) or --warmup 0"
        )


class MasterWeightOptimizer:
    """Updates the parameters of `model` from the gradients of one or several backward passes.

    16-bit parameters have float32 masters, whose gradients add up in float32 (`precision` paper-bf16: neither; the optimizer's
    state is 16-bit too). A master starts as the parameter's `unrounded`, if it has that (see `megaenc.finetune.model.load`).
    """

    def __init__(self, model: nn.Module, *, learning_rate: float, steps: int, protocol: FinetuneConfig):
        self._clip = protocol.clip_grad
        self._masters: dict[nn.Parameter, Tensor] = {}
        """By parameter: its master, or itself."""
        self._hooks = []
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        decayed = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY_PATTERNS))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            unrounded, master = parameter.__dict__.pop("unrounded", None), parameter
            if parameter.dtype != torch.float32 and protocol.precision != "paper-bf16":
                master = parameter.detach().float() if unrounded is None else unrounded
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._add_to_master))
            self._masters[parameter] = master
            groups[name in decayed].append(master)
        self._adam = torch.optim.AdamW(
            [{"params": groups[True], "weight_decay": protocol.weight_decay}, {"params": groups[False], "weight_decay": 0.0}],
            lr=learning_rate,
            betas=(protocol.adam_beta1, protocol.adam_beta2),
            eps=protocol.adam_eps,
            fused=True,
        )
        self._schedule = get_linear_schedule_with_warmup(self._adam, math.ceil(protocol.warmup * steps), steps)

    def _add_to_master(self, parameter: nn.Parameter) -> None:
        """Add the 16-bit gradient of a backward pass to the master's."""
        master, new = self._masters[parameter], parameter.grad.float()
        master.grad = new if master.grad is None else master.grad.add_(new)
        parameter.grad = None

    def close(self) -> None:
        """Release the model, whose parameters else keep this and its state, several times their size, alive."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def step(self) -> float:
        """Clip and clear the gradients, update at this step's rate; return the norm before clipping.

        A norm that is nan or inf changes no weight, and the step does not count.
        """
        learned = [(parameter, master) for parameter, master in self._masters.items() if master.grad is not None]
        norm = nn.utils.get_total_norm([master.grad for _, master in learned])
        total = norm.item()
        if math.isfinite(total):
            if 0 < self._clip < total + 1e-6:  # else the factor is 1
                nn.utils.clip_grads_with_norm_([master for _, master in learned], self._clip, norm)
            self._adam.step()
            self._schedule.step()
            copied = [(parameter, master) for parameter, master in learned if master is not parameter]
            if copied:
                torch._foreach_copy_([parameter for parameter, _ in copied], [master for _, master in copied])
        self._adam.zero_grad()
        return total
