"""A grid of runs that take no time: `grid_of_fakes.py MODEL OUTPUT [flags]`."""

import sys

import fake_runs

from megaenc import flags
from megaenc.errors import handle_command_errors
from megaenc.finetune.grid.command import GridConfig, run_grid


@handle_command_errors
def main() -> None:
    model, output, *rest = sys.argv[1:]
    argv = ["--model", model, "--output", output, *rest]
    settings = flags.parse(GridConfig, argv, prog="grid", description="a grid")
    run_grid(settings, fake_runs.find, "fake_runs:run")


if __name__ == "__main__":
    main()
