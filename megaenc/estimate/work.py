"""Computation of each objective and phase of a run."""

from collections import Counter
from dataclasses import dataclass

from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.estimate.length_model import LengthModel
from megaenc.model.config import ModelConfig
from megaenc.objectives import GPTBERT, Attention, MaskedDiffusion, Objective, Schedule
from megaenc.training.config import PretrainConfig


@dataclass(frozen=True)
class ObjectiveWork:
    """Mean work of one pack under an objective; counts may be fractional.

    `compute_objective_work` builds it. `objective` is its text, `tokens` the pack's length,
    `predicted` the positions whose logits are computed. `squares` is the sum of the squared
    document lengths, `local_pairs` the ordered pairs of tokens of a document within the window of
    local layers, 0 without such layers; `visible_squares` and `visible_local_pairs` count only
    parts with bidirectional attention. `selects_rows` is whether the last layer computes only the
    predicted positions after its attention, `classes` the size of an objective's own output layer,
    0 if it predicts tokens.
    """

    objective: str
    tokens: int
    """tokens of a pack"""
    predicted: float
    """positions whose logits are computed"""
    squares: float
    """sum of the squared document lengths"""
    visible_squares: float
    """sum of the squared lengths of bidirectional parts: full documents, none, or prefixes"""
    local_pairs: float = 0.0
    """ordered pairs of tokens in a document within the window of local layers; 0 without such
    layers"""
    visible_local_pairs: float = 0.0
    """those in bidirectional parts"""
    selects_rows: bool = True
    """whether the last layer computes only the predicted positions after its attention"""
    classes: int = 0
    """classes of an objective with logits of its own; 0 if it predicts tokens"""

    def body_flops(self, shape: ModelConfig) -> float:
        """Return the FLOPs of the layers' matrices in a pack, forward and backward.

        Attention products, output layer and prediction head are not counted (see `attention_flops`
        and `head_flops`), nor is recomputation. All positions are computed in all layers;
        `unneeded_flops` is not subtracted.
        """
        return float(shape.layer_flops_per_token() * self.tokens)

    @property
    def unneeded_tokens(self) -> float:
        """Return the tokens of a pack that the last layer leaves out after its attention.

        It is 0 unless `selects_rows`, or if nothing is predicted.
        """
        return self.tokens - self.predicted if self.selects_rows and self.predicted else 0.0

    def unneeded_flops(self, shape: ModelConfig) -> float:
        """Return the FLOPs, forward and backward, that `unneeded_tokens` save in a pack."""
        return self.unneeded_tokens * shape.unselected_flops_per_token()

    def attention_flops(self, shape: ModelConfig) -> float:
        """Return all layers' attention FLOPs of a pack, forward and backward.

        They follow from the squared lengths of documents and bidirectional parts, and in local
        layers from the pairs of tokens within the window. Causal attention costs half.
        """
        flops_per_pair = shape.attention_flops(1, prefix=0) // shape.num_layers
        local = shape.local_layers
        global_flops = (
            flops_per_pair * (shape.num_layers - local) * (self.squares + self.visible_squares)
        )
        return global_flops + flops_per_pair * local * (self.local_pairs + self.visible_local_pairs)

    def head_flops(self, shape: ModelConfig, vocab_size: int) -> float:
        """Return the FLOPs of a pack's output layer and prediction head, in both passes.

        The passes are forward and backward. Only the predicted positions count.

        Args:
            vocab_size: Vocabulary without padding; unused if the objective has its own classes.
        """
        return float(shape.head_flops(self.classes or vocab_size, self.predicted))

    def flops(self, shape: ModelConfig, vocab_size: int) -> float:
        """Return all FLOPs of a pack, forward and backward.

        `unneeded_flops` are subtracted. Recomputation and padding of the vocabulary do not count.

        Args:
            vocab_size: As in `head_flops`.
        """
        body = self.body_flops(shape) - self.unneeded_flops(shape)
        return body + self.attention_flops(shape) + self.head_flops(shape, vocab_size)


@dataclass(frozen=True)
class PhaseWork:
    """Work of one phase of the schedule, from step `first` to step `last`, inclusive.

    `build_phases` builds it. Steps are counted from 1; `text` is the phase in the schedule. Each
    step reads its packs `passes` times, with an objective for each pass. `parts` has (work of an
    objective, mean number of its steps), which add up to the steps of the phase: a pass is 1 /
    `passes` of a step. `batches` has (global batch size, steps with it).
    """

    text: str
    first: int
    last: int
    parts: tuple[tuple[ObjectiveWork, float], ...]
    batches: tuple[tuple[int, int], ...]
    """(global batch size, steps with it); one pair without --rampup-batch-size"""
    passes: int = 1
    """number of times that a step reads its packs, each time with an objective of its own"""


