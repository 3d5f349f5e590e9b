"""The reference with which ways to preprocess are compared."""

import dataclasses

import pytest
from text_helpers import contents

from megaenc.data.preprocess.command import preprocess


@pytest.fixture
def expected_contents(tmp_path, settings) -> list[bytes]:
    """Return the output of one run without partitions on the same input."""
    (prefix,) = preprocess(
        dataclasses.replace(settings, output_prefix=str(tmp_path / "whole"), partitions=1)
    )
    return contents(prefix)
