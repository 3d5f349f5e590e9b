"""Properties of a tokenizer that the rest of the package needs, free of transformers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """Size, special ids and fingerprint of a tokenizer; ids are 0..size-1, added tokens included."""

    size: int
    eos_id: int | None
    """Id of the end-of-document token."""
    mask_id: int | None
    """Id of the mask token."""
    special_ids: tuple[int, ...]
    """Ids that are not text, ascending; never masked."""
    fingerprint: str
    """sha256 in hex of everything that decides ids; equal for equal tokenizers wherever they are stored."""
