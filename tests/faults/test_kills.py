"""A few kills of the campaign that `make faults` runs, at chosen moments."""

import pytest
from faults.campaign import SAVES, Campaign
from faults.moments import Moment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

LIVES = [
    ("TP2", SAVES[1], [Moment("save", launcher=True), Moment("launch", into=0.0, launcher=True), Moment("publish", which=0.9)]),
    ("one", SAVES[0], [Moment("save"), Moment("start"), Moment("publish")]),
]


def test_runs_that_are_killed_end_as_if_nothing_had_happened(small_corpus, tmp_path):
    """Two runs, three kills each: the launcher or a worker, in synchronous and asynchronous saves, at the start, before all."""
    campaign = Campaign(tmp_path, small_corpus.flags, kills=6, seed=0)
    for life in LIVES:
        campaign.live(*life)
    print(campaign.table())
    assert campaign.failures == []
    assert len(campaign.kills) == 6 and all(kill.finished_equal for kill in campaign.kills)
