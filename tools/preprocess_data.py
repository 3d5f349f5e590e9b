"""Tokenize JSONL text to .bin and .idx files; the same as `megaenc preprocess`."""

from megaenc.data.preprocess.command import main

if __name__ == "__main__":
    main()
