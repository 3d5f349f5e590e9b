"""The model under megatron-core: one call runs a global batch through its schedules, another makes an update."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import tee

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.core.transformer.module import Float16Module

from megaenc.backend import Backend
from megaenc.data.packing.packed_dataset import PackedDataset
from megaenc.model.encoder import build_model_chunks
from megaenc.model.fp8.linear import check_linear_layers
from megaenc.objectives import Objective
from megaenc.training.attention_select import select_plan_attention
from megaenc.training.dist.collectives import all_gather_call
from megaenc.training.micro_batches import DataParallelSampler, MicroBatch, MicroBatchSpec, Prefetcher
from megaenc.training.plan import Plan
from megaenc.training.timers import DATA, FORWARD_BACKWARD, OPTIMIZER, StepTimers


@dataclass(frozen=True)
class StepMetrics:
    """Sums over one or more global batches, the same on every rank; `flops` of the matrix products, forward and backward."""

    loss_sum: float = 0.0
    predicted: int = 0
    correct: int = 0
    flops: float = 0.0

    def __add__(self, other: "StepMetrics") -> "StepMetrics":
        return StepMetrics(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    @property
    def loss(self) -> float | None:
        """Mean over the predicted tokens; None where there were none."""
        return self.loss_sum / self.predicted if self.predicted else None

    @property
    def accuracy(self) -> float | None:
        """Share of the predicted tokens whose most likely guess was right."""
        return self.correct / self.predicted if self.predicted else None


@dataclass(frozen=True)
class TrainStepResult:
    """What one update has come to, the same on every rank."""

    metrics: StepMetrics
    grad_norm: float
    """Of the gradient before clipping."""
    build: bool
    """Not where loss or gradient are no finite numbers: then weights and optimizer stay as they were."""


class Engine:
    """This rank's part of the model with its optimizer."""

    def __init__(self, plan: Plan, backend: Backend, drawn: bool = True):
        """`drawn`: with the initial weights of the seed; otherwise they are left empty, to be filled."""
        settings = plan.settings
        self.plan = plan
        self.layout = settings.layout
        self.device = backend.device
        self.local_loss_sum = torch.zeros((), dtype=torch.float64, device=backend.device)
        self.sampler = DataParallelSampler(
            settings.global_batch_size,
            settings.micro_batch_size,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        self.kernels = dataclasses.replace(settings.kernels, attention_backend=select_plan_attention(plan, backend))
        widths = settings.shape.linear_shapes(self.layout.tensor_model_parallel_size).values()
        all_gather_call(lambda: check_linear_layers(settings.kernels, backend, widths, plan.dtype))
        sizes, seed = (settings.shape, plan.vocab_size, settings.data.seq_length), settings.seed if drawn else None
        encoders = build_model_chunks(*sizes, settings.layout, plan.dtype, seed=seed, kernels=self.kernels)
        self.fused_kernels = dataclasses.asdict(encoders[0].fused)  # by name, whether a kernel is used; alike in all parts
        self.config = encoders[0].config  # the one that megatron-core's schedules read
        self.config.finalize_model_grads_func = finalize_model_grads
        self.step_timers = StepTimers()  # of one update
        # A host's cores all compute in any case: a thread would but take turns with them.
        self._build_micro_batch = partial(MicroBatchSpec.build, device=backend.device)
        self._prefetcher = None if backend.is_cpu else Prefetcher(self._build_micro_batch, partial(torch.cuda.set_device, backend.device))
        level = settings.monitoring.timing_log_level  # at 0 nothing is timed, for each of these timers waits for the device
        self.timers = self.config.timers = Timers(level, "max") if level else None
        modules = [Float16Module(encoder.config, encoder) if settings.bf16 else encoder for encoder in encoders]
        data_parallel = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.layout.use_distributed_optimizer,
            overlap_grad_reduce=self.layout.overlap_grad_reduce,
            overlap_param_gather=self.layout.overlap_param_gather,
        )
        # One part of the model, or several where pipeline stages are interleaved.
        self.chunks = [
            # What later parts send hides behind the computation of the others: no need to cut it into buckets.
            DistributedDataParallel(module.config, data_parallel, module, disable_bucketing=number > 0)
            for number, module in enumerate(modules)
        ]
        if self.layout.overlap_grad_reduce:
            self.config.no_sync_func = self._chunk_methods("no_sync")
            self.config.grad_sync_func = self._chunk_methods("start_grad_sync")
        if self.layout.overlap_param_gather and len(self.chunks) > 1:
            self.config.param_sync_func = self._chunk_methods("start_param_sync")
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.optimizer.lr,
                weight_decay=settings.optimizer.weight_decay,
                adam_beta1=settings.optimizer.adam_beta1,
                adam_beta2=settings.optimizer.adam_beta2,
                adam_eps=settings.optimizer.adam_eps,
                clip_grad=settings.optimizer.clip_grad or float("inf"),  # so that the norm is always known
                use_distributed_optimizer=self.layout.use_distributed_optimizer,
                overlap_param_gather=self.layout.overlap_param_gather,
                bf16=settings.bf16,
                params_dtype=plan.dtype,
                timers=self.timers,
            ),
            self.chunks,
            config_overrides={},  # no exceptions: norms decay like everything else, as in the study
        )

    def _chunk_methods(self, method: str):
        """Return a method of the part of the model, or of each of several, as megatron-core's schedules want it."""
        methods = [getattr(chunk, method) for chunk in self.chunks]
        return methods if len(methods) > 1 else methods[0]

    def gather_parameters(self) -> None:
        """Wait until this rank has all weights of the last update (with `--overlap-param-gather` they come when needed)."""
        if self.layout.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def train_step(self, step: int) -> TrainStepResult:
        """Make update number `step` (1, 2, ...)."""
        self.step_timers = StepTimers()
        for timer in self.timers._timers.values() if self.timers else ():
            timer.reset()
        self.zero_grad()
        with self.step_timers.measure(FORWARD_BACKWARD):
            following = self._micro_batch_specs(step + 1) if self._prefetcher and step < self.plan.settings.total_iters else ()
            result = self._run_batch(self._micro_batch_specs(step), following, train=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate(step)
        with self.step_timers.measure(OPTIMIZER):
            return TrainStepResult(result, *self._optimizer_step(result.loss_sum))

    def _micro_batch_specs(self, step: int) -> list[MicroBatchSpec]:
        objective = self.plan.schedule.objective(step)
        return [MicroBatchSpec(self.plan.packs, tuple(row), objective, self.plan.settings.seed) for row in self.micro_batch_samples(step)]

    def micro_batch_samples(self, step: int) -> list[Sequence[int]]:
        """Return the samples of each micro-batch that this rank reads for update number `step`."""
        share = dataclasses.replace(self.sampler, global_batch_size=self.plan.settings.batch_sizes.size(step))
        positions = share.samples(self.plan.samples_read(step - 1))
        return [[self.plan.sample(position) for position in row] for row in positions]

    def zero_grad(self) -> None:
        """Forget the gradient that is there."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _optimizer_step(self, loss_sum: float) -> tuple[float, bool]:
        """Do megatron-core's `step` in its parts: return the gradient's norm, and whether the weights were updated from it."""
        self.optimizer.prepare_grads()
        [optimizer] = self.optimizer.chained_optimizers
        grad_norm = float(optimizer.clip_grad_norm(optimizer.config.clip_grad))
        finite = math.isfinite(loss_sum) and math.isfinite(grad_norm)
        if self.sampler.size > 1 and not self.layout.use_distributed_optimizer:
            # Each copy of the model has found its own norm: where one of them alone is faulty, they would part here.
            all_finite = torch.full((), finite, dtype=torch.int32, device=self.device)
            dist.all_reduce(all_finite, dist.ReduceOp.MIN, group=parallel_state.get_data_parallel_group())
            finite = bool(all_finite)
        if finite:
            self.optimizer.step_with_ready_grads()
        return grad_norm, finite

    @contextlib.contextmanager
    def _gathered_parameters(self) -> Iterator[None]:
        """Fetch all weights at once and let nothing fetch them on use: that belongs to updates."""
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks if self.layout.overlap_param_gather else ():
                chunk.disable_forward_pre_hook()  # which waits for what is under way
                stack.callback(chunk.enable_forward_pre_hook)
            yield

    @contextlib.contextmanager
    def no_grad_reduction(self) -> Iterator[None]:
        """Let `local_grad_norm` leave each rank its own gradient: nothing is added up over the copies of the model."""
        names = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")
        before = {name: getattr(self.config, name) for name in names}
        with self._gathered_parameters():
            vars(self.config).train_step(dict.fromkeys(names))
            try:
                yield
            finally:
                vars(self.config).train_step(before)
                self.zero_grad()

    def local_grad_norm(self, row: Sequence[int], objective: Objective) -> tuple[float, float]:
        """Return, without reduction, the loss of the packs `row` (0 where this rank computes none) and the norm of the gradient.

        The ranks of one copy of the model call it together with the same row, those of all copies with as many packs.
        """
        self.zero_grad()
        repeated = self.layout.pipeline_model_parallel_size if len(self.chunks) > 1 else 1  # interleaved stages take no fewer
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(chunk.no_sync())  # here, for a gradient that is cleared is one to be reduced again
            wanted = MicroBatchSpec(self.plan.packs, tuple(row), objective, self.plan.settings.seed)
            sums = self._run_micro_batches([wanted] * repeated, (), train=True)
        norms = [torch.linalg.vector_norm(buffer.grad_data, dtype=torch.float32) for c in self.chunks for buffer in c.buffers]
        return float(sums[0]), float(torch.linalg.vector_norm(torch.stack(norms)))

    def evaluate(self, packs: PackedDataset, batches: int, objective: Objective) -> StepMetrics:
        """Return sums over the first `batches` global batches of `packs`, with masks that are the same every time."""
        for chunk in self.chunks:
            chunk.eval()
        starts = range(0, batches * self.sampler.global_batch_size, self.sampler.global_batch_size)
        wanted = [[MicroBatchSpec(packs, tuple(row), objective, 0) for row in self.sampler.samples(start)] for start in starts]
        with self._gathered_parameters():
            results = [self._run_batch(now, following, train=False) for now, following in zip(wanted, [*wanted[1:], []], strict=True)]
        for chunk in self.chunks:
            chunk.train()
        return sum(results, StepMetrics())

    def _run_batch(self, wanted: Sequence[MicroBatchSpec], following: Sequence[MicroBatchSpec], train: bool) -> StepMetrics:
        """Run the global batch of which this rank reads `wanted` forward and, to train, backward; `following` is wanted next."""
        sums = self._run_micro_batches(wanted, following, train)
        if train:
            self.local_loss_sum = sums[0].clone()
        dist.all_reduce(sums)
        loss_sum, correct, predicted, flops = sums.tolist()
        return StepMetrics(loss_sum, int(predicted), int(correct), flops)

    def _run_micro_batches(self, wanted: Sequence[MicroBatchSpec], following: Sequence[MicroBatchSpec], train: bool) -> torch.Tensor:
        """Return float64[4] of this rank: loss, correct, predicted, FLOPs of the micro-batches `wanted`."""
        counts = {"predicted": 0, "flops": 0.0}  # known on the host: the device is not asked
        batches = self._prefetcher.over(wanted, following) if self._prefetcher else map(self._build_micro_batch, wanted)
        batches = self.step_timers.over(DATA, batches)
        iterators = list(tee(batches, len(self.chunks)))  # each part goes through all of them, at its own pace
        with torch.set_grad_enabled(train):
            outputs = get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, counts),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks,
                num_microbatches=len(wanted),
                seq_length=len(wanted[0].samples) * self.plan.settings.data.seq_length,
                micro_batch_size=1,  # a row holds all packs of the micro-batch
                forward_only=not train,
            )
        # One copy of each micro-batch counts: that of the last stage's first tensor-parallel rank.
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        if outputs and parallel_state.get_tensor_model_parallel_rank() == 0:
            sums[:2] = torch.stack(outputs).sum(0)
            for place, name in enumerate(counts, start=2):  # written by the device: what is copied to it is waited for
                sums[place].fill_(counts[name])
        return sums

    def _forward_step(self, counts: dict[str, float], iterator: Iterator[MicroBatch], model: torch.nn.Module):
        """Be megatron-core's forward step: the stage's output, and what makes a loss of the last one. Adds to `counts` there."""
        batch = next(iterator)
        others = {"packing": batch.packing, "predict_at": batch.predict_at, "labels": batch.labels}
        output = model(batch.tokens, batch.positions, **others)

        def loss_of(sums: tuple[torch.Tensor, torch.Tensor]):
            (loss, correct), predicted = sums, batch.labels.numel()
            counts["predicted"] += predicted
            shape, rows = self.plan.settings.shape, self.plan.vocab_size
            counts["flops"] += shape.training_flops(rows, predicted, batch.packing.spans())
            sums = torch.stack([loss.detach().double(), correct.double()])
            return loss, torch.full((), predicted, dtype=torch.int, device=self.device), sums

        return output, loss_of
