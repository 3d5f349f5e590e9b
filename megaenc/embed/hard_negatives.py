"""Add hard negatives to training pairs: similar documents of other queries.

megaenc embed mine --model demo/hf --data pairs.jsonl --output mined.jsonl
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megaenc import flags
from megaenc.atomic_io import atomic_files
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.embed.config import EmbeddingFlags
from megaenc.errors import InputError, handle_command_errors
from megaenc.flags import NonNegativeInt, PositiveFraction, PositiveInt
from megaenc.output_paths import check_output_file, create_parent_with_rollback
from megaenc.processes import exit_on_sigterm

if TYPE_CHECKING:
    from torch import Tensor

    from megaenc.embed.pairs import TrainingPair


@dataclass(frozen=True)
class MineConfig:
    """Options of `megaenc embed mine`: model, pairs, corpus, selection and output.

    Each field is a flag, read by `flags.parse_with_config`. `model`, `data`, a tuple of files or
    data sets of pairs, and `output`, a .jsonl file, must not stay empty, which only
    `flags.check_given` checks. `config` is a YAML file of flags, `corpus` a tuple of further data
    to search, `embedding` has the flags of EmbeddingFlags, and `overwrite` permits replacing
    `output`. A pair gets up to `negatives` documents of ranks `skip` + 1 to `depth`, of at most the
    fraction `margin` of the right document's cosine.
    """

    config: str = ""
    """YAML file of flags; flags on the command line override it"""
    model: str = ""
    """Hugging Face or sentence-transformers directory, or model of the Hub as ORG/NAME"""
    data: tuple[str, ...] = ()
    """training pairs as in `megaenc embed train`; hard negatives in them are replaced"""
    corpus: tuple[str, ...] = ()
    """BEIR directories or pairs whose documents are searched too"""
    output: str = ""
    """.jsonl file to write: the pairs with `query`, `document` and `negatives`, the most similar
    first"""
    overwrite: bool = False
    """replace the file of --output if it exists"""
    negatives: PositiveInt = 4
    """hard negatives of a pair, or fewer if too few documents follow the rules"""
    depth: PositiveInt = 100
    """last rank of a hard negative among the documents that are not the query's own"""
    skip: NonNegativeInt = 0
    """first ranks to leave out, whose documents are the likeliest to be relevant"""
    margin: PositiveFraction = 0.95
    """maximum cosine of a hard negative with the query, as a fraction of that of the pair's
    document"""
    embedding: EmbeddingFlags = field(default_factory=EmbeddingFlags)
    """how texts become embeddings"""


