"""Loading of a Hugging Face directory as a backbone, with a test of its attention.

The test is numerical and finds the attention's direction.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaenc.console import print_rank_0
from megaenc.errors import InputError, first_error_line
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.model.backbone import AttentionDirection, Backbone, PackedTexts, pack_texts
from megaenc.finetune.model.fingerprint import check_model_directory
from megaenc.finetune.model.task_class import NativeHead, find_task_class, set_labels
from megaenc.hf.checkpoint import HFCheckpoint
from megaenc.hf.model import load_hf_config, load_model

_TOLERANCE = 1e-4
"""Maximum difference of equal states in float32, relative to the largest state."""
_MIN_INFLUENCE = 1e-5
"""Minimum change of a state that depends on a changed token, relative to the largest state."""
_TOLERANCE_16_BIT = 0.1
"""Maximum difference between a 16-bit and a float32 state, relative to the largest state: rounding
adds up over layers."""


def load_backbone(
    directory: str,
    attention: AttentionDirection | None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    check: Callable[[Backbone, PackedTexts], None] = lambda backbone, texts: None,
) -> Backbone:
    """Return a Hugging Face directory's base model as a tested Backbone in `dtype`.

    It is in eval mode. The test checks that each state depends on exactly the visible tokens of its
    text, and that packed states equal padded ones; if packing fails, texts are padded, and a line
    is printed. A directory that cannot be loaded and a model that fails the test are an InputError.
    Rounded parameters keep their float32 value as the attribute `unrounded`, on `device` too, for
    an optimizer's master weights. Code in the directory is never executed.

    Args:
        attention: Direction of attention; None: the model's own.
        check: Called with the float32 backbone and short random texts; may raise InputError.
    """
    model, _ = _load_hf_model(directory, TaskFamily.IR)
    return _build_backbone(model, directory, attention, device, dtype, check)


def load_with_native_head(
    directory: str,
    attention: AttentionDirection,
    family: TaskFamily,
    labels: Sequence[str],
    *,
    padding: int | None,
    device: torch.device | str,
    dtype: torch.dtype,
    check: Callable[[Backbone, NativeHead, PackedTexts], None] = lambda backbone, head, texts: None,
) -> tuple[Backbone, NativeHead]:
    """Return a directory's backbone, and the head of transformers' class for a task.

    The backbone and errors are those of `load_backbone`, in `dtype`; a family without such a class
    is an InputError too. The head is float32, with new random weights from torch's generator; only
    a pooler whose weights are in the directory keeps them.

    Args:
        family: Any but IR.
        labels: Label names in the order of their indices.
        padding: The tokenizer's padding id, for a config without one; None: none.
        check: Called with the float32 backbone, the head and short random texts; may raise
            InputError.
    """
    model, has_pooler_weights = _load_hf_model(directory, family, labels)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = padding
    base = model.base_model
    head = NativeHead(model, has_pooler_weights=has_pooler_weights).to(device)
    head.reset_parameters()
    return _build_backbone(
        base,
        directory,
        attention,
        device,
        dtype,
        lambda backbone, texts: check(backbone, head, texts),
    ), head


def _build_backbone(
    model: Any,
    directory: str,
    attention: AttentionDirection | None,
    device: torch.device | str,
    dtype: torch.dtype,
    check: Callable[[Backbone, PackedTexts], None],
) -> Backbone:
    """Return the base model `model` as a tested Backbone on `device` in `dtype`."""
    # torch gives the padding token no gradient, but some tokenizers (the study's) pad with EOS.
    model.get_input_embeddings().padding_idx = None
    model.config.use_cache = False
    backbone = Backbone(model.to(device).eval(), attention)
    with torch.no_grad():
        _select_attention(backbone, directory)
        probe = AttentionProbe(backbone)
        check(backbone, probe.pack_probe_texts())
        reference_states = probe.compute_states()
        for parameter in backbone.parameters():
            exact = parameter.data
            parameter.data = parameter.data.to(dtype)
            if not torch.equal(parameter.float(), exact):
                parameter.unrounded = exact
        problem = probe.find_16_bit_error(reference_states) if dtype != torch.float32 else None
        if problem is not None and backbone.is_packed and backbone.device.type != "cpu":
            backbone.use_varlen_kernel = False
            kernel_problem = problem
            problem = probe.find_16_bit_error(reference_states)
            if problem is None:
                print_rank_0(
                    f"{directory}: attention batches texts of equal length: "
                    f"torch's variable-length kernel {kernel_problem}"
                )
        if problem is not None:
            raise InputError(
                f"--model {directory}: {problem} in {dtype}; expected --precision fp32"
            )
    return backbone


def open_model_directory(directory: str) -> tuple[HFCheckpoint, Any]:
    """Return a model directory's HFCheckpoint and its config object of transformers.

    Weights are not read, and code in the directory is not run. Progress bars of transformers are
    disabled from then on.

    Raises:
        InputError: The directory holds no model, or one that `load_hf_config` refuses: of an
            unknown type, with a wrong field or quantized.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    check_model_directory(directory)
    hf = HFCheckpoint(Path(directory), "--model")
    return hf, load_hf_config(hf)


