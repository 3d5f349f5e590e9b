"""Errors of connections to other ranks, which are one line."""

import socket

import pytest
import torch.distributed as dist

from megaenc.errors import LostConnectionError
from megaenc.training.distributed.collectives import convert_connection_errors

CLOSED = "Connection closed by peer [10.83.0.2]:35486"
STORE = dist.DistNetworkError
GLOO = f"[/w/gloo/transport/tcp/pair.cc:553] {CLOSED}. This is typically caused by a remote worker"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(GLOO), CLOSED),
        (STORE("failed to recv, got 0 bytes\nException raised from"), "failed to"),
    ],
)
def test_a_lost_connection_names_rank_and_host(error, reason):
    with pytest.raises(LostConnectionError) as raised, convert_connection_errors():
        raise error
    line = str(raised.value)
    place = f"rank 0 on {socket.gethostname()}: lost the connection to another rank: "
    assert line.startswith(place + reason)
    assert "typically" not in line and "\n" not in line


@pytest.mark.parametrize(("first", "last"), [(GLOO, LostConnectionError), ("shapes", STORE)])
def test_the_first_error_counts_if_the_store_is_lost_too(first, last):
    with pytest.raises(last) as raised, convert_connection_errors():
        try:
            raise RuntimeError(first)
        except RuntimeError:
            raise STORE("Broken pipe")  # noqa: B904  as it comes from the store
    assert ("Broken pipe" in str(raised.value)) == (first != GLOO)


def test_another_error_stays_as_it_is():
    with pytest.raises(RuntimeError, match="shapes differ"), convert_connection_errors():
        raise RuntimeError("shapes differ")
