"""Four ranks that check `megaenc.backend.reductions` and `call_on_all`."""

import torch

from megaenc.backend import ParallelConfig, destroy_distributed, init_distributed, prepare_megatron
from megaenc.dist_env import get_rank
from megaenc.errors import InputError


def main() -> None:
    prepare_megatron()
    init_distributed(ParallelConfig(), 0)
    from torch.distributed import ReduceOp

    from megaenc.backend.reductions import (
        broadcast_object,
        gather_lowest,
        is_same_on_all_ranks,
        reduce_over_ranks,
    )
    from megaenc.training.distributed.collectives import broadcast_call, call_on_all

    rank = get_rank()
    assert reduce_over_ranks([rank, 1], ReduceOp.SUM) == [6, 4]
    assert reduce_over_ranks([rank / 2], ReduceOp.MAX, torch.float64) == [1.5]
    assert is_same_on_all_ranks(b"as all")
    assert not is_same_on_all_ranks(
        b"on the last rank others" if rank == 3 else b"on all others this"
    )
    assert broadcast_object({"from": rank}, 2) == {"from": 2}

    assert gather_lowest(None) == ({}, 0)
    assert gather_lowest(f"of {rank}" if rank else None) == ({1: "of 1"}, 3)
    assert gather_lowest(rank * 10 if rank in (1, 3) else None, limit=4) == ({1: 10, 3: 30}, 2)
    assert gather_lowest(0 if rank == 2 else None) == ({2: 0}, 1), "what is false is a value"

    assert call_on_all(lambda: rank) == rank
    assert broadcast_call(lambda: rank) == 0
    for call, ranks, message in (
        (call_on_all, (2, 3), "on 2"),
        (call_on_all, (3,), "on 3"),
        (broadcast_call, (0,), "on 0"),
    ):

        def fail(ranks=ranks):
            if rank in ranks:
                raise InputError(f"on {rank}")

        try:
            call(fail)
        except InputError as error:
            assert str(error) == message
        else:
            raise AssertionError(f"no error on rank {rank}")
    destroy_distributed()


if __name__ == "__main__":
    main()
