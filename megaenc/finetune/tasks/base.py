"""What the four families share: a model with a head, the loss of a batch in parts that fit, one pass of evaluation, scores."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from megaenc.finetune.encoded import Encoded, Parts, TextEncoder
from megaenc.finetune.examples import Examples, Family
from megaenc.finetune.options import Protocol
from megaenc.finetune.packing import Packed, forwards, pack

if TYPE_CHECKING:
    from megaenc.finetune.backbone import Backbone
    from megaenc.finetune.datasets.registry import Dataset


@dataclass(frozen=True)
class Scores:
    """Of one split; all shares are fractions."""

    score: float
    """The study's metric."""
    scores_i: list[float]
    """The study's metric of each example, in the order of the examples."""
    metrics: dict[str, float]
    """The field's standard metrics by name."""
    metrics_i: dict[str, list[float]]
    """What the standard metrics are made of, by example."""
    collapsed: str | None
    """Why the predictions are worthless, as "constant prediction positive"; None where they are not."""
    baseline: dict[str, float]
    """What the family's trivial baseline gets on the same examples: "score" and each name in `metrics`."""


class NotFinite(ArithmeticError):
    """What a model predicts is no number: its last update was one too many. The message says what was found."""


class Model(nn.Module):
    """A backbone and the task's head on its states."""

    def __init__(self, backbone: "Backbone", head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def logits(self, states: Tensor) -> Tensor:
        """float32[..., labels] of states [..., hidden]; the head computes in the type of its own weights."""
        return self.head(states.to(self.head.weight.dtype)).float()


class Task(ABC):
    """A family of tasks on one data set; megaenc.finetune.tasks.TASKS has the class of each family."""

    family: ClassVar[Family]

    def __init__(self, dataset: "Dataset", protocol: Protocol) -> None:
        self.dataset = dataset
        self.protocol = protocol
        self.progress: Callable[[int, int], None] = lambda done, total: None
        """Is told how many texts of an evaluation are read, and of how many."""

    @abstractmethod
    def encode(self, examples: Examples, encoder: TextEncoder) -> Parts:
        """`examples` as the other methods take them; a pure function of them, the encoder and the task's labels."""

    @abstractmethod
    def head(self, hidden_size: int) -> nn.Module:
        """A new head in float32, drawn by torch's own generator."""

    def count(self, data: Parts) -> int:
        """Training examples."""
        return len(data)

    @abstractmethod
    def backward(self, model: Model, data: Parts, rows: np.ndarray) -> float:
        """Add the gradients of the mean loss of the batch `rows` (int[batch]) to the weights' and return that loss.

        The mean is over all that is predicted in the batch, however many forward passes it takes.
        """

    @abstractmethod
    def evaluate(self, model: Model, data: Parts, examples: Examples) -> Scores:
        """Predict all of a split in one pass and score it; `data` is what `encode` made of `examples`."""

    def forwards(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Places in `lengths` of the texts of each forward pass."""
        return forwards(lengths, self.protocol.tokens_per_forward)

    def predictions(self, model: Model, data: Encoded) -> Iterator[tuple[np.ndarray, Packed, Tensor]]:
        """(rows, their texts, states [T, hidden]) of each forward pass over all of `data`."""
        done = 0
        for rows in self.forwards(data.lengths):
            packed = pack(data.texts(rows), model.device)
            yield rows, packed, model.backbone.states(packed)
            self.progress(done := done + len(rows), len(data))


def linear_head(hidden_size: int, labels: int) -> nn.Linear:
    """float32, weights from N(0, 0.02), no bias to begin with."""
    head = nn.Linear(hidden_size, labels)
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head


def backward_in_parts(task: Task, model: Model, data: Encoded, rows: np.ndarray, loss_sum, count: int) -> float:
    """`Task.backward` where the loss is a sum over `count` predictions, each of which sees one text.

    `loss_sum(packed, states, rows)` gives the sum over the predictions of these rows, float32.
    """
    total = torch.zeros((), device=model.device)
    for some in task.forwards(data.lengths[rows]):
        packed = pack(data.texts(rows[some]), model.device)
        loss = loss_sum(packed, model.backbone.states(packed), rows[some]) / max(1, count)
        loss.backward()
        total += loss.detach()
    return total.item()


def mean_states(states: Tensor, packed: Packed) -> Tensor:
    """float32[texts, hidden]: the mean state of each text's tokens. Its sums have one order, on an accelerator too."""
    lengths = torch.tensor(packed.lengths, device=states.device)
    return torch.segment_reduce(states.float(), "mean", lengths=lengths, unsafe=True)


def finite(predicted: Tensor) -> Tensor:
    """`predicted` itself. Raises NotFinite where a number in it is nan or inf."""
    if not bool(torch.isfinite(predicted).all()):
        raise NotFinite("what the model predicts is nan or inf")
    return predicted


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


def column(values: np.ndarray) -> list[float]:
    """As JSON has it."""
    return [float(value) for value in values]
