"""Distillation: masked language modeling with labels from a frozen teacher.

The labels are in part the teacher's distribution.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.objectives.base import OptionError, SoftLabels, Targets, option
from megaenc.objectives.masking import MaskedLanguageModeling, text_token_ids
from megaenc.objectives.registry import register

if TYPE_CHECKING:
    import torch

    from megaenc.hf.checkpoint import HFCheckpoint

_BATCH_TOKENS = 2048  # padded tokens that the teacher reads at a time, or one longer document


@register
@dataclass(frozen=True)
class Distillation(MaskedLanguageModeling):
    """Objective `distill`: `mlm` with a teacher.

    `teacher`, which must be given, is a directory with a masked language model for the run's
    tokenizer, for example an export of this project. The constructor does not read it. Its path has
    no space and none of `,():=`, which mean something in a schedule.

    It follows Hinton et al. 2015 (arXiv 1503.02531) and DistilBERT (arXiv 1910.01108), and hides
    the same tokens as `mlm` with the same options. The label distribution of a hidden token is (1 -
    `share`) onehot(token) + `share` softmax(z / `temperature`) over the teacher's `top_k` largest
    logits z among tokens that are not special. The teacher reads the same masked inputs, each
    document separately. The loss is the cross-entropy with this distribution, at least its entropy:
    runs are compared by the held-out loss of `mlm`. The student's temperature is 1, so there is no
    factor of temperature^2.

    The teacher's config and weights join the run's identity. It runs in float32 on the CPU, in the
    threads that OMP_NUM_THREADS gives, for each pack that a rank reads: all tensor- and
    pipeline-parallel ranks of a model compute it again. On accelerators it must not take longer
    than the step. No count of FLOPs and no estimate includes it.
    """

    name = "distill"

    teacher: str = option("", "directory of a Hugging Face masked language model")
    top_k: int = option(
        32, "number of the teacher's likeliest tokens in a label distribution", low=1
    )
    temperature: float = option(1.0, "divisor of the teacher's logits", above=0)
    share: float = option(0.5, "share of the teacher in a label distribution", low=0, high=1)

    def __post_init__(self) -> None:
        """Check the options, but not the teacher's directory.

        Exports of a run do not need the directory.

        Raises:
            OptionError: An option has a wrong value.
            InputError: There is no mask token.
        """
        super().__post_init__()
        if not self.teacher:
            raise OptionError(
                self.name,
                "teacher",
                "missing, expected the directory of a masked language model: "
                f"{self.name}(teacher=DIR)",
            )

    def files(self) -> tuple[Path, ...]:
        """Return the file of collocations of `unit`, if any, and those of the teacher.

        They are the teacher's config and weights.

        Raises:
            InputError: The teacher's directory cannot be read.
        """
        directory = _open_directory(self.teacher)
        return *super().files(), directory.config_file, *directory.files

    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """Return the Targets of `mlm` with label distributions that mix label and teacher.

        The teacher is loaded once and runs here, on the CPU.

        Raises:
            InputError: The teacher is unusable, or its context is shorter than the pack.
        """
        targets = super().targets(pack, randomness)
        teacher = load_teacher(self.teacher, self.vocabulary)
        ids_NK, logits_NK = teacher.find_top_tokens(
            pack, targets.inputs, targets.predict_at, self.top_k
        )
        weights_NK = np.exp((logits_NK - logits_NK.max(axis=1, keepdims=True)) / self.temperature)
        probabilities_NK = self.share * weights_NK / weights_NK.sum(axis=1, keepdims=True)
        # A token has all of its probability at one place, so that the sum over a row has one result
        # in any order.
        labels_N1 = targets.labels[:, None]
        is_label_NK = ids_NK == labels_N1
        of_label_N1 = (
            1 - self.share + np.where(is_label_NK, probabilities_NK, 0).sum(axis=1, keepdims=True)
        )
        probabilities_NK[is_label_NK] = 0
        probabilities = np.concatenate([of_label_N1, probabilities_NK], axis=1).astype(np.float32)
        return targets._replace(
            soft_labels=SoftLabels(np.concatenate([labels_N1, ids_NK], axis=1), probabilities)
        )


class Teacher:
    """Frozen masked language model in float32 on the CPU, by `load_teacher`.

    `path` is its directory, `vocabulary` that of the run, which it shares, and `model` the torch
    module. `find_top_tokens` runs it on the documents of a pack, one by one. A pack of more than
    `context_length` tokens is an InputError there.
    """

    def __init__(self, path: str, vocabulary: Vocabulary):
        """Load the model in the directory `path`.

        Args:
            path: Directory with config.json, safetensors, and the tokenizer if there is one.
            vocabulary: Vocabulary of the run, which the model must share.

        Raises:
            InputError: It is no masked language model, or has another vocabulary.
        """
        from megaenc.hf.model import find_position_offset, load_hf_config, load_masked_lm

        directory = _open_directory(path)
        config = load_hf_config(directory)
        size = getattr(config, "vocab_size", 0)
        if size < vocabulary.size:
            owner = "the tokenizer" if vocabulary.fingerprint else "made-up packs"
            raise InputError(
                f"teacher {path}: a vocabulary of {size} ids, expected at least the "
                f"{vocabulary.size} of {owner}"
            )
        _check_tokenizer(Path(path), vocabulary)
        self.path = path
        self.vocabulary = vocabulary
        self.model = load_masked_lm(directory, config).requires_grad_(False)
        if shift := getattr(config, "prediction_shift", 0):
            raise InputError(
                f"teacher {path}: predicts tokens {shift} further (`prediction_shift`), "
                "expected a model trained with mlm last"
            )
        self.context_length = config.max_position_embeddings - find_position_offset(self.model)
        self._padding = getattr(config, "pad_token_id", None) or 0
        self._lock = threading.Lock()  # for the hook of a call

    def find_top_tokens(
        self, pack: Pack, inputs: np.ndarray, positions: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the teacher's likeliest tokens at some positions, and their logits.

        They are (ids int64[N, K], logits float64[N, K]), best first, without special tokens. K is
        `count`, or the number of tokens that are not special if that is smaller. Each document is
        read without the others; still a whole pack longer than `context_length` is an InputError
        (of made-up packs only a longer document). Threads may call it at the same time.

        Args:
            pack: Pack whose document boundaries are read; its tokens are not.
            inputs: int64[T], token ids that the teacher reads, mask tokens included.
            positions: int64[N], in any order, which is that of the rows of the result.
        """
        import torch

        # The made-up packs of checks, whose vocabulary is of no tokenizer, have short documents.
        needed = (
            len(pack.tokens) if self.vocabulary.fingerprint else int(np.diff(pack.cu_seqlens).max())
        )
        if needed > self.context_length:
            raise InputError(
                f"teacher {self.path}: reads up to {self.context_length} tokens, "
                f"expected the {needed} of a pack; "
                "use a smaller --seq-length or another teacher"
            )
        count = min(count, len(text_token_ids(self.vocabulary)))
        ids_NK = np.empty((len(positions), count), dtype=np.int64)
        logits_NK = np.empty((len(positions), count))
        lengths = np.diff(pack.cu_seqlens)
        document_of = np.searchsorted(pack.cu_seqlens, positions, side="right") - 1
        for documents in _iterate_batches(np.unique(document_of), lengths):
            row_of = np.full(len(lengths), -1)
            row_of[documents] = np.arange(len(documents))
            tokens_BL = np.full((len(documents), lengths[documents[0]]), self._padding)
            mask_BL = np.arange(tokens_BL.shape[1]) < lengths[documents, None]
            tokens_BL[mask_BL] = np.concatenate(
                [
                    inputs[pack.cu_seqlens[document] : pack.cu_seqlens[document + 1]]
                    for document in documents
                ]
            )
            (chosen,) = (row_of[document_of] >= 0).nonzero()
            place_n = (
                row_of[document_of[chosen]] * tokens_BL.shape[1]
                + positions[chosen]
                - pack.cu_seqlens[document_of[chosen]]
            )
            logits_nV = self._compute_logits(*map(torch.from_numpy, (tokens_BL, mask_BL, place_n)))
            best = logits_nV.topk(count)
            ids_NK[chosen] = best.indices.numpy()
            logits_NK[chosen] = best.values.numpy()
        return ids_NK, logits_NK

    def _compute_logits(
        self, tokens_BL: "torch.Tensor", mask_BL: "torch.Tensor", place_n: "torch.Tensor"
    ) -> "torch.Tensor":
        """Return the teacher's logits float32[n, V], -inf for special tokens.

        Args:
            tokens_BL: Right-padded tokens.
            mask_BL: True for tokens.
            place_n: Places in the flattened tokens.
        """
        import torch

        def select(module: Any, inputs: tuple["torch.Tensor"]) -> tuple["torch.Tensor"]:
            """Keep only the predicted positions, so that no other logits are computed."""
            return (inputs[0].flatten(0, 1)[place_n],)

        with (
            torch.inference_mode(),
            self._lock,
            self.model.get_output_embeddings().register_forward_pre_hook(select),
        ):
            logits_nV = self.model(input_ids=tokens_BL, attention_mask=mask_BL.long()).logits[
                :, : self.vocabulary.size
            ]
            logits_nV[:, list(self.vocabulary.special_ids)] = -torch.inf
            return logits_nV


