r"""Find the collocations of a corpus, which `mlm(unit=FILE)` hides as a whole.

megaenc objective collocations --data-path demo/corpus_text_document \
    --tokenizer demo/tokenizer --output demo/pmi.npz
megaenc data inspect demo/corpus_text_document --tokenizer demo/tokenizer \
    --objective 'mlm(mask=0.15,unit=demo/pmi.npz)'

N-grams of 2 to 5 tokens are ranked by the pointwise mutual information of PMI-Masking (arXiv
2010.01825): the smallest, over all ways to cut the n-gram into shorter ones, of log p(n-gram) - the
sum of log p(part). So `the New York` does not rank high only because `New York` does. Half of the
collocations have 2 tokens, a quarter 3, an eighth 4 and an eighth 5, all with a PMI above 0. No
n-gram holds a special token or crosses the end of a document. The paper counts n-grams of words;
here a word of several tokens may be one. Counts are exact; the memory is about 4 bytes a token and
1 GB.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from megaenc import flags
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.data.indexed.corpus import Corpus
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, handle_command_errors
from megaenc.flags import Bounds
from megaenc.objectives.units.matching import LONGEST, Collocations
from megaenc.output_paths import check_parent_writable, create_parent_with_rollback, refuse_existing
from megaenc.processes import exit_on_sigterm

FRACTIONS = {2: 0.5, 3: 0.25, 4: 0.125, 5: 0.125}
"""Share of the collocations of each number of tokens, as in the paper."""
_CHUNK = 1 << 22  # tokens that are processed together
_SORTED = 1 << 24  # n-grams that are sorted together
_HASH = np.uint64(0x9E3779B97F4A7C15)
_EXAMPLES = 5


@dataclass(frozen=True)
class CollocationsConfig:
    """Flags of `megaenc objective collocations`, each a field.

    `data_path`, a corpus without extension, `tokenizer`, its tokenizer, and `output`, a new file,
    must be given. At most `count` collocations are kept: of each length, 2 to 5 tokens, those of
    the highest pointwise mutual information among n-grams with at least `min_count` occurrences in
    the first `max_tokens` tokens.
    """

    data_path: str
    """Corpus: path of its .bin, .idx and .json without the extension."""
    tokenizer: str
    """Tokenizer of the corpus, a directory or Hub name; its special tokens are in no
    collocation."""
    output: str
    """File to write, for `mlm(unit=FILE)`; must not exist."""
    count: Annotated[int, Bounds(low=8, below=1 << 30)] = 100_000
    """Most collocations to keep; 800,000 in the paper, for Wikipedia and books."""
    min_count: Annotated[int, Bounds(low=1, below=1 << 40)] = 10
    """Fewest occurrences of a collocation; PMI overrates rare n-grams."""
    max_tokens: Annotated[int, Bounds(low=2, below=1 << 31)] = 100_000_000
    """Tokens to read from the start of the corpus; more take time and memory."""


class NgramTable(NamedTuple):
    """Frequent n-grams of one length n, each identified by its index in the arrays.

    counts: int64[N], occurrences; prefixes and suffixes: int64[N], its first and last n - 1 tokens
    as indices in the table for n - 1 (for n = 1 both are the token id), in ascending order of
    (prefix, suffix); total: number of n-grams of this length in the corpus, rare ones included.
    """

    counts: np.ndarray
    prefixes: np.ndarray
    suffixes: np.ndarray
    total: int


def count_ngrams(
    ids: np.ndarray,
    min_count: int,
    tick: Callable[[int], None] = lambda count: None,
    most_sorted: int = _SORTED,
) -> list[NgramTable]:
    """Return the tables of the frequent n-grams of 1, 2, 3, 4 and 5 tokens.

    There are always five; one without frequent n-grams is empty.

    Args:
        ids: int32[T], token ids, by `read_tokens`: a negative number stands at each place that no
            n-gram may hold. Overwritten.
        min_count: Fewest occurrences of an n-gram.
        tick: Progress function, called with the number of places processed since its last call,
            which add up to about 8 T.
        most_sorted: About the largest number of n-grams that are sorted at a time, which limits the
            memory.
    """
    ends = np.flatnonzero(np.concatenate([ids, [-1]]) < 0)
    runs = np.diff(ends, prepend=-1) - 1
    counts = np.bincount(ids[ids >= 0])
    tokens = np.flatnonzero(counts >= min_count)
    # The last entry is for negative numbers.
    index_of_token = np.full(len(counts) + 1, -1, dtype=np.int32)
    index_of_token[tokens] = np.arange(len(tokens))
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        chunk[:] = index_of_token[np.maximum(chunk, -1)]
    tables = [NgramTable(counts[tokens], tokens, tokens, int(runs.sum()))]
    for length in range(2, LONGEST + 1):
        base = len(tables[-1].counts)
        keys, counts = _count_keys(ids, base, min_count, tick, most_sorted)
        # The n-gram at each place replaces the shorter one, chunk by chunk: a key needs only its
        # own place and the next.
        for start, places, chunk_keys in _iterate_keys(ids, base):
            indices = np.full(min(_CHUNK, len(ids) - start), -1, dtype=np.int32)
            if len(keys):
                key_indices = np.minimum(np.searchsorted(keys, chunk_keys), len(keys) - 1)
                indices[places] = np.where(keys[key_indices] == chunk_keys, key_indices, -1)
            ids[start : start + _CHUNK] = indices
            tick(len(indices))
        total = int(np.maximum(runs - length + 1, 0).sum())
        tables.append(NgramTable(counts, keys // max(base, 1), keys % max(base, 1), total))
    return tables


def _iterate_keys(ids: np.ndarray, base: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the keys of overlapping n-grams in chunks of `ids`.

    The key is that of the first times `base` plus that of the second, which is exact.

    Yields:
        (start, places from there with an n-gram at both this place and the next, their keys).
    """
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK + 1].astype(np.int64)
        places = np.flatnonzero((chunk[:-1] >= 0) & (chunk[1:] >= 0))
        yield start, places, chunk[places] * base + chunk[places + 1]


