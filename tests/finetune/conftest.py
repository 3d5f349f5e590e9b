"""A model that knows nothing and a data set of each family."""

import pytest
import transformers
from small_data import write_families
from small_models import save_model

from megaenc.data.tokenizer.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def model(small_corpus, tmp_path_factory):
    """A EuroBERT with random weights that reads 64 tokens, in a folder of the name `little`. Do not change it."""
    folder = tmp_path_factory.mktemp("models") / "little"
    save_model(
        folder,
        "eurobert",
        load_tokenizer(small_corpus.tokenizer),
        transformers.AutoModelForMaskedLM,
    )
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The data sets `sc`, `tc`, `qa`, `ir` and `other`, which is of retrieval too. Do not change them."""
    root = tmp_path_factory.mktemp("data")
    write_families(root)
    return root
