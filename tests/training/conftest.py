"""A run with several checkpoints, for the tests that damage or forge them."""

import pytest
import runs


@pytest.fixture(scope="session")
def saved_run(small_corpus, tmp_path_factory):
    """Twelve of twenty float32 steps, with checkpoints of steps 4, 8 and 12. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    every = ["--save-interval", "4", "--exit-interval", "12"]
    runs.script(runs.PRETRAIN, [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder), *every])
    return folder
