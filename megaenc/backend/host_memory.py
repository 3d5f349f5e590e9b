"""Memory of a host: what one step frees, the next one takes again."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed, for the rest of this process; returns whether it does.

    A tensor above 32 MB would be mapped when it is made and given back when it is freed, and the kernel clears its pages again
    for every one that is made: with bfloat16 instructions that was up to a fifth of a training step (docs/performance.md).

    A malloc that is set up by variables of its own (MALLOC_*, GLIBC_TUNABLES) is left alone, as is one that is not glibc's.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))
