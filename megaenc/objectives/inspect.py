"""Look at a corpus: its figures, how long its documents are, and one pack decoded as an objective sees it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.console import format_number, silence_libraries, build_rich_console
from megaenc.data.indexed.corpus import Corpus, parse_split, split_documents
from megaenc.data.packing.builder import PACKINGS
from megaenc.data.packing.packed_dataset import CorpusPackedDataset
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, handle_command_errors
from megaenc.objectives.base import Objective
from megaenc.objectives.parser import FLAG
from megaenc.objectives.schedule import Schedule

_BAR_WIDTH = 20  # columns of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class InspectConfig:
    """What `megaenc data inspect` takes; split, seed and what cuts packs as for pretraining, whose packs these are."""

    prefix: Annotated[str, Positional, arg(metavar="PREFIX")]
    """Corpus: the path of its .bin, .idx and .json without the extension."""
    tokenizer: str = ""
    """Tokenizer that the corpus was made with, a folder or a name; without it no pack is decoded."""
    objective: str = "mlm"
    """Objective under which the pack is shown, as a schedule spells it: clm, mlm(mask=0.3)."""
    pack: int = 0
    """Number of the pack that is decoded, in the order in which a run reads them."""
    seq_length: int = 128
    """Tokens of a pack."""
    packing: Literal["concat", "random-length", "sentences"] = "concat"
    """How packs are cut."""
    seed: int = 1
    """Order of the packs, and what is hidden in them."""
    split: str = "99,1,0"
    """Shares of the documents for training, validation and test; packs hold the first."""


class LengthBin(NamedTuple):
    """The number of documents of `low` to `high` tokens, both included, and of their tokens."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class LengthStats:
    """Lengths in tokens, over all documents, empty ones included."""

    mean: float
    median: float
    p5: float
    """One document in twenty is shorter."""
    p95: float
    longest: int
    longest_document: int
    """Its number; the first where there are several."""
    empty: int
    bins: tuple[LengthBin, ...]
    """From the shortest documents to the longest without a gap: none, 1, 2 to 3, 4 to 7, 8 to 15, ... tokens."""


def compute_length_stats(document_lengths: np.ndarray) -> LengthStats:
    """Return the Lengths of documents, int64[D] in tokens, D at least 1."""
    p5, median, p95 = np.percentile(document_lengths, [5, 50, 95]).tolist()
    longest, empty = int(document_lengths.argmax()), int((document_lengths == 0).sum())
    # frexp's exponent is exact: 0 for no token, 1 for 1, 2 for 2 and 3, 3 for 4 to 7.
    exponents = np.frexp(document_lengths.astype(np.float64))[1]
    counts = zip(np.bincount(exponents), np.bincount(exponents, weights=document_lengths), strict=True)
    bins = [LengthBin(1 << power >> 1, (1 << power) - 1, int(found), int(tokens)) for power, (found, tokens) in enumerate(counts)]
    mean = float(document_lengths.mean())
    return LengthStats(mean, median, p5, p95, int(document_lengths[longest]), longest, empty, tuple(bins[exponents.min() :]))


def parse_objective(text: str, vocabulary: Vocabulary) -> Objective:
    """One objective as a schedule spells it, `mlm(mask=0.3)`, without a share. Raises InputError."""
    if re.search(r"[:,]", re.sub(r"\([^()]*\)", "", text)):
        raise InputError(f"--objective {text}: found phases or a share, expected one objective alone, such as mlm(mask=0.3)")
    try:
        choices = Schedule.build(text, 1, vocabulary).phases[0].choices
    except InputError as error:
        raise InputError(str(error).replace(FLAG, "--objective", 1)) from None
    if len(choices) > 1 or choices[0].start != choices[0].end:
        found = "a mixture" if len(choices) > 1 else "an option that changes"
        raise InputError(f"--objective {text}: found {found}, expected one objective as it is, such as mlm(mask=0.3)")
    return choices[0].start


