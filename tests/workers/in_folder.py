"""Runs a command as if typed in another folder: `in_folder.py FOLDER pretrain --config ...`."""

import os
import sys

from megaenc import cli

if __name__ == "__main__":  # checkpoint writers are spawned and import this file again
    os.chdir(sys.argv[1])
    cli.main(sys.argv[2:])
