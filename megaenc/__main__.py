"""Entry point of `python -m megaenc COMMAND`, the same as `megaenc COMMAND`."""

import sys

if __name__ == "__main__":
    # `-m` puts the current directory first, where a file of any name could stand in for a module.
    if not sys.flags.safe_path:
        del sys.path[0]
    from megaenc.cli import main

    main()
