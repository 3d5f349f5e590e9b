"""Stages of a study: their commands, output directories and progress.

    STUDY/corpus            the study's own tokenizer and text
    STUDY/runs/NAME         pretraining runs
    STUDY/hf/NAME           exports
    STUDY/demo              demo data sets, if there are any
    STUDY/results           the tree of fine-tuning results
    STUDY/embed/NAME        evaluations of zero-shot retrieval, and contrastively trained models
    STUDY/logs/STAGE.log    the output of a stage

A stage is done when its output and that of every stage that it needs are complete. Each output
directory records its inputs, which are compared with the manifest and with the directories of the
needed stages.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Strict, TypeAdapter
from typing_extensions import TypedDict

from megaenc.atomic_io import atomic_write
from megaenc.errors import InputError
from megaenc.json_checks import JSON_OBJECT, check_json
from megaenc.json_files import read_json_object, read_json_or_empty
from megaenc.processes import python_command
from megaenc.study.manifest.model_key import ModelKey
from megaenc.training.checkpoint_dir import CheckpointDir
from megaenc.training.run_dir import RUN_FILE, describe_difference
from megaenc.training.run_init import identity_digest

CORPUS = "corpus"
"""Directory of the study's own corpus and tokenizer; also the name and id of the stage that builds
them.
"""
CORPUS_REQUEST = "asked.json"
"""File in the corpus directory that records the requested text and vocabulary size."""


class _CorpusRequest(TypedDict):
    """Content of asked.json."""

    __pydantic_config__ = JSON_OBJECT
    text: list[Annotated[tuple[str, int | None], Strict(False)]]
    """(name, bytes) of each file"""


_REQUEST_FIELDS = TypeAdapter(_CorpusRequest)


@dataclass(frozen=True, kw_only=True)
class StageRunner:
    """Base class of a study's stages, with their commands, needs and progress.

    `name` is that of the model, checkpoint or corpus, and of the output directory. A subclass sets
    `kind`, `subfolder` (of the study, for the output) and `unit` (of `progress`), and implements
    `remaining_commands` and `progress`. It may override `needs` (ids of the stages that must be
    done before, by default none), `processes` (number that train together, 1), `work` (amount that
    run times are proportional to, 1.0), `planned_seconds` (30.0; None: unknown), `prepare` and
    `check`. An instance only describes the stage; its state is that of the files.
    """

    study: Path
    """study directory"""
    name: str
    """name of the model, checkpoint or corpus, and of the output directory"""

    kind = subfolder = unit = ""
    """corpus, pretrain, export, finetune or embed; subdirectory of the study that holds the output;
    unit of `progress`
    """
    needs = ()
    """ids of the stages that must be done before"""
    processes = 1
    """number of processes that train together, each on its own device"""
    work = 1.0
    """amount of work, to which run times of the same kind of stage are proportional"""
    planned_seconds = 30.0
    """planned run time, by default that of a conversion or a corpus; None if the plan has none"""

    @property
    def id(self) -> str:
        """Return the unique id of the stage, `KIND/NAME`, such as `export/610m-mlm40-42k`."""
        return f"{self.kind}/{self.name}"

    @property
    def directory(self) -> Path:
        """Return the path of the stage's output directory: study / subfolder / name."""
        return self.study / self.subfolder / self.name

    def prepare(self) -> None:
        """Write records to the output directory before the stage's commands.

        It is called at every start of the stage with a command left. The base class writes none.
        """

    def remaining_commands(self) -> list[list[str]]:
        """Return the command lines that the stage still has to run, in order.

        There are none if the stage is done. Each command is a list of arguments and may be repeated
        after a crash. Each subclass implements it.
        """
        raise NotImplementedError

    def progress(self) -> tuple[float, float]:
        """Return (completed work, total work) in `unit`, from the output directory.

        Each subclass implements it.
        """
        raise NotImplementedError

    def is_done(self) -> bool:
        """Return whether the output is complete: `progress()` has reached its total.

        The stages that this one needs are not regarded.
        """
        done, total = self.progress()
        return done == total

    def check(self) -> None:
        """Raise StaleArtifactError if the existing output is out of date.

        It is if it does not match the manifest or its inputs; missing output passes. Records that
        cannot be read are other InputErrors. The base class checks nothing.
        """


def strip_training_set(stage: str) -> str:
    """Return a stage id without `@SET`: `finetune/NAME` of a grid's, others unchanged."""
    return stage.partition("@")[0]


def finished_stages(stages: Iterable[StageRunner]) -> set[str]:
    """Return the ids of the stages that are done and need only done ones.

    Output that remains after a needed stage was rerun must still be compared with it
    (`StageRunner.check`).

    Args:
        stages: Each after those that it needs; needs outside them count as done.
    """
    stage_ids = set()
    done = set()
    for stage in stages:
        stage_ids.add(stage.id)
        if stage.is_done() and done.issuperset(stage_ids.intersection(stage.needs)):
            done.add(stage.id)
    return done


