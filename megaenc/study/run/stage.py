"""Stages of a study: the commands that do them, the folders that they make, and how far they are.

    STUDY/corpus            the study's own tokenizer and text
    STUDY/runs/NAME         pretraining runs
    STUDY/hf/NAME           exports
    STUDY/demo              demo data sets, where there are some
    STUDY/results           the tree of fine-tuning results
    STUDY/logs/STAGE.log    what a stage has said

A stage is done when what it makes is there, and whole, and so is what it needs. What each was made of its folder says, which
is compared with the manifest and with the folders of what it needs.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc.atomic_io import atomic_write
from megaenc.errors import InputError
from megaenc.json_files import read_json_object, read_json_or_empty
from megaenc.processes import python_command
from megaenc.study.manifest.model_key import ModelKey
from megaenc.training.checkpoint_dir import CheckpointDir
from megaenc.training.run_dir import RUN_FILE, describe_difference
from megaenc.training.run_init import identity_digest

CORPUS = "corpus"
"""Folder of the study's own corpus and tokenizer, and the name and id of the stage that makes them."""
CORPUS_REQUEST = "asked.json"
"""In the folder of the corpus: what it was to be made of."""


@dataclass(frozen=True, kw_only=True)
class StageRunner:
    """A stage that can be planned and done. Each kind of stage is a class of its own."""

    study: Path
    """the study's folder"""
    name: str
    """of the model, checkpoint or corpus, and of the folder"""

    kind = subfolder = unit = ""
    """corpus, pretrain, export or finetune; the folder of the study that the stage's is in; what its progress counts"""
    needs = ()
    """ids of stages that come before"""
    processes = 1
    """that train together, each on a device of its own"""
    work = 1.0
    """what its time grows with, among stages of its kind"""
    planned_seconds = 30.0
    """seconds that it takes by the plan, here those of a conversion or a corpus; None where the plan does not know"""

    @property
    def id(self) -> str:
        """KIND/NAME, unlike that of any other stage."""
        return f"{self.kind}/{self.name}"

    @property
    def folder(self) -> Path:
        """The folder of what it makes."""
        return self.study / self.subfolder / self.name

    def prepare(self) -> None:
        """Write down what its folder has to remember; called before its first command."""

    def next_command(self) -> list[str]:
        """Return the words of the next command that is left to do."""
        raise NotImplementedError

    def remaining_commands(self) -> list[list[str]]:
        """Return the words of every command that is left to do."""
        return [self.next_command()]

    def progress(self) -> tuple[float, float]:
        """Return how much of how much is done."""
        raise NotImplementedError

    def is_done(self) -> bool:
        """Return whether what it makes is there; `finished_stages` asks what it needs too."""
        done, total = self.progress()
        return done == total

    def check(self) -> None:
        """Raise Changed where its folder holds something else than the manifest says, or was made of something else."""


def finished_stages(stages: Iterable[StageRunner]) -> set[str]:
    """Return the ids of those that are done with all that they need; `stages` come after what they need, if that is among them.

    What is left when that is made again is still to be compared with it (`StageRunner.check`).
    """
    known, found = set(), set()
    for stage in stages:
        known.add(stage.id)
        if stage.is_done() and found.issuperset(known.intersection(stage.needs)):
            found.add(stage.id)
    return found


def megaenc_command(*words: str, processes: int = 1, launcher: Sequence[str] = ("--standalone",)) -> list[str]:
    """Return a command of this package as words to start; under torchrun where there are several processes or machines."""
    if processes == 1 and tuple(launcher) == ("--standalone",):
        return python_command("-m", "megaenc", *words)
    torchrun = python_command("-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(processes))
    return [*torchrun, "-m", "megaenc", *words]


def format_flags(flags: Mapping[str, Any]) -> list[str]:
    """Flags as the words of a command line: `{"lr": 5e-4, "bf16": False}` is `--lr 0.0005 --no-bf16`; None and () say nothing."""
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)] if value else []
        elif value is not None:
            words += [flag, str(value)]
    return words


class StaleArtifactError(InputError):
    """A folder that does not fit the manifest, or what it was made of."""

    def __init__(self, folder: Path, what: str, remove: str = "that folder and what was made of it") -> None:
        super().__init__(f"{folder}: {what}; take the change back, remove {remove}, or choose another --output")
        self.folder, self.what = folder, what


def manifest_mismatch(folder: Path, what: str) -> StaleArtifactError:
    """Return the error for a folder of which `what` differs from what the manifest says."""
    return StaleArtifactError(folder, f"made from another manifest: {what}")


def check_stages(stages: Iterable[StageRunner], every: Mapping[str, StageRunner], study: Path) -> None:
    """Raise Changed for the first of `stages` that does not fit, with each folder that was made of it by others of `every`."""
    for stage in stages:
        try:
            stage.check()
        except StaleArtifactError as error:
            made = {stage.id}
            for other in every.values():  # each after what it needs
                made.update([other.id] if made.intersection(other.needs) else [])
            folders = [str(every[id].folder.relative_to(study)) for id in every if id in made and every[id].folder.exists()]
            raise StaleArtifactError(error.folder, error.what, f"what was made so ({' '.join(folders)})") from None


