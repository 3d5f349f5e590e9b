"""Base class of the task families: model with head, loss in micro-batches, predictions and scores."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import Examples, TaskFamily
from megaenc.finetune.model.backbone import Backbone, PackedTexts, batch_by_tokens, pack_texts
from megaenc.finetune.results.files import SplitScores
from megaenc.finetune.tokenized import TextEncoder, TokenizedSplit, TokenizedTexts

if TYPE_CHECKING:
    from megaenc.finetune.datasets.registry import Dataset

IGNORE_INDEX = -100
"""Target value that cross_entropy ignores."""


@dataclass(frozen=True)
class Scores(SplitScores):
    """Scores of one split, with those of each example, in the field order of results.json."""

    scores_i: list[float]
    """The study's metric of each example, in order."""
    metrics_i: dict[str, list[float]]
    """Values of each example behind the standard metrics, by metric name."""

    @classmethod
    def from_examples(
        cls,
        scores_i: Sequence[float],
        metrics_i: Mapping[str, Sequence[float]],
        *,
        collapsed: str | None,
        baseline: dict[str, float],
        metrics: dict[str, float] | None = None,
    ) -> Self:
        """Build Scores from per-example values; `metrics` defaults to the means of `metrics_i`."""
        by_example = {name: [float(value) for value in values] for name, values in metrics_i.items()}
        metrics = metrics or {name: float(np.mean(values)) for name, values in metrics_i.items()}
        return cls(float(np.mean(scores_i)), metrics, collapsed, baseline, [float(score) for score in scores_i], by_example)


class NonFinitePredictionError(ArithmeticError):
    """Error of NaN or inf in a model's predictions."""


class TaskModel(nn.Module):
    """A backbone with the head of a task."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device

    def compute_logits(self, states: Tensor) -> Tensor:
        """Apply the head, in the dtype of its weights, to `states` [..., hidden_size]; return float32[..., labels]."""
        return self.head(states.to(self.head.weight.dtype)).float()


class FinetuneTask(ABC):
    """A task family on one data set; by default the loss is the cross-entropy of `compute_outputs` and `get_targets`."""

    family: ClassVar[TaskFamily]

    def __init__(self, dataset: "Dataset", protocol: FinetuneConfig) -> None:
        self.dataset = dataset
        self.protocol = protocol
        self.progress: Callable[[int, int], None] = lambda done, total: None
        """Callback (predicted texts, total texts) of an evaluation."""

    @abstractmethod
    def encode(self, examples: Examples, encoder: TextEncoder) -> TokenizedSplit:
        """Tokenize `examples`, with targets as columns; a pure function of examples, encoder and the task's labels."""

    @abstractmethod
    def evaluate(self, model: TaskModel, data: TokenizedSplit, examples: Examples) -> Scores:
        """Predict a split and compute its scores; `data` is the result of `encode(examples, ...)`."""

    def build_head(self, hidden_size: int) -> nn.Module:
        """Build a float32 head with random weights, normal with standard deviation 0.02, and zero bias."""
        head = nn.Linear(hidden_size, self.output_count)
        nn.init.normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    @property
    def output_count(self) -> int:
        """Return the number of outputs of the head: one per label."""
        return len(self.dataset.labels)

    def count_examples(self, data: TokenizedSplit) -> int:
        """Return the number of training examples."""
        return len(data)

    def compute_outputs(self, model: TaskModel, packed: PackedTexts) -> Tensor:
        """Compute the logits of each token of a pack, float32[tokens, labels]; some families have one output per text."""
        return model.compute_logits(model.backbone.compute_states(packed))

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return the label of each output of `rows`, int64[outputs], or IGNORE_INDEX."""
        raise NotImplementedError

    def backward(self, model: TaskModel, data: TokenizedSplit, rows: np.ndarray) -> float:
        """Backpropagate the mean loss of the batch `rows` (int[batch]), in several forward passes if needed; return the loss."""
        count = max(1, int((self.get_targets(data, rows) != IGNORE_INDEX).sum()))
        total = torch.zeros((), device=model.device)
        for part in self.split_into_forwards(data.lengths[rows]):
            outputs = self.compute_outputs(model, pack_texts(data.gather_rows(rows[part]), model.device))
            targets = torch.from_numpy(self.get_targets(data, rows[part])).to(outputs.device)
            loss = cross_entropy(outputs, targets, ignore_index=IGNORE_INDEX, reduction="sum") / count
            loss.backward()
            total += loss.detach()
        return total.item()

    def split_into_forwards(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Group texts of `lengths` tokens into forward passes; return the indices of each, int64."""
        return batch_by_tokens(lengths, self.protocol.tokens_per_forward)

    @torch.inference_mode()
    def predict(
        self, model: TaskModel, data: TokenizedTexts, rows: np.ndarray, *, before: int = 0, after: int = 0
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield (indices into `rows`, their outputs) of each forward pass, in eval mode.

        `before` and `after` are numbers of other texts to count in `progress`. Raises NonFinitePredictionError for NaN or inf.
        """
        model.eval()
        done = before
        for part in self.split_into_forwards(data.lengths[rows]):
            outputs = self.compute_outputs(model, pack_texts(data.gather_rows(rows[part]), model.device))
            if not bool(torch.isfinite(outputs).all()):
                raise NonFinitePredictionError("a prediction of the model is NaN or inf")
            yield part, outputs
            self.progress(done := done + len(part), before + len(rows) + after)

    def predict_texts(self, model: TaskModel, data: TokenizedTexts) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (row, token logits float32[tokens, labels]) of every text in `data`."""
        for rows, outputs in self.predict(model, data, np.arange(len(data))):
            yield from zip(rows, np.split(outputs.cpu().numpy(), np.cumsum(data.lengths[rows])[:-1]), strict=True)

    def describe_constant_prediction(self, predicted: np.ndarray, gold: np.ndarray) -> str | None:
        """Return the text "constant prediction LABEL" if all predictions are one label although gold labels differ, else None."""
        collapsed = (predicted == predicted[0]).all() and not (gold == gold[0]).all()
        return f"constant prediction {self.dataset.labels[predicted[0]]}" if collapsed else None


def mean_pool(states: Tensor, packed: PackedTexts) -> Tensor:
    """Return the mean of each text's token states, float32[texts, hidden_size]; deterministic on GPUs too."""
    lengths = torch.tensor(packed.lengths, device=states.device)
    return torch.segment_reduce(states.float(), "mean", lengths=lengths, unsafe=True)
