"""InfoNCE loss over batches of pairs, without false negatives.

Each distinct text of a batch is embedded once, by one of the ranks.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from megaenc.embed.config import ContrastiveConfig
from megaenc.embed.pairs import TrainingPair
from megaenc.errors import InputError


@dataclass(frozen=True)
class ContrastiveData:
    """Training pairs as indices of their distinct texts, tokenized once each.

    `build` builds it, the same on every rank. `texts` have their prefixes, `rows` their token ids,
    int32[tokens] each, and `lengths` the numbers of tokens, int64[texts]. `queries` and
    `documents`, int64[pairs], and `negatives`, tuples, are indices of each pair's texts.
    `positives` has the texts that are no negatives of a query, by the query's index.
    """

    texts: list[str]
    """Distinct texts, each with its prefix."""
    rows: list[np.ndarray]
    """Token ids of each distinct text, int32[tokens]."""
    lengths: np.ndarray
    """Number of tokens of each distinct text, int64[texts]."""
    queries: np.ndarray
    """Text of each pair's query, int64[pairs]."""
    documents: np.ndarray
    """Text of each pair's document, int64[pairs]."""
    negatives: list[tuple[int, ...]]
    """Texts of each pair's hard negatives that are used."""
    positives: dict[int, tuple[int, ...]]
    """Texts that are no negatives of a query, by the query's text: documents of all of its pairs,
    and the query as a document."""

    @classmethod
    def build(
        cls,
        pairs: Sequence[TrainingPair],
        tokenize: Callable[[Sequence[str]], list[np.ndarray]],
        *,
        prefixes: tuple[str, str],
        negatives: int,
    ) -> "ContrastiveData":
        """Return the data of `pairs`, with each distinct text tokenized once.

        Args:
            tokenize: Function from texts to the token ids of each, as `Embedder.tokenize`.
            prefixes: Texts before queries and before documents, hard negatives too.
            negatives: Maximum number of hard negatives of a pair that are used, the first ones.

        Raises:
            InputError: A text has no tokens.
        """
        index: dict[str, int] = {}

        def find(text: str) -> int:
            return index.setdefault(text, len(index))

        before_query, before_document = prefixes
        queries = [find(before_query + pair.query) for pair in pairs]
        documents = [find(before_document + pair.document) for pair in pairs]
        used = [
            tuple(find(before_document + text) for text in pair.negatives[:negatives])
            for pair in pairs
        ]
        positives: dict[int, dict[int, None]] = defaultdict(dict)
        for query, document in zip(queries, documents, strict=True):
            positives[query][document] = None
        texts = list(index)
        rows = tokenize(texts)
        lengths = np.array([len(row) for row in rows])
        if not lengths.all():
            text = texts[int(np.argmin(lengths))]
            raise InputError(
                f"--data: the tokenizer gives no token for the text {text[:40]!r}, expected at "
                "least one in each"
            )
        for query, pair in zip(queries, pairs, strict=True):
            if (document := index.get(before_document + pair.query)) is not None:
                positives[query][document] = None
        by_query = {query: tuple(documents) for query, documents in positives.items()}
        return cls(texts, rows, lengths, np.array(queries), np.array(documents), used, by_query)

    def build_batch(self, pairs: np.ndarray) -> "ContrastiveBatch":
        """Return the batch of the pairs with the indices `pairs`, int64[batch].

        It has their distinct texts, sorted by index, and the places of queries and candidates (all
        documents, then all hard negatives) in them. Scores of other candidates that answer the
        query are masked.
        """
        candidates = [
            *self.documents[pairs].tolist(),
            *(text for pair in pairs for text in self.negatives[pair]),
        ]
        columns_of: dict[int, list[int]] = defaultdict(list)
        for column, text in enumerate(candidates):
            columns_of[text].append(column)
        masked = [
            (row, column)
            for row, query in enumerate(self.queries[pairs].tolist())
            for document in self.positives[query]
            for column in columns_of.get(document, ())
            if column != row
        ]
        texts, places = np.unique(
            np.concatenate([self.queries[pairs], candidates]), return_inverse=True
        )
        masked_rows, masked_columns = np.array(masked, dtype=np.int64).reshape(-1, 2).T
        return ContrastiveBatch(
            texts, places[: len(pairs)], places[len(pairs) :], masked_rows, masked_columns
        )


