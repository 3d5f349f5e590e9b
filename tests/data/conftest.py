"""Fixtures that several tests of data share."""

import pytest
from text_helpers import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory) -> str:
    """Return the directory of the small tokenizer."""
    directory = tmp_path_factory.mktemp("tokenizer") / "small"
    small_tokenizer().save_pretrained(directory)
    return str(directory)
