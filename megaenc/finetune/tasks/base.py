"""Base class of the task families: model with head, loss, predictions and scores."""

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
from megaenc.finetune.model.task_class import NativeHead
from megaenc.finetune.results.files import SplitScores
from megaenc.finetune.tokenized import TextEncoder, TokenizedSplit, TokenizedTexts

if TYPE_CHECKING:
    from megaenc.finetune.datasets.registry import Dataset

IGNORE_INDEX = -100
"""Target value that cross_entropy ignores."""


@dataclass(frozen=True)
class Scores(SplitScores):
    """SplitScores for results.json, with score and metrics of each example.

    `scores_i`, and `metrics_i` by metric name, have a value for each example, in order; both are
    empty in regression and MULTI_LABEL. `from_examples` builds it from both, whose means become
    `score` and (by default) `metrics`, and from `collapsed` and `baseline`.
    """

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
        """Return Scores whose `score` is the mean of `scores_i`, at least one.

        Args:
            scores_i: The study's score of each example.
            metrics_i: Value of each example by metric name.
            collapsed: Reason if the predictions are worthless, else None.
            baseline: Score ("score") and metrics of the trivial predictor, by name.
            metrics: Metrics by name; None: the means of `metrics_i`.
        """
        by_example = {
            name: [float(value) for value in values] for name, values in metrics_i.items()
        }
        metrics = metrics or {name: float(np.mean(values)) for name, values in metrics_i.items()}
        return cls(
            float(np.mean(scores_i)),
            metrics,
            collapsed,
            baseline,
            [float(score) for score in scores_i],
            by_example,
        )


class NonFinitePredictionError(ArithmeticError):
    """ArithmeticError that a model's predictions contain NaN or inf."""


