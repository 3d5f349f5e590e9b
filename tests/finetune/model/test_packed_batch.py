from itertools import pairwise

import numpy as np
import pytest
import torch

from megaenc.finetune.model.backbone import batch_by_tokens, pack_texts


def test_texts_lie_end_to_end():
    packed = pack_texts(
        [np.array([4]), np.array([8, 9]), np.array([1, 2, 3]), np.array([5, 6, 7])], "cpu"
    )
    assert packed.tokens.tolist() == [4, 8, 9, 1, 2, 3, 5, 6, 7]
    assert packed.lengths == (1, 2, 3, 3)
    assert packed.position_ids.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2]
    assert packed.length_groups == [(1, 1), (1, 2), (2, 3)]
    assert packed.cu_seqlens.tolist() == [0, 1, 3, 6, 9]
    assert packed.cu_seqlens.dtype == torch.int32


def test_an_empty_text_and_another_order_are_refused():
    for texts in (
        [],
        [np.array([], dtype=np.int64), np.array([1])],
        [np.array([1, 2]), np.array([1])],
    ):
        with pytest.raises(ValueError, match="at least one token"):
            pack_texts(texts, "cpu")


def test_forward_passes_hold_every_row_once_and_not_too_many_tokens():
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    lengths[17] = 500
    groups = batch_by_tokens(lengths, 128)
    assert sorted(np.concatenate(groups)) == list(range(200))
    assert groups[-1].tolist() == [17]
    assert all(lengths[group].sum() <= 128 for group in groups[:-1])
    # Like lengths are together, and no group has room for the next one's first row.
    assert (np.diff(lengths[np.concatenate(groups)]) >= 0).all()
    assert all(
        lengths[group].sum() + lengths[following[0]] > 128 for group, following in pairwise(groups)
    )
    assert batch_by_tokens(lengths[:0], 128) == []
