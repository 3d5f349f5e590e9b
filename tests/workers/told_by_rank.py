"""A command with more flags on its last rank: `told_by_rank.py FLAGS...`.

The last rank's flags follow `--last-rank`.
"""

import sys

from megaenc.dist_env import get_rank, get_world_size
from megaenc.training.command import main

if __name__ == "__main__":
    at = sys.argv.index("--last-rank")
    more = sys.argv[at + 1 :] if get_rank() == get_world_size() - 1 else []
    main([*sys.argv[1:at], *more])
