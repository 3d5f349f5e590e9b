"""How a study was made, from what its results and runs say: counts, seeds, rates, hours, software. No paths, no clock."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scipy.special import stdtr

from megaenc.console import format_number
from megaenc.errors import InputError
from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.results.aggregate import IntervalKind
from megaenc.finetune.results.files import TIMING, Result
from megaenc.json_files import read_json_or_empty
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.pretrain_runs import TrainedRun
from megaenc.study.results.published import SOURCE, published
from megaenc.study.run import provenance
from megaenc.viz.run_metrics import is_number, training_seconds

Fact = tuple[str, str]


def published_facts() -> list[Fact]:
    """Return what the printed tables are."""
    tests = "of printed means and intervals alone: without single seeds or examples, so less can be resolved than with them"
    return [
        ("Numbers", f"{SOURCE}: means and intervals of five fine-tuning seeds, as printed"),
        ("Intervals", f"of tables and figures: {describe_intervals(published())}"),
        ("Cost", "110,000 MI250X GPU hours, as its authors say"),
        ("Tests", tests),
    ]


def finetuning_facts(results: Sequence[Result], evidence: Evidence) -> list[Fact]:
    """Return counts of the fine-tunings, next to those that a manifest asks for if there is one."""
    scope = evidence.scope
    finished = [one for one in results if one.test is not None]
    outside = len(results) - sum(len(one.ended) for one in evidence.grids)
    counted = f"{len(finished):,} results, {len(results) - len(finished):,} failed runs"
    if outside:
        counted += f"; {outside:,} with rates or seeds that the manifest does not ask for are left out"
    of = f" of {len(scope.model_keys)} planned" if scope.model_keys else ""
    seconds = _total_seconds(results)
    facts = [
        ("Models", f"{len({one.model for one in finished})} evaluated{of}"),
        ("Data sets", f"{len({(one.family, one.dataset) for one in finished})}"),
        ("Fine-tuning", counted),
        ("Fine-tuning seeds", _format_unique(sorted({seed for one in evidence.grids for _, seed in one.ended}))),
        ("Learning rates", _format_unique(map(format_learning_rate, sorted({rate for one in evidence.grids for rate, _ in one.ended})))),
        ("Pretraining seeds", _format_unique(sorted({setting.seed for setting in evidence.settings()}))),
        ("Time in fine-tunings", f"{seconds / 3600:,.1f} hours, evaluation included" if seconds else ""),
    ]
    return [(name, text) for name, text in facts if text]


def _format_unique(values: Iterable[object]) -> str:
    """Return each value once, in the order in which they come up."""
    return ", ".join(dict.fromkeys(map(str, values)))


def _total_seconds(results: Sequence[Result]) -> float:
    """Return the seconds of all runs that tell, a training for several retrieval sets once; a damaged file tells nothing."""
    trained: dict[tuple, float] = {}
    total = 0.0
    for one in results:
        times = dict(read_json_or_empty(one.path / TIMING))
        if all(is_number(value) and value >= 0 for value in times.values()):
            total += times.pop("evaluation", 0.0)
            trained[one.model, one.family, one.train_on, one.learning_rate, one.seed] = sum(times.values())
    return total + sum(trained.values())


def pretraining_facts(runs: Mapping[str, TrainedRun]) -> list[Fact]:
    """Return counts of the pretraining, each shared beginning once."""
    if not runs:
        return []
    every = list(runs.values())
    steps, tokens = (sum(run.steps[-1][name] - run.start_progress[name] for run in every) for name in ("step", "tokens"))
    seconds = sum(training_seconds(run.steps, run.start_progress["step"]) for run in every)
    facts = [
        ("Pretraining", f"{len(every)} runs, {steps:,} steps, {format_number(tokens)} tokens"),
        ("Time in pretraining", f"{seconds / 3600:,.2f} hours in updates"),
        ("Parameters", _format_unique(format_number(run.facts["parameters"]) for run in every if is_number(run.facts.get("parameters")))),
    ]
    flags = {"Tokens a sequence": "seq_length", "Sequences a step": "global_batch_size", "Peak learning rate": "lr"}
    for label, name in flags.items():
        facts.append((label, _format_unique(f"{run.identity[name]:g}" for run in every if is_number(run.identity.get(name)))))
    facts.append(("Software", _format_unique(f"megaenc {run.facts['megaenc']}" for run in every if "megaenc" in run.facts)))
    return [(name, text) for name, text in facts if text]


def read_notes(results: Path, said: Sequence[str]) -> list[Fact]:
    """Return what was written down next to the results, then the NAME=TEXT that the command line gives; else InputError."""
    facts = provenance.read_provenance(results.parent / provenance.PROVENANCE_FILE)
    for text in said:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise InputError(f"--about {text}: expected NAME=TEXT, such as hardware='2 cores of an EPYC 7B13'")
        facts[name.strip()] = value.strip()
    return [(name[:1].upper() + name[1:].replace("_", " "), value) for name, value in facts.items()]


PUBLISHED_SEEDS = 5


def normal_interval_coverage(seeds: int) -> float:
    """Return the share of intervals of 1.96 standard errors that hold the true mean: 0.70 for two seeds, 0.88 for five."""
    return float(1 - 2 * stdtr(seeds - 1, -1.96))


def describe_intervals(evidence: Evidence, published: Evidence | None = None) -> str:
    """Return `1.96 standard errors over 2 seeds, which hold the true mean 70 times in 100`; `published` stand next to these."""

    def said(counts: Sequence[int], kind: IntervalKind) -> str:
        over = f"over {' or '.join(map(str, counts)) if len(counts) < 3 else f'{counts[0]} to {counts[-1]}'} fine-tuning seeds"
        if kind == "t":
            return f"95 % by Student's t {over}"
        often = " to ".join(dict.fromkeys(f"{100 * normal_interval_coverage(count):.0f}" for count in (counts[0], counts[-1])))
        return f"1.96 standard errors {over}, which hold the true mean {often} times in 100"

    counts = sorted({len(one.seeds) or PUBLISHED_SEEDS for one in evidence.scores if one.half_width is not None})
    ours = said(counts, evidence.kind) if counts else "none, as there is one fine-tuning seed"
    if published is None or (evidence.kind == "normal" and counts == [PUBLISHED_SEEDS]):
        return ours
    return f"{ours}; published ones are {said([PUBLISHED_SEEDS], 'normal')}"
