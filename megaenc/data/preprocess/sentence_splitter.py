"""Documents cut into sentences by Punkt, of which nltk has a model for many languages and learns one from any text."""

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
"""Characters of the input that a model is learnt from where none is installed: some seconds' work."""
_WINDOW = 100_000  # characters that Punkt sees at a time
_CONTEXT = 1_000  # characters after a break that it must have seen for the break to count


@dataclass(frozen=True)
class PunktModel:
    """What Punkt knows of a language; it pickles."""

    language: str
    """`english` and so on for an installed model, `learnt` for one of the input's own."""
    parameters: "PunktParameters"

    def describe(self) -> dict[str, Any]:
        """Return method, language and fingerprint, for the sidecar."""
        known = self.parameters
        orthography = sorted((word, flags) for word, flags in known.ortho_context.items() if flags)
        lists = [sorted(known.abbrev_types), sorted(known.collocations), sorted(known.sent_starters), orthography]
        fingerprint = hashlib.sha256(json.dumps(lists).encode("utf-8", "surrogatepass")).hexdigest()
        return {"method": "punkt", "language": self.language, "fingerprint": fingerprint}


def load_installed_punkt(language: str) -> PunktModel | None:
    """The model of nltk's `punkt_tab` for `language`, None where it is not installed. Nothing is downloaded.

    Raises InputError for a name that no language has.
    """
    from nltk.tokenize.punkt import PunktTokenizer

    try:
        return PunktModel(language, PunktTokenizer(language)._params)
    except LookupError:
        return None
    except ValueError:
        raise InputError(f"--punkt-language {language}: expected the name of a language, such as english") from None


def train_punkt(texts: Iterable[str]) -> PunktModel:
    """A model learnt from the first LEARNT_FROM characters of `texts`; the same texts give the same model."""
    from nltk.tokenize.punkt import PunktTrainer

    _disable_regex_timeouts()
    trainer, left = PunktTrainer(), TRAINING_CHARACTERS
    for text in texts:
        text = text[:left]
        left -= len(text)
        for start in range(0, len(text), _WINDOW):  # a document may be one line of fifty megabytes
            trainer.train(text[start : start + _WINDOW], finalize=False)
        if left <= 0:
            break
    trainer.finalize_training()
    return PunktModel("learnt", trainer.get_params())


def build_sentence_splitter(punkt: PunktModel) -> Callable[[str], list[str]]:
    """A function from a text to its sentences; one after the other they are the text.

    White space between two sentences belongs to the second.
    """
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    _disable_regex_timeouts()
    tokenizer = PunktSentenceTokenizer()
    tokenizer._params = copy.copy(punkt.parameters)
    tokenizer._params.ortho_context = _Orthography(punkt.parameters.ortho_context)

    def split(text: str) -> list[str]:
        edges = [0]
        start, width = 0, _WINDOW
        while start < len(text):
            stop = start + width
            # A break near the window's end may be the window's doing: only what is well inside counts.
            trusted = len(text) if stop >= len(text) else stop - _CONTEXT
            ends = [start + end for _, end in tokenizer.span_tokenize(text[start:stop])]
            ends = [end for end in ends if edges[-1] < end < min(trusted, len(text))]
            edges.extend(ends)
            if stop >= len(text):
                break
            start, width = (ends[-1], _WINDOW) if ends else (start, 2 * width)
        # What Punkt leaves out is white space after a sentence: without any after it, it is the end of the document.
        while len(edges) > 1 and text[edges[-1] :].isspace():
            edges.pop()
        return [text[here:there] for here, there in pairwise([*edges, len(text)])]

    return split


class _Orthography(dict):
    """Punkt's own table grows by an entry for every word that it does not know."""

    def __missing__(self, word: str) -> int:
        return 0


def _disable_regex_timeouts() -> None:
    """Let nltk's regular expressions take the time they need: with a limit, what comes out would depend on the machine's load."""
    try:
        from nltk import redos
    except ImportError:  # before nltk 3.10 there is no limit
        return
    redos.DEFAULT_TIMEOUT = None
