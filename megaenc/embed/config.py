"""Configuration of embedding and of contrastive training."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

from megaenc.data.tokenizer.special_tokens import SpecialTokensChoice
from megaenc.errors import InputError
from megaenc.flags import (
    Bounds,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
)

TRAINING_DETAILS = "training.json"
"""File next to a trained model with its settings, digests and counts."""
TRAINING_LOG = "training.jsonl"
"""File next to a trained model with the losses by step."""


class NonFiniteTrainingError(ArithmeticError):
    """ArithmeticError of `embed train`: a loss or gradient norm is NaN or inf."""


@dataclass(frozen=True)
class EmbeddingFlags:
    """Flags for embedding texts with a model, of `embed eval` and `embed mine`.

    `query_prefix` and `document_prefix`, None for the model's own and "" for none, stand before
    texts. 0 as `max_length` (tokens) and "" as `attention` and `special_tokens` stand for the
    model's own values too (see `override_config`). "" as `precision` is bf16 if the device supports
    it, else fp32; 0 as `truncate_dim` is the full size. `batch_size` is the number of texts of a
    forward pass.
    """

    query_prefix: str | None = None
    """text before each query of retrieval; by default that of a sentence-transformers directory,
    else none"""
    document_prefix: str | None = None
    """text before each document of retrieval; by default that of a sentence-transformers directory,
    else none"""
    max_length: NonNegativeInt = 0
    """maximum tokens of a text; longer ones are cut; 0: that of a sentence-transformers directory,
    else at most 512"""
    truncate_dim: NonNegativeInt = 0
    """first numbers of an embedding that are used, as of models trained with --matryoshka-dims; 0:
    all"""
    attention: Literal["", "bidirectional", "causal"] = ""
    """direction of attention; by default the model's own in a sentence-transformers directory, else
    bidirectional"""
    special_tokens: SpecialTokensChoice = ""
    """special tokens around each text. template: those that the tokenizer puts there, such as [CLS]
    ... [SEP]; eod: EOS, or without one SEP, after it; none: only the text. By default what the
    tokenizer does"""
    precision: Literal["", "bf16", "fp32"] = ""
    """dtype of the weights; by default bf16 if the device supports it, else fp32"""
    batch_size: PositiveInt = 32
    """texts of a forward pass, of similar length and without padding"""


RULES = tuple(field.name for field in fields(EmbeddingFlags) if field.name != "batch_size")
"""Flags that change embeddings by more than rounding."""


@dataclass(frozen=True)
class ContrastiveConfig:
    """Hyperparameters of contrastive training: batch, steps, AdamW, loss, text length.

    Each field is a flag. `batch_size` pairs make a step; training ends after `epochs` or
    `max_steps` (0: no limit). `learning_rate` is the peak after `warmup`, a fraction of the steps;
    AdamW also has `weight_decay`, adam_ flags and `clip_grad` (0: none). The loss has
    `temperature`, `symmetric`, hard `negatives` (0: none) and `matryoshka_dims`, a tuple of sizes.
    `query_prefix`, `document_prefix` (None: the model's own, "": none), `max_length` (0: the
    model's own), `attention`, `pooling` and `special_tokens` ("": the model's own) are rules for
    embedding. `precision` "" is bf16 if the device supports it, else fp32. `tokens_per_forward`
    limits memory; `seed` and `threads` affect the numbers, too.
    """

    batch_size: Annotated[int, Bounds(low=2)] = 256
    """pairs of a step, over all processes; the other documents of the batch are the negatives"""
    epochs: PositiveFloat = 1.0
    """maximum number of passes over the pairs; training ends at --max-steps or --epochs, the
    earlier of the two"""
    max_steps: NonNegativeInt = 0
    """maximum number of steps; 0: no limit but --epochs"""
    learning_rate: PositiveFloat = 1e-4
    """peak learning rate, reached at the end of the warmup"""
    warmup: FractionBelowOne = 0.1
    """fraction of the steps in which the learning rate rises linearly from 0; it falls linearly to
    0 over the rest"""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay of matrices and embeddings; norms and biases are not decayed"""
    adam_beta1: FractionBelowOne = 0.9
    """AdamW's decay rate of the gradients' mean"""
    adam_beta2: FractionBelowOne = 0.999
    """AdamW's decay rate of the squared gradients' mean"""
    adam_eps: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the denominator"""
    clip_grad: NonNegativeFloat = 1.0
    """maximum gradient norm; larger gradients are scaled down to it; 0 disables clipping"""
    temperature: PositiveFloat = 0.05
    """divisor of the cosine similarities in the InfoNCE loss"""
    symmetric: bool = False
    """add the loss of finding each document's query among the queries of the batch, and halve the
    sum"""
    negatives: NonNegativeInt = 1
    """hard negatives of each pair that are used at most, the first ones; 0: only the documents of
    the batch"""
    matryoshka_dims: tuple[PositiveInt, ...] = ()
    """sizes to which embeddings may be cut afterwards; the loss is the sum over these and the full
    size"""
    query_prefix: str | None = None
    """text before each query, in training and in the exported model's prompt `query`; by default
    that of a sentence-transformers directory, else none"""
    document_prefix: str | None = None
    """text before each document, in training and in the exported model's prompt `document`; by
    default that of a sentence-transformers directory, else none"""
    max_length: NonNegativeInt = 0
    """maximum tokens of a text; longer ones are cut; 0: that of a sentence-transformers directory,
    else at most 512"""
    attention: Literal["", "bidirectional", "causal"] = ""
    """direction of attention; by default the model's own in a sentence-transformers directory, else
    bidirectional"""
    pooling: Literal["", "mean", "cls", "lasttoken"] = ""
    """pooling of the token states; by default that of a sentence-transformers directory, else
    mean"""
    special_tokens: SpecialTokensChoice = ""
    """special tokens around each text. template: those that the tokenizer puts there, such as [CLS]
    ... [SEP]; eod: EOS, or without one SEP, after it; none: only the text. By default what the
    tokenizer does, and eod if it adds nothing, unless it is a sentence-transformers directory"""
    precision: Literal["", "bf16", "fp32"] = ""
    """bf16: compute in bfloat16 with float32 master weights; by default bf16 if the device supports
    it, else fp32"""
    tokens_per_forward: PositiveInt = 16384
    """maximum tokens of a forward pass; larger batches use gradient caching; a text is never
    split"""
    seed: Seed = 0
    """seed of the data order and dropout"""
    threads: PositiveInt = 1
    """CPU threads of a process; the last bits of the result depend on this number"""

    def check(self) -> None:
        """Check that each size of `matryoshka_dims` is given once.

        Raises:
            InputError: A size is given twice.
        """
        for value in self.matryoshka_dims:
            if self.matryoshka_dims.count(value) > 1:
                raise InputError(f"--matryoshka-dims: found {value}, expected each size once")


@dataclass(frozen=True)
class EmbedTrainConfig:
    """Options of `megaenc embed train`: model, pairs, output, training and saving.

    Each field is a flag, read by `flags.parse_with_config`. `model`, `data`, a tuple of files or
    data sets of pairs, and `output` must not stay empty, which the constructor does not check.
    `output` is a new directory; an unfinished training is resumed from OUTPUT.state. `config` is a
    YAML file of flags, and `contrastive` has the flags of ContrastiveConfig. States are saved every
    `save_interval` steps, and a row logged every `log_interval`.
    """

    config: str = ""
    """YAML file of flags; flags on the command line override it"""
    model: str = ""
    """Hugging Face or sentence-transformers directory, or a model of the Hub as ORG/NAME"""
    data: tuple[str, ...] = ()
    """files or data sets of pairs of a query and a document, maybe with hard negatives"""
    output: str = ""
    """new directory for the trained model; OUTPUT.state keeps an unfinished training, which the
    same command resumes"""
    contrastive: ContrastiveConfig = field(default_factory=ContrastiveConfig)
    """contrastive training: batches, schedule, optimizer, loss and texts"""
    save_interval: PositiveInt = 100
    """steps between saved states, from which the same command resumes"""
    log_interval: PositiveInt = 1
    """steps between rows of training.jsonl; the last step always has one"""


@dataclass(frozen=True)
class TrainedEmbedder:
    """Trained embedding model: its directory for sentence-transformers, and its loss."""

    directory: Path
    steps: int
    """Steps of the training, with those before a resume."""
    loss: float
    """InfoNCE loss of the last step, over its whole batch."""
