"""Optimizers of a run under megatron-core: AdamW, StableAdamW and Muon.

Their weights may be split over ranks.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from megaenc.backend.optimizer_patches import GroupStepAdamW, compare_groups_by_stage, replace_adam
from megaenc.training.config import PretrainConfig

# Quintic of Jordan et al. 2024: maps singular values of (0, 1] to about 0.7 to 1.2.
_NEWTON_SCHULZ = (
    3.4445,
    -4.7750,
    2.0315,
)
_VOCABULARY_WEIGHTS = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")
_MUON_RMS = 0.2  # root mean square of an update, as that of AdamW (Liu et al. 2025)


@dataclass(frozen=True)
class WeightShard:
    """Part of a weight that this rank updates; `list_shards` builds it.

    It is a range of the rank's tensor-parallel shard, whose shape is `shape`, or that whole shard.
    `param` is the optimizer's float32 parameter, flat if it is a range from element `start` on;
    None if this rank updates no element. `elements` counts those of the whole weight, without rows
    that pad the vocabulary. `split_dim` is the dimension divided over tensor-parallel ranks, or -1;
    `group` is the index of the parameter group. The shard consists of equal blocks of rows: `parts`
    has the number of rows in a block of each matrix that Muon orthogonalizes, and is empty for
    AdamW.
    """

    shape: torch.Size
    """Shape of the tensor-parallel shard."""
    param: torch.Tensor | None
    """Float32 parameter of the optimizer, flat if it is a range; None if this rank updates no
    element."""
    elements: int
    """Elements of the whole weight, without rows that only pad the vocabulary."""
    start: int = 0
    """First element of the range."""
    split_dim: int = -1
    """Dimension that is divided over the tensor-parallel ranks; -1: each of them holds the whole
    weight."""
    group: int = 0
    """Index of the optimizer's parameter group, which has a weight decay of its own."""
    parts: tuple[int, ...] = ()
    """Rows, in each of equal blocks of rows, of the matrices that Muon orthogonalizes separately;
    (): left to AdamW."""


class _ShardAwareOptimizer(GroupStepAdamW):
    """Base of optimizers whose update of an element depends on the whole weight.

    Other ranks may hold shards of the weight. `shards` lists the weights of the pipeline stage in
    the same order on all its ranks; `frozen` are indices of it. The process groups are those over
    which ranges and tensor-parallel shards are divided; None for a group of one rank.
    """

    shards: Sequence[WeightShard] = ()
    range_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    device = torch.device("cpu")

    def begin_steps(self) -> None:
        """Count a step in each group, and divide the gradients by `grad_scale`.

        Missing state of parameters with a gradient is created as zeros. Gradients are divided in
        place, as not only AdamW reads them, and `grad_scale` is 1 afterwards.
        """
        for group in self.param_groups:
            self.begin_step(group)
            grads = [p.grad for p in group["params"] if p.grad is not None]
            if grads and self.grad_scale != 1:
                torch._foreach_div_(grads, self.grad_scale)
        self.grad_scale = 1.0

    def _split_group(self, shard: WeightShard) -> dist.ProcessGroup | None:
        """Return the process group over which a weight's rows or columns are divided.

        None if they are not divided.
        """
        return self.tensor_group if shard.split_dim >= 0 else None


