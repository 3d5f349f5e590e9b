"""Methods section of the report, from results and runs, without paths or dates.

It has counts, seeds, rates, hours and software.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scipy.special import stdtr

from megaenc.console import format_number
from megaenc.errors import InputError
from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.examples import STUDY_FAMILIES
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
    """Return facts, (name, text) pairs, on the published tables.

    They are the source of the numbers, intervals, cost and tests.
    """
    tests = (
        "of published means and intervals only, with less power than tests over single seeds and "
        "examples"
    )
    return [
        ("Numbers", f"{SOURCE}: means and intervals of five fine-tuning seeds, as published"),
        ("Intervals", f"of tables and figures: {describe_intervals(published())}"),
        ("Cost", "110,000 MI250X GPU hours, according to its authors"),
        ("Tests", tests),
    ]


def finetuning_facts(results: Sequence[Result], evidence: Evidence) -> list[Fact]:
    """Return facts, (name, text) pairs, on fine-tuning.

    They are models, data sets, families that are in tables only, runs, seeds, learning rates and,
    if known, the hours of all runs together; those without a value are left out.

    Args:
        results: All results, finished and failed; the hours are read from their directories.
        evidence: Scores of the same results; only runs in it count for seeds and rates.
    """
    scope = evidence.scope
    finished = [result for result in results if result.test is not None]
    outside = len(results) - sum(len(grid.collapsed_by_run) for grid in evidence.grids)
    counts = f"{len(finished):,} results, {len(results) - len(finished):,} failed runs"
    if outside:
        counts += f"; {outside:,} with rates or seeds that the manifest does not plan are left out"
    planned = f" of {len(scope.model_keys)} planned" if scope.model_keys else ""
    rates = {rate for grid in evidence.grids for rate, _ in grid.collapsed_by_run}
    seeds = {seed for grid in evidence.grids for _, seed in grid.collapsed_by_run}
    seconds = _total_seconds(results)
    others = [family for family, _ in evidence.datasets() if family not in STUDY_FAMILIES]
    facts = [
        ("Models", f"{len({result.model for result in finished})} evaluated{planned}"),
        ("Data sets", f"{len({(result.family, result.dataset) for result in finished})}"),
        (
            "In tables only",
            f"{_format_unique(others)}: no verdict or figure is about them" if others else "",
        ),
        ("Fine-tuning", counts),
        ("Fine-tuning seeds", _format_unique(sorted(seeds))),
        ("Learning rates", _format_unique(map(format_learning_rate, sorted(rates)))),
        ("Pretraining seeds", _format_unique(sorted({key.seed for key in evidence.model_keys()}))),
        (
            "Time in fine-tuning",
            f"{seconds / 3600:,.1f} hours, evaluation included" if seconds else "",
        ),
    ]
    return [(name, text) for name, text in facts if text]


def _format_unique(values: Iterable[object]) -> str:
    """Return the distinct values in order of appearance, joined by commas."""
    return ", ".join(dict.fromkeys(map(str, values)))


def _total_seconds(results: Sequence[Result]) -> float:
    """Return the seconds of all runs with a valid timing file.

    Training that several data sets share counts once.
    """
    training: dict[tuple, float] = {}
    total = 0.0
    for result in results:
        times = dict(read_json_or_empty(result.path / TIMING))
        if all(is_number(value) and value >= 0 for value in times.values()):
            total += times.pop("evaluation", 0.0)
            training[
                result.model, result.family, result.train_on, result.learning_rate, result.seed
            ] = sum(times.values())
    return total + sum(training.values())


def pretraining_facts(runs: Mapping[str, TrainedRun]) -> list[Fact]:
    """Return facts, (name, text) pairs, on pretraining; empty without runs.

    They are the number of runs, their steps, tokens and hours in all, parameters, main flags and
    software; those without a value are left out. Hours are wall-clock time. A branch counts without
    the steps, tokens and hours of its parent.

    Args:
        runs: Pretraining runs by name, of `read_runs`.
    """
    if not runs:
        return []
    trained_runs = list(runs.values())
    steps = sum(run.steps[-1]["step"] - run.start_progress["step"] for run in trained_runs)
    tokens = sum(run.steps[-1]["tokens"] - run.start_progress["tokens"] for run in trained_runs)
    seconds = sum(training_seconds(run.steps, run.start_progress["step"]) for run in trained_runs)
    facts = [
        (
            "Pretraining",
            f"{len(trained_runs)} runs, {steps:,} steps, {format_number(tokens)} tokens",
        ),
        ("Time in pretraining", f"{seconds / 3600:,.2f} hours in training steps"),
    ]
    sizes = [run.facts.get("parameters") for run in trained_runs]
    facts.append(("Parameters", _format_unique(map(format_number, filter(is_number, sizes)))))
    flags = {
        "Tokens a sequence": "seq_length",
        "Sequences a step": "global_batch_size",
        "Peak learning rate": "lr",
    }
    for label, name in flags.items():
        values = filter(is_number, [run.identity.get(name) for run in trained_runs])
        facts.append((label, _format_unique(f"{value:g}" for value in values)))
    versions = [f"megaenc {run.facts['megaenc']}" for run in trained_runs if "megaenc" in run.facts]
    facts.append(("Software", _format_unique(versions)))
    return [(name, text) for name, text in facts if text]


def read_notes(results: Path, about: Sequence[str]) -> list[Fact]:
    """Read notes, (name, text) pairs, from study.json and from `about`.

    In the result, names have a capital first letter, and spaces for underscores.

    Args:
        results: Results directory; study.json is in its parent directory, and may be missing.
        about: NAME=TEXT of each note, with neither part empty. It replaces that of study.json, or
            an earlier one, with exactly this NAME.

    Raises:
        InputError: A text has another form, or study.json is no JSON object.
    """
    notes = provenance.read_provenance(results.parent / provenance.PROVENANCE_FILE)
    for text in about:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise InputError(
                f"--about {text}: expected NAME=TEXT, such as hardware='2 cores of an EPYC 7B13'"
            )
        notes[name.strip()] = value.strip()
    return [(name[:1].upper() + name[1:].replace("_", " "), value) for name, value in notes.items()]


PUBLISHED_SEEDS = 5


def normal_interval_coverage(seeds: int) -> float:
    """Return the probability that mean +- 1.96 standard errors covers the true mean.

    The standard error is estimated from one score of each seed; for five seeds it is 0.88.

    Args:
        seeds: Number of seeds, at least two.
    """
    return float(1 - 2 * stdtr(seeds - 1, -1.96))


def describe_intervals(evidence: Evidence, published: Evidence | None = None) -> str:
    """Return a phrase on the kind, seeds and coverage of the scores' intervals.

    It fits after "Intervals: " and has no full stop, such as `95 % by Student's t over 5
    fine-tuning seeds, given the chosen learning rate`. Without intervals it begins with `none`.

    Args:
        published: Published scores, whose intervals are added to the phrase if their kind or number
            of seeds differs; None for none.
    """

    def describe(counts: Sequence[int], kind: IntervalKind) -> str:
        """Describe intervals of this kind over these numbers of seeds."""
        numbers = f"{counts[0]} to {counts[-1]}"
        if len(counts) < 3:
            numbers = " or ".join(map(str, counts))
        over = f"over {numbers} fine-tuning seeds"
        if kind == "t":
            return f"95 % by Student's t {over}"
        often = " to ".join(
            dict.fromkeys(
                f"{100 * normal_interval_coverage(count):.0f}" for count in (counts[0], counts[-1])
            )
        )
        return f"1.96 standard errors {over}, which hold the true mean {often} times in 100"

    counts = sorted(
        {
            len(score.seed_scores) or PUBLISHED_SEEDS
            for score in evidence.scores
            if score.half_width is not None
        }
    )
    study_intervals = "none, as there is one fine-tuning seed"
    if counts:
        study_intervals = f"{describe(counts, evidence.kind)}, given the chosen learning rate"
    if published is None or (evidence.kind == "normal" and counts == [PUBLISHED_SEEDS]):
        return study_intervals
    return f"{study_intervals}; published ones are {describe([PUBLISHED_SEEDS], 'normal')}"
