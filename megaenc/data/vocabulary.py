"""What the rest of the package knows about a tokenizer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """Ids run over 0..size-1; `fingerprint` is equal exactly when two tokenizers give the same ids for every text."""

    size: int
    eos_id: int | None
    mask_id: int | None
    special_ids: tuple[int, ...]
    fingerprint: str
