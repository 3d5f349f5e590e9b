"""The stages of a study that neither pretrain nor fine-tune: its own corpus, and exports."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megaenc.errors import InputError
from megaenc.files import write_whole
from megaenc.json_files import read_json_object
from megaenc.study.node import Changed, Node, arguments, changed, megaenc
from megaenc.study.pretrain_stage import check_kept, identity_of
from megaenc.study.setting import Setting
from megaenc.training.run_folder import difference
from megaenc.training.start import digest

CORPUS = "corpus"
"""Folder of the study's own corpus and tokenizer, and the name and id of the stage that makes them."""
ASKED = "asked.json"
"""In the folder of the corpus: what it was to be made of."""


class Command(NamedTuple):
    """A command of megaenc, and the file or folder that is there when it is done."""

    arguments: tuple[str, ...]
    makes: Path


@dataclass(frozen=True, kw_only=True)
class CorpusNode(Node):
    """The study's own tokenizer and tokenised text."""

    name: str = CORPUS
    demo: bool
    text: tuple[Path, ...]
    vocab_size: int
    id = kind = CORPUS
    unit = "parts"

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of `megaenc pretrain` that name it."""
        return {"data_path": [f"{self.folder / 'corpus'}_text_document"], "tokenizer": str(self.folder / "tokenizer")}

    @property
    def commands(self) -> list[Command]:
        """What makes it, one after another; a command whose `makes` is there is done."""
        [data], tokenizer = self.flags.values()
        demo, prefix = self.folder / "corpus.jsonl", data.removesuffix("_text_document")
        text = [str(path) for path in self.text] or [str(demo)]
        learn = ("tokenizer", "--input", *text, "--vocab-size", str(self.vocab_size), "--output", tokenizer)
        read = ("preprocess", "--input", *text, "--output-prefix", prefix, "--tokenizer", tokenizer, "--append-eod")
        first = [Command(("demo", "--output", str(self.folder)), demo)] if self.demo else []
        return [*first, Command(learn, Path(tokenizer)), Command(read, Path(f"{data}.idx"))]

    def prepare(self) -> None:
        """Write down what it is made of: of the tokenizer and the text alone this could not be told."""
        if not self.progress()[0]:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / ASKED, json.dumps(self._asked(), indent=1) + "\n")

    def commands_left(self) -> list[list[str]]:
        """Return those whose file or folder, which appears by a rename, is not there."""
        return [megaenc(*command.arguments) for command in self.commands if not command.makes.exists()]

    def command(self) -> list[str]:
        """Return the first that is left; the last where none is."""
        return (self.commands_left() or [megaenc(*self.commands[-1].arguments)])[0]

    def progress(self) -> tuple[float, float]:
        """Return how many of how many commands are done."""
        there = [command.makes.exists() for command in self.commands]
        return sum(there), len(there)

    def _asked(self) -> dict[str, Any]:
        """Size of the vocabulary, and names and sizes of the text; null for what is not there."""
        text = {"text": [[path.name, _bytes(path)] for path in self.text]}
        return {"vocab_size": self.vocab_size, "demo": self.demo, **text}

    def check(self) -> None:
        """Compare with what it was made of, as the folder remembers it."""
        file = self.folder / ASKED
        here, there = self._asked(), read_json_object(file, "what the corpus was to be made of") if file.exists() else {}
        if not there:
            self._check_made()
            return
        if not _is_text(there.get("text")):
            raise InputError(f"{file}: field `text`: missing or of another kind; expected a list of [name, bytes]")
        names = [{**asked, "text": " ".join(name for name, _ in asked["text"])} for asked in (there, here)]
        if other := difference(*names):
            raise changed(self.folder, f"corpus: {other}")
        for (name, before), (_, now) in zip(there["text"], here["text"], strict=True):
            if None not in (before, now) and before != now:
                raise changed(self.folder, f"corpus: {name} had {before:,} bytes then, {now:,} now")

    def _check_made(self) -> None:
        """Compare with what the text itself remembers, of a study from before there was more: names, and how many ids."""
        file = self.folder / "corpus_text_document.json"
        if not self.done() or not file.exists():
            return
        found = read_json_object(file, "what `megaenc preprocess` wrote")
        size, sources = found.get("vocab_size", 0), found.get("sources", [])
        if type(size) is not int or not isinstance(sources, list):
            raise InputError(
                f"{file}: field `vocab_size` or `sources`: of another kind; expected what `megaenc preprocess` wrote"
            )
        if size > self.vocab_size:
            raise changed(self.folder, f"corpus: vocab_size is {size} there, {self.vocab_size} here")
        there = [str(source.get("path") if isinstance(source, dict) else source) for source in sources]
        here = [path.name for path in self.text] or ["corpus.jsonl"]
        if other := difference({"text": " ".join(there)}, {"text": " ".join(here)}):
            raise changed(self.folder, f"corpus: {other}")


def _is_text(value: Any) -> bool:
    """Return whether a value of JSON is a list of names with their sizes, null for an unknown one."""
    pairs = value if isinstance(value, list) else [value]
    return all(isinstance(pair, list) and [*map(type, pair)] in ([str, int], [str, type(None)]) for pair in pairs)


def _bytes(path: Path) -> int | None:
    """Return the bytes of a file, or of all in a folder; None for what cannot be read."""
    try:
        files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        return sum(each.stat().st_size for each in files)
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class ExportNode(Node):
    """One `megaenc convert to-hf`: a checkpoint that is evaluated, under its name, with its certificate."""

    setting: Setting
    run: str
    step: int
    kind, home, unit = "export", "hf", "models"

    @property
    def needs(self) -> tuple[str, ...]:
        """Its run."""
        return (f"pretrain/{self.run}",)

    @property
    def _run(self) -> Path:
        return self.study / "runs" / self.run

    @property
    def _certificate(self) -> Path:
        return self.folder / "conversion.json"

    def command(self) -> list[str]:
        """Return the words of `megaenc convert to-hf`."""
        flags = {"load": self._run, "ckpt_step": self.step, "output": self.folder}
        return megaenc("convert", "to-hf", *arguments(flags))

    def progress(self) -> tuple[float, float]:
        """Return whether the folder is there, which appears by a rename."""
        return float(self._certificate.is_file()), 1

    def check(self) -> None:
        """Compare the step that it is of, and the run; or look whether the run's checkpoint is there."""
        if not self.done():
            check_kept(self._run, self.step, f"{self.id} is")
            return
        made_of, identity = read_json_object(self._certificate, "the certificate of an export"), identity_of(self._run)
        if (found := made_of.get("step", self.step)) != self.step:
            raise changed(self.folder, f"step is {found} there, {self.step} here")
        if identity is None and "identity" not in made_of:
            raise Changed(self.folder, f"does not say of which {self.run} it was made, and that is not there to be compared")
        if identity is not None and made_of.get("identity", digest(identity)) != digest(identity):
            raise Changed(self.folder, f"made of another {self.run} than {self._run} is now")
