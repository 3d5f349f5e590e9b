"""Properties of a tokenizer that the rest of the package needs, free of transformers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """Facts of a tokenizer: number of ids (0..size-1, added tokens included), end, mask and special ids, and fingerprint."""

    size: int
    eos_id: int | None
    """Id of the end-of-document token."""
    mask_id: int | None
    """Id of the mask token."""
    special_ids: tuple[int, ...]
    """Ids that are not text, ascending; never masked."""
    fingerprint: str
    """sha256 in hex of everything that decides ids; equal for equal tokenizers wherever they are stored."""
