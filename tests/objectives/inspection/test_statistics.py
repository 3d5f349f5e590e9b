"""Lengths of documents against figures worked out by hand."""

import numpy as np
import pytest

from megaenc.objectives.inspection.inspect import LengthBin, compute_length_stats


def test_figures_worked_out_by_hand():
    actual = compute_length_stats(np.array([0, 1, 2, 3, 4, 7, 8, 100, 0, 25]))
    assert (actual.mean, actual.median) == (
        15.0,
        3.5,
    )  # 150 tokens in ten documents; between 3 and 4
    assert (actual.longest, actual.longest_document, actual.empty) == (100, 7, 2)
    # In order 0 0 1 2 3 4 7 8 25 100: a twentieth of the way from first to last is place 0.45, from
    # the other end 8.55.
    assert actual.p5 == 0.0 and actual.p95 == pytest.approx(25 + 0.55 * 75)
    assert actual.bins == (
        LengthBin(0, 0, 2, 0),
        LengthBin(1, 1, 1, 1),
        LengthBin(2, 3, 2, 5),
        LengthBin(4, 7, 2, 11),
        LengthBin(8, 15, 1, 8),
        LengthBin(16, 31, 1, 25),
        LengthBin(32, 63, 0, 0),
        LengthBin(64, 127, 1, 100),
    )
