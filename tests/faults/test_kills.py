"""A few kills of the campaign that `make faults` runs, at chosen moments."""

import pytest
from faults.campaign import SAVES, Campaign
from faults.moments import Moment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MOMENTS = [
    Moment("save", launcher=True),
    Moment("launch", launcher=True),
    Moment("publish", which=0.9),
]


def test_runs_that_are_killed_end_as_if_nothing_had_happened(small_corpus, tmp_path):
    """The launcher or a worker is killed, in asynchronous saves and at the start."""
    campaign = Campaign(tmp_path, small_corpus.flags)
    campaign.live("TP2", SAVES[1], MOMENTS)
    assert campaign.failures == []
    assert len(campaign.kills) == len(MOMENTS)