def megaenc_command(
    *words: str, processes: int = 1, launcher: Sequence[str] = ("--standalone",)
) -> list[str]:
    """Return the command line of `megaenc WORDS` with this Python.

    Several processes or machines are started by torchrun.

    Args:
        words: Subcommand and its arguments.
        processes: Number of processes on this machine.
        launcher: Rendezvous arguments of torchrun; the default is that of a single machine.
    """
    if processes == 1 and tuple(launcher) == ("--standalone",):
        return python_command("-m", "megaenc", *words)
    torchrun = python_command(
        "-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(processes)
    )
    return [*torchrun, "-m", "megaenc", *words]


def format_flags(flags: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments for flags by field name.

    `{"a_b": [1, 2], "bf16": False}` becomes `--a-b 1 2 --no-bf16`; None, () and [] add none. A text
    that begins with `-` becomes `--flag=TEXT`, one argument.
    """
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)] if value else []
        elif isinstance(value, str) and value.startswith("-"):
            words.append(f"{flag}={value}")
        elif value is not None:
            words += [flag, str(value)]
    return words


class StaleArtifactError(InputError):
    """InputError for a directory that does not match the manifest or its inputs.

    The message is `DIRECTORY: REASON; undo the change, remove REMOVE, or choose another --output`.
    `reason` has no full stop; `remove` is a noun phrase. `directory` and `reason` are attributes.
    """

    def __init__(
        self,
        directory: Path,
        reason: str,
        remove: str = "that directory and everything made from it",
    ) -> None:
        super().__init__(
            f"{directory}: {reason}; undo the change, remove {remove}, or choose another --output"
        )
        self.directory = directory
        self.reason = reason


def manifest_mismatch(directory: Path, difference: str) -> StaleArtifactError:
    """Return the error to raise for a directory that was made from another manifest.

    Args:
        difference: Text with the field and both values, as of `describe_difference`.
    """
    return StaleArtifactError(directory, f"made from another manifest: {difference}")


def check_stages(
    stages: Iterable[StageRunner], all_stages: Mapping[str, StageRunner], study: Path
) -> None:
    """Raise StaleArtifactError for the first of `stages` whose output is out of date.

    The message lists its directory and all existing ones of `all_stages` that depend on it.

    Args:
        all_stages: All stages of the study by id, each after those that it needs.

    Raises:
        InputError: Another error of `StageRunner.check`.
    """
    for stage in stages:
        try:
            stage.check()
        except StaleArtifactError as error:
            stale = {stage.id}
            for dependent in all_stages.values():  # in topological order
                if stale.intersection(dependent.needs):
                    stale.add(dependent.id)
            directories = [
                dependent.directory
                for id, dependent in all_stages.items()
                if id in stale and dependent.directory.exists()
            ]
            names = " ".join(str(directory.relative_to(study)) for directory in directories)
            raise StaleArtifactError(
                error.directory, error.reason, f"all that depends on it ({names})"
            ) from None


def read_identity(run: Path) -> dict[str, Any] | None:
    """Return the identity of a run, its settings and data, from its run.json.

    It is None if the file is missing or unreadable, or lacks it.

    Args:
        run: Run directory.
    """
    identity = read_json_or_empty(run / RUN_FILE).get("identity")
    return identity if isinstance(identity, dict) else None


def check_checkpoint_exists(run: Path, step: int, consumer: str) -> None:
    """Raise InputError if a run has reached `step` but kept no checkpoint of it.

    An incomplete checkpoint does not count; a run that does not exist passes.

    Args:
        run: Run directory.
        consumer: Stage that needs the checkpoint, for the message.
    """
    checkpoints = CheckpointDir(run / "checkpoints")
    latest = checkpoints.tracked_step()
    if latest is not None and latest >= step and not checkpoints.is_complete(step):
        raise InputError(
            f"{run}: trained to step {latest} without keeping step {step}, which {consumer} needs "
            "and the manifest lacked then; remove that directory to train it again, or choose "
            "another --output"
        )


@dataclass(frozen=True, kw_only=True)
class CorpusStage(StageRunner):
    """Stage that trains the study's tokenizer and tokenizes its corpus.

    The corpus is the files or directories `text`, or the demo corpus if `demo` is True and `text`
    is empty. `vocab_size` is that of the tokenizer. `build_graph` builds the stage.
    """

    name: str = CORPUS
    demo: bool
    text: tuple[Path, ...]
    vocab_size: int
    id = kind = CORPUS
    unit = "parts"

    @property
    def prefix(self) -> Path:
        """Return the --output-prefix of `megaenc preprocess` for the corpus."""
        return self.directory / "corpus"

    @property
    def tokenizer(self) -> Path:
        """Return the directory of the tokenizer."""
        return self.directory / "tokenizer"

    @property
    def flags(self) -> dict[str, Any]:
        """Return data_path and tokenizer of `megaenc pretrain` for this corpus."""
        return {"data_path": [f"{self.prefix}_text_document"], "tokenizer": str(self.tokenizer)}

    @property
    def commands(self) -> dict[Path, tuple[str, ...]]:
        """Return the stage's commands by the path that each writes last, in order.

        Each is the arguments after `megaenc`, the subcommand first. A command whose path exists is
        complete.
        """
        demo = self.directory / "corpus.jsonl"
        text = self.text or (demo,)
        commands = {}
        if self.demo:
            commands[demo] = ("demo", "--output", str(self.directory))
        flags = {"input": text, "vocab_size": self.vocab_size, "output": self.tokenizer}
        commands[self.tokenizer] = ("tokenizer", *format_flags(flags))
        flags = {
            "input": text,
            "output_prefix": self.prefix,
            "tokenizer": self.tokenizer,
            "append_eod": True,
        }
        index = Path(f"{self.prefix}_text_document.idx")
        commands[index] = ("preprocess", *format_flags(flags))
        return commands

    def prepare(self) -> None:
        """Write the request to asked.json, for `check`.

        Once a command is done, nothing is written.
        """
        if not self.progress()[0]:
            self.directory.mkdir(parents=True, exist_ok=True)
            atomic_write(
                self.directory / CORPUS_REQUEST, json.dumps(self._request(), indent=1) + "\n"
            )

    def remaining_commands(self) -> list[list[str]]:
        """Return the command lines, in order, whose output does not exist."""
        return [
            megaenc_command(*words)
            for output, words in self.commands.items()
            if not output.exists()
        ]

    def progress(self) -> tuple[float, float]:
        """Return (number of commands whose output exists, number of commands)."""
        is_complete = [output.exists() for output in self.commands]
        return sum(is_complete), len(is_complete)

    def _request(self) -> dict[str, Any]:
        """Return the requested vocabulary size, `demo`, and names and sizes of the text.

        The size of a missing file is None.
        """
        text = [[path.name, compute_size(path)] for path in self.text]
        return {"vocab_size": self.vocab_size, "demo": self.demo, "text": text}

    def check(self) -> None:
        """Raise StaleArtifactError if asked.json has another request than now.

        It passes without the file; a broken one is another InputError. Sizes of text are compared
        only if both are known.
        """
        file = self.directory / CORPUS_REQUEST
        request = self._request()
        if not file.exists():
            return
        values = read_json_object(file, "the request of a corpus")
        recorded = check_json(_REQUEST_FIELDS, values, file, "not the request of a corpus")
        names = [
            {**content, "text": " ".join(name for name, _ in content["text"])}
            for content in (recorded, request)
        ]
        difference = describe_difference(*names)
        if difference:
            raise manifest_mismatch(self.directory, f"corpus: {difference}")
        for (name, before), (_, now) in zip(recorded["text"], request["text"], strict=True):
            if None not in (before, now) and before != now:
                raise manifest_mismatch(
                    self.directory, f"corpus: {name} had {before:,} bytes, has {now:,} now"
                )


def compute_size(path: Path) -> int | None:
    """Return the bytes of a file, or of all files below a directory.

    It is None if one is unreadable; a missing path is unreadable.
    """
    try:
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files)
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class ExportStage(StageRunner):
    """Stage of `megaenc convert to-hf`: export of the checkpoint at `step` of `run`.

    `build_graph` builds it. `name` and `key` (ModelKey) are those of the checkpoint. `run` is the
    run's name, which may be another model's if steps are shared. The export has a certificate,
    conversion.json.
    """

    key: ModelKey
    run: str
    step: int
    kind = "export"
    subfolder = "hf"
    unit = "models"

    @property
    def needs(self) -> tuple[str, ...]:
        """Return (`pretrain/RUN`,), the id of the stage that trains the checkpoint."""
        return (f"pretrain/{self.run}",)

    @property
    def _run(self) -> Path:
        """Return the run directory."""
        return self.study / "runs" / self.run

    @property
    def _certificate(self) -> Path:
        """Return the path of the certificate, in a directory that appears atomically."""
        return self.directory / "conversion.json"

    def remaining_commands(self) -> list[list[str]]:
        """Return the command line of `megaenc convert to-hf` unless the export exists."""
        flags = {"load": self._run, "ckpt_step": self.step, "output": self.directory}
        return [] if self.is_done() else [megaenc_command("convert", "to-hf", *format_flags(flags))]

    def progress(self) -> tuple[float, float]:
        """Return (finished exports, all exports): (1.0, 1) or (0.0, 1).

        The export is finished if its conversion.json exists.
        """
        return float(self._certificate.is_file()), 1

    def check(self) -> None:
        """Check that the export is of this step and run.

        Raises:
            StaleArtifactError: The export is of another step or run.
            InputError: There is no export, and the run has reached the step without keeping its
                checkpoint; or conversion.json cannot be read.
        """
        if not self.is_done():
            check_checkpoint_exists(self._run, self.step, self.id)
            return
        certificate = read_json_object(self._certificate, "the certificate of an export")
        identity = read_identity(self._run)
        export_step = certificate.get("step", self.step)
        if export_step != self.step:
            raise manifest_mismatch(
                self.directory, f"step is {export_step} there, {self.step} here"
            )
        if "identity" not in certificate or (
            identity is not None and certificate["identity"] != identity_digest(identity)
        ):
            raise StaleArtifactError(
                self.directory, f"made from another {self.run} than {self._run} is now"
            )
