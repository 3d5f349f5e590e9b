"""`megaenc tokenizer`: train a byte-level BPE on text and save it as a Hugging Face tokenizer folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaenc import flags
from megaenc.atomic_io import atomic_dir, exit_on_sigterm
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.data.sources.resolve import InputConfig, resolve_inputs, read_blocks
from megaenc.errors import InputError, handle_command_errors
from megaenc.output_paths import check_parent_writable, create_parent_with_rollback, refuse_existing


@dataclass(frozen=True)
class TrainTokenizerConfig(InputConfig):
    """What `megaenc tokenizer` takes."""

    output: str
    """Folder to write; must not hold anything yet."""
    vocab_size: int = 8192
    """Largest number of token ids."""
    json_key: str = "text"
    """Key of the text in each JSON object, column of a table."""


def train_and_save_tokenizer(settings: TrainTokenizerConfig) -> None:
    """Train and save a tokenizer, all or nothing. Raises InputError for input or output that cannot be used."""
    output = Path(settings.output)
    refuse_existing(output, "--output")
    inputs = resolve_inputs(settings, [settings.json_key])
    for remark in inputs.messages:
        print_rank_0(remark)
    check_parent_writable(output, "--output")
    from megaenc.data.tokenizer.tokenizer import train_tokenizer

    documents = 0

    def texts() -> Iterator[str]:
        nonlocal documents
        for block in read_blocks(inputs):
            for (text,) in block.documents([settings.json_key], False).texts:
                documents += 1
                yield text
            progress.update(block.position, documents=documents)
        if not documents:
            raise InputError(f"{inputs.origins[0]['path']}: holds no document to learn from")
        progress.update(block.position, description="merging into a vocabulary")

    with create_parent_with_rollback(output, "--output"), atomic_dir(output) as folder:
        with ProgressLine("reading for the tokenizer", inputs.known_size) as progress:
            tokenizer = train_tokenizer(texts(), settings.vocab_size)
        tokenizer.save_pretrained(folder)
    print_rank_0(f"{output}: a byte-level BPE of {len(tokenizer):,} ids, learnt from {documents:,} documents")


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc tokenizer`."""
    silence_libraries()
    settings = flags.parse(TrainTokenizerConfig, argv, prog="megaenc tokenizer", description=__doc__)
    with exit_on_sigterm():
        train_and_save_tokenizer(settings)
