"""The pretraining command with two backends, one of them wrong on the last rank."""

import sys

from megaenc.backend import prepare_megatron
from megaenc.console import silence_libraries
from megaenc.dist_env import get_rank, get_world_size

if __name__ == "__main__":
    silence_libraries()
    prepare_megatron()
    from megaenc.model import layer
    from megaenc.model.attention import backends, selftest
    from megaenc.objectives import Attention
    from megaenc.training.command import main

    real_attention = backends.compute_attention
    real_requirement = backends.missing_requirement

    def compute_attention(name, q, k, v, packing, scale=None, window=None):
        """Compute every backend as `sdpa`, `flash` without masks on the last rank."""
        if name == "flash" and get_rank() == get_world_size() - 1:
            packing = type(packing).from_cu_seqlens(
                packing.cu_seqlens_q.tolist(), Attention.BIDIRECTIONAL, q.device
            )
        return real_attention("sdpa", q, k, v, packing, scale, window=window)

    layer.compute_attention = selftest.compute_attention = compute_attention
    selftest.missing_requirement = lambda name, *others: (
        "" if name in ("flash", "varlen") else real_requirement(name, *others)
    )
    main(sys.argv[1:])
