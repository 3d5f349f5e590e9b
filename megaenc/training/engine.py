"""Model and optimizer of one rank: training steps and evaluation."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import tee

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megaenc.backend import Backend, main_grad
from megaenc.backend.parallel_config import FLOAT8_ALIGNMENT
from megaenc.data.packing.packed_dataset import PackedDataset
from megaenc.model.attention.backends import describe_backend
from megaenc.model.encoder import build_model_chunks, named_global_parameters
from megaenc.model.fp8.linear import check_linear_layers
from megaenc.model.freezing import find_part, parse_freeze
from megaenc.model.packed_sequences import copy_to_device
from megaenc.objectives import Objective
from megaenc.training.attention_select import select_plan_attention
from megaenc.training.config import PretrainConfig
from megaenc.training.distributed.collectives import call_on_all
from megaenc.training.micro_batches import (
    DataParallelSampler,
    MicroBatch,
    MicroBatchSpec,
    Prefetcher,
    TokenGroups,
)
from megaenc.training.optimizers import build_optimizer, list_shards
from megaenc.training.plan import Plan
from megaenc.training.timers import DATA, FORWARD_BACKWARD, OPTIMIZER, StepTimers


@dataclass(frozen=True)
class BatchSums:
    """Sums over the predicted tokens of micro-batches or batches, added by `+`.

    `loss_count` is the divisor of `loss_sum`; `predicted` counts tokens, and `correct` those whose
    most likely token is the label; `flops` are those of matrix products, forward and backward, also
    if only the forward pass ran; `group_sums` has losses and tokens (with weights, sums of weights)
    by TokenGroups, float64[2, G], with G = 0 without groups. BatchSums() is zero. In sums of one
    rank `loss_sum`, `correct` and `group_sums` are tensors on its device, so that the host does not
    wait for it. `reduce(votes)` returns a pair: the BatchSums of all ranks, with numbers and
    `group_sums` as an array, and the sums of `votes`.
    """

    loss_sum: float | torch.Tensor = 0.0
    correct: int | torch.Tensor = 0
    """Predicted tokens whose most likely token is the label."""
    predicted: int = 0
    loss_count: int = 0
    """Divisor of the loss: the predicted tokens, or what the objective counts instead."""
    flops: float = 0.0
    """FLOPs of matrix products, forward and backward.

    They are those of both passes even if only the forward pass ran. Each micro-batch counts as a
    whole, once for all its model-parallel ranks.
    """
    group_sums: np.ndarray | torch.Tensor | float = 0.0
    """float64[2, G], losses and predicted tokens (sums of weights) of each of G TokenGroups; G is 0
    in training."""

    def __add__(self, other: "BatchSums") -> "BatchSums":
        return BatchSums(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    @property
    def loss(self) -> float | None:
        """Return loss_sum / loss_count, the mean loss; None if `loss_count` is 0.

        Before `reduce` it is None too, or a tensor on the device.
        """
        return self.loss_sum / self.loss_count if self.loss_count else None

    @property
    def accuracy(self) -> float | None:
        """Return the fraction of correct predictions, 0 to 1; None without predictions.

        Before `reduce` it is None too, or a tensor on the device.
        """
        return self.correct / self.predicted if self.predicted else None

    def reduce(self, votes: Sequence[int] = ()) -> tuple["BatchSums", tuple[float, ...]]:
        """Return the sums over all ranks as Python numbers, and those of `votes`.

        All ranks call this together, on results of `run_micro_batches`, with equally many votes.
        The device is synchronized, once, after a single all-reduce.

        Args:
            votes: Numbers of this rank to be summed over all ranks along with the others.

        Returns:
            The sums, with `group_sums` as an array, and the sum of each vote, in order.
        """
        device = self.group_sums.device
        of_device = torch.stack([self.loss_sum, self.correct])
        of_host = torch.tensor(
            [self.predicted, self.loss_count, self.flops, *votes], dtype=torch.float64
        )
        parts = [of_device, copy_to_device(of_host, device), self.group_sums.flatten()]
        sums = torch.cat(parts)
        dist.all_reduce(sums)
        of_device, of_host, of_groups = sums.cpu().split([len(part) for part in parts])
        loss_sum, correct = of_device.tolist()
        predicted, loss_count, flops, *votes = of_host.tolist()
        group_sums = of_groups.numpy().reshape(2, -1)
        return BatchSums(
            loss_sum, int(correct), int(predicted), int(loss_count), flops, group_sums
        ), tuple(votes)


@dataclass(frozen=True)
class TrainStepResult:
    """Result of `Engine.train_step`, equal on all ranks.

    `metrics` are sums over all ranks; `grad_norm` is the gradient norm of all weights but frozen
    ones before clipping, divided by `loss_count` (by 1 if that is 0), also if it is not finite;
    `is_applied` is False if loss or gradient are not finite, so that weights and optimizer are
    unchanged; `votes` are sums over all ranks.
    """

    metrics: BatchSums
    grad_norm: float
    """Norm of the gradient before clipping, divided by `loss_count` as the loss is."""
    is_applied: bool
    """False if loss or gradient are not finite; weights and optimizer are then unchanged."""
    votes: tuple[float, ...] = ()
    """Sums over all ranks of their votes."""


class Engine:
    """Model chunks and optimizer shard of one rank under megatron-core.

    All ranks construct it together, after `init_distributed`, from `plan` and backend; its weights
    are drawn by the seed, unless `init_weights` is False. `train_step` trains a step of `plan`,
    `evaluate` measures the loss on given packs. `chunks` are the rank's parts of the model in
    DistributedDataParallel, one unless pipeline stages are interleaved; `optimizer` is
    megatron-core's, `shards` are the parts of their weights that it updates, and `always_frozen`
    the indices in `shards` of weights that no phase trains. `kernel_metadata` names the kernels in
    use, `step_timers` (StepTimers) has the times of the last step. Most methods are collective.
    """

    def __init__(self, plan: Plan, backend: Backend, init_weights: bool = True):
        """Build model chunks and optimizer; all ranks call this together.

        Args:
            plan: Plan of the run, equal on all ranks.
            backend: Hardware of this process.
            init_weights: True to draw the initial weights by the seed of `plan`; False leaves them
                uninitialized, for a checkpoint to be loaded.

        Raises:
            InputError: Attention backend or linear layers of the flags do not work here.
        """
        settings = plan.settings
        self.plan = plan
        self.layout = settings.layout
        self.device = backend.device
        self.local_sums = BatchSums()  # of this rank in the last training step
        first = settings.phase_configs[0].settings
        self.sampler = DataParallelSampler(
            first.global_batch_size,
            first.packs_at_once,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            self._interleaved_stages,
        )
        self.kernels = dataclasses.replace(
            settings.kernels, attention_backend=select_plan_attention(plan, backend)
        )
        widths = settings.shape.linear_shapes(self.layout.tensor_model_parallel_size).values()
        call_on_all(lambda: check_linear_layers(settings.kernels, backend, widths, plan.dtype))
        longest = max(phase.settings.data.seq_length for phase in settings.phase_configs)
        self._encoders = encoders = build_model_chunks(
            settings.shape,
            plan.vocab_size,
            longest,
            settings.layout,
            plan.dtype,
            seed=settings.seed if init_weights else None,
            kernels=self.kernels,
        )
        # By name, whether the kernel is used; equal in all chunks.
        self.fused_kernels = dataclasses.asdict(encoders[0].fused)
        attention = describe_backend(self.kernels.attention_backend, backend.device)
        self.kernel_metadata = dataclasses.asdict(self.kernels) | {
            "attention": attention,
            "fused": self.fused_kernels,
        }
        self.config = encoders[0].config  # read by megatron-core's schedules
        self.config.finalize_model_grads_func = finalize_summed_grads
        self.step_timers = StepTimers()  # of one step
        # On a CPU a prefetching thread would only take cores from the computation.
        self._build_micro_batch = partial(MicroBatchSpec.build, device=backend.device)
        self._prefetcher = (
            None
            if backend.is_cpu
            else Prefetcher(self._build_micro_batch, partial(torch.cuda.set_device, backend.device))
        )
        modules = [
            Float16Module(encoder.config, encoder) if settings.bf16 else encoder
            for encoder in encoders
        ]
        data_parallel = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.layout.use_distributed_optimizer,
            overlap_grad_reduce=self.layout.overlap_grad_reduce,
            overlap_param_gather=self.layout.overlap_param_gather,
        )
        self.chunks = [
            # Communication of later chunks overlaps with the computation of others without buckets.
            DistributedDataParallel(
                module.config, data_parallel, module, disable_bucketing=index > 0
            )
            for index, module in enumerate(modules)
        ]
        if backend.is_cpu or self.fused_kernels["sum"]:
            main_grad.enable_in(self.chunks)
        if self.layout.overlap_grad_reduce:
            self.config.no_sync_func = self._chunk_methods("no_sync")
            self.config.grad_sync_func = self._chunk_methods("start_grad_sync")
        if self.layout.overlap_param_gather and len(self.chunks) > 1:
            self.config.param_sync_func = self._chunk_methods("start_param_sync")
        self.optimizer = build_optimizer(settings, plan.dtype, self.chunks)
        [optimizer] = self.optimizer.chained_optimizers
        self.shards = list_shards(self.chunks, optimizer)
        self._parts = [
            find_part(name, settings.shape)
            for encoder in encoders
            for name, _ in named_global_parameters(encoder)
        ]
        self._frozen = self._frozen_in(first)
        self._frozen_steps: dict[torch.Tensor, int] = {}
        self.always_frozen = frozenset.intersection(
            *(self._frozen_in(phase.settings) for phase in settings.phase_configs)
        )

    def _frozen_in(self, settings: PretrainConfig) -> frozenset[int]:
        """Return the indices in `shards` of the weights that a phase freezes."""
        if not settings.optimizer.freeze:
            return frozenset()
        frozen = parse_freeze(settings.optimizer.freeze, settings.shape)
        return frozenset(index for index, part in enumerate(self._parts) if part in frozen)

    def _count_frozen_steps(self, step: int) -> dict[torch.Tensor, int]:
        """Return the steps of the phases before that of `step` that freeze each parameter.

        Parameters are those of the optimizer; those that no earlier phase freezes are left out.
        Steps whose update was skipped count, as only the plan is known here: such a weight is then
        corrected for as many updates less.
        """
        counts: dict[torch.Tensor, int] = {}
        for phase in self.plan.settings.phase_configs:
            if phase.last_step >= step:
                break
            for index in self._frozen_in(phase.settings):
                param = self.shards[index].param
                if param is not None:
                    counts[param] = counts.get(param, 0) + phase.last_step - phase.first_step + 1
        return counts

    def _chunk_methods(self, method: str):
        """Return the bound `method` of the model chunk, or a list of several.

        megatron-core's schedules expect either.
        """
        methods = [getattr(chunk, method) for chunk in self.chunks]
        return methods if len(methods) > 1 else methods[0]

    def enter_phase(self, step: int) -> None:
        """Set rotary base, batch sizes and frozen weights to those of the phase of `step`.

        Steps are 1, 2, ...; 0 is in the first phase, a step after the run in the last. Nothing is
        communicated. `train_step` calls it.
        """
        settings = self.plan.settings.phase_at(step).settings
        self.sampler = dataclasses.replace(
            self.sampler,
            global_batch_size=settings.global_batch_size,
            micro_batch_size=settings.packs_at_once,
        )
        for encoder in self._encoders:
            encoder.set_rotary_base(settings.shape.rotary_base)
        self._frozen = self._frozen_in(settings)
        self._frozen_steps = self._count_frozen_steps(step)

    def gather_parameters(self) -> None:
        """Gather the weights that other ranks of a distributed optimizer update.

        All ranks call this together, when each has loaded into `chunks` the weights that it
        updates. Without --use-distributed-optimizer nothing is done.
        """
        if self.layout.use_distributed_optimizer:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def train_step(
        self,
        step: int,
        votes: Callable[[], Sequence[int]] = tuple,
        before_optimizer: Callable[[BatchSums], None] | None = None,
    ) -> TrainStepResult:
        """Train on the batch of `step` (1, 2, ...), but skip a non-finite update.

        All ranks call this together. It enters the phase of `step`, and sets the learning rate of
        `step`. Gradients are set to zero before, not after.

        Args:
            votes: Returns numbers of this rank to be summed over all ranks, equally many on each.
                It is called when the work of the step is given to the device, so that a signal
                during the step counts in it.
            before_optimizer: Called with the sums over all ranks, when all gradients are reduced,
                neither divided nor clipped yet, also before an update that is skipped.
        """
        plan = self.plan
        self.step_timers = StepTimers()
        self.zero_grad()
        self.enter_phase(step)
        with self.step_timers.measure(FORWARD_BACKWARD):
            specs = self.micro_batch_specs(step)
            next_specs = (
                self.micro_batch_specs(step + 1)
                if self._prefetcher and step < plan.settings.total_iters
                else ()
            )
            self.local_sums = self.run_micro_batches(specs, next_specs, train=True)
            sums, vote_sums = self.local_sums.reduce(votes())
        if before_optimizer:
            before_optimizer(sums)
        weight_decay = plan.settings.phase_at(step).settings.optimizer.weight_decay
        for group in self.optimizer.param_groups:
            group["lr"] = plan.learning_rate(step)
            group["weight_decay"] = weight_decay * group["wd_mult"]
        with self.step_timers.measure(OPTIMIZER):
            grad_norm, is_applied = self._optimizer_step(sums)
        return TrainStepResult(sums, grad_norm, is_applied, vote_sums)

    def micro_batch_specs(self, step: int) -> list[MicroBatchSpec]:
        """Return the specs of this rank's micro-batches of `step`, in order.

        Steps count from 1. A sum of objectives has all micro-batches under the first, then all
        under the next. Nothing is read or communicated.
        """
        rows = self.micro_batch_samples(step)
        packs = self.plan.data_at(step).train
        specs = []
        for weight, objective in self.plan.schedule.objectives(step):
            specs += self._list_specs(
                packs, rows, objective, self.plan.settings.seed, weight=weight
            )
        return specs

    def relative_load(self, step: int) -> float:
        """Return this rank's tokens of `step`, divided by the mean of data-parallel ranks.

        Steps count from 1. The result is 1 for equal loads. Nothing is communicated. Tokens that
        only fill micro-batches count for this rank, not in the mean.
        """
        specs = self.micro_batch_specs(step)
        mean_packs = (
            self.plan.batch_size(step)
            / self.sampler.size
            * len(self.plan.schedule.objectives(step))
        )
        return sum(spec.length for spec in specs) / (mean_packs * specs[0].packs.seq_length)

    @property
    def _interleaved_stages(self) -> int:
        """Return the number of pipeline stages if they are interleaved, else 1."""
        is_interleaved = self.layout.chunks_per_stage(self.plan.settings.shape.num_layers) > 1
        return self.layout.pipeline_model_parallel_size if is_interleaved else 1

    def _list_specs(
        self,
        packs: PackedDataset,
        rows: Sequence[Sequence[int]],
        objective: Objective,
        seed: int,
        groups: TokenGroups | None = None,
        weight: int = 1,
        train: bool = True,
    ) -> list[MicroBatchSpec]:
        """Return the specs of micro-batches of `rows`.

        Rows may be empty. They are filled to lengths that the layout can divide; in a pipeline all
        have the same.

        Args:
            train: Whether dropout applies.
        """
        lengths = [
            -(-max(1, len(row)) * packs.seq_length // self._row_divisor) * self._row_divisor
            for row in rows
        ]
        if self.layout.pipeline_model_parallel_size > 1:
            lengths = [max(lengths)] * len(rows)
        dropout = train and self.plan.settings.shape.attention_output_dropout > 0
        return [
            MicroBatchSpec(packs, tuple(row), objective, seed, groups, weight, length, dropout)
            for row, length in zip(rows, lengths, strict=True)
        ]

    @property
    def _row_divisor(self) -> int:
        """Return the number that the tokens of a row must be a multiple of."""
        kernels = self.plan.settings.kernels
        aligned = kernels.fp8_format and kernels.transformer_impl == "transformer_engine"
        ranks = self.layout.tensor_model_parallel_size if self.layout.sequence_parallel else 1
        return ranks * (FLOAT8_ALIGNMENT if aligned else 1)

    def micro_batch_samples(self, step: int) -> list[Sequence[int]]:
        """Return the sample indices of each micro-batch of this rank in `step`.

        Steps count from 1. Sample indices are those of packs in the data order, without skipped
        ones. Data-parallel ranks divide the batch; those of a replica have the same. A micro-batch
        may be empty. Under a sum of objectives each is listed once.
        """
        sizes = {"global_batch_size": self.plan.batch_size(step)}
        sizes["micro_batch_size"] = self.plan.settings.phase_at(step).settings.packs_at_once
        sampler = dataclasses.replace(self.sampler, **sizes)
        positions = sampler.samples(self.plan.samples_read(step - 1))
        return [[self.plan.sample_at(position) for position in row] for row in positions]

    def zero_grad(self) -> None:
        """Set this rank's gradients to zero, in model chunks and optimizer."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _optimizer_step(self, sums: BatchSums) -> tuple[float, bool]:
        """Clip the gradient and, if it is finite, update the weights.

        Gradients are sums over the global batch: the optimizer divides them, while it reads them,
        by the number of tokens and by the clipping coefficient. Those of frozen weights are
        dropped: without one, a weight is neither in the norm nor updated.

        Returns:
            The norm of the gradient, and whether the weights were updated.
        """
        self.optimizer.prepare_grads()
        [optimizer] = self.optimizer.chained_optimizers
        optimizer.optimizer.frozen = self._frozen
        optimizer.optimizer.frozen_steps = self._frozen_steps
        for index in self._frozen:
            if self.shards[index].param is not None:
                self.shards[index].param.grad = None
        divisor = max(sums.loss_count, 1)
        grad_norm = float(optimizer.get_grad_norm()) / divisor
        # As megatron-core clips, with its epsilon.
        optimizer.optimizer.grad_scale = divisor * max(
            1.0, (grad_norm + 1e-6) / optimizer.config.clip_grad
        )
        finite = math.isfinite(sums.loss_sum) and math.isfinite(grad_norm)
        if self.sampler.size > 1 and not self.layout.use_distributed_optimizer:
            # Each model replica computes its own norm: a fault in one of them would make the
            # replicas diverge.
            all_finite = torch.full((), finite, dtype=torch.int32, device=self.device)
            dist.all_reduce(
                all_finite, dist.ReduceOp.MIN, group=parallel_state.get_data_parallel_group()
            )
            finite = bool(all_finite)
        if finite:
            self.optimizer.step_with_ready_grads()
        return grad_norm, finite

    @contextlib.contextmanager
    def _gathered_parameters(self) -> Iterator[None]:
        """Hold all weights inside the context, without hooks that gather them."""
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks if self.layout.overlap_param_gather else ():
                chunk.disable_forward_pre_hook()  # waits for running gathers
                stack.callback(chunk.enable_forward_pre_hook)
            yield

    @contextlib.contextmanager
    def no_grad_reduction(self) -> Iterator[None]:
        """Disable gradient reduction between model replicas inside the context.

        All ranks enter it together. Gradients of weights that ranks of a replica share, such as
        those of a tied embedding, are not reduced either. At its end, also after an error,
        gradients are set to zero.
        """
        names = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")
        before = {name: getattr(self.config, name) for name in names}
        with self._gathered_parameters():
            vars(self.config).update(dict.fromkeys(names))
            try:
                yield
            finally:
                vars(self.config).update(before)
                self.zero_grad()

    def local_loss_and_grad_norm(
        self, row: Sequence[int], objective: Objective, packs: PackedDataset | None = None
    ) -> tuple[float, float]:
        """Return summed loss and gradient norm of one micro-batch, on this rank only.

        Weights are not updated. The loss is 0 on ranks that compute none; the norm is that of the
        gradients of this rank's `chunks`, undivided. Gradients are set to zero before, and kept,
        but those of weights that the phase entered last freezes are zero, as the step ignores them.
        Targets are those of training. Ranks of a replica call this together, inside
        `no_grad_reduction`.

        Args:
            row: Indices of the samples, the same on all ranks of a replica.
            objective: Objective whose loss is computed.
            packs: Data set of the samples; None for that of the first phase.
        """
        self.zero_grad()
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks:
                # zero_grad has enabled the reduction again.
                stack.enter_context(chunk.no_sync())
            specs = self._list_specs(
                packs or self.plan.packs, [row], objective, self.plan.settings.seed
            )
            sums = self.run_micro_batches(specs * self._interleaved_stages, (), train=True)
        weights = [weight for chunk in self.chunks for weight in chunk.parameters()]
        for index in self._frozen:
            weights[index].main_grad.zero_()
        norms = [
            torch.linalg.vector_norm(buffer.grad_data, dtype=torch.float32)
            for c in self.chunks
            for buffer in c.buffers
        ]
        return float(sums.loss_sum), float(torch.linalg.vector_norm(torch.stack(norms)))

    def evaluate(
        self,
        packs: PackedDataset,
        samples: int,
        objective: Objective,
        groups: TokenGroups | None = None,
    ) -> BatchSums:
        """Return the sums over all ranks under `objective` over packs 0 to `samples` - 1.

        All ranks call this together. Batches are those of the phase entered last, and masks are the
        same in each call. Gradients are neither computed nor changed, and dropout is off;
        afterwards the model is in training mode.

        Args:
            packs: Data set.
            samples: Number of packs, 1 or more.
            objective: Objective whose loss is measured.
            groups: Groups of tokens for `group_sums`, if `packs` is a BlendedDataset; None for
                none.
        """
        for chunk in self.chunks:
            chunk.eval()
        specs = []
        batch_size = self.sampler.global_batch_size
        for start in range(0, samples, batch_size):
            sampler = dataclasses.replace(
                self.sampler, global_batch_size=min(batch_size, samples - start)
            )
            specs.append(
                self._list_specs(packs, sampler.samples(start), objective, 0, groups, train=False)
            )
        total = BatchSums()
        with self._gathered_parameters():
            for batch, next_batch in zip(specs, [*specs[1:], []], strict=True):
                sums, _ = self.run_micro_batches(batch, next_batch, train=False).reduce()
                total += sums
        for chunk in self.chunks:
            chunk.train()
        return total

    def run_micro_batches(
        self, specs: Sequence[MicroBatchSpec], next_specs: Sequence[MicroBatchSpec], train: bool
    ) -> BatchSums:
        """Run this rank's micro-batches forward and, if `train`, backward.

        All ranks call this together; those of a model replica have equally many `specs`. Gradients
        are added to, and reduced over ranks unless in `no_grad_reduction`; weights are not updated.

        Args:
            specs: Micro-batches, 1 or more, all with equal groups; in a pipeline, of one length.
            next_specs: Those likely to be run next, to be read in advance.

        Returns:
            This rank's sums, as tensors. Only the first tensor-parallel rank of the last pipeline
            stage counts a micro-batch, so that it is counted once; those of other ranks are zero.
        """
        batches = (
            self._prefetcher.iterate(specs, next_specs)
            if self._prefetcher
            else map(self._build_micro_batch, specs)
        )
        batches = self.step_timers.measure_items(DATA, batches)
        # Each chunk consumes all of them at its own pace.
        iterators = repeat_iterator(batches, len(self.chunks))
        with torch.set_grad_enabled(train):
            sums_of_micro_batches = get_forward_backward_func()(
                forward_step_func=self.forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks,
                num_microbatches=len(specs),
                seq_length=specs[0].length,
                micro_batch_size=1,  # a row holds all packs of the micro-batch
                forward_only=not train,
            )
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        sums = BatchSums(zero, zero, group_sums=zero.new_zeros(2, len(specs[0].groups or ())))
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for micro_batch in sums_of_micro_batches:
                sums += micro_batch
        return sums

    def forward_step(self, iterator: Iterator[MicroBatch], model: torch.nn.Module):
        """Return this stage's output of the next micro-batch, and its loss function.

        It is a `forward_step_func` of megatron-core's schedules, which call the loss function on
        the last stage with the output. The function returns the summed loss, zero and the
        BatchSums, which they collect.

        Args:
            iterator: Micro-batches, from which one is taken.
            model: Model chunk of this rank.
        """
        batch = next(iterator)
        predictions = batch.predictions
        output = model(batch.tokens, batch.positions, batch.packing, predictions)

        def compute_loss(
            output: tuple[torch.Tensor, torch.Tensor],
        ) -> tuple[torch.Tensor, torch.Tensor, BatchSums]:
            loss, correct = output
            predicted = predictions.labels.numel()
            outputs = predictions.classes or self.plan.vocab_size
            selects_rows = self._encoders[-1].selects_rows
            flops = self.plan.settings.shape.training_flops(
                outputs, predicted, batch.spans(), selects_rows=selects_rows
            )
            group_sums = 0.0
            if predictions.per_token:
                group_sums = sum_by_group(batch, loss.detach())
                loss = loss.sum()
            loss_sum = loss.detach().double()
            sums = BatchSums(
                loss_sum, correct.double(), predicted, batch.loss_count, flops, group_sums
            )
            # megatron-core adds up numbers of tokens in 32 bits, which finalize_summed_grads
            # ignores.
            return loss, torch.zeros((), dtype=torch.int, device=self.device), sums

        return output, compute_loss


