"""Packs, a vocabulary and bounds that the tests of objectives share."""

import math
from pathlib import Path

import numpy as np

from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary

SPECIAL = (0, 1, 7)
MASK = 1
VOCABULARY = Vocabulary(size=50, eos_id=0, mask_id=MASK, special_ids=SPECIAL, fingerprint="f" * 64)


def random_pack(sample: int, length: int = 64) -> Pack:
    """Tokens of the whole vocabulary, three in fifty of them special, in documents of 1 to some tens of tokens."""
    rng = np.random.default_rng(sample)
    inner = np.flatnonzero(rng.random(length - 1) < rng.choice([0.0, 0.05, 0.4])) + 1
    return Pack(sample, 0, rng.integers(0, VOCABULARY.size, size=length), np.array([0, *inner, length], dtype=np.int32))


def places_in_document(pack: Pack) -> list[int]:
    """Of each token, counted from 0 by walking along the pack."""
    places, place = [], 0
    for at in range(len(pack.tokens)):
        place = 0 if at in pack.edges else place + 1
        places.append(place)
    return places


def within(successes, trials, probability) -> bool:
    """Whether a count lies within 4.5 standard deviations of its mean (a chance of 7e-6 to fail, and the seed is fixed)."""
    return abs(successes - trials * probability) < 4.5 * math.sqrt(trials * probability * (1 - probability))


def write_teacher(folder: Path, name: str = "eurobert", **options) -> Path:
    """A model of tests/convert/hf_models.py with random weights, without a tokenizer, in `folder`."""
    from convert import hf_models

    hf_models.build(name, **({"vocab_size": VOCABULARY.size} | options)).save_pretrained(folder)
    return folder