def _count_keys(
    ids: np.ndarray, base: int, min_count: int, tick: Callable[[int], None], most_sorted: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the frequent keys of `ids`, sorted, and their counts, both int64.

    Frequent keys occur at least `min_count` times.
    """
    total = sum(len(keys) for _, _, keys in _iterate_keys(ids, base))
    parts = -(-total // most_sorted) or 1
    kept_keys = []
    kept_counts = []
    for part in range(parts):
        selected = [np.empty(0, dtype=np.int64)]
        for start, _, keys in _iterate_keys(ids, base):
            if parts > 1:
                hashes = (keys.view(np.uint64) * _HASH) >> np.uint64(32)
                keys = keys[hashes % np.uint64(parts) == part]
            selected.append(keys)
            tick(min(_CHUNK, len(ids) - start) // parts)
        sorted_keys = np.concatenate(selected)
        del selected
        sorted_keys.sort()
        starts = np.flatnonzero(np.diff(sorted_keys, prepend=-1))
        counts = np.diff(starts, append=len(sorted_keys))
        frequent = counts >= min_count
        kept_keys.append(sorted_keys[starts[frequent]])
        kept_counts.append(counts[frequent])
    all_keys = np.concatenate(kept_keys)
    order = np.argsort(all_keys)
    return all_keys[order], np.concatenate(kept_counts)[order]


def compute_pmi(tables: Sequence[NgramTable]) -> list[np.ndarray]:
    """Return the pointwise mutual information of n-grams, a list by length.

    It has a float64[N] for each n from 2. `tables` begin with n = 1, as of `count_ngrams`. It is
    PMI_n of arXiv 2010.01825, in nats: the minimum over all segmentations, but the n-gram itself,
    of log p(n-gram) - sum of log p(segment), where p is the fraction of an n-gram among those of
    its length.
    """
    logs = [np.log(table.counts / max(table.total, 1)) for table in tables]
    best = [logs[0]]  # largest sum of log p(segment), the n-gram itself included
    pmi = []
    for level in range(1, len(tables)):
        heads = tails = np.arange(len(tables[level].counts))
        # By level, the n-grams that begin and end it.
        prefixes = {}
        suffixes = {}
        for shorter in range(level - 1, -1, -1):
            heads = tables[shorter + 1].prefixes[heads]
            tails = tables[shorter + 1].suffixes[tails]
            prefixes[shorter] = heads
            suffixes[shorter] = tails
        # The first segment has cut + 1 tokens, the others are the best ones of the rest.
        sums = [
            logs[cut][prefixes[cut]] + best[level - 1 - cut][suffixes[level - 1 - cut]]
            for cut in range(level)
        ]
        in_parts = np.max(sums, axis=0)
        pmi.append(logs[level] - in_parts)
        best.append(np.maximum(logs[level], in_parts))
    return pmi


def select_collocations(
    tables: Sequence[NgramTable], count: int, facts: dict[str, object]
) -> Collocations:
    """Return at most `count` Collocations of the highest PMI above 0.

    Their shares by length are FRACTIONS, from half for 2 tokens to an eighth for 5. A length with
    too few n-grams leaves the rest of its share unused. Ties go to frequent ones.

    Args:
        tables: Result of `count_ngrams`.
        facts: Origin of the n-grams, stored as `Collocations.facts`.
    """
    rows = []
    pmis = []
    counts = []
    for level, pmi in enumerate(compute_pmi(tables), 1):
        quota = int(count * FRACTIONS[level + 1])
        order = np.lexsort((-tables[level].counts, -pmi))[:quota]
        order = order[pmi[order] > 0]
        row = np.full((len(order), LONGEST), -1, dtype=np.int32)
        heads = order
        for place in range(level, -1, -1):
            tails = heads
            for shorter in range(place, 0, -1):
                tails = tables[shorter].suffixes[tails]
            row[:, place] = tables[0].prefixes[tails]
            heads = tables[place].prefixes[heads] if place else heads
        rows.append(row)
        pmis.append(pmi[order])
        counts.append(tables[level].counts[order])
    return Collocations(
        np.concatenate(rows), np.concatenate(pmis).astype(np.float32), np.concatenate(counts), facts
    )


def read_tokens(corpus: Corpus, vocabulary: Vocabulary, max_tokens: int) -> np.ndarray:
    """Return the first `max_tokens` tokens of a corpus, for `count_ngrams`.

    They are int32, fewer if the corpus has fewer. -1 stands in place of special tokens, which count
    as tokens. After each document that is not empty, the last one too if it is cut, comes a further
    -1, which does not count.
    """
    documents = np.flatnonzero(corpus.document_lengths)
    ends = np.cumsum(corpus.document_lengths[documents])
    documents = documents[: np.searchsorted(ends, max_tokens) + 1]
    stops = corpus.document_lengths[documents].copy()
    stops[-1] -= max(int(stops.sum()) - max_tokens, 0)
    is_special = np.zeros(vocabulary.size, dtype=bool)
    is_special[list(vocabulary.special_ids)] = True
    ids = np.full(int(stops.sum()) + len(stops), -1, dtype=np.int32)
    blocks = np.searchsorted(np.cumsum(stops), np.arange(_CHUNK, int(stops.sum()), _CHUNK))
    position = 0
    for block in np.split(np.arange(len(stops)), np.unique(blocks)):
        if len(block):
            tokens = corpus.read_spans(
                documents[block], np.zeros(len(block), dtype=np.int64), stops[block]
            )
            tokens[is_special[tokens]] = -1
            places = (
                position + np.arange(len(tokens)) + np.repeat(np.arange(len(block)), stops[block])
            )
            ids[places] = tokens
            position += len(tokens) + len(block)
    return ids


def find_collocations(settings: CollocationsConfig) -> None:
    """Count n-grams of the corpus, write the file of collocations and print examples.

    Missing directories of the file are created, and progress is shown on the terminal.

    Raises:
        InputError: The output exists, a file cannot be used, or there are no collocations.
    """
    output = Path(settings.output)
    refuse_existing(output, "--output")
    corpus = Corpus.open(settings.data_path)
    # Imported here, because transformers takes seconds.
    from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary

    tokenizer = load_tokenizer(settings.tokenizer)
    vocabulary = read_vocabulary(tokenizer)
    corpus.check_vocabulary(vocabulary)
    check_parent_writable(output, "--output")
    ids = read_tokens(corpus, vocabulary, settings.max_tokens)
    done = 0

    def tick(places: int) -> None:
        nonlocal done
        done += places
        progress.update(done)

    with ProgressLine("counting n-grams", 2 * (LONGEST - 1) * len(ids)) as progress:
        tables = count_ngrams(ids, settings.min_count, tick)
    tokens = tables[0].total
    facts = {
        "tokenizer": vocabulary.fingerprint,
        "corpus": corpus.fingerprint,
        "tokens": tokens,
        "min_count": settings.min_count,
    }
    collocations = select_collocations(tables, settings.count, facts)
    if not len(collocations.tokens):
        raise InputError(
            f"{settings.data_path}: no n-gram occurs --min-count {settings.min_count} times with a "
            "PMI above 0, expected a "
            "larger corpus or a smaller --min-count"
        )
    with create_parent_with_rollback(output, "--output"):
        collocations.save(output)
    print_rank_0(
        f"{output}: {len(collocations.tokens):,} collocations of {tokens:,} tokens; "
        "of the highest PMI"
    )
    for length in FRACTIONS:
        rows = collocations.tokens[collocations.lengths == length]
        texts = (
            repr(tokenizer.backend_tokenizer.decode(row[:length].tolist()))
            for row in rows[:_EXAMPLES]
        )
        print_rank_0(f"  {len(rows):,} of {length} tokens: {', '.join(texts)}")


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc objective collocations`: write the collocations of a corpus.

    Examples are printed. Wrong input exits with 2.

    Args:
        argv: Words after the command; None: those of this process.
    """
    silence_libraries()
    settings = flags.parse(
        CollocationsConfig, argv, prog="megaenc objective collocations", description=__doc__
    )
    with exit_on_sigterm():
        find_collocations(settings)
