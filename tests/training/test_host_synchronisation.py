"""Micro-batches in which the host never waits for the device.

On the host there is nothing to wait for, but each request that would wait on an accelerator is
seen: numbers that are read out of tensors, shapes that follow from numbers, and tensors made of
Python's numbers, which would be copied from memory that is not pinned. With an accelerator torch
itself reports where it waits.
"""

import contextlib
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from training_helpers import plan_of

OBJECTIVES = ["clm", "mlm", "prefix_lm"]
WAYS = {
    "float32": ["--no-bf16"],
    "bfloat16, all is recomputed": ["--bf16", "--recompute-granularity", "full"],
    "attention is recomputed": ["--no-bf16", "--recompute-granularity", "selective"],
    "float8": ["--no-bf16", "--fp8-format", "hybrid"],
    "head norms, biases, tied": [
        "--no-bf16",
        "--qk-layernorm",
        "--add-qkv-bias",
        "--no-untie-embeddings-and-output-weights",
    ],
}
aten = torch.ops.aten
READ = {
    *(
        aten._local_scalar_dense,
        aten.item,
        aten.equal,
        aten.is_nonzero,
        aten.nonzero,
        aten.nonzero_static,
        aten.masked_select,
    ),
    *(
        aten._unique2,
        aten.unique_consecutive,
        aten.unique_dim,
        aten.bincount,
        aten.histc,
        aten.repeat_interleave,
    ),
}
MADE = {aten.lift_fresh}


class Waits(TorchDispatchMode):
    """A record of calls before or after which the host would wait on an accelerator."""

    def __init__(self):
        super().__init__()
        self.found = []
        self._copies = _CopiesToHost(self.found)

    def __enter__(self):
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        packet = function.overloadpacket
        waits = packet in READ | MADE or (
            packet in (aten.index, aten.index_put, aten.index_put_) and _by_truth(arguments[1])
        )
        if waits and not _of_the_host():
            self.found.append(str(function))
        return function(*arguments, **(options or {}))


class _CopiesToHost(TorchFunctionMode):
    """A mode that records copies to the host, which are no operation on the host."""

    def __init__(self, copies):
        super().__init__()
        self._found = copies

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu):
            self._found.append(function.__name__)
        return function(*arguments, **(options or {}))


def _of_the_host():
    """Return if megatron-core is reading a tensor that it keeps on the host.

    The tensor has the number of a mask type, which is read where attention is recomputed.
    """
    between = "/torch/", "/cpu_patches.py", __file__
    frames = reversed(traceback.extract_stack())
    caller = next(frame for frame in frames if not any(name in frame.filename for name in between))
    in_attention = caller.filename.endswith("megatron/core/transformer/attention.py")
    return in_attention and caller.name in ("_checkpointed_attention_forward", "custom_forward")


def _by_truth(indices):
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: float(x[0]),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0]),
    ],
)
def test_what_would_wait_is_seen(wait):
    with Waits() as waits:
        wait(torch.randn(5))
    assert waits.found


def forward_and_backward(engine, objective, watched):
    """Run a micro-batch by megatron-core's schedule; return its gradient norm.

    Only the schedule runs inside `watched`.
    """
    from megaenc.objectives import Schedule
    from megaenc.training.micro_batches import MicroBatchSpec

    plan = engine.plan
    [model] = engine.chunks
    objective = Schedule.build(objective, 1, plan.vocabulary, 1).objective(1)
    engine.zero_grad()
    batch = MicroBatchSpec(plan.packs, (0, 1), objective, 1).build(engine.device)
    with watched:
        output, loss_of = engine.forward_step(iter([batch]), model)
        loss, _, _ = loss_of(output)
        loss.backward()
    return sum(float(buffer.grad_data.norm()) for buffer in model.buffers)


def in_documents(q, k, v, cu_q, cu_k, longest_q, longest_k, *, scale, window_size, **_):
    """Compute attention as torch's kernel for accelerators, but read the boundaries."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        q_lengths = cu_q.diff().tolist()
        k_lengths = cu_k.diff().tolist()
    assert (longest_q, longest_k) == (max(q_lengths), max(k_lengths))
    documents = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    parts = []
    for document in documents:
        rows = len(document[0])
        columns = len(document[1])
        mask = torch.ones(rows, columns, dtype=torch.bool)
        if window_size == (-1, 0):
            mask = mask.tril(columns - rows)
        inputs = [x.transpose(0, 1)[None] for x in document]
        parts.append(
            F.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=scale, enable_gqa=True)
        )
    return torch.cat([part[0].transpose(0, 1) for part in parts])


@pytest.mark.parametrize("way", WAYS)
def test_a_micro_batch_asks_for_nothing_that_would_wait(way, short_run, engine_of, monkeypatch):
    """Both a stand-in for the accelerator's kernel and the host's have one gradient."""
    engine = engine_of(*short_run, *WAYS[way])
    from megaenc.model.attention import backends
    from megaenc.model.layer import PackedAttention

    monkeypatch.setattr(backends, "varlen_attn", in_documents)
    monkeypatch.setattr("megaenc.model.linear_cross_entropy._is_on_host", lambda x: False)
    for objective in OBJECTIVES:
        norms = []
        for backend in ("varlen", "sdpa"):
            for module in engine.chunks[0].modules():
                if isinstance(module, PackedAttention):
                    module.backend = backend
            waits = Waits()
            norms.append(forward_and_backward(engine, objective, waits))
            assert waits.found == [], f"{objective} by {backend}"
        assert norms[0] == pytest.approx(norms[1], rel=0.05 if way != "float32" else 1e-4)
        assert norms[0] > 0


class Copies(TorchDispatchMode):
    """A record of copies from the host to a device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        to = options.get("device")
        if (
            function.overloadpacket is aten._to_copy
            and to is not None
            and to.type != arguments[0].device.type
        ):
            self.found.append((arguments[0].data_ptr(), options.get("non_blocking", False)))
        return function(*arguments, **options)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_micro_batch_is_copied_from_pinned_memory_without_waiting(
    objective, short_run, monkeypatch
):
    """The device is torch's meta device, and pinning is only noted."""
    from megaenc.objectives import Schedule

    plan = plan_of(*short_run)
    from megaenc.training.micro_batches import MicroBatchSpec

    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    objective = Schedule.build(objective, 1, plan.vocabulary, 1).objective(1)
    with Copies() as copies:
        batch = MicroBatchSpec(plan.packs, (0, 1), objective, 1).build(torch.device("meta"))
    rows = batch.packing.prefix_rows
    parts = [
        batch.tokens,
        batch.positions,
        batch.predictions.positions,
        batch.predictions.labels,
        batch.packing.cu_seqlens_q,
    ]
    parts += (
        [rows.prefix, rows.suffix, rows.cu_seqlens_prefix, rows.cu_seqlens_suffix] if rows else []
    )
    assert {part.device.type for part in parts} == {"meta"}
    assert copies.found == [(tensor.data_ptr(), True) for tensor in pinned]
    assert len(copies.found) == len(parts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_accelerator_is_not_waited_for_inside_a_micro_batch(objective, short_run, engine_of):
    """torch raises where it would wait."""

    @contextlib.contextmanager
    def waiting_is_an_error():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine = engine_of(*short_run, "--bf16")
    # The first call chooses and compiles kernels.
    forward_and_backward(engine, objective, contextlib.nullcontext())
    assert forward_and_backward(engine, objective, waiting_is_an_error()) > 0
