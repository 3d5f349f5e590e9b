"""A model that knows nothing and a data set of each family."""

import pytest
import transformers
from small_data import write_families
from small_models import save_model

from megaenc.data.tokenizer.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def model(small_corpus, tmp_path_factory):
    """Return the path of `little`, a random EuroBERT of 64 positions. Read only."""
    directory = tmp_path_factory.mktemp("models") / "little"
    save_model(
        directory,
        "eurobert",
        load_tokenizer(small_corpus.tokenizer),
        transformers.AutoModelForMaskedLM,
    )
    return directory


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Return the data sets `sc`, `tc`, `qa`, `ir` and `other` (retrieval). Read only."""
    root = tmp_path_factory.mktemp("data")
    write_families(root)
    return root