@handle_command_errors
def mine_main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc embed mine`: write all pairs with new hard negatives, print counts.

    Hard negatives in --data are replaced; a pair may get none. The file of --output, .jsonl, may
    exist only with --overwrite. Wrong input exits with 2.

    Args:
        argv: The flags; None: those of this process.
    """
    silence_libraries()
    settings = flags.parse_with_config(
        MineConfig, argv, prog="megaenc embed mine", description=__doc__
    )
    flags.check_given(settings, "embed mine", "model", "data", "output")
    last_rank = settings.skip + settings.negatives
    if settings.depth < last_rank:
        raise InputError(
            f"--depth: found {settings.depth}, expected at least {last_rank}, --skip and "
            "--negatives together"
        )
    output = Path(settings.output)
    if output.suffix != ".jsonl":
        raise InputError(f"--output {output}: found the ending {output.suffix!r}, expected .jsonl")
    inputs = (settings.config, settings.model, *settings.data, *settings.corpus)
    check_output_file(output, "--output", inputs=inputs, overwrite=settings.overwrite)
    with exit_on_sigterm(), create_parent_with_rollback(output, "--output"):
        pairs, negatives = _mine(settings)
        from megaenc.data.tokenizer.fast_encode import replace_surrogates

        with atomic_files(output) as [temporary], open(temporary, "w", encoding="utf-8") as stream:
            for pair, texts in zip(pairs, negatives, strict=True):
                row = {"query": pair.query, "document": pair.document, "negatives": texts}
                stream.write(replace_surrogates(json.dumps(row, ensure_ascii=False)) + "\n")
    counts = np.array([len(texts) for texts in negatives])
    few = int((counts < settings.negatives).sum())
    none = int((counts == 0).sum())
    print_rank_0(
        f"{output}: {counts.sum():,} hard negatives of {len(pairs):,} pairs"
        + (f"; {few:,} pairs have fewer than {settings.negatives}, {none:,} none" if few else "")
        # Untrained models: all cosines are similar
        + ("; raise --margin or --depth for more" if 2 * few > len(pairs) else "")
    )


def _mine(settings: MineConfig) -> tuple[list["TrainingPair"], list[list[str]]]:
    """Return the pairs, and the hard negatives of each.

    Each distinct text is embedded once.
    """
    print_rank_0("importing torch and transformers")
    from megaenc.embed.embedder import (
        build_embedder,
        fetch_model,
        override_config,
        read_embedding_config,
    )
    from megaenc.embed.pairs import load_pairs
    from megaenc.finetune.datasets.beir import load_beir_corpus

    directory = fetch_model(settings.model)
    config = override_config(read_embedding_config(directory), settings.embedding)
    pairs = load_pairs(settings.data).pairs
    queries = list(dict.fromkeys(pair.query for pair in pairs))
    texts = [pair.document for pair in pairs]
    for source in settings.corpus:
        if os.path.isdir(source):
            texts += filter(str.strip, load_beir_corpus(Path(source)))  # without empty ones
        else:
            texts += [pair.document for pair in load_pairs([source]).pairs]
    documents = list(dict.fromkeys(texts))
    embedder = build_embedder(
        Path(settings.model).name or settings.model, directory, config, settings.embedding
    )
    vectors = embedder.embed_queries_and_documents(queries, documents)
    with ProgressLine("searching", total=len(queries), closing=False) as line:
        return pairs, mine_negatives(pairs, queries, documents, *vectors, settings, line.update)


def mine_negatives(
    pairs: Sequence["TrainingPair"],
    queries: Sequence[str],
    documents: Sequence[str],
    query_vectors: "Tensor",
    document_vectors: "Tensor",
    settings: MineConfig,
    progress: Callable[[int], None],
) -> list[list[str]]:
    """Return the hard negatives of each pair, the most similar to the query first.

    They are the first `settings.negatives` documents of ranks `skip` + 1 to `depth` whose cosine
    with the query is at most c - (1 - `margin`) x |c|, if c is that of the pair's document; there
    may be fewer, or none. Ranks leave out the query's documents in all pairs, and its own text. The
    search is exact; equal cosines rank by index.

    Args:
        pairs: Their own hard negatives are not regarded.
        queries, documents: Distinct texts without prefixes, among them those of all pairs.
        query_vectors, document_vectors: Their embeddings of length 1, float32[texts, size].
        progress: Called with the number of queries done so far.
    """
    from megaenc.finetune.tasks.retrieval import iterate_cosines, rank_top_documents

    row_of = {document: row for row, document in enumerate(documents)}
    members: dict[str, list[int]] = {query: [] for query in queries}
    for pair_index, pair in enumerate(pairs):
        members[pair.query].append(pair_index)
    negatives: list[list[str]] = [[] for _ in pairs]
    # Exact: 10,000 queries, 100,000 documents and 256 dimensions take about 10 s on one core, far
    # less than their embedding.
    for done, (query, cosines) in enumerate(
        zip(queries, iterate_cosines(query_vectors, document_vectors), strict=True), 1
    ):
        excluded_rows = {row_of[pairs[pair_index].document] for pair_index in members[query]} | (
            {row_of[query]} if query in row_of else set()
        )
        best = [
            row
            for row in rank_top_documents(cosines, settings.depth + len(excluded_rows)).tolist()
            if row not in excluded_rows
        ]
        best = best[settings.skip : settings.depth]
        for pair_index in members[query]:
            cosine = cosines[row_of[pairs[pair_index].document]]
            limit = cosine - (1 - settings.margin) * abs(cosine)  # below a negative cosine too
            negatives[pair_index] = [documents[row] for row in best if cosines[row] <= limit][
                : settings.negatives
            ]
        progress(done)
    return negatives