def _load_hf_model(
    directory: str, family: TaskFamily, labels: Sequence[str] = ()
) -> tuple[Any, bool]:
    """Load a model in transformers' class for a task family, in float32, for eval.

    Returns:
        The model, without head for IR, and whether the directory has the weights of its pooler.

    Raises:
        InputError: The directory has no such model, or lacks weights.
    """
    hf, config = open_model_directory(directory)
    kind = find_task_class(config, family)
    options = {}
    prefix = ""
    if family == TaskFamily.IR:
        if (
            kind is None
            or config.is_encoder_decoder
            or not hasattr(config, "max_position_embeddings")
        ):
            raise InputError(
                f"--model {directory}: found a {config.model_type} model, "
                "expected an encoder or a decoder of text"
            )
        if "add_pooling_layer" in inspect.signature(kind.__init__).parameters:
            options["add_pooling_layer"] = False  # unused, and few directories have its weights
    else:
        if kind is None:
            raise InputError(
                f"--head native: transformers has no class of {config.model_type} for "
                f"{family}; expected --head linear"
            )
        set_labels(config, family, labels)
        prefix = f"{kind.base_model_prefix}."
    model, report = load_model(
        hf, config, kind, f"the weights of a {config.model_type} model", **options
    )
    missing = sorted(
        name for name in report["missing_keys"] if name.startswith(prefix) and "pooler" not in name
    )
    if missing:
        some = ", ".join(missing[:3]) + (", ..." if missing[3:] else "")
        problem = f"{len(missing)} weights are missing ({some})"
        raise InputError(
            f"--model {directory}: {problem}, expected those of a {config.model_type} model"
        )
    return model, not any("pooler" in name for name in report["missing_keys"])


def _select_attention(backbone: Backbone, directory: str) -> None:
    """Configure packed attention in the backbone's direction, or padded attention.

    Raises:
        InputError: Neither works.
    """
    try:
        probe = AttentionProbe(backbone)
        model_direction = probe.detect_direction(backbone.compute_padded_states)
    # A config.json that a model can be built from may still fail in any way.
    except Exception as error:
        raise InputError(
            f"--model {directory}: the model computes no states: {first_error_line(error)}; "
            "check its config.json"
        ) from None
    if backbone.attention is None:
        if model_direction is None:
            raise InputError(
                f"--model {directory}: its own attention is neither bidirectional nor causal; "
                "choose one, --attention"
            )
        backbone.attention = model_direction
    problem = (
        "its own attention is neither bidirectional nor causal"
        if model_direction is None
        else probe.enable_packing(model_direction)
    )
    if problem is None:
        return
    backbone.set_direction(backbone.attention)
    direction = probe.detect_direction(backbone.compute_states)
    if direction != backbone.attention or probe.is_different(
        backbone.compute_states, backbone.compute_padded_states
    ):
        raise InputError(
            f"--model {directory}: found {direction or 'another'} attention in "
            f"{backbone.model.config.model_type}, "
            f"expected a model that supports {backbone.attention} attention "
            f"(packing is impossible: {problem}); try --attention"
        )
    print_rank_0(
        f"{directory}: texts are padded in batches of similar length, not packed: {problem}"
    )


