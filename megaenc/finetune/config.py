"""Configuration of fine-tuning: hyperparameters, precision and limits."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from megaenc.data.tokenizer.special_tokens import SpecialTokensChoice
from megaenc.errors import InputError
from megaenc.flags import (
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)


@dataclass(frozen=True)
class FinetuneConfig:
    """Hyperparameters of fine-tuning and evaluation: batch, steps, AdamW, precision.

    Each field is a flag; the constructor checks nothing. The defaults are those of the study
    (EncodEval) except for the precision, which is "paper-bf16" there. Training on batches of
    `batch_size` examples ends after `epochs` or `max_steps` (0: no limit), the earlier of the two;
    `warmup` is a fraction of the steps. AdamW has `weight_decay`, adam_ flags and `clip_grad` (0:
    none). `attention`, `head`, `pooling`, `special_tokens`, `add_bos`, `add_eos` and `max_length`
    set model and texts; `threshold` is for multi_label, `scale` for retrieval. A forward pass has
    at most `tokens_per_forward` tokens. With `eval_interval` (steps, 0: none), `best_checkpoint` or
    `early_stopping` chooses the weights. "", 0 and None as `precision`, special tokens and length
    are taken from machine, tokenizer and model.
    """

    batch_size: PositiveInt = 32
    """examples of a step; in retrieval, the other documents of the batch are the negatives; in
    reranking, a query with one of its documents is an example"""
    max_steps: NonNegativeInt = 1000
    """maximum number of steps; 0: no limit but --epochs"""
    epochs: PositiveFloat = 1.0
    """maximum number of passes over the training data; training ends at --max-steps or --epochs,
    the earlier of the two"""
    warmup: FractionBelowOne = 0.1
    """fraction of the steps in which the learning rate rises linearly from 0; it falls linearly to
    0 over the rest"""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW's weight decay of matrices and embeddings; norms and biases are not decayed"""
    adam_beta1: FractionBelowOne = 0.9
    """AdamW's decay rate of the gradients' mean"""
    adam_beta2: FractionBelowOne = 0.95
    """AdamW's decay rate of the squared gradients' mean"""
    adam_eps: PositiveFloat = 1e-5
    """AdamW's epsilon, added to the denominator"""
    clip_grad: NonNegativeFloat = 1.0
    """maximum gradient norm; larger gradients are scaled down to it; 0 disables clipping"""
    max_length: NonNegativeInt = 0
    """maximum tokens of a text, special tokens included; longer texts are cut; 0: 99 % of the
    model's context (study: 2,028)"""
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    """direction of attention in fine-tuning and evaluation, independent of pretraining"""
    head: Literal["linear", "native"] = "linear"
    """linear: the study's linear layer, on the mean state for classification; native: the head of
    transformers' class for the task, by that class's own pooling, layers and initialisation"""
    precision: Literal["", "bf16", "paper-bf16", "fp32"] = ""
    """bf16: compute in bfloat16 with float32 master weights; paper-bf16: weights and optimizer
    state in bfloat16 too; by default bf16 if the device supports it, else fp32"""
    special_tokens: SpecialTokensChoice = ""
    """special tokens around each text. template: those that the tokenizer puts there, such as [CLS]
    ... [SEP]; eod: EOS, or without one SEP, after it; none: only the text. By default the template,
    or eod for a tokenizer that adds nothing"""
    add_bos: bool | None = None
    """with this flag or --add-eos: only these tokens; prepend BOS, or without one CLS, to each
    text; by default no"""
    add_eos: bool | None = None
    """with this flag or --add-bos: only these tokens; append EOS, or without one SEP, to each text;
    by default yes"""
    pooling: Literal["mean", "cls", "lasttoken"] = "mean"
    """state of a text for the linear head of classification and for retrieval: the mean of its
    tokens' states, the first, or the last; --head native pools as the model's config says"""
    threshold: Literal["0.5", "auto"] = "0.5"
    """probability from which a label of multi_label is predicted; auto: the one with the best score
    on the validation split"""
    scale: PositiveFloat = 20.0
    """factor of the cosine similarities in the retrieval loss, the inverse of its temperature"""
    tokens_per_forward: PositiveInt = 16384
    """maximum tokens of a forward pass; a smaller number needs less memory; a text is never
    split"""
    deterministic: bool = True
    """use deterministic GPU kernels, some slower, so that equal runs give equal bits; CPU runs are
    always deterministic"""
    threads: PositiveInt = 1
    """CPU threads of a run; the last bits of its results depend on this number"""
    eval_interval: NonNegativeInt = 0
    """steps between evaluations on the validation split during training; 0: only after the last
    step"""
    best_checkpoint: bool = False
    """test and keep the weights with the best validation score, the earliest of equals, instead of
    the last ones; needs --eval-interval"""
    early_stopping: NonNegativeInt = 0
    """end training after this number of evaluations without a better validation score, and use the
    best weights, as with --best-checkpoint; needs --eval-interval; 0: never"""

    def check(self) -> None:
        """Check that the flags fit each other; bounds of single flags are not checked.

        Raises:
            InputError: Two flags exclude each other, or one needs another; the message names it.
        """
        if self.special_tokens and self.adds_named_tokens:
            flag = "--add-eos" if self.add_bos is None else "--add-bos"
            raise InputError(
                f"{flag}: found with --special-tokens {self.special_tokens}, expected one of them"
            )
        if self.pooling != "mean" and self.head == "native":
            raise InputError(
                f"--pooling {self.pooling}: found with --head native, "
                "which pools as the model's config says"
            )
        for name in ("best_checkpoint", "early_stopping"):
            if getattr(self, name) and not self.eval_interval:
                raise InputError(
                    f"--{name.replace('_', '-')}: found --eval-interval 0, "
                    "expected its number of steps, such as 100"
                )

    @property
    def adds_named_tokens(self) -> bool:
        """Return whether `add_bos` or `add_eos` is given, as True or as False."""
        return self.add_bos is not None or self.add_eos is not None

    def normalize_special_tokens(self) -> Self:
        """Return a copy in which `add_bos` and `add_eos` replace `special_tokens`.

        If one of the two is given, the other gets its default: no BOS, an EOS; `special_tokens`,
        which must be empty then, is not changed. If none is given, "eod" becomes only an EOS and
        "none" neither, both with an empty `special_tokens`, while "template" and "" stay. Results
        of earlier versions have `add_bos` and `add_eos`.
        """
        if self.adds_named_tokens:
            return replace(self, add_bos=bool(self.add_bos), add_eos=self.add_eos is not False)
        if self.special_tokens in ("eod", "none"):
            return replace(
                self, special_tokens="", add_bos=False, add_eos=self.special_tokens == "eod"
            )
        return self

    @property
    def uses_best_weights(self) -> bool:
        """Return whether the weights of the best validation score replace the last ones."""
        return self.best_checkpoint or self.early_stopping > 0


def format_learning_rate(rate: float) -> str:
    """Return a finite learning rate in scientific notation, such as `2e-05`.

    The text has the fewest digits that give exactly `rate` when parsed.
    """
    return next(name for digits in range(17) if float(name := f"{rate:.{digits}e}") == rate)
