"""From a manifest to the stages of the work: corpus, pretraining runs, exports, fine-tunings."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megaenc.study.entries import Model
from megaenc.study.manifest import Manifest
from megaenc.study.setting import Setting
from megaenc.study.sharing import maker, starts_of
from megaenc.study.tasks import Training

if TYPE_CHECKING:
    from megaenc.study.begun import Begun

CORPUS = "corpus"
"""Folder of the study's own corpus and tokenizer, and the name of the stage that makes them."""


@dataclass(frozen=True)
class Command:
    """A command of megaenc, and the file or folder that is there when it is done."""

    arguments: tuple[str, ...]
    makes: Path


@dataclass(frozen=True)
class CorpusStage:
    """The study's own tokenizer and tokenised text."""

    demo: bool
    text: tuple[Path, ...]
    vocab_size: int
    kind = "corpus"
    name = CORPUS
    needs: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Unlike that of any other stage."""
        return CORPUS

    def commands(self, folder: Path) -> list[Command]:
        """What makes it in the study's `folder`, one after another; a command whose `makes` is there is done."""
        home = folder / CORPUS
        text = [str(path) for path in self.text] or [str(home / "corpus.jsonl")]
        tokenizer, prefix = home / "tokenizer", home / "corpus"
        demo = [Command(("demo", "--output", str(home)), home / "corpus.jsonl")] if self.demo else []
        learn = ("tokenizer", "--input", *text, "--vocab-size", str(self.vocab_size), "--output", str(tokenizer))
        read = ("preprocess", "--input", *text, "--output-prefix", str(prefix), "--tokenizer", str(tokenizer), "--append-eod")
        return [*demo, Command(learn, tokenizer), Command(read, Path(f"{prefix}_text_document.idx"))]


@dataclass(frozen=True)
class Pretraining:
    """One `megaenc pretrain`: the run that ends as `model`, or the part of it that no other has trained."""

    model: Model
    start: Literal["new", "branch", "weights"]
    parent: str
    """Name of the run that it branches off or begins with the weights of; "" for new weights."""
    at: int
    """The parent's step at which it branches; 0 otherwise."""
    keep: tuple[int, ...]
    """Steps before the last whose checkpoints others need: branches, and exports of checkpoints on the way."""
    corpus: bool
    """Whether the study makes the corpus that it reads."""
    kind = "pretrain"

    @property
    def name(self) -> str:
        """That of the model in which it ends; also its folder."""
        return self.model.name

    @property
    def id(self) -> str:
        """Unlike that of any other stage."""
        return f"{self.kind}/{self.name}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Stages that come before."""
        return (f"{self.kind}/{self.parent}",) if self.parent else (CORPUS,) if self.corpus else ()

    @property
    def steps(self) -> int:
        """Steps that it makes itself."""
        return self.model.steps - self.at

    @property
    def is_tail(self) -> bool:
        """Whether it is nothing but another run's decay."""
        return self.start == "branch" and self.steps <= self.model.decay

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of `megaenc pretrain`, all but those that name folders; keys are field names."""
        model = self.model
        return {
            **model.flags,
            "objective_schedule": model.schedule,
            "train_iters": model.steps,
            "seed": model.setting.seed,
            "lr_warmup_iters": model.warmup,
            "lr_wsd_decay_iters": model.decay,
            "save_steps": list(self.keep),
            "keep_last": 1,
        }

    def flags_in(self, folder: Path) -> dict[str, Any]:
        """Those and the folders, for a study that is made in `folder`; `arguments` spells them."""
        found = {**self.flags, "save": str(folder / "runs" / self.name)}
        if self.corpus:
            home = folder / CORPUS
            found |= {"data_path": [str(home / "corpus_text_document")], "tokenizer": str(home / "tokenizer")}
        parent = str(folder / "runs" / self.parent)
        if self.start == "branch":
            found |= {"branch_from": parent, "branch_at": self.at}
        elif self.start == "weights":
            found |= {"init_from": parent, "skip_samples": "parent"}
        return found


@dataclass(frozen=True)
class Export:
    """One `megaenc convert to-hf`: a checkpoint that is evaluated, under its name."""

    name: str
    setting: Setting
    run: str
    step: int
    kind = "export"

    @property
    def id(self) -> str:
        """Unlike that of any other stage."""
        return f"{self.kind}/{self.name}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Stages that come before."""
        return (f"pretrain/{self.run}",)

    def arguments(self, folder: Path) -> tuple[str, ...]:
        """The words after `megaenc` for a study that is made in `folder`."""
        run, output = folder / "runs" / self.run, folder / "hf" / self.name
        return ("convert", "to-hf", "--load", str(run), "--ckpt-step", str(self.step), "--output", str(output))