def build_schedule(config: PretrainConfig, vocab_size: int) -> Schedule:
    """Return a run's objective schedule, for sizes and steps only.

    Its vocabulary has `vocab_size` ids, without padding, but placeholders as EOS, mask and special
    tokens.

    Raises:
        InputError: The schedule is wrong.
    """
    # Parsing needs a mask token.
    any_vocabulary = Vocabulary(vocab_size, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")
    return Schedule.build(
        config.objective_schedule, config.total_iters, any_vocabulary, config.seed
    )


def build_phases(config: PretrainConfig, vocab_size: int, docs: LengthModel) -> list[PhaseWork]:
    """Return a PhaseWork for each phase of a run's schedule, in order.

    Of a branch, steps up to --branch-at are left out, and phases that have no others.

    Args:
        vocab_size: Vocabulary without padding.
        docs: Document lengths of the training data.

    Raises:
        InputError: The schedule is wrong.
    """
    schedule = build_schedule(config, vocab_size)
    phases = []
    for phase in schedule.phases:
        first = max(phase.first_step, (config.start.branch_at or 0) + 1)
        last = phase.last_step
        if first <= last:
            pairs = zip(phase.choices, phase.fractions, strict=True)
            works = [
                (
                    compute_objective_work(choice.start, choice.end, config, docs),
                    fraction * (last - first + 1),
                )
                for choice, fraction in pairs
            ]
            batches = _count_batch_sizes(config, first, last)
            phases.append(PhaseWork(phase.text, first, last, tuple(works), batches, phase.passes))
    return phases


def compute_objective_work(
    start: Objective, end: Objective, config: PretrainConfig, docs: LengthModel
) -> ObjectiveWork:
    """Return a pack's mean work under an objective whose options change linearly.

    Args:
        start: The objective with its options at the first step.
        end: The same objective with those at the last step; `start` if they are constant.
        docs: Document lengths of the training data.
    """
    length = config.data.seq_length
    unpredicted = 0.0
    special = docs.special
    if start.shift:
        unpredicted = docs.pieces  # a document's first token has no predecessor
        special -= docs.special_starts  # counted in `unpredicted`
    text = length - unpredicted - special
    predicted = length - unpredicted  # `clm` also predicts the ends of documents
    is_bidirectional = start.attention is Attention.BIDIRECTIONAL
    visible_squares = is_bidirectional * docs.squares
    visible_local = is_bidirectional * docs.local_pairs
    if hasattr(start, "mask"):
        predicted = (start.mask + end.mask) / 2 * text
    if isinstance(start, MaskedDiffusion):
        predicted = (start.low + start.high + end.low + end.high) / 4 * text
    if isinstance(start, GPTBERT):
        causal = (start.causal + end.causal) / 2
        predicted += causal * (text - predicted)
        visible_squares = (1 - causal) * docs.squares
        visible_local = (1 - causal) * docs.local_pairs
    elif start.attention is Attention.PREFIX:
        low = getattr(start, "low", 0.0)
        high = getattr(start, "high", 1.0)
        # A prefix is rounded down.
        rest = length * (1 - (low + high) / 2) + docs.pieces / 2 - special
        predicted = min(text, rest)
        visible_squares = docs.squares * (low * low + low * high + high * high) / 3
        # Exact if documents are much longer than the window.
        visible_local = docs.local_pairs * (low + high) / 2
    return ObjectiveWork(
        objective=start.describe(end=end),
        tokens=length,
        predicted=max(predicted, 0.0),
        squares=docs.squares,
        visible_squares=visible_squares,
        local_pairs=docs.local_pairs,
        visible_local_pairs=visible_local,
        selects_rows=config.layout.selects_rows,
        classes=start.classes,
    )


def _count_batch_sizes(
    config: PretrainConfig, first: int, last: int
) -> tuple[tuple[int, int], ...]:
    """Return the global batch sizes of steps `first` to `last`, and the steps of each."""
    if not config.rampup_batch_size:  # avoids a slow import of megatron-core
        return ((config.global_batch_size, last - first + 1),)
    sizes = config.batch_sizes
    growing = min(last, len(sizes.starts))
    counts = Counter(sizes.size(step) for step in range(first, growing + 1))
    counts[sizes.full] += max(0, last - max(first - 1, growing))
    return tuple(counts.items())