class StableAdamW(_ShardAwareOptimizer):
    """AdamW with Adafactor's update clipping (Wortsman et al. 2023, algorithm 2).

    The learning rate, also in the weight decay, is divided, for each weight, by the root mean
    square of gradient / sqrt(second moment) if that is above 1. The state is that of AdamW.
    `build_optimizer` makes it and sets its `shards` and process groups. See arXiv 2304.13013.
    """

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters by one StableAdamW step.

        All ranks call this together, with all gradients but those of weights whose index in
        `shards` is in `frozen`; these are not updated. Gradients are divided in place by
        `grad_scale`, which is 1 again afterwards; `closure` is ignored, and nothing returned.
        """
        self.begin_steps()
        group = self.param_groups[0]
        rates = (group["lr"] / self._root_mean_squares(group).clamp(min=1.0)).unbind()
        for shard, rate in zip(self.shards, rates, strict=True):
            if shard.param is not None:
                self.update_adamw([shard.param], self.param_groups[shard.group], rate)

    def _root_mean_squares(self, group: dict) -> torch.Tensor:
        """Return the root mean square of gradient / sqrt(second moment) of each weight.

        Args:
            group: Any parameter group, as all have the same decay rates and steps.

        Returns:
            float32 [weights], equal on all ranks.
        """
        beta2 = group["betas"][1]
        eps = group["eps"]
        is_first = self.tensor_group is None or self.tensor_group.rank() == 0
        sums = []
        for index, shard in enumerate(self.shards):
            counts_here = is_first or self._split_group(shard)
            if shard.param is None or index in self.frozen or not counts_here:
                sums.append(torch.zeros((), device=self.device))
                continue
            squared = shard.param.grad.square()
            second = torch.lerp(self.state[shard.param]["exp_avg_sq"], squared, 1 - beta2).div_(
                1 - beta2 ** self.count_updates(shard.param, group)
            )
            sums.append(squared.div_(second.clamp_(min=eps * eps)).sum())
        total = torch.stack(sums)
        for process_group in (self.range_group, self.tensor_group):
            if process_group is not None:
                dist.all_reduce(total, group=process_group)
        return (total / self._element_counts).sqrt()

    @functools.cached_property
    def _element_counts(self) -> torch.Tensor:
        """Return the number of elements of each whole weight, float32 [weights].

        It is kept on the device.
        """
        return torch.tensor(
            [shard.elements for shard in self.shards], dtype=torch.float32, device=self.device
        )


class Muon(_ShardAwareOptimizer):
    """Muon for the matrices of the layers, and AdamW for all other weights.

    AdamW updates embedding, output layer, norms and biases. Muon is that of Jordan et al. 2024
    (https://kellerjordan.github.io/posts/muon), with the weight decay and the size of updates of
    Liu et al. 2025 (arXiv 2502.16982): W -= lr * (0.2 sqrt(max(rows, columns)) *
    orthogonalize(Nesterov momentum) + weight_decay * W), so that learning rate and weight decay of
    AdamW apply. Projections of query, key, value, gate and up are separate matrices, each whole
    over all tensor-parallel ranks. Each data-parallel rank orthogonalizes some of the matrices.
    `build_optimizer` makes it. In the state of a matrix `exp_avg` is the momentum; `exp_avg_sq`,
    which stays zero, is only kept because megatron-core's checkpoints hold both for all weights.
    """

    momentum: float = 0.95
    newton_schulz_steps: int = 5
    dtype: torch.dtype = torch.float32
    """Data type of the orthogonalization."""
    replica_group: dist.ProcessGroup | None = None
    """Data-parallel ranks, which share the work; None for one."""

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters by one step of Muon or AdamW.

        All ranks call this together, with all gradients but those of weights whose index in
        `shards` is in `frozen`; these are not updated. Gradients are divided in place by
        `grad_scale`, which is 1 again afterwards; `closure` is ignored, and nothing returned.
        """
        self.begin_steps()
        for index, group in enumerate(self.param_groups):
            vectors = [
                s.param
                for s in self.shards
                if s.param is not None and s.group == index and not s.parts
            ]
            self.update_adamw(vectors, group, group["lr"])
        replicas = self.replica_group.size() if self.replica_group else 1
        rank = self.replica_group.rank() if self.replica_group else 0
        matrices = self._order_matrices(replicas)
        for first in range(0, len(matrices), replicas):
            indices = matrices[first : first + replicas]
            batch = [self.shards[index] for index in indices]
            momenta = [self._update_momentum(shard) for shard in batch]
            exchange = (
                _RangeExchange(self._ranges, indices, self.range_group)
                if self.range_group
                else None
            )
            local_matrix = (
                exchange.to_owner(momenta, self.dtype, self.device)
                if exchange
                else momenta[min(rank, len(batch) - 1)]
            )
            if rank < len(batch):
                local_matrix = self._orthogonalize(
                    batch[rank], local_matrix.view(batch[rank].shape)
                )
            updates = (
                exchange.from_owner(local_matrix)
                if exchange
                else self._broadcast_updates(batch, local_matrix)
            )
            for shard, update in zip(batch, updates, strict=True):
                if shard.param is not None:
                    group = self.param_groups[shard.group]
                    shard.param.mul_(1 - group["lr"] * group["weight_decay"])
                    shard.param.add_(update.view_as(shard.param), alpha=-group["lr"])

    def _order_matrices(self, replicas: int) -> list[int]:
        """Return the indices of the matrices among the weights, in order of the rounds.

        They are in order of size, so that ranks have about equal work in a round of `replicas`, and
        those of a size far apart in the model, so that not all of a round are in the range of one
        rank. Frozen ones are left out.
        """
        by_size: dict[int, list[int]] = {}
        for index, shard in enumerate(self.shards):
            if shard.parts and index not in self.frozen:
                by_size.setdefault(shard.shape.numel(), []).append(index)
        order = []
        for size in sorted(by_size, reverse=True):
            rounds = -(-len(by_size[size]) // replicas)
            order += [index for first in range(rounds) for index in by_size[size][first::rounds]]
        return order

    def _update_momentum(self, shard: WeightShard) -> torch.Tensor | None:
        """Update the momentum of this rank's part of `shard`.

        Returns:
            The Nesterov momentum of the part; None without a part.
        """
        if shard.param is None:
            return None
        momentum = self.state[shard.param]["exp_avg"]
        grad = shard.param.grad
        momentum.lerp_(grad, 1 - self.momentum)
        return grad.lerp(momentum, self.momentum).to(self.dtype)

    def _broadcast_updates(
        self, batch: Sequence[WeightShard], local_update: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the updates of all matrices of `batch`.

        Args:
            local_update: Update that this rank has computed, of matrix i on rank i of the replicas.
        """
        if self.replica_group is None:
            return [local_update]
        updates = []
        for owner, shard in enumerate(batch):
            is_owner = self.replica_group.rank() == owner
            updates.append(
                local_update
                if is_owner
                else torch.empty(shard.shape, dtype=self.dtype, device=self.device)
            )
            dist.broadcast(
                updates[-1], dist.get_global_rank(self.replica_group, owner), self.replica_group
            )
        return updates

    @functools.cached_property
    def _ranges(self) -> list[list[int]]:
        """Return the number of elements of each weight that each rank updates.

        Returns:
            Numbers [ranks of `range_group`][weights].
        """
        local_sizes = [0 if shard.param is None else shard.param.numel() for shard in self.shards]
        sizes: list = [None] * self.range_group.size()
        dist.all_gather_object(sizes, local_sizes, group=self.range_group)
        return sizes

    def _orthogonalize(self, shard: WeightShard, update: torch.Tensor) -> torch.Tensor:
        """Return `update` with its matrices orthogonalized.

        They are parts of the matrices of all tensor-parallel ranks, and are scaled to the root mean
        square of AdamW's updates.

        Args:
            update: Tensor [shard.shape].
        """
        split_group = self._split_group(shard)
        columns = shard.shape[1]
        blocks = update.view(-1, sum(shard.parts), columns)
        results = []
        for part in blocks.split(shard.parts, dim=1):
            matrix = part.reshape(-1, columns)
            if split_group:
                pieces = [torch.empty_like(matrix) for _ in range(split_group.size())]
                dist.all_gather(pieces, matrix, group=split_group)
                full_matrix = orthogonalize(
                    torch.cat(pieces, shard.split_dim), self.newton_schulz_steps
                )
                matrix = full_matrix.chunk(split_group.size(), shard.split_dim)[split_group.rank()]
            else:
                matrix = full_matrix = orthogonalize(matrix, self.newton_schulz_steps)
            results.append(
                (matrix * (_MUON_RMS * max(full_matrix.shape) ** 0.5)).reshape(part.shape)
            )
        return torch.cat(results, dim=1).reshape(shard.shape).contiguous()


class _RangeExchange:
    """Exchange of a round of matrices between ranks that update and own them.

    A rank updates a range of each matrix, and owns at most one whole matrix. Ranges follow each
    other by rank, as megatron-core divides its buffers. Each element is sent to one rank only,
    unlike in a reduction and a broadcast.

    Args:
        ranges: Number of elements by rank and weight.
        indices: Matrices of the round, as indices of weights; rank i owns `indices[i]`.
    """

    def __init__(
        self, ranges: Sequence[Sequence[int]], indices: Sequence[int], group: dist.ProcessGroup
    ):
        rank = group.rank()
        idle = group.size() - len(indices)
        self._group = group
        self._updated = [ranges[rank][index] for index in indices] + [0] * idle  # by owner
        # Elements of the owned matrix by the rank that updates them.
        self._owned = [sizes[indices[rank]] if rank < len(indices) else 0 for sizes in ranges]
        self._count = len(indices)

    def to_owner(
        self, parts: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the matrix that this rank owns, flat; empty if it owns none.

        All ranks of the group call this together.

        Args:
            parts: This rank's part of each matrix of the round, of any shape; None if it has none.
            dtype: Data type of the parts and of the result.
        """
        sent = [torch.empty(0, dtype=dtype, device=device)] + [
            part.flatten() for part in parts if part is not None
        ]
        local_matrix = torch.empty(sum(self._owned), dtype=dtype, device=device)
        dist.all_to_all_single(
            local_matrix, torch.cat(sent), self._owned, self._updated, group=self._group
        )
        return local_matrix

    def from_owner(self, local_matrix: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's part of each matrix of the round, flat.

        All ranks of the group call this together. A part is an empty tensor if this rank has none.

        Args:
            local_matrix: Matrix that this rank owns, of any shape; an empty tensor if it owns none.
        """
        parts = local_matrix.new_empty(sum(self._updated))
        dist.all_to_all_single(
            parts, local_matrix.flatten(), self._updated, self._owned, group=self._group
        )
        return list(parts.split(self._updated))[: self._count]


def orthogonalize(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Return about U V^T of the singular value decomposition U S V^T of `matrix`.

    Its singular values are about 0.7 to 1.2; those near zero in `matrix` become less, and zero ones
    stay zero, as does a zero matrix.

    Args:
        matrix: Matrix [rows, columns] of any floating data type, which is that of the iterations
            and the result.
        steps: Number of Newton-Schulz iterations, such as 5.
    """
    a, b, c = _NEWTON_SCHULZ
    x = (matrix.float() / matrix.float().norm().clamp(min=1e-30)).to(matrix.dtype)
    x = x.mT if x.size(0) > x.size(1) else x  # products of the smaller side
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.size(0) > matrix.size(1) else x


_CLASSES = {"adamw": GroupStepAdamW, "stable_adamw": StableAdamW, "muon": Muon}


def build_optimizer(
    settings: PretrainConfig, dtype: torch.dtype, chunks: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Return megatron-core's optimizer of this rank's model chunks.

    It is a ChainedOptimizer of one element, built around AdamW, StableAdamW or Muon by --optimizer.
    All ranks call this together.

    Args:
        settings: Flags of the run, of which optimizer, learning rate and layout count.
        dtype: Data type in which the chunks compute.
        chunks: This rank's model chunks, one unless pipeline stages are interleaved.
    """
    flags = settings.optimizer
    layout = settings.layout
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate.lr,
        weight_decay=flags.weight_decay,
        adam_beta1=flags.adam_beta1,
        adam_beta2=flags.adam_beta2,
        adam_eps=flags.adam_eps,
        # Read by the training engine, which folds clipping into `grad_scale`.
        clip_grad=flags.clip_grad or float("inf"),
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_param_gather=layout.overlap_param_gather,
        bf16=settings.bf16,
        params_dtype=dtype,
    )
    # Without overrides the weight decay applies to all parameters.
    overrides = get_standard_config_overrides(config) if flags.no_weight_decay_norm_bias else {}
    with replace_adam(_CLASSES[flags.optimizer]), compare_groups_by_stage():
        result = get_megatron_optimizer(
            config, chunks, config_overrides=overrides, use_gloo_process_groups=False
        )
    [part] = result.chained_optimizers
    optimizer = part.optimizer
    if not isinstance(optimizer, _ShardAwareOptimizer):
        return result
    optimizer.shards = list_shards(chunks, part)
    optimizer.device = next(chunks[0].parameters()).device
    replicas = parallel_state.get_data_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    optimizer.range_group = (
        replicas if layout.use_distributed_optimizer and replicas.size() > 1 else None
    )
    optimizer.tensor_group = tensor if tensor.size() > 1 else None
    if isinstance(optimizer, Muon):
        optimizer.replica_group = replicas if replicas.size() > 1 else None
        optimizer.momentum = flags.muon_momentum
        optimizer.newton_schulz_steps = flags.muon_num_ns_steps
        optimizer.dtype = dtype
    return result


def list_shards(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> list[WeightShard]:
    """Return a WeightShard for each weight of `chunks`, in the order of parameters.

    Nothing is communicated.

    Args:
        chunks: This rank's model chunks.
        optimizer: Only element of `chained_optimizers` of `build_optimizer`'s result, which updates
            the chunks.
    """
    groups = optimizer.optimizer.param_groups
    group_of = {id(param): index for index, group in enumerate(groups) for param in group["params"]}
    shards = []
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            param = getattr(weight, "main_param", weight)
            start = 0
            if isinstance(optimizer, DistributedOptimizer):
                param = None
                if weight in optimizer.model_param_group_index_map:
                    group, param_index = optimizer.model_param_group_index_map[weight]
                    param = groups[group]["params"][param_index]
                    start = optimizer._get_model_param_range_map(weight)["param"].start
            group = group_of.get(id(param), 0)
            split_dim = getattr(weight, "partition_dim", -1)
            elements = weight.numel() * (tensor_parallel if split_dim >= 0 else 1)
            if name.endswith(_VOCABULARY_WEIGHTS):
                elements = get_attr_wrapped_model(chunk, "vocab_size") * weight[0].numel()
            parts = _matrix_parts(name, weight, chunk.config)
            shards.append(
                WeightShard(weight.shape, param, elements, start, split_dim, group, parts)
            )
    return shards


def _matrix_parts(
    name: str, weight: torch.nn.Parameter, config: TransformerConfig
) -> tuple[int, ...]:
    """Return the rows of each matrix in a block of rows of `weight`.

    They are (Q, K, V), (gate, up) or all; () if it is no matrix.
    """
    if weight.dim() != 2 or getattr(weight, "is_embedding_or_output_parameter", False):
        return ()
    if name.endswith("linear_qkv.weight"):  # a block is a group of queries with its key and value
        queries = config.num_attention_heads // config.num_query_groups
        return (queries * config.kv_channels, config.kv_channels, config.kv_channels)
    if name.endswith("linear_fc1.weight") and config.gated_linear_unit:
        return (weight.size(0) // 2, weight.size(0) // 2)
    return (weight.size(0),)
