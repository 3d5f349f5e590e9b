"""Processes that were told different things train nothing."""

import pytest
import runs
from checkpoint_helpers import errors

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(("more", "name"), [(["--skip-packs", "3-5"], "skip_packs"), (["--save-interval", "7"], "save_interval")])
def test_another_flag_on_one_rank_is_named_before_a_step_is_made(more, name, small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--save", str(tmp_path / "run"), "--last-rank", *more]
    ended = runs.script(runs.WORKERS / "told_by_rank.py", flags, processes=2, expect=1)
    [line] = errors(ended)
    assert line.startswith(f"error: {name} is ") and "on rank 0" in line and "on rank 1 (" in line
    assert not (tmp_path / "run").exists()
