"""Small cases with round numbers, for hand computation."""

from megaenc.backend.parallel_config import ParallelConfig
from megaenc.estimate.devices import Device
from megaenc.estimate.layout_case import LayoutCase
from megaenc.estimate.total import Workload
from megaenc.estimate.work import ObjectiveWork, PhaseWork
from megaenc.model.config import ModelConfig

# Two layers of 4 x 8 wide heads. The products of a layer have
# 32 x (32 + 2 x 16 + 32 + 3 x 80) = 10,752 weights.
SHAPE = ModelConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=80, num_attention_heads=4, num_query_groups=2
)
WORK = ObjectiveWork(
    "mlm",
    tokens=64,
    predicted=25.6,
    squares=64.0 * 64,
    visible_squares=64.0 * 64,
    selects_rows=False,
)

DEVICE = Device("made up", peak=1e12, gib=16, per_node=8)


def case(
    shape=SHAPE, *, gpus=1, vocab_size=1024, batch=16, micro=1, bf16=True, **layout
) -> LayoutCase:
    """Return a small layout case; `layout` has the fields of its ParallelConfig."""
    laid = ParallelConfig(**layout)
    return LayoutCase(
        shape,
        vocab_size,
        laid,
        laid.layers_per_chunk(shape.num_layers),
        gpus,
        micro,
        batch,
        64,
        bf16,
    )


def workload(steps: int = 100, batch: int = 16, work: ObjectiveWork = WORK) -> Workload:
    """Return a workload of one phase with one objective."""
    return Workload((PhaseWork("mlm", 1, steps, ((work, float(steps)),), ((batch, steps),)),), 0, 0)