@dataclass(frozen=True)
class ContrastiveBatch:
    """Batch of pairs: its distinct texts, and the queries and candidates among them.

    `ContrastiveData.build_batch` builds it. `texts`, int64[T], are indices in ContrastiveData.
    `queries`, int64[B], and `documents`, int64[C], are indices in `texts`; the C candidates are the
    documents of the B queries in order, then all hard negatives. The scores at (`masked_rows`,
    `masked_columns`), other copies of a document that answers the query, or of the query, are left
    out of the loss.
    """

    texts: np.ndarray
    """Indices of the distinct texts in ContrastiveData, int64[T]; each is embedded once."""
    queries: np.ndarray
    """Place of each query in `texts`, int64[B]."""
    documents: np.ndarray
    """Place of each candidate in `texts`, int64[C]: the documents of the B queries in order, then
    all hard negatives."""
    masked_rows: np.ndarray
    """Queries of the masked scores, int64[masked]."""
    masked_columns: np.ndarray
    """Candidates of the masked scores, int64[masked]: other copies of a document that answers the
    query, or of the query."""

    @property
    def has_negatives(self) -> bool:
        """Return whether any query has a negative; without one, the loss is constant.

        A negative is a candidate that is neither masked nor the query's own document.
        """
        return len(self.masked_rows) < len(self.queries) * (len(self.documents) - 1)

    def compute_loss(self, vectors: Tensor, config: ContrastiveConfig) -> Tensor:
        """Return the InfoNCE loss of the embeddings of a batch, a scalar with a graph.

        It is the mean over queries, summed over `matryoshka_dims` and the full size, and averaged
        with the loss of finding each document's query if `symmetric`. Without masked scores it
        equals sentence-transformers' MultipleNegativesRankingLoss or, with several sizes,
        MatryoshkaLoss.

        Args:
            vectors: Embeddings of `texts`, in order, of all ranks, [T, size]; they are normalized
                here.
            config: `temperature`, `matryoshka_dims` and `symmetric` are read.
        """
        device = vectors.device
        full = vectors.shape[1]
        queries = torch.from_numpy(self.queries).to(device)
        documents = torch.from_numpy(self.documents).to(device)
        masked = tuple(
            torch.from_numpy(places).to(device)
            for places in (self.masked_rows, self.masked_columns)
        )
        targets = torch.arange(len(queries), device=device)
        losses = []
        for size in sorted({*config.matryoshka_dims, full}):
            unit = normalize(vectors[:, :size], dim=1)
            scores = unit[queries] @ unit[documents].T / config.temperature
            scores[masked] = -torch.inf
            loss = cross_entropy(scores, targets)
            if config.symmetric:
                loss = (loss + cross_entropy(scores[:, : len(queries)].T, targets)) / 2
            losses.append(loss)
        return torch.stack(losses).sum()


def divide_texts(lengths: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Return the indices of each rank's texts, with nearly equal numbers of tokens.

    The longest texts go first, each to the rank with the fewest tokens. Indices are int64,
    ascending; a rank has none if there are fewer texts than ranks.

    Args:
        lengths: Number of tokens of each text, int64[texts].
        ranks: Number of ranks.
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for place in np.argsort(-lengths, kind="stable").tolist():
        load, rank = loads[0]
        parts[rank].append(place)
        heapq.heapreplace(loads, (load + int(lengths[place]), rank))
    return [np.array(sorted(part), dtype=np.int64) for part in parts]