class AttentionProbe:
    """Numerical tests of a `backbone`'s attention and accuracy on short random texts.

    Attention is tested for its direction and for packing, in float32; accuracy in 16 bits. The
    backbone must be in eval mode. `load_backbone` runs the tests: `detect_direction`,
    `enable_packing` and `find_16_bit_error`.
    """

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        config = backbone.model.config
        special = {
            getattr(config, f"{role}_token_id", None)
            for role in ("pad", "bos", "eos", "sep", "cls", "mask", "unk")
        }
        self._usable = np.array(
            [token for token in range(min(config.vocab_size, 1000)) if token not in special]
        )
        # Shorter than a sliding window, which would hide further tokens.
        self._length = min(
            6, backbone.context_length - 1, getattr(config, "sliding_window", None) or 6
        )

    def detect_direction(self, read: Callable[[PackedTexts], Tensor]) -> AttentionDirection | None:
        """Return the attention direction of a function from packed texts to token states.

        Args:
            read: Function such as `Backbone.compute_states`.

        Returns:
            "bidirectional", "causal", or None if the attention is neither.
        """
        moved = self._compute_influence(read)
        every = torch.ones_like(moved)
        if torch.equal(moved, every):
            return "bidirectional"
        return "causal" if torch.equal(moved, every.triu()) else None

    def compute_states(self) -> Tensor:
        """Return the backbone's states of `pack_probe_texts`, float32[T, hidden_size]."""
        return self.backbone.compute_states(self.pack_probe_texts()).float()

    def find_16_bit_error(self, reference: Tensor) -> str | None:
        """Return a text about how the backbone's 16-bit states fail, or None if correct.

        They fail if they differ from the float32 states `reference`, the result of `compute_states`
        before the weights were rounded, or depend on hidden tokens. The text is a predicate without
        subject, such as "computes other states".
        """
        backbone = self.backbone
        try:
            if _is_different(self.compute_states(), reference, _TOLERANCE_16_BIT):
                return "computes other states"
            # Weak dependencies vanish in 16 bits, so only forbidden ones are tested.
            leaks_ahead = backbone.attention == "causal" and bool(
                self._compute_influence(backbone.compute_states).tril(-1).any()
            )
            return (
                "sees what the direction or another text hides"
                if leaks_ahead or (backbone.is_packed and self._are_texts_mixed())
                else None
            )
        except (RuntimeError, ValueError) as error:  # e.g. an unsupported shape or device
            return f"fails: {first_error_line(error)}"

    def _compute_influence(self, read: Callable[[PackedTexts], Tensor]) -> Tensor:
        """Return whether a change of each token of a text changes each state under `read`.

        Args:
            read: Function from packed texts to states.

        Returns:
            bool[token, state].
        """
        size = self._length
        text = self._draw_texts(size)[0]
        changed = np.tile(text, (size, 1))
        np.fill_diagonal(
            changed, self._usable[(np.searchsorted(self._usable, text) + 1) % len(self._usable)]
        )
        # A longer text is added, so that padded batches have padding.
        states = read(
            pack_texts([text, *changed, *self._draw_texts(size + 1)], self.backbone.device)
        )
        states = states[: (size + 1) * size].float().unflatten(0, (size + 1, size))
        return (states[1:] - states[0]).abs().amax(-1) > _MIN_INFLUENCE * states.abs().max()

    def is_different(self, *functions: Callable[[PackedTexts], Tensor]) -> bool:
        """Return whether two functions differ beyond rounding on the random texts.

        NaN in a result is a difference.

        Args:
            functions: Two functions from packed texts to token states.
        """
        texts = self.pack_probe_texts()
        return _is_different(*(function(texts) for function in functions))

    def enable_packing(self, model_direction: AttentionDirection) -> str | None:
        """Switch the backbone to packed attention if all tests pass, else leave it padded.

        The tests may change the direction of the model's own attention to the backbone's.

        Args:
            model_direction: Direction of the model's own attention.

        Returns:
            None if packing is enabled, else a clause such as "bert mixes texts or directions".
        """
        backbone = self.backbone
        target = backbone.attention
        kind = backbone.model.config.model_type
        if not backbone.model._can_set_attn_implementation() or not backbone.accepts_position_ids:
            return f"{kind} computes attention or positions in a way of its own"
        states = {}
        try:
            backbone.set_packed(True)
            for direction in (model_direction, target):
                backbone.attention = direction
                # Collects the sliding windows.
                backbone.compute_states(pack_texts(self._draw_texts(1, 2), backbone.device))
                states[direction] = backbone.compute_states(self.pack_probe_texts())
            wrong = (
                self.detect_direction(backbone.compute_states) != target or self._are_texts_mixed()
            )
        except Exception as error:  # an unknown model may fail in any way
            return f"{kind} fails: {first_error_line(error)}"
        finally:
            backbone.attention = target
            backbone.set_packed(False)
        if wrong:
            return f"{kind} mixes texts or directions"
        for direction in states:
            if direction != model_direction:
                backbone.set_direction(direction)
                if self.detect_direction(backbone.compute_padded_states) != direction:
                    # transformers does not support this direction, so there is no reference.
                    continue
            if _is_different(
                states[direction], backbone.compute_padded_states(self.pack_probe_texts())
            ):
                return f"{kind} computes other states packed"
        backbone.set_packed(True)
        return None

    def _are_texts_mixed(self) -> bool:
        """Return whether a text's states depend on other texts of its pack."""
        first, second, third = self._draw_texts(4, 5, 4)
        packs = (
            pack_texts([first, third, second], self.backbone.device),
            pack_texts([third, first, second], self.backbone.device),
        )
        return _is_different(*(self.backbone.compute_states(texts)[8:] for texts in packs))

    def pack_probe_texts(self) -> PackedTexts:
        """Return packed random texts of several lengths.

        They are always the same, but for each sliding window that packed attention has used so far,
        a longer text is added.
        """
        context = self.backbone.context_length
        beyond = sorted(
            min(window + 8, context) for window in self.backbone.sliding_windows if window < context
        )
        return pack_texts(
            self._draw_texts(*(min(length, context) for length in (1, 3, 5, 7, 7)), *beyond),
            self.backbone.device,
        )

    def _draw_texts(self, *lengths: int) -> list[np.ndarray]:
        """Draw random texts of these lengths, int64[length] each, always the same."""
        random = np.random.default_rng(0)
        return [random.choice(self._usable, length) for length in lengths]


def _is_different(first: Tensor, second: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Return whether two state tensors differ by more than a relative tolerance.

    A tensor with NaN differs from all.
    """
    # A comparison with NaN is false.
    return not bool((first - second).abs().max() <= tolerance * second.abs().max())
