"""Make training pairs from running text: neighbouring paragraphs, or random spans.

megaenc embed pairs --input corpus.jsonl --method adjacent --output pairs.jsonl
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, TextIO

import numpy as np

from megaenc import counter_rng, flags
from megaenc.atomic_io import atomic_files
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.data.sources.resolve import (
    InputConfig,
    JsonKey,
    ResolvedInputs,
    read_blocks,
    resolve_inputs,
)
from megaenc.data.tokenizer.fast_encode import replace_surrogates
from megaenc.errors import InputError, handle_command_errors
from megaenc.flags import NonNegativeInt, PositiveInt
from megaenc.output_paths import check_output_file, create_parent_with_rollback, refuse_input
from megaenc.processes import exit_on_sigterm

_WORD = re.compile(r"\S+")
_BLANK_LINES = re.compile(r"\n\s*\n")
_ABBREVIATION = re.compile(r"\W*(?:[A-Z]|[A-Za-z]\.[A-Za-z.]*|Mr|Mrs|Ms|Dr|St|Prof|vs|cf|etc)\.")


@dataclass(frozen=True)
class TextPairsConfig(InputConfig):
    """Options of `megaenc embed pairs`: input, output, method, and size of the pairs.

    Each field is a flag, also those of InputConfig; `input`, `output`, a .jsonl file, and `method`
    ("adjacent" paragraphs or "spans") must be given. `overwrite` permits replacing `output`.
    `count` pairs are written, 0 for all, of texts of `min_words` to `max_words` words; `seed` draws
    them. `json_key` is the key or column of the text.
    """

    output: str
    """.jsonl file to write, a line with `query` and `document` for each pair"""
    method: Literal["adjacent", "spans"]
    """adjacent: two neighbouring paragraphs; spans: two random spans of the same part of a
    document, which may overlap"""
    overwrite: bool = False
    """replace the file of --output if it exists"""
    count: NonNegativeInt = 0
    """pairs to write, drawn evenly from the whole input; 0: all"""
    seed: NonNegativeInt = 0
    """seed of the spans, and of the draw of --count"""
    min_words: PositiveInt = 8
    """minimum words of a text; shorter paragraphs, such as headings, are joined with the next
    one"""
    max_words: PositiveInt = 128
    """maximum words of a text; longer paragraphs are cut at sentence ends"""
    json_key: JsonKey = "text"
    """key of the text in each JSON object, or column of a table"""


@handle_command_errors
def pairs_main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc embed pairs`: write pairs of parts of documents and print counts.

    A pair is two neighbouring paragraphs, or two random spans, of the same document (--method). The
    file, .jsonl, may exist only with --overwrite. Wrong input exits with 2.

    Args:
        argv: The flags; None: those of this process.
    """
    silence_libraries()
    settings = flags.parse(TextPairsConfig, argv, prog="megaenc embed pairs", description=__doc__)
    # Halves of a text that is too long have a quarter of its words at least
    if settings.max_words < 4 * settings.min_words:
        raise InputError(
            f"--max-words: found {settings.max_words}, expected at least {4 * settings.min_words}, "
            "4 x --min-words"
        )
    output = Path(settings.output)
    if output.suffix != ".jsonl":
        raise InputError(f"--output {output}: found the ending {output.suffix!r}, expected .jsonl")
    check_output_file(output, "--output", inputs=settings.input, overwrite=settings.overwrite)
    inputs = resolve_inputs(settings, [settings.json_key])
    refuse_input(output, "--output", [path for path, _, _ in inputs.file_stats()])
    for message in inputs.messages:
        print_rank_0(message)
    with (
        exit_on_sigterm(),
        create_parent_with_rollback(output, "--output"),
        atomic_files(output, before_rename=inputs.check_unchanged) as [temporary],
        open(temporary, "w", encoding="utf-8") as stream,
    ):
        line = _write_pairs(settings, inputs, stream)
    print_rank_0(f"{output}: {line}")


def _write_pairs(settings: TextPairsConfig, inputs: ResolvedInputs, stream: TextIO) -> str:
    """Write the pairs of the input as lines of JSON; return the line of counts.

    Raises:
        InputError: There is no pair.
    """
    total = None
    # An even draw that holds only one document's pairs in memory needs the number of all pairs
    if settings.count:
        total = sum(len(pairs) for pairs in _read_pairs(settings, inputs, "counting pairs"))
    available = written = documents = too_short = 0
    for document_index, pairs in enumerate(_read_pairs(settings, inputs, "writing pairs")):
        drawn = (
            pairs
            if total is None
            else _draw(pairs, settings, document_index, settings.count - written, total - available)
        )
        for query, document in drawn:
            line = json.dumps({"query": query, "document": document}, ensure_ascii=False)
            stream.write(replace_surrogates(line) + "\n")
        written += len(drawn)
        available += len(pairs)
        documents += 1
        too_short += not pairs
    if not available:
        expected = f"two paragraphs or sentences of {settings.min_words} words or more each"
        raise InputError(f"{settings.input[0]}: found no document with a pair, expected {expected}")
    parts = [
        f"{written:,} pairs"
        + (f" of {available:,}" if written < available else "")
        + f" from {documents:,} documents"
    ]
    parts += (
        [f"{settings.count - written:,} fewer than --count asks for"]
        if written < settings.count
        else []
    )
    parts += [f"{too_short:,} documents too short for a pair"] if too_short else []
    return "; ".join(parts)


def _read_pairs(
    settings: TextPairsConfig, inputs: ResolvedInputs, description: str
) -> Iterator[list[tuple[str, str]]]:
    """Yield the list of (query, document) of each document, with a progress line."""
    documents = 0
    with ProgressLine(description, inputs.known_size, closing=False) as progress:
        for block in read_blocks(inputs):
            for (text,) in block.parse([settings.json_key], False).texts:
                yield list(iterate_pairs(text, documents, settings))
                documents += 1
            progress.update(block.position, documents=documents)


