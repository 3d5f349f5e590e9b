"""megatron-core for the tests of attention."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def megatron():
    """No process group: attention asks for none."""
    from megaenc.backend import prepare_megatron

    prepare_megatron()
