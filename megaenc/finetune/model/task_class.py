"""Task classes of transformers: their own heads in training, and export to them.

An exported model computes the same as the run.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from megaenc.errors import InputError, first_error_line
from megaenc.finetune.examples import POOLED_FAMILIES, TaskFamily
from megaenc.finetune.model.backbone import Backbone, PackedTexts

_TOLERANCE = 1e-4
"""Maximum difference of float32 outputs of the run and of transformers, relative to the largest
output."""
QA_LABELS = ("OUTSIDE", "INSIDE")
"""Labels of question answering, which labels each token as inside or outside the answer."""
_EUROBERT_POOLING = {"mean": "mean", "cls": "bos"}
_PROBLEM_TYPES = {
    TaskFamily.REGRESSION: "regression",
    TaskFamily.MULTI_LABEL: "multi_label_classification",
}
"""Names of transformers for tasks of its classes for sequences; pipelines follow them."""
USE_NATIVE = "expected --head native, which trains the class's own head"


def find_task_class(config: Any, family: TaskFamily) -> type | None:
    """Return the transformers class that a config's model type has for a task family.

    The class for QA is that for token classification; the one for IR is the model without head.

    Args:
        config: Config object of transformers.

    Returns:
        The class, or None if transformers has none.
    """
    from transformers.models.auto import modeling_auto

    if family in POOLED_FAMILIES:
        mapping = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    elif family == TaskFamily.IR:
        mapping = modeling_auto.MODEL_MAPPING
    else:
        mapping = modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    kind = mapping.get(type(config), None)
    return kind if isinstance(kind, type) else None


def set_labels(config: Any, family: TaskFamily, labels: Sequence[str]) -> None:
    """Set labels and `problem_type` of a transformers `config` in place.

    Args:
        family: Task family, which gives the problem type: "regression" for REGRESSION,
            "multi_label_classification" for MULTI_LABEL, else None.
        labels: Label names in the order of their indices.
    """
    config.problem_type = _PROBLEM_TYPES.get(family)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}


class _GivenStates(nn.Module):
    """Stand-in for the base model of a task class that returns given states.

    The base model's pooler, if there is one, is applied to them.
    """

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.states: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Return `states`, float[B, L, hidden_size], as the output of a base model.

        NativeHead sets them. They are pooled too if there is a pooler. Arguments are not used.
        """
        pooled = self.pooler(self.states) if self.pooler is not None else None
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=self.states, pooler_output=pooled
        )


