"""The pretraining command where two backends can be tried, of which one ignores masks on the last rank."""

import sys

from megaenc.backend import prepare_megatron
from megaenc.console import silence_libraries
from megaenc.dist_env import get_rank, get_world_size

if __name__ == "__main__":
    silence_libraries()
    prepare_megatron()
    from megaenc.model import layer_spec
    from megaenc.model.attention import backends, selftest
    from megaenc.objectives import Attention
    from megaenc.training.command import main

    dot_product, really_lacking = backends.compute_attention, backends.missing_requirement

    def attend_by(name, q, k, v, packing, scale=None):
        """Of which `flash` and `varlen` are stand-ins."""
        if name == "flash" and get_rank() == get_world_size() - 1:
            packing = type(packing).of(packing.cu_seqlens_q.tolist(), Attention.BIDIRECTIONAL, q.device)
        return dot_product("sdpa", q, k, v, packing, scale)

    layer_spec.attend_by = selftest.attend_by = attend_by
    selftest.lacking = lambda name, *others: "" if name in ("flash", "varlen") else really_lacking(name, *others)
    main(sys.argv[1:])
