"""From a manifest to the stages of the work, in which every shared beginning is trained once.

A run of N steps that decays over the last D has the same first N - D steps as any other that trains the same objectives at the
same rate up to there. So each model is a branch of the run with which it shares most, or all of its own where it shares nothing;
longer runs come first and are the trunks. What is continued from a decayed end is a run of its own, which others can branch.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megaenc.flags import flatten
from megaenc.study.entries import Model, Trained
from megaenc.study.manifest import Manifest
from megaenc.study.setting import Setting
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
    starts = _starts(manifest.models, begun)
    owned = [(model, step, _owner(starts, model.name, step)) for model in manifest.models for step in model.checkpoints]
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


_Start = tuple[Literal["new", "branch", "weights"], str, int]


def _starts(models: Iterable[Model], begun: "Begun | None") -> dict[str, _Start]:
    """How the run of each model begins, parents before children.

    What is left for each model to train does not depend on the order, only which run is the trunk does: the longest, of equals
    the one with the fewest objectives, which checkpoints on the way are named after.
    """
    families: dict[tuple, list[Model]] = {}
    for model in models:
        families.setdefault(_family(model), []).append(model)
    found = _kept_starts([model for members in families.values() for model in members], begun)
    kept = set(found)
    for members in families.values():
        placed: list[Model] = []
        for model in sorted(members, key=lambda model: (model.name not in kept, -model.undecayed, len(model.phases))):
            if model.name not in kept:
                found[model.name] = _best_start(model, placed, found, begun)
            placed.append(model)
    return _parents_first(found)


def _family(model: Model) -> tuple:
    """What runs that can share a beginning have in common."""
    # Not as flags are spelled: a default that is written down changes nothing. The schedule has its own comparison.
    flags = {name: value for name, value in flatten(model.run).items() if not name.startswith(("lr_warmup", "lr_wsd_decay"))}
    return model.after, model.warmup, model.setting.seed, model.setting.size, repr(flags)


def _best_start(model: Model, placed: Iterable[Model], starts: Mapping[str, _Start], begun: "Begun | None") -> _Start:
    """As a branch of the one of its family that it shares most with, if any; of equals the first."""
    best, at = "", 0
    for other in placed:
        common = shared_steps(model, other)
        common = begun.branch_point(other.name, common) if begun else common
        kind, _, its_own = starts[other.name]
        if common > at and (kind != "branch" or common > its_own):  # steps that it makes itself
            best, at = other.name, common
    if best:
        return "branch", best, at
    return ("weights", model.after, 0) if model.after else ("new", "", 0)


def _kept_starts(models: Iterable[Model], begun: "Begun | None") -> dict[str, _Start]:
    """How runs have begun, where that makes what the manifest says of them now."""
    by_name = {model.name: model for model in models}
    said = {name: start for name in by_name if begun and (start := begun.start(name))}

    def fits(name: str, children: tuple[str, ...] = ()) -> bool:
        model, (kind, parent, at) = by_name[name], said[name]
        if kind != "branch":
            return (kind, parent) == (("weights", model.after) if model.after else ("new", ""))
        if parent not in said or parent in children or _family(model) != _family(by_name[parent]):
            return False
        return 0 < at <= shared_steps(model, by_name[parent]) and fits(parent, (*children, name))

    return {name: said[name] for name in said if fits(name)}


def _parents_first(starts: Mapping[str, _Start]) -> dict[str, _Start]:
    """In the given order, but for parents that come later: what is continued may be a branch."""
    found: dict[str, _Start] = {}

    def place(name: str) -> None:
        if name in found:
            return
        if parent := starts[name][1]:
            place(parent)
        found[name] = starts[name]

    for name in starts:
        place(name)
    return found


def shared_steps(one: Model, other: Model) -> int:
    """The first steps that two models of the same flags, warm-up and start have in common, none of them decayed."""
    last = min(one.undecayed, other.undecayed)
    return min(last, _agreeing(one.phases, other.phases))


def _agreeing(here: tuple[Trained, ...], there: tuple[Trained, ...]) -> int:
    """The last step up to which two schedules train the same; a phase that changes is the same only as a whole."""
    step, mine, other = 0, iter(here), iter(there)
    one, two = next(mine, None), next(other, None)
    while one and two and one.text == two.text:
        if one.last_step != two.last_step and (one.changes or two.changes):
            return step
        step = min(one.last_step, two.last_step)
        one = next(mine, None) if one.last_step == step else one
        two = next(other, None) if two.last_step == step else two
    return step


def _owner(starts: Mapping[str, _Start], name: str, step: int) -> str:
    """The run that makes `step` of the run `name`."""
    while starts[name][0] == "branch" and step <= starts[name][2]:
        name = starts[name][1]
    return name