def read_identity(run: Path) -> dict[str, Any] | None:
    """What makes it this run, by its folder; None where it has not begun."""
    found = read_json_or_empty(run / RUN_FILE).get("identity")
    return found if isinstance(found, dict) else None


def check_checkpoint_exists(run: Path, step: int, what: str) -> None:
    """Raise InputError where a run is beyond `step` and has no checkpoint of it."""
    checkpoints = CheckpointDir(run / "checkpoints")
    latest = checkpoints.tracked_step()
    if latest is not None and latest >= step and not checkpoints.is_complete(step):
        raise InputError(
            f"{run}: trained to step {latest} without keeping step {step}, where {what}: the manifest did not ask for it then; "
            "remove that folder to train it again, or choose another --output"
        )


@dataclass(frozen=True, kw_only=True)
class CorpusStage(StageRunner):
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
    def commands(self) -> dict[Path, tuple[str, ...]]:
        """Commands of megaenc that make it, in their order, by the file or folder that is there when they are done."""
        [data], tokenizer = self.flags.values()
        demo, prefix = self.folder / "corpus.jsonl", data.removesuffix("_text_document")
        text = [str(path) for path in self.text] or [str(demo)]
        read = ("preprocess", "--input", *text, "--output-prefix", prefix, "--tokenizer", tokenizer, "--append-eod")
        return {
            **({demo: ("demo", "--output", str(self.folder))} if self.demo else {}),
            Path(tokenizer): ("tokenizer", "--input", *text, "--vocab-size", str(self.vocab_size), "--output", tokenizer),
            Path(f"{data}.idx"): read,
        }

    def prepare(self) -> None:
        """Write down what it is made of: of the tokenizer and the text alone this could not be told."""
        if not self.progress()[0]:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self.folder / CORPUS_REQUEST, json.dumps(self._asked(), indent=1) + "\n")

    def remaining_commands(self) -> list[list[str]]:
        return [megaenc_command(*words) for makes, words in self.commands.items() if not makes.exists()]

    def next_command(self) -> list[str]:
        """Return the first that is left; the last where none is."""
        return [*self.remaining_commands(), megaenc_command(*[*self.commands.values()][-1])][0]

    def progress(self) -> tuple[float, float]:
        there = [makes.exists() for makes in self.commands]
        return sum(there), len(there)

    def _asked(self) -> dict[str, Any]:
        """Return size of the vocabulary, and names and sizes of the text; null for what is not there."""
        text = {"text": [[path.name, _size_in_bytes(path)] for path in self.text]}
        return {"vocab_size": self.vocab_size, "demo": self.demo, **text}

    def check(self) -> None:
        """Compare with what it was made of, as the folder remembers it."""
        file, here = self.folder / CORPUS_REQUEST, self._asked()
        if not file.exists():
            return
        there = read_json_object(file, "what the corpus was to be made of")
        if not _is_text_list(there.get("text")):
            raise InputError(f"{file}: field `text`: missing or of another kind; expected a list of [name, bytes]")
        names = [{**asked, "text": " ".join(name for name, _ in asked["text"])} for asked in (there, here)]
        if other := describe_difference(*names):
            raise manifest_mismatch(self.folder, f"corpus: {other}")
        for (name, before), (_, now) in zip(there["text"], here["text"], strict=True):
            if None not in (before, now) and before != now:
                raise manifest_mismatch(self.folder, f"corpus: {name} had {before:,} bytes then, {now:,} now")


def _is_text_list(value: Any) -> bool:
    """Return whether a value of JSON is a list of names with their sizes, null for an unknown one."""
    pairs = value if isinstance(value, list) else [value]
    return all(isinstance(pair, list) and [*map(type, pair)] in ([str, int], [str, type(None)]) for pair in pairs)


def _size_in_bytes(path: Path) -> int | None:
    """Return the bytes of a file, or of all in a folder; None for what cannot be read."""
    try:
        files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        return sum(each.stat().st_size for each in files)
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class ExportStage(StageRunner):
    """One `megaenc convert to-hf`: a checkpoint that is evaluated, under its name, with its certificate."""

    key: ModelKey
    run: str
    step: int
    kind, home, unit = "export", "hf", "models"

    @property
    def needs(self) -> tuple[str, ...]:
        return (f"pretrain/{self.run}",)

    @property
    def _run(self) -> Path:
        return self.study / "runs" / self.run

    @property
    def _certificate(self) -> Path:  # in a folder that appears by a rename
        return self.folder / "conversion.json"

    def next_command(self) -> list[str]:
        flags = {"load": self._run, "ckpt_step": self.step, "output": self.folder}
        return megaenc_command("convert", "to-hf", *format_flags(flags))

    def progress(self) -> tuple[float, float]:
        return float(self._certificate.is_file()), 1

    def check(self) -> None:
        """Compare the step that it is of, and the run; or look whether the run's checkpoint is there."""
        if not self.is_done():
            check_checkpoint_exists(self._run, self.step, f"{self.id} is")
            return
        made_of, identity = read_json_object(self._certificate, "the certificate of an export"), read_identity(self._run)
        if (found := made_of.get("step", self.step)) != self.step:
            raise manifest_mismatch(self.folder, f"step is {found} there, {self.step} here")
        if "identity" not in made_of or (identity is not None and made_of["identity"] != identity_digest(identity)):
            raise StaleArtifactError(self.folder, f"made of another {self.run} than {self._run} is now")
