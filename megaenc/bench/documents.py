"""Documents made of a seed, for work that is the same on every side of a comparison; text plays no part in how long it takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megaenc import randomness
from megaenc.data.packs import Pack
from megaenc.data.vocabulary import Vocabulary
from megaenc.objectives import Attention, Objective, Schedule, Targets
from megaenc.randomness import SampleRandomness

EOS, MASK = 0, 1


@dataclass(frozen=True)
class Documents:
    """Documents 0..count - 1 of `shortest` to `longest` tokens, each a pack of its own; megaenc.data.packs.Packs.

    Numbers go on from `count` at 0 again. Lengths, tokens and masks follow from the seed and the document's number alone: any
    order and any grouping in batches has the same predictions.
    """

    count: int
    shortest: int
    longest: int
    vocab_size: int
    seed: int
    order: Sequence[int] | None = None
    """Which document is read as which number."""

    @property
    def seq_length(self) -> int:
        """The longest that there may be."""
        return self.longest

    def __getitem__(self, sample: int) -> Pack:
        number = sample % self.count if self.order is None else self.order[sample % self.count]
        draws = randomness.uniforms(self.seed, "benchmark tokens", self.length(number), counters=(number,))
        tokens = (MASK + 1 + draws * (self.vocab_size - MASK - 1)).astype(np.int64)
        return Pack(number, 0, tokens, np.array([0, len(tokens)], dtype=np.int32))

    def length(self, number: int) -> int:
        """Tokens of document `number`."""
        draw = float(randomness.uniforms(self.seed, "benchmark lengths", 1, counters=(number,))[0])
        return self.shortest + int(draw * (self.longest - self.shortest + 1))

    @property
    def samples_before_repeat(self) -> int:
        """See Packs."""
        return self.count

    @property
    def tokens(self) -> int:
        """Of all documents."""
        return sum(map(self.length, range(self.count)))

    def vocabulary(self) -> Vocabulary:
        """What objectives know of the tokens."""
        return Vocabulary(self.vocab_size, EOS, MASK, (EOS, MASK), f"benchmark {self.vocab_size}")

    def objective(self, text: str) -> Objective:
        """The one objective that a schedule `text` names. Raises InputError."""
        return Schedule.build(text, 1, self.vocabulary()).objective(1)

    def targets(self, objective: Objective, sample: int) -> tuple[Pack, Targets]:
        """What `objective` asks of the document that is read as number `sample`."""
        pack = self[sample]
        return pack, objective.targets(pack, SampleRandomness(self.seed, pack.sample, pack.epoch))

    def spans(self, attention: Attention) -> list[tuple[int, int, int]]:
        """(0, prefix, length) of each document, as ModelConfig.training_flops counts them."""
        lengths = list(map(self.length, range(self.count)))
        return [(0, length if attention == Attention.BIDIRECTIONAL else 0, length) for length in lengths]

    def by_length(self) -> tuple[int, ...]:
        """The numbers, the shortest document first."""
        return tuple(sorted(range(self.count), key=self.length))
