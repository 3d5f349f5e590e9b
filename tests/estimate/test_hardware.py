"""The table agrees with what training counts utilization of, and collectives with what is known of them."""

import pytest

from megaenc.backend.device import peak_bf16_flops
from megaenc.errors import InputError
from megaenc.estimate.hardware import TABLE, Link, get_machine


@pytest.mark.parametrize("name", TABLE)
def test_peaks_are_those_that_training_counts_utilization_of(name):
    known = peak_bf16_flops(name.upper().removesuffix("-40GB").replace("-PCIE", " PCIe"))
    assert TABLE[name].peak == known > 0


def test_an_all_reduce_sends_twice_all_but_one_share():
    link = Link(bandwidth=1e9, latency=0.0)
    assert [link.all_reduce(1e9, ranks) for ranks in (1, 2, 4, 8)] == [0, 1, 1.5, 1.75]
    assert link.gather(1e9, 4) == 0.75
    assert Link(1e9, 1e-3).all_reduce(1e9, 2) == 1 + 2e-3


def test_an_unknown_machine_names_the_nearest():
    assert get_machine("MI250X") is TABLE["mi250x"]
    with pytest.raises(InputError, match="--gpu: unknown machine 'mi250xx', did you mean mi250x"):
        get_machine("mi250xx")
    with pytest.raises(InputError, match="expected one of a100, "):
        get_machine("abacus")
