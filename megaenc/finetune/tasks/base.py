"""The base of the four families of tasks: model with head, loss of a batch in parts that fit, predictions, scores."""

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
"""The target of what is not learned, as cross_entropy has it."""


@dataclass(frozen=True)
class Scores(SplitScores):
    """Scores of one split, in the order in which results have them, with those of the examples."""

    scores_i: list[float]
    """The study's metric of each example, in the order of the examples."""
    metrics_i: dict[str, list[float]]
    """What the standard metrics are made of, by example."""

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
        """Average what each example scores; `metrics` are given only where they are not the means of `metrics_i`."""
        by_example = {name: [float(value) for value in values] for name, values in metrics_i.items()}
        metrics = metrics or {name: float(np.mean(values)) for name, values in metrics_i.items()}
        return cls(float(np.mean(scores_i)), metrics, collapsed, baseline, [float(score) for score in scores_i], by_example)


class NonFinitePredictionError(ArithmeticError):
    """A prediction that is nan or inf: the last update was one too many."""


class TaskModel(nn.Module):
    """A backbone and the task's head on its states."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def compute_logits(self, states: Tensor) -> Tensor:
        """float32[..., labels] of states [..., hidden]; the head computes in the type of its own weights."""
        return self.head(states.to(self.head.weight.dtype)).float()


class FinetuneTask(ABC):
    """A family of tasks on one data set. Unless a family has its own loss, it is the cross-entropy of `outputs` and `targets`."""

    family: ClassVar[TaskFamily]

    def __init__(self, dataset: "Dataset", protocol: FinetuneConfig) -> None:
        self.dataset = dataset
        self.protocol = protocol
        self.progress: Callable[[int, int], None] = lambda done, total: None
        """Is told how many texts of an evaluation are read, and of how many."""

    @abstractmethod
    def encode(self, examples: Examples, encoder: TextEncoder) -> TokenizedSplit:
        """Tokenise `examples` for the other methods; a pure function of them, the encoder and the task's labels."""

    @abstractmethod
    def evaluate(self, model: TaskModel, data: TokenizedSplit, examples: Examples) -> Scores:
        """Predict all of a split in one pass and score it; `data` is what `encode` made of `examples`."""

    def build_head(self, hidden_size: int) -> nn.Module:
        """Draw a new head in float32 by torch's own generator: weights from N(0, 0.02), zero bias."""
        head = nn.Linear(hidden_size, self.output_count)
        nn.init.normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    @property
    def output_count(self) -> int:
        """The numbers that the head gives: one for each label."""
        return len(self.dataset.labels)

    def count_examples(self, data: TokenizedSplit) -> int:
        """Return the number of training examples."""
        return len(data)

    def compute_outputs(self, model: TaskModel, packed: PackedTexts) -> Tensor:
        """Compute the logits of each token of a pack, float32[tokens, labels]; in some families, an output of each text."""
        return model.compute_logits(model.backbone.compute_states(packed))

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return int64: the label of each output of these rows, or NO_LABEL."""
        raise NotImplementedError

    def backward(self, model: TaskModel, data: TokenizedSplit, rows: np.ndarray) -> float:
        """Add the gradients of the mean loss over all that the batch `rows` (int[batch]) predicts, and return that loss."""
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
        """Return the places in `lengths` of the texts of each forward pass."""
        return batch_by_tokens(lengths, self.protocol.tokens_per_forward)

    @torch.inference_mode()
    def predict(
        self, model: TaskModel, data: TokenizedTexts, rows: np.ndarray, *, before: int = 0, after: int = 0
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield (places in `rows`, their `outputs`) of each forward pass over `rows`, without dropout.

        `before` and `after` say how many other texts are read, for `progress`. Raises NotFinite for nan and inf.
        """
        model.eval()
        done = before
        for part in self.split_into_forwards(data.lengths[rows]):
            outputs = self.compute_outputs(model, pack_texts(data.gather_rows(rows[part]), model.device))
            if not bool(torch.isfinite(outputs).all()):
                raise NonFinitePredictionError("what the model predicts is nan or inf")
            yield part, outputs
            self.progress(done := done + len(part), before + len(rows) + after)

    def predict_texts(self, model: TaskModel, data: TokenizedTexts) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (row, float32[tokens, labels]) of every text, where outputs are of tokens."""
        for rows, outputs in self.predict(model, data, np.arange(len(data))):
            yield from zip(rows, np.split(outputs.cpu().numpy(), np.cumsum(data.lengths[rows])[:-1]), strict=True)

    def describe_constant_prediction(self, predicted: np.ndarray, gold: np.ndarray) -> str | None:
        """Word what is wrong with predictions that are one label for everything; None if they are not, or that is right."""
        collapsed = (predicted == predicted[0]).all() and not (gold == gold[0]).all()
        return f"constant prediction {self.dataset.labels[predicted[0]]}" if collapsed else None


def mean_pool(states: Tensor, packed: PackedTexts) -> Tensor:
    """Return float32[texts, hidden]: the mean state of each text's tokens. Its sums have one order, on an accelerator too."""
    lengths = torch.tensor(packed.lengths, device=states.device)
    return torch.segment_reduce(states.float(), "mean", lengths=lengths, unsafe=True)