@dataclass(frozen=True)
class FineTuning:
    """One `megaenc finetune grid`: a model on every data set with every rate and seed."""

    name: str
    """That of the export."""
    trainings: tuple[Training, ...] = field(repr=False)
    flags: Mapping[str, Any] = field(repr=False)
    """Flags of the grid that the manifest gives; datasets, learning_rates and seeds among them."""
    kind = "finetune"

    @property
    def id(self) -> str:
        """Unlike that of any other stage."""
        return f"{self.kind}/{self.name}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Stages that come before."""
        return (f"export/{self.name}",)

    @property
    def runs(self) -> int:
        """Trainings: retrieval trains once for all the sets that share its pairs."""
        return len(self.trainings) * len(self.flags["learning_rates"]) * self.flags["seeds"]

    @property
    def results(self) -> int:
        """Results: one for each data set, rate and seed."""
        sets = sum(len(training.datasets) for training in self.trainings)
        return sets * len(self.flags["learning_rates"]) * self.flags["seeds"]


Stage = CorpusStage | Pretraining | Export | FineTuning


@dataclass(frozen=True)
class Graph:
    """The stages of a study by name, each kind in an order in which everything comes after what it needs."""

    manifest: Manifest
    corpus: CorpusStage | None
    runs: dict[str, Pretraining]
    exports: dict[str, Export]
    grids: dict[str, FineTuning]

    def stages(self) -> Iterator[Stage]:
        """All of them, each after what it needs."""
        yield from (self.corpus,) if self.corpus else ()
        for group in (self.runs, self.exports, self.grids):
            yield from group.values()


def arguments(flags: Mapping[str, Any]) -> list[str]:
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


def build_graph(manifest: Manifest, begun: "Begun | None" = None) -> Graph:
    """Work the stages out: what branches where, which checkpoints are kept, what is exported and fine-tuned.

    `begun`: a study that is gone on with. Its runs keep the start that they have had, and are branched where they can be.
    """
    starts = starts_of(manifest.models, begun)
    owned = [(model, step, maker(starts, model.name, step)) for model in manifest.models for step in model.checkpoints]
    keep: dict[str, set[int]] = {name: set() for name in starts}
    for _, step, owner in owned:
        keep[owner].add(step)
    for _, parent, at in starts.values():
        if at:
            keep[parent].add(at)
    made = manifest.corpus.made
    by_name = {model.name: model for model in manifest.models}
    runs = {
        name: Pretraining(by_name[name], start, parent, at, tuple(sorted(keep[name])), made)
        for name, (start, parent, at) in starts.items()
    }
    exports = {
        model.name: Export(model.name, model.setting, model.name, model.steps) for model in manifest.models if model.evaluate
    }
    for model, step, owner in owned:
        name = model.checkpoint_name(step)
        exports[name] = Export(name, model.checkpoint_setting(step), owner, step)
    grids = _grids(manifest, exports)
    return Graph(manifest, _corpus(manifest), runs, exports, grids)


def _corpus(manifest: Manifest) -> CorpusStage | None:
    corpus = manifest.corpus
    text = tuple(manifest.data / path for path in corpus.text)
    return CorpusStage(corpus.demo, text, corpus.vocab_size) if corpus.made else None


def _grids(manifest: Manifest, exports: Iterable[str]) -> dict[str, FineTuning]:
    if manifest.finetune is None:
        return {}
    return {name: FineTuning(name, manifest.trainings, manifest.finetune_flags) for name in exports}