class NativeHead(nn.Module):
    """Head of a transformers task class, applied to the states of packed texts.

    The class's own code computes it. A pooler belongs to the head. The weights are those of
    `task_model` until `reset_parameters` draws new ones.

    Args:
        task_model: Model of the task class. It is changed: a stand-in replaces its base model, and
            takes its pooler. Get the base model, for the backbone, before.
        has_pooler_weights: Whether the pooler has trained weights, which `reset_parameters` keeps.
    """

    def __init__(self, task_model: Any, *, has_pooler_weights: bool) -> None:
        super().__init__()
        prefix = task_model.base_model_prefix
        base = getattr(task_model, prefix)
        pooler = getattr(base, "pooler", None)
        if pooler is not None:
            base.pooler = None
        setattr(task_model, prefix, _GivenStates(pooler))
        self.model = task_model
        self._new_modules = [
            module
            for module in task_model.modules()
            if not (has_pooler_weights and pooler and module in [*pooler.modules()])
        ]

    @property
    def base(self) -> _GivenStates:
        """Return the stand-in for the base model, which returns given states."""
        return getattr(self.model, self.model.base_model_prefix)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights by the class's own rule from torch's generator.

        A pooler with trained weights keeps them.
        """
        for module in self._new_modules:
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = False
            self.model._init_weights(module)

    def forward(self, states: Tensor, packed: PackedTexts) -> Tensor:
        """Return the class's logits for the states [T, hidden_size] of a pack.

        They are computed in the head's dtype, whatever that of `states`.

        Returns:
            float32[texts, labels] of a class for sequences, float32[T, labels] of one for tokens.
        """
        mask = build_padding_mask(packed)
        dtype = next(self.model.parameters()).dtype
        padded = states.new_zeros((*mask.shape, states.shape[-1]), dtype=dtype)
        padded[mask] = states.to(dtype)
        self.base.states = padded
        try:
            logits = self.model(
                input_ids=pad_tokens(packed, self.model.config.pad_token_id),
                attention_mask=mask.long(),
            ).logits
        finally:
            self.base.states = None
        return (logits if logits.dim() == 2 else logits[mask]).float()


def build_padding_mask(packed: PackedTexts) -> Tensor:
    """Return the mask of a right-padded batch of packed texts, True for tokens.

    Returns:
        bool[texts, tokens of the longest text].
    """
    lengths = torch.tensor(packed.lengths, device=packed.tokens.device)
    return torch.arange(packed.lengths[-1], device=packed.tokens.device) < lengths[:, None]


def pad_tokens(packed: PackedTexts, padding: int | None) -> Tensor:
    """Return the token ids of packed texts, right-padded.

    Args:
        padding: Id of the padding token; None: 0.

    Returns:
        int64[texts, tokens of the longest text].
    """
    mask = build_padding_mask(packed)
    return torch.full(mask.shape, padding or 0, device=mask.device).masked_scatter(
        mask, packed.tokens
    )


@torch.no_grad()
def build_hf_model(
    backbone: Backbone,
    head: nn.Module,
    family: TaskFamily,
    labels: Sequence[str],
    padding: int | None,
    pooling: str = "mean",
) -> Any:
    """Return a float32 model of transformers' task class with the weights of a run.

    The weights are those of `backbone` and `head`, not an optimizer's master weights. The model is
    on the CPU and in eval mode. It is an InputError if transformers has no class for the family, or
    none that can compute a linear head. Outputs are not compared: see `check_same_outputs`.

    Args:
        head: A linear layer or a NativeHead; not used in IR.
        labels: Label names in the order of their indices; not used in IR.
        padding: The tokenizer's padding id, for a config without one; None: none.
        pooling: Pooling before a linear head, only for EuroBERT, whose class can choose it: "mean"
            or "cls", others are an InputError.
    """
    config = copy.deepcopy(
        head.model.config if isinstance(head, NativeHead) else backbone.model.config
    )
    config._attn_implementation = None  # transformers selects its best one
    for name in ("is_causal", "use_bidirectional_attention"):
        if hasattr(backbone.model.config, name):
            setattr(config, name, getattr(backbone.model.config, name))
    if config.pad_token_id is None:
        config.pad_token_id = padding
    # Of a CrossEncoder that was fine-tuned further: the activation of its own scores.
    for name in ("sentence_transformers", "sbert_ce_default_activation_function"):
        vars(config).pop(name, None)
    kind = find_task_class(config, family)
    if kind is None:
        raise InputError(
            f"--save-model: transformers has no class of {config.model_type} for {family}; "
            "expected another model"
        )
    weights = {
        name: tensor.detach().float().cpu() for name, tensor in backbone.model.state_dict().items()
    }
    if family != TaskFamily.IR:
        set_labels(config, family, labels)
        prefix = kind.base_model_prefix
        weights = {f"{prefix}.{name}": tensor for name, tensor in weights.items()}
        if isinstance(head, NativeHead):
            weights |= {
                name: tensor.detach().float().cpu()
                for name, tensor in head.model.state_dict().items()
            }
        else:
            weights |= _express_linear_head(head, config, kind, family, pooling)
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = [
        name for name in report["missing_keys"] if family != TaskFamily.IR or "pooler" not in name
    ]
    if missing:
        raise InputError(
            f"--save-model: {kind.__name__} has weights that a linear head lacks "
            f"({missing[0]}); {USE_NATIVE}"
        )
    return model.eval()


def _express_linear_head(
    head: nn.Linear, config: Any, kind: type, family: TaskFamily, pooling: str
) -> dict[str, Tensor]:
    """Return weights of class `kind`, by name, that compute the linear `head`.

    Fields of `config` are set if needed.

    Raises:
        InputError: The class cannot compute it.
    """
    with torch.device("meta"):
        empty = kind(copy.deepcopy(config))
    head_names = [
        name
        for name, _ in empty.named_parameters()
        if not name.startswith(f"{kind.base_model_prefix}.")
    ]
    weight = head.weight.detach().float().cpu()
    bias = head.bias.detach().float().cpu()
    labels, hidden_size = weight.shape
    modules = {name.rpartition(".")[0] for name in head_names}
    if len(modules) == 1 and len(head_names) == 2:
        [module] = modules
        return {f"{module}.weight": weight, f"{module}.bias": bias}
    is_eurobert = config.model_type == "eurobert" and family in POOLED_FAMILIES
    if is_eurobert and 2 * labels <= hidden_size:
        # The class has a dense layer and GELU in between: gelu(x) - gelu(-x) = x.
        if pooling not in _EUROBERT_POOLING:
            raise InputError(
                f"--save-model: {kind.__name__} has no --pooling {pooling}; expected mean or cls"
            )
        config.classifier_pooling = _EUROBERT_POOLING[pooling]
        filler = hidden_size - 2 * labels
        eye = torch.eye(labels)
        return {
            "dense.weight": torch.cat([weight, -weight, weight.new_zeros(filler, hidden_size)]),
            "dense.bias": torch.cat([bias, -bias, bias.new_zeros(filler)]),
            "classifier.weight": torch.cat([eye, -eye, eye.new_zeros(labels, filler)], dim=1),
            "classifier.bias": torch.zeros(labels),
        }
    raise InputError(
        f"--save-model: {kind.__name__} has no linear head ({', '.join(sorted(modules))}); "
        f"{USE_NATIVE}"
    )


@torch.no_grad()
def compute_hf_outputs(model: Any, packed: PackedTexts) -> Tensor:
    """Return the outputs of a transformers model on packed texts, right-padded.

    The model must be on the device of `packed`, and in eval mode. No gradients are recorded.

    Returns:
        Logits, or states if the model has no head: float32[texts, size] of a class for sequences,
        else float32[T, size].
    """
    mask = build_padding_mask(packed)
    output = model(
        input_ids=pad_tokens(packed, model.config.pad_token_id), attention_mask=mask.long()
    )
    values = output.logits if "logits" in output else output.last_hidden_state
    return (values if values.dim() == 2 else values[mask]).float()


def check_same_outputs(
    model: Any, packed: PackedTexts, compute: Callable[[], Tensor], flag: str, advice: str
) -> None:
    """Check that a transformers model has the run's outputs, up to float32 rounding.

    Args:
        model: Model on the device of `packed`, in eval mode.
        compute: Function that returns the run's outputs on `packed`, of the shape of
            `compute_hf_outputs`.
        flag: Start of the error, such as "--save-model".
        advice: End of the error, such as "expected another model".

    Raises:
        InputError: Outputs differ, or the model or `compute` fails in any way.
    """
    kind = type(model).__name__
    try:
        expected = compute().float()
        outputs = compute_hf_outputs(model, packed)
        same = outputs.shape == expected.shape and bool(
            (outputs - expected).abs().max() <= _TOLERANCE * expected.abs().max().clamp(min=1e-6)
        )
        problem = "computes other outputs than the run"
    except Exception as error:  # a model class may fail in any way
        same = False
        problem = f"fails: {first_error_line(error)}"
    if not same:
        raise InputError(f"{flag}: transformers' {kind} {problem}; {advice}")
