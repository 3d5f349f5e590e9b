"""Patches of megatron-core's optimizers.

Most of them are for machines without apex and Transformer Engine. Without these megatron-core uses
torch's AdamW, which counts steps per parameter, although its checkpoints expect one count per
group, as in apex's FusedAdam. Its replacement of apex's norm synchronizes with the device for each
gradient; the one here processes all gradients at once.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW optimizer with one step count per parameter group, as apex's FusedAdam.

    Arguments are params, lr, betas, eps and weight_decay as in torch.optim.AdamW, but without
    weight decay by default; `adam_w_mode=False` raises ValueError. State of a parameter: `exp_avg`,
    `exp_avg_sq`, in its dtype; of a group: `step`, the number of optimizer steps. The caller may
    set, before a step, `grad_scale`, by which all gradients are divided, `frozen`, the indices of
    weights without a gradient that stay as they are, and `frozen_steps`, for each parameter the
    steps of its group in which it was frozen: bias correction leaves them out. See Loshchilov &
    Hutter 2019.
    """

    grad_scale: float = 1.0
    """Divisor of all gradients in the next step, which saves passes over them that divide and
    clip."""
    frozen: Collection[int] = ()
    """Weights of the rank's model chunks, by index, that the next step leaves as they are; none of
    them has a gradient."""
    frozen_steps: Mapping[torch.Tensor, int] = {}
    """Steps, of those that the groups count, in which a parameter was frozen; 0 for those left out.
    The bias correction leaves them out, as torch's, which counts the updates of each parameter."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True
    ):
        if not adam_w_mode:
            raise ValueError("only decoupled weight decay (adam_w_mode=True) is provided")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient by one AdamW step.

        Gradients are first divided in place by the attribute `grad_scale`, a float that is not
        reset (1.0 at first). The step is counted in each group; `closure` is ignored, and None is
        returned.
        """
        for group in self.param_groups:
            self.begin_step(group)
            self.update_adamw(group["params"], group, group["lr"])

    def begin_step(self, group: dict[str, Any]) -> None:
        """Count a step in `group`, and call `create_state` for parameters with a gradient.

        Parameters are not updated.

        Args:
            group: Element of `param_groups`.
        """
        group["step"] = group.get("step", 0) + 1
        for p in group["params"]:
            if p.grad is not None:
                self.create_state(p)

    def create_state(self, p: torch.Tensor) -> None:
        """Create missing state of a parameter: `exp_avg` and `exp_avg_sq`, both zeros.

        They have its dtype. The parameter needs no gradient.
        """
        if not self.state[p]:
            self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))

    def count_updates(self, p: torch.Tensor, group: dict[str, Any]) -> int:
        """Return the number of updates of a parameter, with that of the present step.

        It is the `step` of `group` less the parameter's `frozen_steps`, and at least 1.

        Args:
            group: Element of `param_groups` that has the parameter.
        """
        return max(1, group["step"] - self.frozen_steps.get(p, 0))

    def update_adamw(
        self, params: Sequence[torch.Tensor], group: dict[str, Any], lr: float | torch.Tensor
    ) -> None:
        """Update those of `params` that have a gradient by an AdamW step.

        Call `begin_step` of their group before, which creates the state. Gradients are divided in
        place by `grad_scale`, as in `step`.

        Args:
            params: Some parameters of `group`.
            group: Element of `param_groups`, which gives betas, eps, weight_decay and step.
            lr: Learning rate in place of the group's.
        """
        params = [p for p in params if p.grad is not None]
        if not params:
            return
        # One count per parameter, which the kernel increments.
        steps = torch.full((len(params),), float(group["step"] - 1), device=params[0].device)
        counts = list(steps.unbind())
        for p, count in zip(params, counts, strict=True):
            if p in self.frozen_steps:
                count.fill_(self.count_updates(p, group) - 1)
        adamw(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            counts,
            fused=True,
            grad_scale=None
            if self.grad_scale == 1
            else torch.full((), self.grad_scale, device=params[0].device),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=lr,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor, *_):
    """Return the L2 norm of all tensors together, in place of amp_C's function.

    Args:
        tensor_lists: Lists of tensors on one device; at least one tensor in all.
        chunk_size, noop_flag, per_tensor: Ignored.

    Returns:
        The norm, float32[1], and None.
    """
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float32).reshape(1), None


def install() -> None:
    """Make megatron-core checkpoint torch optimizers, and use our gradient norm.

    `prepare_megatron` calls it, which must be before an optimizer is built; further calls do
    nothing. Nothing changes if megatron-core has apex or Transformer Engine; a norm that is
    already replaced stays, as on a CPU, whose patches come first.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    # On a CPU it is replaced already.
    if clip_grads.l2_norm_impl is clip_grads.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = multi_tensor_l2norm


@contextlib.contextmanager
def replace_adam(optimizer_class: type[GroupStepAdamW]) -> Iterator[None]:
    """Make megatron-core build `optimizer_class` for "adam" inside the context.

    It does so with apex or Transformer Engine, too.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    before = optimizer.Adam, distrib_optimizer.Adam
    optimizer.Adam = distrib_optimizer.Adam = optimizer_class
    try:
        yield
    finally:
        optimizer.Adam, distrib_optimizer.Adam = before


@contextlib.contextmanager
def compare_groups_by_stage() -> Iterator[None]:
    """Make megatron-core compare parameter groups only between pipeline stages.

    For the construction of its optimizer: inside the context, any
    torch.distributed.all_gather_object, called without a group, gathers over the
    pipeline-parallel group instead of all ranks, since ranks of a stage have the same parameter
    groups.
    """
    from megatron.core import parallel_state

    all_gather_object = dist.all_gather_object

    def gather_from_stages(objects: list[Any], local_object: Any) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        objects[:] = [None] * group.size()
        all_gather_object(objects, local_object, group=group)

    dist.all_gather_object = gather_from_stages
    try:
        yield
    finally:
        dist.all_gather_object = all_gather_object
