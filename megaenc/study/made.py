"""How a study was made, from what its results and runs say: counts, seeds, rates, hours, software. No paths, no clock."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy.special import stdtr

from megaenc.console import number
from megaenc.errors import InputError
from megaenc.finetune.jobs import rate_name
from megaenc.finetune.results import TIMING, Result
from megaenc.json_files import read_json
from megaenc.study import record
from megaenc.study.evidence import Evidence
from megaenc.study.metrics import is_number
from megaenc.study.published import SOURCE, published
from megaenc.study.run_tree import TrainedRun

Fact = tuple[str, str]


def intervals_of(evidence: Evidence, beside: Evidence | None = None) -> Fact:
    """What the intervals of tables and figures are; `beside` is shown with these."""
    return "Intervals", f"of tables and figures: {words(evidence, beside)}"


_OF_PRINTED = "of printed means and intervals alone: without single seeds or examples, so less can be resolved than with them"


def of_published() -> list[Fact]:
    """What the printed tables are."""
    return [
        ("Numbers", f"{SOURCE}: means and intervals of five fine-tuning seeds, as printed"),
        intervals_of(published()),
        ("Cost", "110,000 MI250X GPU hours, as its authors say"),
        ("Tests", _OF_PRINTED),
    ]


def of_results(results: Sequence[Result], evidence: Evidence) -> list[Fact]:
    """Counts of the fine-tunings, beside those that a manifest asks for if there is one."""
    scope = evidence.scope
    finished = [one for one in results if one.test is not None]
    models = len({one.model for one in finished})
    sets = len({(one.family, one.dataset) for one in finished})
    outside = len(results) - sum(len(one.ended) for one in evidence.grids)
    counted = f"{len(finished):,} results, {len(results) - len(finished):,} failed runs"
    if outside:
        counted += f"; {outside:,} with rates or seeds that the manifest does not ask for are left out"
    facts = [
        ("Models", f"{models} evaluated" + (f" of {len(scope.names)} planned" if scope.names else "")),
        ("Data sets", f"{sets}"),
        ("Fine-tuning", counted),
        ("Fine-tuning seeds", _listed(sorted({seed for one in evidence.grids for _, seed in one.ended}))),
        ("Learning rates", ", ".join(map(rate_name, sorted({rate for one in evidence.grids for rate, _ in one.ended})))),
        ("Pretraining seeds", _listed(sorted({setting.seed for setting in evidence.settings()}))),
    ]
    seconds = _seconds(results)
    facts.append(("Time in fine-tunings", f"{seconds / 3600:,.1f} hours, evaluation included" if seconds else ""))
    return [(name, text) for name, text in facts if text]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _seconds(results: Sequence[Result]) -> float:
    """Return the seconds of all runs that tell, a training for several retrieval sets once; a damaged file tells nothing."""
    trained: dict[tuple, float] = {}
    total = 0.0
    for one in results:
        times = dict(read_json(one.path / TIMING))
        if all(is_number(value) and value >= 0 for value in times.values()):
            total += times.pop("evaluation", 0.0)
            trained[one.model, one.family, one.train_on, one.learning_rate, one.seed] = sum(times.values())
    return total + sum(trained.values())


def of_runs(runs: Mapping[str, TrainedRun]) -> list[Fact]:
    """Counts of the pretraining, each shared beginning once."""
    if not runs:
        return []
    every = list(runs.values())
    steps = sum(run.steps[-1]["step"] - run.begun["step"] for run in every)
    facts = [
        ("Pretraining", f"{len(every)} runs, {steps:,} steps, {number(sum(run.tokens for run in every))} tokens"),
        ("Time in pretraining", f"{sum(run.seconds for run in every) / 3600:,.2f} hours in updates"),
        ("Parameters", _several(number(run.facts["parameters"]) for run in every if is_number(run.facts.get("parameters")))),
    ]
    flags = {"Tokens a sequence": "seq_length", "Sequences a step": "global_batch_size", "Peak learning rate": "lr"}
    for label, name in flags.items():
        facts.append((label, _several(f"{run.identity[name]:g}" for run in every if is_number(run.identity.get(name)))))
    facts.append(("Software", _several(f"megaenc {run.facts['megaenc']}" for run in every if "megaenc" in run.facts)))
    return [(name, text) for name, text in facts if text]


def _several(texts) -> str:
    return ", ".join(dict.fromkeys(texts))


def noted(results: Path, said: Sequence[str]) -> list[Fact]:
    """What was written down beside the results, then the NAME=TEXT that the command line says. InputError for neither form."""
    facts = record.noted(results.parent / record.NOTES)
    for text in said:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise InputError(f"--about {text}: expected NAME=TEXT, such as hardware='2 cores of an EPYC 7B13'")
        facts[name.strip()] = value.strip()
    return [(name[:1].upper() + name[1:].replace("_", " "), value) for name, value in facts.items()]


PUBLISHED_SEEDS = 5


def coverage(seeds: int) -> float:
    """Return the share of intervals of 1.96 standard errors that hold the true mean: 0.70 for two seeds, 0.88 for five."""
    return float(1 - 2 * stdtr(seeds - 1, -1.96))


def words(evidence: Evidence, published: Evidence | None = None) -> str:
    """`1.96 standard errors over 2 seeds, which hold the true mean 70 times in 100`; `published` stand beside these."""
    counts = sorted({len(one.seeds) or PUBLISHED_SEEDS for one in evidence.scores if one.half is not None})
    if not counts:
        said = "none, as there is one fine-tuning seed"
    elif evidence.kind == "t":
        said = f"95 % by Student's t over {_ends(counts)} fine-tuning seeds"
    else:
        said = _normal(counts)
    if published is None or (evidence.kind == "normal" and counts == [PUBLISHED_SEEDS]):
        return said
    return f"{said}; published ones are {_normal([PUBLISHED_SEEDS])}"


def _normal(counts: list[int]) -> str:
    often = " to ".join(dict.fromkeys(f"{100 * coverage(count):.0f}" for count in (counts[0], counts[-1])))
    return f"1.96 standard errors over {_ends(counts)} fine-tuning seeds, which hold the true mean {often} times in 100"


def _ends(counts: list[int]) -> str:
    return " or ".join(map(str, counts)) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"
