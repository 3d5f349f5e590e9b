"""Pretrain, export, fine-tune and compare encoders, on megatron-core.

Objectives are CLM, MLM, or any schedule of them.
"""

# As in `typing`, whose import here would precede the protection of `python -m megaenc`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from megaenc.api import (
        Callback,
        InputError,
        evaluate_embeddings,
        export,
        finetune_model,
        preprocess,
        pretrain,
        train_embedder,
        train_tokenizer,
    )

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "InputError",
    "evaluate_embeddings",
    "export",
    "finetune_model",
    "preprocess",
    "pretrain",
    "train_embedder",
    "train_tokenizer",
]


def __getattr__(name: str) -> object:
    """Import a function of `megaenc.api` on first use, so that the package loads fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megaenc import api

    return getattr(api, name)
