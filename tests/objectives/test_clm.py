"""Next-token targets against a loop over positions."""

import dataclasses

import numpy as np
import pytest

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.objectives import Attention, CausalLanguageModeling

VOCABULARY = Vocabulary(size=100, eos_id=0, mask_id=None, special_ids=(0,), fingerprint="f" * 64)


def targets(tokens, edges, vocabulary=VOCABULARY):
    pack = Pack(0, 0, np.array(tokens, dtype=np.int64), np.array(edges, dtype=np.int32))
    return CausalLanguageModeling(vocabulary).targets(pack, SampleRandomness(0, 0, 0))


@pytest.mark.parametrize(
    ("tokens", "edges", "predictions"),
    [
        # [CLS] 7 8 [SEP] as a whole: the end is predicted.
        ([1, 7, 8, 0], [0, 4], {0: 7, 1: 8, 2: 0}),
        # A chunk of two documents: the end of the first one, not the [CLS] of the second one.
        ([7, 0, 1, 8, 0], [0, 5], {0: 0, 2: 8, 3: 0}),
        # Cut before an end and before a [CLS].
        ([1, 7, 0, 1, 8], [0, 2, 3, 5], {0: 7, 3: 8}),
        # A mask token that is written in the text.
        ([7, 2, 8], [0, 3], {1: 8}),
    ],
)
def test_the_end_of_a_document_is_the_only_special_token_that_is_predicted(tokens, edges, predictions):
    special = {"mask_id": 2, "special_ids": (0, 1, 2)}
    actual = targets(tokens, edges, dataclasses.replace(VOCABULARY, **special))
    assert dict(zip(actual.predict_at.tolist(), actual.labels.tolist(), strict=True)) == predictions
    assert actual.inputs.tolist() == tokens


def test_without_an_end_token_only_text_is_predicted():
    actual = targets([0, 7, 8, 0], [0, 4], dataclasses.replace(VOCABULARY, eos_id=None))
    assert actual.labels.tolist() == [7, 8]


def test_sees_what_comes_before_and_takes_no_option():
    assert CausalLanguageModeling.attention is Attention.CAUSAL == "causal"
    with pytest.raises(InputError, match="clm: option `mask`: unknown, expected no options"):
        CausalLanguageModeling.from_texts(VOCABULARY, {"mask": "0.3"})
