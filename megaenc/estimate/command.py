"""`megaenc estimate`: what a run takes, before anything is booked."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megaenc.console import quiet, rich_console
from megaenc.errors import one_line_errors
from megaenc.estimate.case import Case, phases
from megaenc.estimate.documents import Documents, documents, vocabulary
from megaenc.estimate.machines import GIB, USABLE, Rates, between, inside, machine
from megaenc.estimate.report import Report
from megaenc.estimate.settings import EstimateSettings, read
from megaenc.estimate.whole import Demand, best_layout, estimate
from megaenc.files import write_whole
from megaenc.output_paths import check_output_file, make_parent

# Vocabularies of the presets where neither a corpus nor --vocab-size says: that of the small preset's measurements, the demo
# tokenizer's, and for the study's sizes Llama 3's.
_USUAL = {"small": 32_768, "tiny": 8_192}
_STUDY = 128_256


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc estimate`."""
    quiet()
    settings = read(sys.argv[1:] if argv is None else argv, "megaenc estimate")
    if settings.output:
        check_output_file(Path(settings.output), "--output")
    report = make_report(settings)
    console = rich_console(width=None if sys.stdout.isatty() else 130, highlight=False, markup=False)
    report.show(console, explain=settings.explain)
    if settings.output:
        make_parent(Path(settings.output), "--output")
        write_whole(Path(settings.output), json.dumps(report.as_json(), indent=2) + "\n")


def make_report(settings: EstimateSettings) -> Report:
    """Return everything that there is to say of a run. Raises InputError."""
    run = settings.pretrain
    vocab_size, said = vocabulary_size(settings)
    docs = documents(run.data, settings.document_tokens)
    case, demand = Case.of(run, vocab_size, settings.gpus), demand_of(settings, vocab_size, docs)
    rates = _rates(settings, case, demand, docs)
    own, search = estimate(case, demand, rates), settings.suggest and settings.mfu is None
    better = best_layout(case, demand, rates) if search else None
    return Report(run.model_name, said, docs, rates, own, better, search, settings.price_per_hour, settings.mfu)


def vocabulary_size(settings: EstimateSettings) -> tuple[int, str]:
    """Return the rows of the embedding, and where the number is from."""
    run = settings.pretrain
    if run.shape.vocab_size:
        return run.shape.vocab_size, f"vocabulary of {run.shape.vocab_size:,}"
    if (found := vocabulary(run.data)) is not None:
        return found, f"vocabulary of {found:,}, the corpus's"
    usual = _USUAL.get(run.model.lower(), _STUDY)
    return usual, f"vocabulary of {usual:,} (assumed; --vocab-size says another)"


def demand_of(settings: EstimateSettings, vocab_size: int, docs: Documents) -> Demand:
    """Return what the run computes: its phases, and its validations under the usual two objectives and its own."""
    run = settings.pretrain
    found = phases(run, vocab_size, docs)
    steps = sum(phase.last - phase.first + 1 for phase in found)
    objectives = {"clm", "mlm"} | {work.objective for phase in found for work, _ in phase.parts}
    times = steps // run.eval_every if run.eval_every else 0
    return Demand(tuple(found), times, len(objectives) * run.output.eval_iters, settings.mfu)


def _rates(settings: EstimateSettings, case: Case, demand: Demand, docs: Documents) -> Rates:
    known = machine(settings.gpu) if settings.gpu else None
    if known:
        given = {
            "devices": settings.devices_per_node,
            "memory": settings.memory_gib and USABLE * (settings.memory_gib * GIB),
            "inside": settings.intra_node_bandwidth and inside(settings.intra_node_bandwidth),
            "between": settings.inter_node_bandwidth and between(settings.inter_node_bandwidth),
        }
        known = dataclasses.replace(known, **{name: value for name, value in given.items() if value})
    if not settings.calibrate:
        return known
    from megaenc.estimate.calibrate import calibrate  # imports torch

    rates = calibrate(settings.pretrain, case, demand, docs, known)
    return dataclasses.replace(rates, memory=settings.memory_gib * GIB) if settings.memory_gib else rates