def sum_by_group(batch: MicroBatch, losses_N: torch.Tensor) -> torch.Tensor:
    """Return the sums of losses and of predicted tokens of each token group.

    Groups are in the order of TokenGroups. All tokens of a pack are of one corpus, and are summed
    as a slice, in a fixed order.

    Args:
        batch: Micro-batch with `groups`.
        losses_N: Loss of each predicted token, times its weight if `batch.predictions` has weights.

    Returns:
        float64[2, G] on the device: losses, then tokens; with weights, the sums of weights instead
        of tokens.
    """
    losses_N = losses_N.double()
    weights_N = batch.predictions.weights
    sizes_N = torch.ones_like(losses_N) if weights_N is None else weights_N.double()
    tokens_2N = torch.stack([losses_N, sizes_N])
    sums_2G = tokens_2N.new_zeros(2, len(batch.groups))
    sums_2G[:, : len(batch.groups.starts)] = torch.where(
        batch.in_range, tokens_2N[:, :, None], 0.0
    ).sum(1)
    start = 0
    for group, count in batch.corpus_spans:
        sums_2G[:, group] += tokens_2N[:, start : start + count].sum(1)
        start += count
    return sums_2G


def finalize_summed_grads(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options
) -> None:
    """Reduce gradients as megatron-core does, but leave them undivided sums.

    It is a `finalize_model_grads_func`: all ranks call it together, and it changes gradients in
    place. `options` are passed on, `num_tokens` is ignored: the optimizer's step divides by the
    number of tokens, which all ranks know without another reduction.
    """
    finalize_model_grads(model, None, **options)


def repeat_iterator(items: Iterator, count: int) -> list[Iterator]:
    """Return `count` independent iterators over `items`.

    A single one is `items` itself, so that no item is kept alive, as `tee` does in blocks of 57.
    """
    return [items] if count == 1 else list(tee(items, count))
