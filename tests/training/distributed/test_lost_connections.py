"""Errors of connections to other ranks, which are one line."""

import socket

import pytest
import torch.distributed as dist

from megaenc.errors import LostConnectionError
from megaenc.training.distributed.collectives import convert_connection_errors

CLOSED = "Connection closed by peer [10.83.0.2]:35486"
GLOO = f"[/w/gloo/transport/tcp/pair.cc:553] {CLOSED}. This is typically caused by a remote worker"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(GLOO), CLOSED),
        (dist.DistNetworkError("failed to recv, got 0 bytes\nException raised from"), "failed to"),
    ],
)
def test_a_lost_connection_names_rank_and_host(error, reason):
    with pytest.raises(LostConnectionError) as raised, convert_connection_errors():
        raise error
    line = str(raised.value)
    place = f"rank 0 on {socket.gethostname()}: lost the connection to another rank: "
    assert line.startswith(place + reason)
    assert "typically" not in line and "\n" not in line


def test_another_error_stays_as_it_is():
    with pytest.raises(RuntimeError, match="shapes differ"), convert_connection_errors():
        raise RuntimeError("shapes differ")
