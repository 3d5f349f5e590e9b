"""AdamW with float32 master weights, and the schedule of Hugging Face's Trainer.

Clipping and weight decay are the Trainer's too.
"""

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.optimization import get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import get_parameter_names

from megaenc.errors import InputError

# Like transformers.Trainer, which also excludes all of torch's LayerNorms from weight decay.
_NO_DECAY_PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


class AdamWHyperparameters(Protocol):
    """Hyperparameters that MasterWeightOptimizer reads from a training's options.

    `warmup` is a fraction of the steps, `clip_grad` the maximum gradient norm (0: no clipping), and
    `precision` "fp32", "bf16" or "paper-bf16"; `weight_decay`, `adam_beta1`, `adam_beta2` and
    `adam_eps` are AdamW's. FinetuneConfig and ContrastiveConfig have these fields.
    """

    warmup: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    precision: str


def count_training_steps(epochs: float, max_steps: int, steps_per_epoch: int) -> int:
    """Return the number of steps of `epochs` epochs, at most `max_steps`.

    A fraction of a step is rounded up.

    Args:
        epochs: Number of epochs, which may have a fraction.
        max_steps: Maximum number of steps; 0: no maximum.
    """
    steps = math.ceil(epochs * steps_per_epoch)
    return min(max_steps or steps, steps)


def check_warmup(steps: int, warmup: float) -> None:
    """Check that a training of one step has no warmup.

    Args:
        steps: Number of steps of the training.
        warmup: Fraction of the steps that are warmup.

    Raises:
        InputError: `steps` is 1 and `warmup` is not 0: the only step would have learning rate 0.
    """
    if steps == 1 and warmup:
        raise InputError(
            f"--warmup: found {warmup} and 1 step, whose rate is 0, "
            "expected more steps (a smaller --batch-size, more --epochs) or --warmup 0"
        )


class MasterWeightOptimizer:
    """AdamW with warmup, linear decay, clipping and float32 master weights.

    Call `step` after one or more backward passes, whose gradients add up, and `close` at the end.
    16-bit parameters of `model` have float32 master weights, which take their gradients in the
    backward pass, except with precision "paper-bf16", whose optimizer state is 16-bit too. A master
    weight starts from the parameter's attribute `unrounded`, if it exists (see `load_backbone`),
    and the attribute is removed. Parameters without `requires_grad` are left out; biases and norms
    have no weight decay. The warmup is rounded up to whole steps.

    Args:
        learning_rate, steps: Peak learning rate, and number of steps after which it is 0.
        protocol: Warmup, weight decay, betas, epsilon, clipping and precision.
    """

    def __init__(
        self, model: nn.Module, *, learning_rate: float, steps: int, protocol: AdamWHyperparameters
    ):
        self._clip = protocol.clip_grad
        self._masters: dict[nn.Parameter, Tensor] = {}
        """The master weight of each parameter, or the parameter itself."""
        self._hooks = []
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        decayed = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY_PATTERNS))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            unrounded = parameter.__dict__.pop("unrounded", None)
            master = parameter
            if parameter.dtype != torch.float32 and protocol.precision != "paper-bf16":
                master = parameter.detach().float() if unrounded is None else unrounded
                self._hooks.append(
                    parameter.register_post_accumulate_grad_hook(self._add_to_master)
                )
            self._masters[parameter] = master
            groups[name in decayed].append(master)
        self._adam = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": protocol.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=(protocol.adam_beta1, protocol.adam_beta2),
            eps=protocol.adam_eps,
            fused=True,
        )
        self._schedule = get_linear_schedule_with_warmup(
            self._adam, math.ceil(protocol.warmup * steps), steps
        )

    def _add_to_master(self, parameter: nn.Parameter) -> None:
        """Move the 16-bit gradient of `parameter` into that of its float32 master weight."""
        master = self._masters[parameter]
        new = parameter.grad.float()
        master.grad = new if master.grad is None else master.grad.add_(new)
        parameter.grad = None

    def get_masters(self) -> dict[nn.Parameter, Tensor]:
        """Return the float32 master weight of each parameter that has one.

        Parameters without are left out. The tensors are the optimizer's own, not copies.
        """
        return {
            parameter: master
            for parameter, master in self._masters.items()
            if master is not parameter
        }

    def state_dict(self) -> dict[str, Any]:
        """Return weights, AdamW's moments and the schedule, for `load_state_dict`.

        The weights of 16-bit parameters are their master weights. Tensors are not copied, so save
        them before the next step.
        """
        weights = [master.detach() for master in self._masters.values()]
        return {
            "weights": weights,
            "adam": self._adam.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set weights, moments and schedule to those of a `state_dict`.

        Weights are copied in place; parameters that have a master weight become it, rounded.
        Moments of the parameter's dtype and device are not copied, so that later steps change them
        in `state`.

        Args:
            state: State of an optimizer of the same model and hyperparameters.
        """
        for (parameter, master), saved in zip(self._masters.items(), state["weights"], strict=True):
            master.copy_(saved)
            if parameter is not master:
                parameter.copy_(master)
        self._adam.load_state_dict(state["adam"])
        self._schedule.load_state_dict(state["schedule"])

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._schedule.get_last_lr()[0]

    def all_reduce_gradients(self) -> None:
        """Replace each gradient by its sum over all ranks.

        All ranks must call this after their backward passes and before `step`, in torch's default
        process group. A gradient that only other ranks have counts as 0 on this rank; one that no
        rank has stays None.
        """
        masters = list(self._masters.values())
        has_gradient = torch.tensor(
            [master.grad is not None for master in masters],
            dtype=torch.int32,
            device=masters[0].device,
        )
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
        pending = []
        for master, anywhere in zip(masters, has_gradient.tolist(), strict=True):
            if anywhere:
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
                pending.append(dist.all_reduce(master.grad, async_op=True))
        for work in pending:
            work.wait()

    def copy_weights(self) -> dict[nn.Parameter, Tensor]:
        """Return copies of all trained parameters' weights, on the CPU.

        A parameter with a float32 master weight has a copy of the master weight.
        """
        return {
            parameter: master.detach().to("cpu", copy=True)
            for parameter, master in self._masters.items()
        }

    def close(self) -> None:
        """Remove the gradient hooks, which keep the optimizer's state in memory.

        Take no step afterwards; weights can still be read.
        """
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def step(self) -> float:
        """Clip gradients, update weights and learning rate, and set gradients to None.

        If the gradient norm is NaN or inf, only the gradients are set to None, and nothing is
        raised. Parameters without a gradient do not change.

        Returns:
            The norm of this rank's gradients before clipping.
        """
        learned = [
            (parameter, master)
            for parameter, master in self._masters.items()
            if master.grad is not None
        ]
        norm = nn.utils.get_total_norm([master.grad for _, master in learned])
        total = norm.item()
        if math.isfinite(total):
            if 0 < self._clip < total + 1e-6:  # else the factor is 1
                nn.utils.clip_grads_with_norm_([master for _, master in learned], self._clip, norm)
            self._adam.step()
            self._schedule.step()
            copied = [
                (parameter, master) for parameter, master in learned if master is not parameter
            ]
            if copied:
                torch._foreach_copy_(
                    [parameter for parameter, _ in copied], [master for _, master in copied]
                )
        self._adam.zero_grad()
        return total
