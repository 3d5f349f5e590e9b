"""Command `megaenc tokenizer`: training of a byte-level BPE tokenizer.

It is saved as a Hugging Face tokenizer directory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from megaenc import flags
from megaenc.atomic_io import atomic_dir
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.data.sources.resolve import InputConfig, JsonKey, read_blocks, resolve_inputs
from megaenc.data.tokenizer.tokenizer import MAX_VOCABULARY, MIN_VOCABULARY
from megaenc.errors import InputError, handle_command_errors
from megaenc.flags import Bounds
from megaenc.output_paths import (
    check_parent_writable,
    create_parent_with_rollback,
    refuse_existing,
    report_stale_files,
)
from megaenc.processes import exit_on_sigterm


@dataclass(frozen=True)
class TrainTokenizerConfig(InputConfig):
    """Flags of `megaenc tokenizer`, with those of InputConfig; each is a field.

    The tokenizer is the byte-level BPE of `train_tokenizer`. `output` is a directory, missing or
    empty, `vocab_size` the maximum number of ids, and `json_key` the key or column of the text.
    """

    output: str
    """Directory to write; must be empty or missing."""
    vocab_size: Annotated[int, Bounds(low=MIN_VOCABULARY, high=MAX_VOCABULARY)] = 8192
    """Maximum number of token ids; small corpora give fewer."""
    json_key: JsonKey = "text"
    """Key of the text in each JSON object, or column of a table."""


def train_and_save_tokenizer(settings: TrainTokenizerConfig) -> None:
    """Train a byte-level BPE on the input, write it and print its number of ids.

    It is written atomically to the directory `settings.output`, which must be empty or missing.

    Raises:
        InputError: Input or output is unusable, or the input has no document.
    """
    output = Path(settings.output)
    refuse_existing(output, "--output")
    report_stale_files(output)
    inputs = resolve_inputs(settings, [settings.json_key])
    for message in inputs.messages:
        print_rank_0(message)
    check_parent_writable(output, "--output")
    from megaenc.data.tokenizer.tokenizer import train_tokenizer

    documents = 0

    def texts() -> Iterator[str]:
        nonlocal documents
        for block in read_blocks(inputs):
            for (text,) in block.parse([settings.json_key], False).texts:
                documents += 1
                yield text
            progress.update(block.position, documents=documents)
        if not documents:
            raise InputError(f"{inputs.origins[0]['path']}: holds no document to train on")
        progress.update(block.position, description="merging into a vocabulary")

    with create_parent_with_rollback(output, "--output"), atomic_dir(output) as directory:
        with ProgressLine("reading for the tokenizer", inputs.known_size) as progress:
            tokenizer = train_tokenizer(texts(), settings.vocab_size)
        tokenizer.save_pretrained(directory)
    print_rank_0(
        f"{output}: a byte-level BPE of {len(tokenizer):,} ids, trained on {documents:,} documents"
    )


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc tokenizer`: train a byte-level BPE and write its directory.

    `argv` are the flags; None: those of this process. Wrong input, such as an --output that is
    neither missing nor an empty directory, exits with 2.
    """
    silence_libraries()
    settings = flags.parse(
        TrainTokenizerConfig, argv, prog="megaenc tokenizer", description=__doc__
    )
    with exit_on_sigterm():
        train_and_save_tokenizer(settings)
