"""Packs, a vocabulary, collocations and bounds that the tests of objectives share."""

import dataclasses
import math
from pathlib import Path

import numpy as np

from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.objectives.units.matching import Collocations

SPECIAL = (0, 1, 7)
MASK = 1
VOCABULARY = Vocabulary(size=50, eos_id=0, mask_id=MASK, special_ids=SPECIAL, fingerprint="f" * 64)
# A word begins with every even id, and with every id after one above 40.
CODES = np.array(
    [(0 if token % 2 else 0x7F) | (7 if token > 40 else 0) << 8 for token in range(50)], dtype="<u2"
).tobytes()
WORDS = dataclasses.replace(VOCABULARY, code_words=lambda: CODES)
# Ids 10 to 19 that are prefixes and overlaps of each other. Two have special tokens, which no
# search would find.
PHRASES = [
    (10, 11),
    (10, 11, 12),
    (11, 12, 13, 14),
    (12, 13),
    (14, 15, 16, 17, 18),
    (15, 15),
    (16, 17),
]
PHRASES += [(10, 11, 12, 13, 10), (7, 10), (12, 0, 7, 11)]


def random_pack(sample: int, length: int = 64) -> Pack:
    """Return a pack of short documents with random tokens, three in fifty special."""
    rng = np.random.default_rng(sample)
    inner = np.flatnonzero(rng.random(length - 1) < rng.choice([0.0, 0.05, 0.4])) + 1
    return Pack(
        sample,
        0,
        rng.integers(0, VOCABULARY.size, size=length),
        np.array([0, *inner, length], dtype=np.int32),
    )


def places_in_document(pack: Pack) -> list[int]:
    """Return the position of each token in its document by walking along the pack."""
    places = []
    place = 0
    for at in range(len(pack.tokens)):
        place = 0 if at in pack.cu_seqlens else place + 1
        places.append(place)
    return places


def within(successes, trials, probability) -> bool:
    """Return whether a count lies within 4.5 standard deviations of its mean.

    The chance of a failure is 7e-6, and the seed is fixed.
    """
    return abs(successes - trials * probability) < 4.5 * math.sqrt(
        trials * probability * (1 - probability)
    )


def write_phrases(path, phrases=PHRASES, fingerprint=VOCABULARY.fingerprint) -> str:
    """Write token n-grams as `megaenc objective collocations` does."""
    tokens = np.array([(*phrase, *(5 - len(phrase)) * [-1]) for phrase in phrases], dtype=np.int32)
    counts = np.ones(len(phrases), dtype=np.int64)
    Collocations(tokens, counts.astype(np.float32), counts, {"tokenizer": fingerprint}).save(path)
    return str(path)


def write_teacher(directory: Path, name: str = "eurobert", **options) -> Path:
    """Save a model of tests/convert/hf_models.py with random weights, no tokenizer."""
    from convert import hf_models

    hf_models.build(name, **({"vocab_size": VOCABULARY.size} | options)).save_pretrained(directory)
    return directory
