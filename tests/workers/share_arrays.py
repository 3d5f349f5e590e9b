"""Asks for arrays that processes share, says what it has, and keeps it to the end of its input."""

import os
import sys
import time

import numpy as np

from megaenc.data.packing.shared_memory import share_arrays


def make() -> tuple[np.ndarray, ...]:
    print("makes", flush=True)
    time.sleep({"slow": 1.0, "forever": 600.0}.get(sys.argv[-1], 0.0))
    return np.arange(5, dtype=np.int32), np.array([0.5])


if __name__ == "__main__":
    arrays = share_arrays(("arrays", 1), make)
    with open("/proc/self/maps") as maps:
        [inode] = {line.split()[4] for line in maps if "/memfd:" in line}
    writeable = "writeable" if any(array.flags.writeable for array in arrays) else "read-only"
    types = " ".join(str(array.dtype) for array in arrays)
    print("has", [array.tolist() for array in arrays], types, writeable, inode, flush=True)
    assert os.environ["LOCAL_WORLD_SIZE"] != "1"
    sys.stdin.read()
