"""`python -m megaenc COMMAND`: the same as `megaenc COMMAND`."""

from megaenc.cli import main

if __name__ == "__main__":
    main()
