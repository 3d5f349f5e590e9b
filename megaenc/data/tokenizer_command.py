"""`megaenc tokenizer`: train a byte-level BPE on text and save it as a Hugging Face tokenizer folder."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaenc import flags
from megaenc.console import ProgressLine, quiet, say
from megaenc.data.inputs import InputFlags, Inputs, find_inputs, read_blocks
from megaenc.errors import InputError, one_line_errors
from megaenc.files import stopped_by_sigterm, whole_folder
from megaenc.output_paths import check_parent, created_parent, refuse_existing


@dataclass(frozen=True)
class TokenizerFlags(InputFlags):
    """What `megaenc tokenizer` takes."""

    output: str
    """Folder to write; must not hold anything yet."""
    vocab_size: int = 8192
    """Largest number of token ids."""
    json_key: str = "text"
    """Key of the text in each JSON object, column of a table."""


def make_tokenizer(settings: TokenizerFlags) -> None:
    """Train and save a tokenizer, all or nothing. Raises InputError for input or output that cannot be used."""
    output = Path(settings.output)
    refuse_existing(output, "--output")
    inputs = find_inputs(settings, [settings.json_key])
    for remark in inputs.remarks:
        say(remark)
    check_parent(output, "--output")
    from megaenc.data.tokenizer import train_tokenizer

    counts = _Counts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(created_parent(output, "--output"))
        folder = stack.enter_context(whole_folder(output))
        progress = stack.enter_context(ProgressLine("reading for the tokenizer", inputs.known_size))
        tokenizer = train_tokenizer(_texts(inputs, settings.json_key, counts, progress), settings.vocab_size)
        tokenizer.save_pretrained(folder)
    say(f"{output}: a byte-level BPE of {len(tokenizer):,} ids, learnt from {counts.documents:,} documents")


@dataclass
class _Counts:
    documents: int = 0


def _texts(inputs: Inputs, key: str, counts: _Counts, progress: ProgressLine) -> Iterator[str]:
    for block in read_blocks(inputs):
        for (text,) in block.documents([key], False).texts:
            counts.documents += 1
            yield text
        progress.update(block.position, documents=counts.documents)
    if not counts.documents:
        raise InputError(f"{inputs.origins[0]['path']}: holds no document to learn from")
    progress.update(block.position, description="merging into a vocabulary")


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc tokenizer`."""
    quiet()
    settings = flags.parse(TokenizerFlags, argv, prog="megaenc tokenizer", description=__doc__)
    with stopped_by_sigterm():
        make_tokenizer(settings)
