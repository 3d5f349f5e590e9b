"""Sentence splitting with nltk's Punkt, by an installed or a trained model."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from megaenc.errors import InputError

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktParameters

TRAINING_CHARACTERS = 4_000_000
"""Number of input characters that a model is trained on; takes some seconds."""
_WINDOW = 100_000  # characters given to Punkt at a time
_CONTEXT = 1_000  # characters that must follow a sentence end for it to count


@dataclass(frozen=True)
class PunktModel:
    """Sentence model of nltk's Punkt; picklable.

    `load_installed_punkt` or `train_punkt` builds it. `language` is such as `english`, or `learnt`
    if it was trained on the input; `parameters` are nltk's.
    """

    language: str
    """`english` and so on for an installed model, `learnt` for one trained on the input."""
    parameters: "PunktParameters"

    def describe(self) -> dict[str, Any]:
        """Return `method`, `language` and `fingerprint` for the corpus metadata.

        They are `punkt`, the model's language (`learnt` for a trained one) and the sha256 of the
        parameters in hex.
        """
        parameters = self.parameters
        orthography = sorted(
            (word, flags) for word, flags in parameters.ortho_context.items() if flags
        )
        lists = [
            sorted(parameters.abbrev_types),
            sorted(parameters.collocations),
            sorted(parameters.sent_starters),
            orthography,
        ]
        fingerprint = hashlib.sha256(json.dumps(lists).encode("utf-8", "surrogatepass")).hexdigest()
        return {"method": "punkt", "language": self.language, "fingerprint": fingerprint}


def load_installed_punkt(language: str) -> PunktModel | None:
    """Return nltk's installed Punkt model of `language`, or None if there is none.

    `language` is a name such as `english`. Nothing is downloaded.

    Raises:
        InputError: `language` cannot be a name, such as a path or an empty one.
    """
    from nltk.tokenize.punkt import PunktTokenizer

    try:
        return PunktModel(language, PunktTokenizer(language)._params)
    except LookupError:
        return None
    except ValueError:
        raise InputError(
            f"--punkt-language {language}: expected the name of a language, such as english"
        ) from None


def train_punkt(texts: Iterable[str]) -> PunktModel:
    """Return a Punkt model trained on the first 4,000,000 characters of `texts`.

    `texts` may have fewer, or none; later ones are not read. The same texts give the same model.
    """
    from nltk.tokenize.punkt import PunktTrainer

    _disable_regex_timeouts()
    trainer = PunktTrainer()
    remaining = TRAINING_CHARACTERS
    for text in texts:
        text = text[:remaining]
        remaining -= len(text)
        for start in range(0, len(text), _WINDOW):  # a document may have 50 MB
            trainer.train(text[start : start + _WINDOW], finalize=False)
        if remaining <= 0:
            break
    trainer.finalize_training()
    return PunktModel("learnt", trainer.get_params())


def build_sentence_splitter(punkt: PunktModel) -> Callable[[str], list[str]]:
    """Return a function that splits a text into the list of its sentences.

    Their concatenation is the text: white space between two sentences belongs to the second, that
    at the end of the text to the last. An empty text is one empty sentence. The function cannot be
    pickled; `punkt` can.
    """
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    _disable_regex_timeouts()
    tokenizer = PunktSentenceTokenizer()
    tokenizer._params = copy.copy(punkt.parameters)
    tokenizer._params.ortho_context = _Orthography(punkt.parameters.ortho_context)

    def split(text: str) -> list[str]:
        boundaries = [0]
        start = 0
        width = _WINDOW
        while start < len(text):
            stop = start + width
            # A sentence end near the window's end may be an artefact of the window.
            trusted = len(text) if stop >= len(text) else stop - _CONTEXT
            ends = [start + end for _, end in tokenizer.span_tokenize(text[start:stop])]
            ends = [end for end in ends if boundaries[-1] < end < min(trusted, len(text))]
            boundaries.extend(ends)
            if stop >= len(text):
                break
            width *= 2
            if ends:
                start = ends[-1]
                width = _WINDOW
        # White space at the end of the text belongs to the last sentence.
        while len(boundaries) > 1 and text[boundaries[-1] :].isspace():
            boundaries.pop()
        return [text[start:end] for start, end in pairwise([*boundaries, len(text)])]

    return split


class _Orthography(dict):
    """Punkt's orthography table, which does not grow when unknown words are looked up."""

    def __missing__(self, word: str) -> int:
        return 0


def _disable_regex_timeouts() -> None:
    """Disable the time limit of nltk's regular expressions.

    Results would depend on the machine's load.
    """
    try:
        from nltk import redos
    except ImportError:  # before nltk 3.10 there is no limit
        return
    redos.DEFAULT_TIMEOUT = None