def _draw(
    pairs: Sequence[tuple[str, str]],
    settings: TextPairsConfig,
    document: int,
    needed: int,
    left: int,
) -> list[tuple[str, str]]:
    """Return those of a document's pairs that belong to a random sample.

    Knuth's algorithm S: each of all samples of --count pairs is equally probable, and none is held
    in memory.

    Args:
        needed: Pairs of the sample that are still to be drawn.
        left: Pairs from this document on.
    """
    drawn = []
    uniforms = counter_rng.uniforms(settings.seed, "pairs:count", len(pairs), counters=(document,))
    for pair, uniform in zip(pairs, uniforms, strict=True):
        if uniform * left < needed:
            drawn.append(pair)
            needed -= 1
        left -= 1
    return drawn


def iterate_pairs(
    text: str, document_index: int, settings: TextPairsConfig
) -> Iterator[tuple[str, str]]:
    """Yield (query, document) of each pair of a document by --method, in order.

    A text that is too short has none, and pairs of equal texts are left out.

    Args:
        text: Text of the document.
        document_index: Index of the document in the input, from 0; random spans depend on it.
        settings: `method`, `seed`, `min_words` and `max_words` are read.
    """
    if settings.method == "adjacent":
        units = split_into_units(text, settings.min_words, settings.max_words)
        pairs = pairwise(units)
    else:
        pairs = _draw_spans(text, document_index, settings)
    for query, document in pairs:
        if query != document:  # a refrain, or the same span drawn twice
            yield query, document


def split_into_units(text: str, min_words: int, max_words: int) -> list[str]:
    """Return the paragraphs of a text, with `min_words` to `max_words` words each.

    Paragraphs are separated by an empty line; short ones are joined with the next, at the end with
    the one before. Long ones are cut at the sentence end nearest to the middle, again and again, or
    at the middle if no sentence ends near it. If a single paragraph results, it is cut once, at a
    sentence end; if none leaves `min_words` on both sides, the list is empty, as for a text with
    fewer words. `max_words` must be at least four times `min_words`, which is not checked.
    """
    units = []
    short = ""
    for paragraph in map(str.strip, _BLANK_LINES.split(text)):
        short = f"{short}\n\n{paragraph}" if short else paragraph
        if len(short.split()) >= min_words:
            units.append(short)
            short = ""
    if short and units:
        units[-1] += f"\n\n{short}"
    units = [part for unit in units for part in _cut(unit, max_words)]
    if len(units) == 1:
        words = _find_words(units[0])
        middle = _find_sentence_end(units[0], words, min_words)
        return (
            []
            if middle is None
            else [units[0][: words[middle - 1, 1]], units[0][words[middle, 0] :]]
        )
    return units


def _cut(text: str, max_words: int) -> list[str]:
    """Cut a text into parts of at most `max_words` words, preferably at sentence ends.

    Each part has more than a fourth of that.
    """
    words = _find_words(text)
    if len(words) <= max_words:
        return [text]
    middle = _find_sentence_end(text, words, len(words) // 4) or len(words) // 2
    return _cut(text[: words[middle - 1, 1]], max_words) + _cut(text[words[middle, 0] :], max_words)


def _find_words(text: str) -> np.ndarray:
    """Return start and end of each word separated by white space, int64[words, 2]."""
    return np.fromiter(
        (boundary for word in _WORD.finditer(text) for boundary in word.span()), np.int64
    ).reshape(-1, 2)


def _find_sentence_end(text: str, words: np.ndarray, least: int) -> int | None:
    """Return the number of words before the sentence end nearest to the middle.

    None if no sentence ends with `least` words before and after it.
    """
    half = len(words) // 2
    for distance in range(len(words) - half - least + 1):
        for word_index in (half - distance, half + distance):
            if least <= word_index <= len(words) - least and _is_sentence_end(
                text, words, word_index
            ):
                return word_index
    return None


def _is_sentence_end(text: str, words: np.ndarray, word_index: int) -> bool:
    """Return whether a sentence ends before word `word_index`.

    The word before ends with a full stop or the like and is no abbreviation, and no small letter
    follows.
    """
    start, end = words[word_index - 1]
    next_character = text[words[word_index, 0]]
    word = text[start:end]
    stripped = word.rstrip("\"'”’)]")
    return stripped.endswith((".", "!", "?", "…", "。", "！", "？")) and not (
        next_character.islower() or _ABBREVIATION.fullmatch(stripped)
    )


def _draw_spans(
    text: str, document_index: int, settings: TextPairsConfig
) -> Iterator[tuple[str, str]]:
    """Yield two random spans of each part of a document.

    A part has about 2 * max_words words. Independent cropping (Izacard et al. 2021, 2112.09118):
    there parts have 256 tokens, and spans at most half of that.
    """
    words = _find_words(text)
    part_count = max(1, (len(words) + settings.max_words) // (2 * settings.max_words))
    uniforms = counter_rng.uniforms(
        settings.seed, "pairs:spans", 4 * part_count, counters=(document_index,)
    ).reshape(-1, 4)
    for part, draws in enumerate(uniforms):
        start = len(words) * part // part_count
        stop = len(words) * (part + 1) // part_count
        longest = min(settings.max_words, (stop - start) // 2)
        if longest < settings.min_words:
            continue
        spans = []
        for length_draw, start_draw in draws.reshape(2, 2):
            length = settings.min_words + int(length_draw * (longest - settings.min_words + 1))
            first = start + int(start_draw * (stop - start - length + 1))
            spans.append(text[words[first, 0] : words[first + length - 1, 1]])
        yield spans[0], spans[1]
