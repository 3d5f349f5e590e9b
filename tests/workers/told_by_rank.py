"""The command, told more on its last rank than on the others: `told_by_rank.py FLAGS... --last-rank FLAGS...`."""

import sys

from megaenc.dist_env import get_rank, get_world_size
from megaenc.training.command import main

if __name__ == "__main__":
    at = sys.argv.index("--last-rank")
    more = sys.argv[at + 1 :] if get_rank() == get_world_size() - 1 else []
    main([*sys.argv[1:at], *more])
