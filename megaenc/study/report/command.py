"""Lay what a study has measured open: tables, figures, a verdict on each claim, and one page with all of it.

From a folder of results, with the manifest that they were made by where there is one; from the study's own result files; or, with
--published, from its printed tables alone. Published values stand beside and behind those of the same models.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.atomic_io import atomic_files, atomic_write
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.results.aggregate import IntervalKind
from megaenc.finetune.results.files import Result, read_result_tree
from megaenc.output_paths import create_parent_with_rollback
from megaenc.study.claims.verdicts import judge
from megaenc.study.manifest.scope import StudyScope, build_scope
from megaenc.study.report import methods, output_dir
from megaenc.study.report.figures.base import FigureSpec
from megaenc.study.report.figures.registry import build_figures, published_flops_by_model
from megaenc.study.report.html import ReportPage, render_page
from megaenc.study.report.output_dir import FIGURES, PAGE, TABLES
from megaenc.study.report.score_tables import (
    build_diagnostic_tables,
    build_score_tables,
    build_standard_metric_tables,
    format_scores_csv,
)
from megaenc.study.report.table import WRITERS
from megaenc.study.results.evidence import PAPER_SCORE, Evidence, build_evidence, describe_missing_scores
from megaenc.study.results.groups import STANDARD_METRICS
from megaenc.study.results.pretrain_runs import flops_by_model, read_runs, resolve_model_keys
from megaenc.study.results.published import published

SCORES = "scores.csv"


@dataclass(frozen=True)
class ReportConfig:
    """What `megaenc study report` takes."""

    manifest: Annotated[str, Positional, arg(metavar="MANIFEST")] = ""
    """the study's manifest, which says what its models are; without it they are known by the names that the study gave its own"""
    results: str = ""
    """folder of results: of `megaenc study run`, of `megaenc finetune grid`, or as the study has published them"""
    runs: str = ""
    """folder of the pretraining runs, for curves of losses and for what was spent"""
    output: str = "report"
    """folder to write to; an earlier report there is replaced"""
    published: bool = False
    """report the study's printed tables, without any results"""
    interval: IntervalKind = "normal"
    """intervals of tables and figures: 1.96 standard errors, as in the paper, or Student's t, which is right for few seeds too"""
    about: tuple[str, ...] = ()
    """NAME=TEXT to say on the page, such as hardware='one H100' commit=1a2b3c; study.json beside the results says such too"""


_PUBLISHED = (
    "What was printed in the appendix of “Should We Still Pretrain Encoders with Masked Language Modeling?” (arXiv 2507.00994)."
)
_OURS = (
    "Laid over “Should We Still Pretrain Encoders with Masked Language Modeling?” (arXiv 2507.00994): its tables, figures and "
    "claims, with the numbers of this study."
)


def build_report(config: ReportConfig) -> ReportPage:
    """Read everything that the flags name. Raises InputError for what cannot be used."""
    if config.published:
        conflicting = [name for name in ("manifest", "results", "runs") if getattr(config, name)]
        if conflicting:
            raise InputError(f"--published: found beside {conflicting[0]}, expected alone: it reports the printed tables")
        title, lead, evidence, published_evidence = "The published tables", _PUBLISHED, published(), None
        facts, standard, runs, flops = methods.published_facts(), [], {}, published_flops_by_model(evidence)
    else:
        if not config.results:
            raise InputError("--results: missing, expected a folder of results (or --published for the study's printed tables)")
        scope, title = _read_scope(config.manifest)
        results, published_evidence, lead = read_result_tree(config.results), published(), _OURS
        models = list(dict.fromkeys(one.model for one in results))
        model_keys = resolve_model_keys(sorted(models), scope.model_keys)
        evidence = build_evidence(results, model_keys.get, PAPER_SCORE, config.interval, scope)
        _check_results(evidence, results, models, config)
        runs = read_runs(Path(config.runs)) if config.runs else {}
        flops = flops_by_model(runs, model_keys) if runs else {} if scope.model_keys else published_flops_by_model(evidence)
        available_metrics = {name for one in results if one.test is not None for name in one.test.metrics}
        metrics = [name for names in STANDARD_METRICS.values() for name in names if name in available_metrics]
        standard = [build_evidence(results, model_keys.get, name, config.interval, scope) for name in metrics]
        facts = [
            *methods.read_notes(Path(config.results), config.about),
            *methods.finetuning_facts(results, evidence),
            *methods.pretraining_facts(runs),
            ("Intervals", f"of tables and figures: {methods.describe_intervals(evidence, published_evidence)}"),
        ]
    figures = build_figures(evidence, runs, flops, published_evidence)
    with ProgressLine("judging", total=None, closing=False) as progress:
        progress.update(0)
        verdicts = judge(evidence)
        tables = [
            *build_score_tables(evidence, published_evidence),
            *build_standard_metric_tables(evidence, standard),
            *build_diagnostic_tables(evidence),
        ]
    printed, scores = (
        judge(published_evidence) if published_evidence is not None else [],
        format_scores_csv([evidence, *standard]),
    )
    return ReportPage(title, lead, verdicts, printed, figures, tables, scores, facts, describe_missing_scores(evidence))