class TaskModel(nn.Module):
    """Module of a `backbone` and the `head` of a task.

    The head is a linear layer, a NativeHead or, in retrieval, the identity. Tasks call both parts
    (`FinetuneTask.compute_outputs`); the module itself has no forward.
    """

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    @property
    def device(self) -> torch.device:
        """Return the torch device of the model's weights."""
        return next(self.parameters()).device

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the logits, float32[..., labels], of `states` [..., hidden_size].

        The head must be linear, and computes in its own dtype.
        """
        return self.head(states.to(self.head.weight.dtype)).float()


class FinetuneTask(ABC):
    """Base class of a task family on one data set: tokens, loss and scores.

    Subclasses are in `TASKS`, by `family`, and are built from a `dataset` and the hyperparameters
    `protocol`. `encode` tokenizes examples, `backward` computes the loss (`sum_loss`, cross-entropy
    by default) and gradients, `evaluate` predicts and scores. Before it `calibrate`, on the
    validation split, chooses what evaluations use, such as a threshold; after it, before weights
    change, `clear_cache` drops cached outputs. `progress`, which a caller may set, is called with
    the numbers of predicted and of all texts of an evaluation.
    """

    family: ClassVar[TaskFamily]
    threshold: float | None = None
    """Smallest probability of a predicted label in MULTI_LABEL, else None."""

    def __init__(self, dataset: "Dataset", protocol: FinetuneConfig) -> None:
        self.dataset = dataset
        self.protocol = protocol
        self.progress: Callable[[int, int], None] = lambda done, total: None
        """Callback (predicted texts, total texts) of an evaluation."""

    @abstractmethod
    def encode(self, examples: Examples, encoder: TextEncoder) -> TokenizedSplit:
        """Return the tokenized `examples`, with targets as columns.

        Subclasses implement it. The order is that of the examples; too long ones are cut to
        `encoder.max_length` tokens. Only examples, encoder and labels determine the result, which
        may thus be cached.
        """

    @abstractmethod
    def evaluate(self, model: TaskModel, data: TokenizedSplit, examples: Examples) -> Scores:
        """Return the Scores of the model on a split, and leave the model in eval mode.

        Subclasses implement it.

        Args:
            data: The split's `examples` as tokenized by `encode`.

        Raises:
            NonFinitePredictionError: A prediction is NaN or inf.
        """

    def calibrate(self, model: TaskModel, data: TokenizedSplit) -> None:
        """Choose a value that evaluations of `model` use, on the validation split `data`.

        The default does nothing; MULTI_LABEL chooses its threshold with --threshold auto.

        Raises:
            NonFinitePredictionError: A prediction is NaN or inf.
        """
        return

    def clear_cache(self) -> None:
        """Drop cached outputs of the model: in retrieval, the embeddings of documents.

        Call it after an evaluation, before the weights change: later evaluations of the same model
        and documents use them.
        """
        return

    def count_labels(self, data: TokenizedSplit) -> np.ndarray | None:
        """Return the number of texts or words of each label in `data`.

        Returns:
            int64[labels], or None in regression, QA, IR and reranking.
        """
        return None

    def build_head(self, hidden_size: int) -> nn.Module:
        """Return a new linear layer, hidden_size to `output_count`, in float32.

        It is on torch's default device. Weights are random (sd 0.02) by torch's generator, the bias
        is zero. Retrieval returns the identity.
        """
        head = nn.Linear(hidden_size, self.output_count)
        nn.init.normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the names of the head's outputs, in order: the labels of the data set.

        They are OUTSIDE and INSIDE in QA, "score" in regression and reranking, and empty in
        retrieval, which has no head.
        """
        return self.dataset.labels

    @property
    def output_count(self) -> int:
        """Return the number of outputs of the head, that of `label_names`."""
        return len(self.dataset.labels)

    def count_examples(self, data: TokenizedSplit) -> int:
        """Return the number of examples in the tokenized training split.

        `backward` takes their indices.
        """
        return len(data)

    def compute_outputs(self, model: TaskModel, packed: PackedTexts) -> Tensor:
        """Return the logits of each token of a pack, float32[tokens, labels].

        Classification has logits of each text, float32[texts, labels], and retrieval embeddings,
        float32[texts, hidden_size].
        """
        states = model.backbone.compute_states(packed)
        if isinstance(model.head, NativeHead):
            return model.head(states, packed)
        return model.compute_logits(self.pool(states, packed))

    def pool(self, states: Tensor, packed: PackedTexts) -> Tensor:
        """Return the states that a linear head reads: `states` of all tokens.

        Classification overrides it with one pooled state per text.
        """
        return states

    def get_targets(self, data: TokenizedTexts, rows: np.ndarray) -> np.ndarray:
        """Return the target of each output of the texts `rows`, in their order.

        `sum_loss` takes them. Subclasses that use the default `backward` override it.

        Returns:
            int64[outputs], label indices, IGNORE_INDEX for outputs without a label; float32 of
            the shape of the outputs in regression, MULTI_LABEL and reranking.

        Raises:
            NotImplementedError: The subclass does not override it, as retrieval, which has a loss
                of its own.
        """
        raise NotImplementedError

    def sum_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over `targets`, a scalar: cross-entropy by default.

        The default leaves out targets that equal IGNORE_INDEX.

        Args:
            outputs: Result of `compute_outputs`.
            targets: Result of `get_targets` as a tensor on the device of `outputs`.
        """
        return cross_entropy(outputs, targets, ignore_index=IGNORE_INDEX, reduction="sum")

    def backward(self, model: TaskModel, data: TokenizedSplit, rows: np.ndarray) -> float:
        """Backpropagate the mean loss over targets of the texts `rows`; return the loss.

        Gradients are added to those that parameters have. Texts that do not fit in one forward pass
        take several. The model must be in train mode. The loss is 0 if no text has a target; NaN
        and inf are returned.

        Args:
            data: Training split as tokenized by `encode`.
            rows: Indices of the batch's examples, int64.
        """
        targets = self.get_targets(data, rows)
        is_index = targets.dtype.kind == "i"  # a number may equal IGNORE_INDEX
        count = max(1, int((targets != IGNORE_INDEX).sum()) if is_index else targets.size)
        total = torch.zeros((), device=model.device)
        for part in self.split_into_forwards(data.lengths[rows]):
            outputs = self.compute_outputs(
                model, pack_texts(data.gather_rows(rows[part]), model.device)
            )
            targets = torch.from_numpy(self.get_targets(data, rows[part])).to(outputs.device)
            loss = self.sum_loss(outputs, targets) / count
            loss.backward()
            total += loss.detach()
        return total.item()

    def split_into_forwards(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Return the text indices, int64, of each forward pass, shorter texts first.

        A pass has at most `protocol.tokens_per_forward` tokens, or one longer text.

        Args:
            lengths: Number of tokens of each text.
        """
        return batch_by_tokens(lengths, self.protocol.tokens_per_forward)

    @torch.inference_mode()
    def predict(
        self,
        model: TaskModel,
        data: TokenizedTexts,
        rows: np.ndarray,
        *,
        before: int = 0,
        after: int = 0,
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield (indices into `rows`, outputs) of each forward pass in eval mode.

        Outputs are those of `compute_outputs`, on the model's device, in the order of the indices.
        Passes of shorter texts come first. The model stays in eval mode; no gradients are recorded.

        Args:
            rows: Indices of texts in `data`.
            before: Number of other texts that count as done in `progress`.
            after: Number of other texts that follow.

        Raises:
            NonFinitePredictionError: An output is NaN or inf.
        """
        model.eval()
        done = before
        for part in self.split_into_forwards(data.lengths[rows]):
            outputs = self.compute_outputs(
                model, pack_texts(data.gather_rows(rows[part]), model.device)
            )
            if not bool(torch.isfinite(outputs).all()):
                raise NonFinitePredictionError("a prediction of the model is NaN or inf")
            yield part, outputs
            done += len(part)
            self.progress(done, before + len(rows) + after)

    def predict_texts(
        self, model: TaskModel, data: TokenizedTexts
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the index and the token logits of each text in `data`, shortest first.

        The logits are float32[tokens, labels], on the CPU.

        Raises:
            NonFinitePredictionError: A logit is NaN or inf.
        """
        for rows, outputs in self.predict(model, data, np.arange(len(data))):
            yield from zip(
                rows,
                np.split(outputs.cpu().numpy(), np.cumsum(data.lengths[rows])[:-1]),
                strict=True,
            )

    def describe_constant_prediction(self, predicted: np.ndarray, gold: np.ndarray) -> str | None:
        """Return "constant prediction LABEL" if all predictions are one label.

        Args:
            predicted: int64[examples], label indices, at least one.
            gold: int64[examples], label indices.

        Returns:
            The text, or None if predictions differ, or if all gold labels are equal.
        """
        collapsed = (predicted == predicted[0]).all() and not (gold == gold[0]).all()
        return f"constant prediction {self.dataset.labels[predicted[0]]}" if collapsed else None


def mean_pool(states: Tensor, packed: PackedTexts) -> Tensor:
    """Return the mean of each text's token states, float32[texts, hidden_size].

    The mean is deterministic on GPUs too.

    Args:
        states: States of the tokens of `packed`, [T, hidden_size].
    """
    lengths = torch.tensor(packed.lengths, device=states.device)
    return torch.segment_reduce(states.float(), "mean", lengths=lengths, unsafe=True)


POOLING_FUNCTIONS: dict[str, Callable[[Tensor, PackedTexts], Tensor]] = {
    "mean": mean_pool,
    "cls": lambda states, packed: states[packed.cu_seqlens[:-1].long()].float(),
    "lasttoken": lambda states, packed: states[packed.cu_seqlens[1:].long() - 1].float(),
}
"""Functions from the states of packed texts to one state per text, float32[texts, hidden_size], by
the name of --pooling."""
