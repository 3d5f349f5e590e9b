"""A few kills of the campaign that `make faults` runs, at chosen moments."""

import pytest
from faults.campaign import SAVES, Campaign
from faults.moments import Moment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

LIVES = {
    "TP2": (SAVES[1], [Moment("save", launcher=True), Moment("launch", launcher=True), Moment("publish", which=0.9)]),
    "one": (SAVES[0], [Moment("save"), Moment("publish")]),
}


@pytest.mark.parametrize("layout", LIVES)
def test_runs_that_are_killed_end_as_if_nothing_had_happened(layout, small_corpus, tmp_path):
    """The launcher or a worker, in synchronous and asynchronous saves, at the start, before all."""
    saves, moments = LIVES[layout]
    campaign = Campaign(tmp_path, small_corpus.flags)
    campaign.live(layout, saves, moments)
    assert campaign.failures == []
    assert len(campaign.kills) == len(moments)
