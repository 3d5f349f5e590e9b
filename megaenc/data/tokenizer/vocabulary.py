"""What the rest of the package knows about a tokenizer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """Ids run over 0..size-1, added tokens included."""

    size: int
    eos_id: int | None
    """Ends a document in a corpus."""
    mask_id: int | None
    """Stands for a token to be predicted."""
    special_ids: tuple[int, ...]
    """Ids that are not text, ascending: never masked."""
    fingerprint: str
    """sha256 in hex of everything that decides ids: equal for equal tokenizers, wherever they are stored."""