def inspect_corpus(settings: InspectConfig) -> list[Any]:
    """What rich prints about a corpus. Raises InputError for flags, corpus or tokenizer that cannot be used."""
    for name, least, most in (("pack", 0, 1 << 40), ("seq_length", 1, 1 << 24), ("seed", 0, 1 << 63)):
        flag, value = f"--{name.replace('_', '-')}", getattr(settings, name)
        if value < least:
            raise InputError(f"{flag}: found {value}, expected {least} or more")
        if value >= most:
            raise InputError(f"{flag}: found {str(value)[:40]}, expected less than {most:,}")
    corpus = Corpus.open(settings.prefix)
    training, _, _ = split_documents(len(corpus), parse_split(settings.split))
    packs = PACKINGS[settings.packing](corpus, training, settings.seq_length, settings.seed)
    lengths = compute_length_stats(corpus.document_lengths)
    decoded = ["Give --tokenizer DIR to see a pack decoded, and what --objective hides in it and predicts."]
    if settings.tokenizer:
        # Here and not at the top: transformers takes seconds, and the figures need none of it.
        from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
        from megaenc.objectives.pack_view import decode_pack, build_renderables

        tokenizer = load_tokenizer(settings.tokenizer)
        vocabulary = read_vocabulary(tokenizer)
        objective = parse_objective(settings.objective, vocabulary)
        corpus.check_vocabulary(vocabulary)
        decoded = build_renderables(decode_pack(packs[settings.pack], objective, settings.seed, tokenizer))
    return [settings.prefix, _build_stats_table(corpus, packs, lengths, settings), "", _build_histogram(lengths), "", *decoded]


def _build_stats_table(corpus: Corpus, packs: CorpusPackedDataset, lengths: LengthStats, settings: InspectConfig) -> Any:
    """rich's Table of a corpus in figures."""
    from rich.table import Table

    sidecar, tokens = corpus.metadata, int(corpus.document_lengths.sum())
    unknown = f"unknown: there is no {Path(corpus.prefix).name}.json"
    sizes = (f"{_format_size(Path(corpus.prefix + extension).stat().st_size)} {extension}" for extension in (".bin", ".idx"))
    rows = {
        "documents": f"{len(corpus):,}",
        "sequences": f"{corpus.sequences:,}" if corpus.sequences != len(corpus) else "",
        "tokens": f"{tokens:,}",
        "dtype": corpus.dtype,
        "tokenizer": unknown,
        "end of document": unknown,
        "size on disk": " + ".join(sizes),
        f"packs of {settings.seq_length:,}": f"{packs.samples_before_repeat:,} an epoch ({settings.packing}, training documents "
        f"of --split {settings.split})" + (f", {100 * packs.dropped:.1f} % left out" if packs.dropped else ""),
        "tokens a document": f"mean {format_number(lengths.mean)}, median {format_number(lengths.median)}, "
        f"p5 {format_number(lengths.p5)}, p95 {format_number(lengths.p95)}, "
        f"longest {lengths.longest:,} (document {lengths.longest_document}), {lengths.empty:,} empty",
    }
    if sidecar:
        made_with = sidecar.tokenizer
        rows["tokenizer"] = f"{made_with.name} ({made_with.fingerprint[:12]}), {sidecar.vocab_size:,} ids"
        rows["end of document"] = f"id {sidecar.eod}, appended to each" if sidecar.append_eod else "none appended"
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            table.add_row(f"  {name}", value)
    return table


def _build_histogram(lengths: LengthStats) -> Any:
    """rich's Table of the bins of `lengths`: documents as bars, their share of the tokens beside them."""
    from rich.table import Table

    documents, tokens = (sum(getattr(each, name) for each in lengths.bins) for name in ("documents", "tokens"))
    most = max(each.documents for each in lengths.bins)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name, how in (("  tokens", "right"), ("documents", "right"), ("", "right"), ("", "left"), ("of tokens", "right")):
        table.add_column(name, justify=how, no_wrap=True)
    for low, high, count, held in lengths.bins:
        span = f"  {low:,}" if low >= high else f"  {low:,} - {high:,}"
        shares = f"{100 * count / documents:.1f} %", format_bar(count / most), f"{100 * held / tokens:.1f} %"
        table.add_row(span, f"{count:,}", *shares)
    return table


def _format_size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count:,} bytes"


def format_bar(share: float, width: int = _BAR_WIDTH) -> str:
    """`share` of `width` columns as a bar, to an eighth of a column, blank up to the width; what is not nothing is seen."""
    eighths = max(round(share * width * 8), int(share > 0))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(width)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc data inspect`."""
    silence_libraries()
    settings = flags.parse(InspectConfig, argv, prog="megaenc data inspect", description=__doc__)
    console = build_rich_console(highlight=False, markup=False, emoji=False)
    for part in inspect_corpus(settings):
        console.print(part)
