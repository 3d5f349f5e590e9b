"""What several ways to preprocess are compared with."""

import dataclasses

import pytest
from text_helpers import contents

from megaenc.data.preprocess.command import preprocess


@pytest.fixture
def expected_contents(tmp_path, settings) -> list[bytes]:
    """What one run without partitions makes of the same input."""
    (prefix,) = preprocess(
        dataclasses.replace(settings, output_prefix=str(tmp_path / "whole"), partitions=1)
    )
    return contents(prefix)
