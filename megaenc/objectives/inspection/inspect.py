"""Command `megaenc data inspect`: statistics of a corpus, and one decoded pack.

The pack is shown as an objective sees it, next to a histogram of document lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.console import build_rich_console, format_number, silence_libraries
from megaenc.data.indexed.corpus import Corpus, parse_split
from megaenc.data.packing.builder import PACKINGS, split_corpus
from megaenc.data.packing.packed_dataset import CorpusPackedDataset
from megaenc.errors import handle_command_errors
from megaenc.flags import Bounds, Seed
from megaenc.objectives.schedule import parse_objective

_BAR_WIDTH = 20  # columns of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class InspectConfig:
    """Flags of `megaenc data inspect`: corpus, tokenizer, objective and pack to show.

    Each field is a flag, except for the positional argument `prefix`, the path of the corpus
    without extension. `tokenizer` is that of the corpus, "" to show no pack, and `pack` the number
    from 0 of the one to show under `objective`. Packs are those that `megaenc pretrain` reads with
    the same `seq_length`, `packing`, `data_order`, `seed` and `split`.
    """

    prefix: Annotated[str, Positional, arg(metavar="PREFIX")]
    """Corpus: path of its .bin, .idx and .json without the extension."""
    tokenizer: str = ""
    """Tokenizer of the corpus, a directory or Hub name; without it no pack is decoded."""
    objective: str = "mlm"
    """Objective under which the pack is shown, as written in a schedule: clm, mlm(mask=0.3)."""
    pack: Annotated[int, Bounds(low=0, below=1 << 40)] = 0
    """Number of the pack to decode, in the order in which a run reads them."""
    seq_length: Annotated[int, Bounds(low=1, below=1 << 24)] = 128
    """Tokens per pack."""
    packing: Literal["concat", "random-length", "sentences"] = "concat"
    """Way of cutting documents into packs; see the flag of `megaenc pretrain`."""
    data_order: Literal["blocks", "documents"] = "blocks"
    """Shuffling of a corpus of more than 1,048,576 documents; see the flag of `megaenc
    pretrain`."""
    seed: Seed = 1
    """Seed of the order of packs and of the hidden tokens."""
    split: str = "99,1,0"
    """Weights of the training, validation and test documents; packs hold training documents."""


class LengthBin(NamedTuple):
    """Histogram bin of document lengths.

    `documents` counts those with `low` to `high` tokens, inclusive, and `tokens` all their tokens.
    """

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class LengthStats:
    """Statistics of document lengths in tokens, by `compute_length_stats`.

    `mean` and `median` are over all documents. p5 and p95 are percentiles, interpolated; `longest`
    is the highest length, `longest_document` the index, from 0, of the first such document; `empty`
    the number of documents without tokens; `bins` a histogram without gaps, of 0, 1, 2 to 3, 4 to
    7, 8 to 15, ... tokens, from the bin of the shortest document to that of the longest.
    """

    mean: float
    median: float
    p5: float
    p95: float
    longest: int
    longest_document: int
    empty: int
    bins: tuple[LengthBin, ...]


def compute_length_stats(document_lengths: np.ndarray) -> LengthStats:
    """Return the LengthStats of document lengths, int64[D] in tokens with D > 0."""
    p5, median, p95 = np.percentile(document_lengths, [5, 50, 95]).tolist()
    longest = int(document_lengths.argmax())
    empty = int((document_lengths == 0).sum())
    # frexp's exponent is exact: 0 for 0 tokens, 1 for 1, 2 for 2 and 3, 3 for 4 to 7.
    exponents = np.frexp(document_lengths.astype(np.float64))[1]
    counts = zip(
        np.bincount(exponents), np.bincount(exponents, weights=document_lengths), strict=True
    )
    bins = [
        LengthBin(1 << power >> 1, (1 << power) - 1, int(documents), int(tokens))
        for power, (documents, tokens) in enumerate(counts)
    ]
    mean = float(document_lengths.mean())
    return LengthStats(
        mean,
        median,
        p5,
        p95,
        int(document_lengths[longest]),
        longest,
        empty,
        tuple(bins[exponents.min() :]),
    )


def inspect_corpus(settings: InspectConfig) -> list[Any]:
    """Return rich renderables of a corpus, in the order in which to print them.

    They are statistics, a histogram of lengths, and a decoded pack, or without a tokenizer a line
    on how to get one.

    Raises:
        InputError: The corpus, the tokenizer or the objective is unusable.
    """
    corpus = Corpus.open(settings.prefix)
    lengths = compute_length_stats(corpus.document_lengths)
    training, _, _ = split_corpus(corpus, parse_split(settings.split), settings.data_order)
    packs = PACKINGS[settings.packing](corpus, training, settings.seq_length, settings.seed)
    pack_view = [
        "Add --tokenizer DIR to see a decoded pack with the tokens that --objective hides and "
        "predicts."
    ]
    if settings.tokenizer:
        # Imported here, because transformers takes seconds and the statistics do not need it.
        from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
        from megaenc.objectives.inspection.pack_view import build_renderables, decode_pack

        tokenizer = load_tokenizer(settings.tokenizer)
        vocabulary = read_vocabulary(tokenizer)
        objective = parse_objective(settings.objective, vocabulary, "--objective")
        corpus.check_vocabulary(vocabulary)
        pack_view = build_renderables(
            decode_pack(packs[settings.pack], objective, settings.seed, tokenizer)
        )
    return [
        settings.prefix,
        _build_stats_table(corpus, packs, lengths, settings),
        "",
        _build_histogram(lengths),
        "",
        *pack_view,
    ]


def _build_stats_table(
    corpus: Corpus, packs: CorpusPackedDataset, lengths: LengthStats, settings: InspectConfig
) -> Any:
    """Return a rich table of corpus counts, sizes, tokenizer and document lengths."""
    from rich.table import Table

    metadata = corpus.metadata
    tokens = int(corpus.document_lengths.sum())
    unknown = f"unknown: {Path(corpus.prefix).name}.json is missing"
    sizes = []
    for extension in (".bin", ".idx"):
        size = Path(corpus.prefix + extension).stat().st_size
        text = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size:,} bytes"
        sizes.append(f"{text} {extension}")
    rows = {
        "documents": f"{len(corpus):,}",
        "sequences": f"{corpus.sequences:,}" if corpus.sequences != len(corpus) else "",
        "tokens": f"{tokens:,}",
        "dtype": corpus.dtype,
        "tokenizer": unknown,
        "special tokens": "",
        "end of document": unknown,
        "size on disk": " + ".join(sizes),
        f"packs of {settings.seq_length:,}": f"{packs.samples_before_repeat:,} an epoch "
        f"({settings.packing}, training documents "
        f"of --split {settings.split})"
        + (f", {100 * packs.dropped:.1f} % left out" if packs.dropped else ""),
        "tokens a document": f"mean {format_number(lengths.mean)}, median "
        f"{format_number(lengths.median)}, "
        f"p5 {format_number(lengths.p5)}, p95 {format_number(lengths.p95)}, "
        f"longest {lengths.longest:,} (document {lengths.longest_document}), "
        f"{lengths.empty:,} empty",
    }
    if metadata:
        identity = metadata.tokenizer
        rows["tokenizer"] = (
            f"{identity.name} ({identity.fingerprint[:12]}), {metadata.vocab_size:,} ids"
        )
        special = metadata.surrounding_tokens
        if special.mode == "template":
            rows["special tokens"] = (
                f"ids {' '.join(map(str, [*special.before, '...', *special.after]))}, "
                "the template's"
            )
            rows["end of document"] = ""
        else:
            rows["end of document"] = (
                f"id {metadata.eod}, appended to each" if special.after else "none appended"
            )
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            table.add_row(f"  {name}", value)
    return table


def _build_histogram(lengths: LengthStats) -> Any:
    """Return a rich table of length bins, with documents as bars.

    The last column is the share of tokens.
    """
    from rich.table import Table

    documents = sum(length_bin.documents for length_bin in lengths.bins)
    tokens = sum(length_bin.tokens for length_bin in lengths.bins)
    most = max(length_bin.documents for length_bin in lengths.bins)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name, alignment in (
        ("  tokens", "right"),
        ("documents", "right"),
        ("", "right"),
        ("", "left"),
        ("of tokens", "right"),
    ):
        table.add_column(name, justify=alignment, no_wrap=True)
    for low, high, count, bin_tokens in lengths.bins:
        span = f"  {low:,}" if low >= high else f"  {low:,} - {high:,}"
        cells = (
            f"{100 * count / documents:.1f} %",
            format_bar(count / most),
            f"{100 * bin_tokens / tokens:.1f} %",
        )
        table.add_row(span, f"{count:,}", *cells)
    return table


def format_bar(fraction: float, width: int = _BAR_WIDTH) -> str:
    """Return a bar of block characters, padded with spaces to `width` columns.

    The blocks take `fraction` of the columns, in eighths of one, and at least an eighth above 0.
    `fraction` is from 0 to 1, which is not checked.
    """
    eighths = max(round(fraction * width * 8), int(fraction > 0))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(width)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc data inspect`: print statistics of a corpus and a decoded pack.

    The pack is printed only if a tokenizer is given. Wrong input exits with 2.

    Args:
        argv: Words after the command; None: sys.argv[1:].
    """
    silence_libraries()
    settings = flags.parse(InspectConfig, argv, prog="megaenc data inspect", description=__doc__)
    console = build_rich_console(highlight=False, markup=False, emoji=False)
    for renderable in inspect_corpus(settings):
        console.print(renderable)
