"""Adapter two: megatron-core's optimizers where neither apex nor Transformer Engine is installed, on every device.

megatron-core then falls back to torch's AdamW, which counts a step for each parameter, where its checkpoints expect one a group,
as apex's FusedAdam has it. Its own stand-ins for apex's norm and scaling go from gradient to gradient, the norm waiting for the
device at each: those here take all of them at once.
"""

import torch
from torch.optim.adamw import adamw


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019) and apex FusedAdam's interface.

    State of a parameter: `exp_avg`, `exp_avg_sq`; of a group: `step`, the number of updates made.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True):
        if not adam_w_mode:
            raise ValueError("only decoupled weight decay (adam_w_mode=True) is provided")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        """One update from the gradients in `.grad`."""
        for group in self.param_groups:
            made = group.get("step", 0)
            group["step"] = made + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            adamw(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                # One number each, which the kernel counts up itself.
                list(torch.full((len(params),), float(made), device=params[0].device).unbind()),
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor, *_):
    """float32[1], as amp_C.multi_tensor_l2norm gives it: the norm of all tensors together, left on the device."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float32).reshape(1), None


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    """amp_C.multi_tensor_scale: the tensors of the second list become those of the first, which it may be, times `scale`."""
    source, target = tensor_lists
    if target is not source:
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, scale)


def install() -> None:
    """Put all this where megatron-core looks for apex's; where apex or Transformer Engine is there, change nothing."""
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    if clip_grads.l2_norm_impl is clip_grads.local_multi_tensor_l2_norm:  # on the host it is replaced already
        clip_grads.l2_norm_impl = multi_tensor_l2norm
    clip_grads.multi_tensor_scale_impl = multi_tensor_scale
