"""What global batches and updates have come to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchResult:
    """Sums over one or more global batches, the same on every rank. `flops`: forward and backward, of the matrix products."""

    loss_sum: float = 0.0
    predicted: int = 0
    correct: int = 0
    flops: float = 0.0

    def __add__(self, other: "BatchResult") -> "BatchResult":
        return BatchResult(
            self.loss_sum + other.loss_sum,
            self.predicted + other.predicted,
            self.correct + other.correct,
            self.flops + other.flops,
        )

    @property
    def loss(self) -> float | None:
        """Mean over the predicted tokens; None where there were none."""
        return self.loss_sum / self.predicted if self.predicted else None

    @property
    def accuracy(self) -> float | None:
        """Share of the predicted tokens whose most likely guess was right."""
        return self.correct / self.predicted if self.predicted else None


@dataclass(frozen=True)
class Update:
    """What one update has come to, the same on every rank."""

    result: BatchResult
    grad_norm: float
    """Of the gradient before clipping."""
    made: bool
    """Not where loss or gradient are no finite numbers: then weights and optimizer stay as they were."""
