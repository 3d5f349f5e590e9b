"""The setup of megatron-core for tests of attention."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def megatron():
    """Initialize megatron-core without process groups, which attention does not need."""
    from megaenc.backend import prepare_megatron

    prepare_megatron()