def _read_scope(path: str) -> tuple[StudyScope, str]:
    """Return what a manifest set out to measure, and its title."""
    if not path:
        return StudyScope(), "Results of a study"
    from megaenc.study.manifest.schema import read_manifest

    manifest = read_manifest(path)
    return build_scope(manifest), manifest.title or "Results of a study"


def _check_results(evidence: Evidence, results: Sequence[Result], models: Sequence[str], config: ReportConfig) -> None:
    """Raise InputError if the results are of another study or grid than the manifest's, or if none makes a score."""
    place, names, grid = f"--results {config.results}", list(evidence.scope.model_keys), evidence.scope.grid
    if names and not any(model in names for model in models):
        actual, expected = ", ".join(models[:3]), ", ".join(names[:3])
        raise InputError(f"{place}: found models {actual}, expected those of {config.manifest}: {expected}, ...")
    if grid is not None and not evidence.grids:
        actual = _format_grid({one.learning_rate for one in results}, {one.seed for one in results})
        expected_grid = f"some of what {config.manifest} asks for: {_format_grid(grid.rates, grid.seeds)}"
        raise InputError(f"{place}: found {actual}, expected {expected_grid}")
    if not evidence.scores:
        expected_grid = f"expected at least one: {describe_missing_scores(evidence)}"
        raise InputError(f"{config.results}: no model has a learning rate with every seed finished yet; {expected_grid}")


def _format_grid(rates: Iterable[float], seeds: Iterable[int]) -> str:
    return f"rates {', '.join(map(format_learning_rate, sorted(rates)))} with seeds {', '.join(map(str, sorted(seeds)))}"


def write_report(report: ReportPage, output: Path) -> None:
    """Write tables and figures, then the page, each file whole; remove files that only an earlier report has written.

    FILES lists the files of a report before they are written, so that an attempt that is killed leaves none unlisted.
    Raises InputError for a folder that cannot be written or that holds something that is no report.
    """
    earlier = output_dir.check_report_dir(output)
    texts = {f"{TABLES}/{table.key}.{suffix}": (table, form) for table in report.tables for suffix, form in WRITERS.items()}
    drawn: dict[str, FigureSpec] = {}
    for one in report.figures:
        both = {one.figure.key: one.figure, f"{one.figure.key}-published": one.published}
        drawn |= {f"{FIGURES}/{name}": picture for name, picture in both.items() if picture and picture.panels}
    names = [*texts, f"{TABLES}/{SCORES}", *(f"{name}.{suffix}" for name in drawn for suffix in ("png", "svg"))]
    output_dir.prepare_report_dir(output, earlier, names)
    for name, (table, form) in texts.items():
        atomic_write(output / name, form(table))
    with ProgressLine("drawing", total=len(drawn), closing=False) as progress:
        for at, (name, picture) in enumerate(drawn.items()):
            progress.update(at)
            with atomic_files(output / f"{name}.png") as [temporary]:
                picture.figure.savefig(temporary, format="png", metadata={"Software": None})
            atomic_write(output / f"{name}.svg", picture.svg)
    atomic_write(output / TABLES / SCORES, report.scores)
    atomic_write(output / PAGE, render_page(report))
    output_dir.remove_stale_files(output, earlier, names)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc study report`."""
    silence_libraries()
    config = flags.parse(ReportConfig, argv, prog="megaenc study report", description=__doc__)
    output = Path(config.output)
    output_dir.check_report_dir(output)
    with create_parent_with_rollback(output / PAGE, "--output"):
        report = build_report(config)
        write_report(report, output)
    for one in report.verdicts:
        print_rank_0(f"{one.claim}{one.part} {one.title}: {one.verdict}")
    if report.missing_scores:
        print_rank_0(report.missing_scores)
    drawn = sum(bool(one.figure.panels) for one in report.figures)
    print_rank_0(
        f"{len(report.tables)} tables in {output / TABLES}, {drawn} figures in {output / FIGURES}, the page: {output / PAGE}"
    )
