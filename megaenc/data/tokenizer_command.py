"""`megaenc tokenizer`: train a byte-level BPE on JSONL text and save it as a Hugging Face tokenizer folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaenc import flags
from megaenc.console import ProgressLine, quiet, say
from megaenc.data import readers
from megaenc.errors import InputError, one_line_errors
from megaenc.files import make_parent, refuse_existing, stopped_by_sigterm, whole_folder


@dataclass(frozen=True)
class TokenizerFlags:
    """What `megaenc tokenizer` takes."""

    input: tuple[str, ...]
    """JSONL files, plain or compressed with gzip or zstd."""
    output: str
    """Folder to write; must not hold anything yet."""
    vocab_size: int = 8192
    """Largest number of token ids."""
    json_key: str = "text"
    """Key of the text in each JSON object."""


def make_tokenizer(settings: TokenizerFlags) -> None:
    """Train and save a tokenizer, all or nothing. Raises InputError for input or output that cannot be used."""
    output = Path(settings.output)
    refuse_existing(output, "--output")
    total = readers.input_bytes(settings.input)
    make_parent(output, "--output")
    from megaenc.data.tokenizer import train_tokenizer

    counts = _Counts()
    with whole_folder(output) as folder, ProgressLine("reading for the tokenizer", total) as progress:
        tokenizer = train_tokenizer(_texts(settings, counts, progress), settings.vocab_size)
        tokenizer.save_pretrained(folder)
    say(f"{output}: a byte-level BPE of {len(tokenizer):,} ids, learnt from {counts.documents:,} documents")


@dataclass
class _Counts:
    documents: int = 0


def _texts(settings: TokenizerFlags, counts: _Counts, progress: ProgressLine) -> Iterator[str]:
    for block in readers.read_blocks(settings.input):
        for (text,) in readers.parse_block(block, [settings.json_key]).texts:
            counts.documents += 1
            yield text
        progress.update(block.position, documents=counts.documents)
    if not counts.documents:
        raise InputError(f"{settings.input[0]}: holds no document; expected one JSON object a line")
    progress.update(block.position, description="merging into a vocabulary")


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc tokenizer`."""
    quiet()
    settings = flags.parse(TokenizerFlags, argv, prog="megaenc tokenizer", description=__doc__)
    with stopped_by_sigterm():
        make_tokenizer(settings)
