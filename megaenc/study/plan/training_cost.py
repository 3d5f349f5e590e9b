"""Cost of training steps: tokens, FLOPs and device hours.

FLOPs are counted as in training; hours follow from the manifest's tokens per second.
"""

from dataclasses import dataclass

from megaenc.study.manifest.expand import PlannedModel
from megaenc.study.manifest.schema import Manifest


@dataclass(frozen=True)
class TrainingCost:
    """Cost of some training steps, summed over devices.

    `steps` is their number. `tokens` are those of the packs, each once, also if a step reads its
    packs several times; `flops` are of forward and backward, for every reading. `device_hours` is
    None if the throughput is unknown.
    """

    steps: int = 0
    tokens: int = 0
    """tokens of the packs, each once, also if a step reads its packs several times"""
    flops: float = 0.0
    """FLOPs of forward and backward, for every time that packs are read"""
    device_hours: float | None = 0.0
    """hours of one device, summed over devices; None if the throughput is unknown"""

    def __add__(self, other: "TrainingCost") -> "TrainingCost":
        """Return the sum of two costs; device hours are None if either is unknown."""
        hours = (self.device_hours, other.device_hours)
        total = None if None in hours else sum(hours)
        return TrainingCost(
            self.steps + other.steps, self.tokens + other.tokens, self.flops + other.flops, total
        )


def compute_training_cost(
    manifest: Manifest, model: PlannedModel, after: int, last: int
) -> TrainingCost:
    """Return the TrainingCost of steps after + 1..last of a model's run.

    Steps count from 1, without those of a model that it continues; `after` is 0 to begin with the
    first step.
    """
    config = model.config
    tokens_per_second = manifest.hardware.rate(model.key.size)
    packs = config.global_batch_size
    vocab_size = manifest.vocab_size(model)
    parts = [
        (fraction * steps * phase.passes * packs, work)
        for phase, fraction in model.phase_fractions(after, last)
        for work, steps in phase.parts
    ]
    flops = sum(reads * work.flops(config.shape, vocab_size) for reads, work in parts)
    hours = None
    if tokens_per_second:
        tokens_read = sum(reads for reads, _ in parts) * config.data.seq_length
        hours = tokens_read / tokens_per_second / 3600
    return TrainingCost(last - after, (last - after) * packs * config.data.seq_length, flops, hours)