@lru_cache(maxsize=4)
def load_teacher(path: str, vocabulary: Vocabulary) -> Teacher:
    """Return the Teacher in the directory `path`, loaded once in a process.

    The directory is in Hugging Face's format, with safetensors. The last four Teachers are kept.

    Raises:
        InputError: It cannot be read, is no masked language model, or has another vocabulary.
    """
    return Teacher(path, vocabulary)


@cache
def _open_directory(path: str) -> "HFCheckpoint":
    """Read the config and the weights' headers in a directory, once in a process.

    Raises:
        InputError: They cannot be read.
    """
    from megaenc.hf.checkpoint import HFCheckpoint

    return HFCheckpoint(Path(path), "teacher")


def _check_tokenizer(directory: Path, vocabulary: Vocabulary) -> None:
    """Check that a directory has no tokenizer but that of a vocabulary.

    Raises:
        InputError: It has another one.
    """
    from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary

    if not vocabulary.fingerprint or not (directory / "tokenizer.json").exists():
        return  # made-up vocabularies have no tokenizer
    teacher = read_vocabulary(load_tokenizer(directory, "teacher"))
    if not vocabulary.is_of_tokenizer(teacher.fingerprint, teacher.text_fingerprint):
        raise InputError(
            f"teacher {directory}: its tokenizer ({teacher.fingerprint[:12]}) is not the run's "
            f"({vocabulary.fingerprint[:12]}), "
            "expected a model trained with the same"
        )


def _iterate_batches(documents: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the numbers of documents in batches, longest first.

    A batch has at most _BATCH_TOKENS padded tokens, or one document.
    """
    order = documents[np.argsort(-lengths[documents], kind="stable")]
    while len(order):
        rows = max(1, _BATCH_TOKENS // lengths[order[0]])
        yield order[:rows]
        order = order[rows:]
