"""What several tests of the text side need."""

import pytest
from text_helpers import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> str:
    """The small tokenizer as a folder."""
    folder = tmp_path_factory.mktemp("tokenizer") / "small"
    small_tokenizer().save_pretrained(folder)
    return str(folder)
