"""`megaenc tokenizer`: train a byte-level BPE on text and save it as a Hugging Face tokenizer folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaenc import flags
from megaenc.atomic_io import atomic_dir, stopped_by_sigterm
from megaenc.console import ProgressLine, print_rank_0, quiet
from megaenc.data.sources.resolve import InputConfig, find_inputs, read_blocks
from megaenc.errors import InputError, one_line_errors
from megaenc.output_paths import check_parent, created_parent, refuse_existing


@dataclass(frozen=True)
class TrainTokenizerConfig(InputConfig):
    """What `megaenc tokenizer` takes."""

    output: str
    """Folder to write; must not hold anything yet."""
    vocab_size: int = 8192
    """Largest number of token ids."""
    json_key: str = "text"
    """Key of the text in each JSON object, column of a table."""


def make_tokenizer(settings: TrainTokenizerConfig) -> None:
    """Train and save a tokenizer, all or nothing. Raises InputError for input or output that cannot be used."""
    output = Path(settings.output)
    refuse_existing(output, "--output")
    inputs = find_inputs(settings, [settings.json_key])
    for remark in inputs.remarks:
        print_rank_0(remark)
    check_parent(output, "--output")
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

    with created_parent(output, "--output"), atomic_dir(output) as folder:
        with ProgressLine("reading for the tokenizer", inputs.known_size) as progress:
            tokenizer = train_tokenizer(texts(), settings.vocab_size)
        tokenizer.save_pretrained(folder)
    print_rank_0(f"{output}: a byte-level BPE of {len(tokenizer):,} ids, learnt from {documents:,} documents")


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc tokenizer`."""
    quiet()
    settings = flags.parse(TrainTokenizerConfig, argv, prog="megaenc tokenizer", description=__doc__)
    with stopped_by_sigterm():
        make_tokenizer(settings)
