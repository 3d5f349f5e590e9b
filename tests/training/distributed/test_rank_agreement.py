"""Processes with different flags train nothing."""

import pytest
import runs
from checkpoint_helpers import errors


@pytest.mark.multiprocess
def test_another_flag_on_one_rank_is_named_before_a_step_is_made(small_corpus, tmp_path):
    flags = [
        *small_corpus.flags,
        *runs.SHORT_RUN,
        "--save",
        str(tmp_path / "run"),
        "--last-rank",
        "--skip-packs",
        "3-5",
    ]
    ended = runs.script(runs.WORKERS / "told_by_rank.py", flags, processes=2, expect=1)
    [line] = errors(ended)
    assert (
        line.startswith("error: skip_packs is ") and "on rank 0" in line and "on rank 1 (" in line
    )
    assert not (tmp_path / "run").exists()
