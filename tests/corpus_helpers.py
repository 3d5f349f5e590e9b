"""Small corpora that tests write with megatron-core."""

from pathlib import Path

import numpy as np
import torch

from megaenc.data.tokenizer.vocabulary import Vocabulary

# Four documents: one sequence, three sequences, none at all, one sequence.
DOCUMENTS = [[[5, 6, 7]], [[10, 11], [12], [13, 14, 15]], [], [[20, 21]]]
VOCABULARY = Vocabulary(size=32, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="f" * 64)


def write_corpus(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16) -> str:
    """Write a corpus with megatron-core and return its prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
