"""A command run in another directory: `in_directory.py DIRECTORY pretrain ...`."""

import os
import sys

from megaenc import cli

if __name__ == "__main__":  # checkpoint writers are spawned and import this file again
    os.chdir(sys.argv[1])
    cli.main(sys.argv[2:])
