"""Report the results of a study: tables, figures, verdicts and an HTML page.

Reads a results directory of `megaenc` (with the manifest, if there is one) or of the study itself;
with --published, it reports the study's published tables only. Published values are shown next to
those of the same models. The page has all tables and figures, and a verdict on each claim.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.manifest.scope import StudyScope, build_scope
from megaenc.study.report import methods, output_dir
from megaenc.study.report.figures.base import FigureSpec
from megaenc.study.report.figures.registry import (
    ReportFigure,
    build_figures,
    published_flops_by_model,
)
from megaenc.study.report.html import ReportPage, render_page
from megaenc.study.report.ladder import (
    build_ladder_figures,
    build_ladder_tables,
    describe_missing_fits,
    fit_ladder,
)
from megaenc.study.report.methods import Fact
from megaenc.study.report.missing_results import find_missing_results
from megaenc.study.report.output_dir import FIGURES, PAGE, TABLES
from megaenc.study.report.schedule_table import build_schedule_table
from megaenc.study.report.score_tables import (
    build_diagnostic_tables,
    build_score_tables,
    build_standard_metric_tables,
    format_scores_csv,
)
from megaenc.study.report.table import WRITERS, Table
from megaenc.study.report.zero_shot import (
    build_zero_shot_figure,
    build_zero_shot_tables,
    zero_shot_facts,
)
from megaenc.study.results.evidence import (
    PAPER_SCORE,
    Evidence,
    build_evidence,
    describe_missing_scores,
)
from megaenc.study.results.groups import STANDARD_METRICS
from megaenc.study.results.ladder import LadderRun, read_ladder_runs
from megaenc.study.results.pretrain_runs import (
    TrainedRun,
    flops_by_model,
    read_runs,
    resolve_model_keys,
)
from megaenc.study.results.published import drop_unprinted_results, published
from megaenc.study.results.zero_shot import ZeroShotResults, read_zero_shot
from megaenc.study.run.embed_stage import EmbedStage
from megaenc.study.stats.run_noise import parse_run_noise

SCORES = "scores.csv"


@dataclass(frozen=True)
class ReportConfig:
    """Options of `megaenc study report`.

    Each field is a flag, but `manifest` is positional. Paths are text, by default empty, but
    `output` is "report" by default. `results` is required unless `published` is set, which allows
    no `manifest`, `results` or `runs`; `build_report` checks this. `interval` is "normal" or "t",
    `run_noise` a tuple of FAMILY=POINTS, () to estimate them, and `about` one of facts for the page
    as NAME=TEXT.
    """

    manifest: Annotated[str, Positional, arg(metavar="MANIFEST")] = ""
    """manifest of the study, which defines its models; without it, models are recognised by the
    names of the original study"""
    results: str = ""
    """results directory of `megaenc study run`, of `megaenc finetune grid`, or as published by the
    study"""
    runs: str = ""
    """directory of the pretraining run directories, for loss curves, FLOPs, tokens and hours"""
    data: str = ""
    """directory that relative paths of the manifest start from; default: that of the file, or the
    current one for a packaged manifest"""
    output: str = "report"
    """directory to write to; an earlier report in it is replaced"""
    published: bool = False
    """report the study's published tables, without any other results"""
    interval: IntervalKind = "normal"
    """95 % intervals of tables and figures: normal (1.96 standard errors, as in the paper) or t
    (Student's, also right for few seeds)"""
    run_noise: tuple[str, ...] = ()
    """standard deviation between pretraining runs of one recipe in points, as FAMILY=POINTS, such
    as SC=0.5 QA=3, for verdicts on models that were pretrained once; default: estimated from the
    scores over mask ratios"""
    about: tuple[str, ...] = ()
    """facts to add to the page as NAME=TEXT, such as hardware='one H100' commit=1a2b3c; those in
    study.json next to the results are added too"""


_PUBLISHED = (
    "Results from the appendix of “Should We Still Pretrain Encoders with Masked Language "
    "Modeling?” (arXiv 2507.00994)."
)
_OURS = (
    "Results of this study, in the tables and figures of “Should We Still Pretrain Encoders with "
    "Masked Language Modeling?” (arXiv 2507.00994), and tests of its claims."
)


@dataclass(frozen=True)
class ReportInputs:
    """Scores, pretraining runs and facts that a report is built from.

    `read_study_inputs` or `read_published_inputs` builds it. `title` and `lead` are the heading of
    the page and the sentences below it; `facts` are (name, text). `evidence` has the study's score,
    `standard` is a sequence of an Evidence per standard metric. `runs` are by name, and `flops`,
    training FLOPs, by model. `checks` and `notices` are tables and sentences on missing runs.
    `zero_shot` is None without such scores, `published` None in a report of the published tables;
    the other fields may be empty.
    """

    title: str
    lead: str
    evidence: Evidence
    flops: Mapping[ModelKey, float]
    """training FLOPs by model; empty if unknown"""
    facts: Sequence[Fact]
    runs: Mapping[str, TrainedRun] = field(default_factory=dict)
    standard: Sequence[Evidence] = ()
    """scores in standard metrics"""
    zero_shot: ZeroShotResults | None = None
    published: Evidence | None = None
    """published tables to compare with; None for a report of those"""
    checks: Sequence[Table] = ()
    """tables of missing runs"""
    notices: Sequence[str] = ()
    """sentences on missing runs"""
    ladder: Sequence[LadderRun] = ()
    """finished runs of the manifest's ladder"""


def build_report(config: ReportConfig) -> ReportPage:
    """Build the report page from the files that `config` names.

    No file is written, see `write_report`, and `config.output` is not used; progress is shown on
    the terminal.

    Raises:
        InputError: A file or an option is invalid, or there is nothing to report.
    """
    inputs = read_published_inputs(config) if config.published else read_study_inputs(config)
    evidence = inputs.evidence
    zero_shot = inputs.zero_shot
    has_scores = bool(evidence.scores or zero_shot or not inputs.ladder)
    figures = []
    if has_scores:
        figures = build_figures(evidence, inputs.runs, inputs.flops, inputs.published)
    notices = list(inputs.notices)
    fits = fit_ladder(inputs.ladder)
    if fits:
        figures[:0] = map(ReportFigure, build_ladder_figures(fits))
        notices += describe_missing_fits(fits)
    if zero_shot:
        figures.append(ReportFigure(build_zero_shot_figure(zero_shot, config.interval)))
        notices += filter(None, [zero_shot.describe_missing()])
    with ProgressLine("testing claims", total=None, closing=False) as progress:
        progress.update(0)
        zero_shot_evidence = zero_shot.build_evidence(config.interval) if zero_shot else None
        verdicts = []
        if has_scores:
            verdicts = judge(
                evidence, noise=parse_run_noise(config.run_noise), zero_shot=zero_shot_evidence
            )
        tables = [
            *build_ladder_tables(inputs.ladder, fits),
            *build_score_tables(evidence, inputs.published),
            *build_standard_metric_tables(evidence, inputs.standard),
            *(build_zero_shot_tables(zero_shot, config.interval) if zero_shot else []),
            *filter(None, [build_schedule_table(evidence)]),
            *build_diagnostic_tables(evidence),
            *inputs.checks,
        ]
    has_grid = has_scores and (not zero_shot or evidence.grids or evidence.scope.datasets)
    return ReportPage(
        title=inputs.title,
        lead=inputs.lead,
        verdicts=verdicts,
        published=judge(inputs.published) if verdicts and inputs.published is not None else [],
        figures=figures,
        tables=tables,
        scores=format_scores_csv([evidence, *inputs.standard]),
        facts=inputs.facts,
        missing_scores=describe_missing_scores(evidence) if has_grid else "",
        notices=notices,
    )


def read_published_inputs(config: ReportConfig) -> ReportInputs:
    """Return the inputs for a report of the published tables of the original study.

    The package contains them. `interval` and `about` of `config` have no effect here.

    Raises:
        InputError: `config` names a manifest, results or runs too.
    """
    conflicting = [name for name in ("manifest", "results", "runs") if getattr(config, name)]
    if conflicting:
        raise InputError(
            f"--published: found together with {conflicting[0]}; it reports the published tables "
            "only: leave one out"
        )
    evidence = published()
    return ReportInputs(
        title="The published tables",
        lead=_PUBLISHED,
        evidence=evidence,
        flops=published_flops_by_model(evidence),
        facts=methods.published_facts(),
    )


def read_study_inputs(config: ReportConfig) -> ReportInputs:
    """Read the manifest, results and pretraining runs that `config` names.

    Scores of zero-shot retrieval are read from the directory `embed` beside the results directory,
    if there is one; the results directory may then be missing. Results that the original study
    published on data sets that its tables lack are left out, unless there are no others.

    Raises:
        InputError: `config` names no results, a file is invalid or has nothing to report, or no
            result is of the manifest's models and grid.
    """
    scope = StudyScope()
    title = "Results of a study"
    manifest = None
    if config.manifest:
        from megaenc.study.manifest.schema import read_manifest

        manifest = read_manifest(config.manifest, config.data or None)
        scope = build_scope(manifest)
        title = manifest.title or title
    ladder = manifest.ladder if manifest else None
    if not config.results and not ladder:
        raise InputError(
            "--results: missing, expected a results directory (or --published for the study's "
            "published tables)"
        )
    zero_shot = None
    if config.results:
        zero_shot = read_zero_shot(Path(config.results).parent / EmbedStage.subfolder, scope)
    has_results = bool(config.results) and (zero_shot is None or Path(config.results).exists())
    existing = read_result_tree(config.results) if has_results else []
    results = drop_unprinted_results(existing) or existing
    models = list(
        dict.fromkeys(
            [*(result.model for result in results), *(zero_shot.models if zero_shot else ())]
        )
    )
    model_keys = resolve_model_keys(sorted(models), scope.model_keys)
    evidence = build_evidence(results, model_keys.get, PAPER_SCORE, config.interval, scope)
    if has_results:
        _check_results(evidence, results, models, config)
    runs = read_runs(Path(config.runs)) if config.runs else {}
    if runs:
        flops = flops_by_model(runs, model_keys)
    elif scope.model_keys:
        flops = {}
    else:
        flops = published_flops_by_model(evidence)
    ladder_runs = read_ladder_runs(manifest, runs, evidence) if ladder else []
    if ladder and not (ladder_runs or has_results or zero_shot):
        raise InputError(
            f"--runs: found no finished run of the ladder of {config.manifest}"
            f"{f' in {config.runs}' if config.runs else ''}, expected at least one"
        )
    dropped = len(existing) - len(results)
    facts = [
        *methods.read_notes(Path(config.results or config.runs), config.about),
        *(methods.finetuning_facts(results, evidence) if has_results else []),
        *(zero_shot_facts(zero_shot) if zero_shot else []),
        *methods.pretraining_facts(runs),
        (
            "Intervals",
            f"of tables and figures: {methods.describe_intervals(evidence, published())}",
        ),
    ]
    if dropped:
        facts.append(
            ("Left out", f"{dropped:,} results on data sets that the study's tables do not have")
        )
    checks: list[Table] = []
    notices: list[str] = []
    if not config.manifest:
        checks, notices = find_missing_results(evidence)
    return ReportInputs(
        title=title,
        lead=_OURS,
        evidence=evidence,
        flops=flops,
        facts=facts,
        runs=runs,
        standard=[
            build_evidence(metric_results, model_keys.get, name, config.interval, scope)
            for name, metric_results in _group_by_standard_metric(results).items()
        ],
        zero_shot=zero_shot,
        published=published(),
        checks=checks,
        notices=notices,
        ladder=ladder_runs,
    )


def _group_by_standard_metric(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of the families that each standard metric belongs to.

    They are those of STANDARD_METRICS, and all metrics of the other families. Metrics without a
    value are left out.
    """
    families: dict[str, set[str]] = defaultdict(set)
    for family, names in STANDARD_METRICS.items():
        for name in names:
            families[name].add(family)
    for result in results:
        if result.test is not None and result.family not in STANDARD_METRICS:
            for name in result.test.metrics:
                families[name].add(result.family)
    results_by_metric = {
        name: [result for result in results if result.family in members]
        for name, members in families.items()
    }
    return {
        name: members
        for name, members in results_by_metric.items()
        if any(result.test is not None and name in result.test.metrics for result in members)
    }


def _check_results(
    evidence: Evidence, results: Sequence[Result], models: Sequence[str], config: ReportConfig
) -> None:
    """Check that results belong to the manifest's models and grid, and have a score.

    Raises:
        InputError: One of these does not hold.
    """
    place = f"--results {config.results}"
    names = list(evidence.scope.model_keys)
    grid = evidence.scope.grid
    if names and not any(model in names for model in models):
        actual = ", ".join(models[:3])
        expected = ", ".join(names[:3])
        raise InputError(
            f"{place}: found models {actual}, expected those of {config.manifest}: {expected}, ..."
        )
    if grid is not None and not evidence.grids:
        actual = _format_grid(
            {result.learning_rate for result in results}, {result.seed for result in results}
        )
        expected = f"some of the grid of {config.manifest}: {_format_grid(grid.rates, grid.seeds)}"
        raise InputError(f"{place}: found {actual}, expected {expected}")
    if not evidence.scores:
        expected = f"expected at least one: {describe_missing_scores(evidence)}"
        raise InputError(
            f"{config.results}: no model has a learning rate with every seed finished yet; "
            f"{expected}"
        )


def _format_grid(rates: Iterable[float], seeds: Iterable[int]) -> str:
    return (
        f"rates {', '.join(map(format_learning_rate, sorted(rates)))} with seeds "
        f"{', '.join(map(str, sorted(seeds)))}"
    )


def write_report(report: ReportPage, output: Path) -> None:
    """Write index.html, and the tables and figures of a report to subdirectories.

    Each table is written as CSV, Markdown and LaTeX, each figure with panels as PNG and SVG, all
    scores as tables/scores.csv. An earlier report is replaced, and those of its files that the new
    one lacks are deleted. files.txt lists all files before they are written, so that a killed
    attempt leaves none unlisted.

    Args:
        output: Directory to write to, which is created with its parents.

    Raises:
        InputError: The directory cannot be written or contains anything but a report.
    """
    earlier = output_dir.check_report_dir(output)
    texts = {
        f"{TABLES}/{table.key}.{suffix}": (table, form)
        for table in report.tables
        for suffix, form in WRITERS.items()
    }
    figures: dict[str, FigureSpec] = {}
    for report_figure in report.figures:
        pair = {
            report_figure.figure.key: report_figure.figure,
            f"{report_figure.figure.key}-published": report_figure.published,
        }
        figures |= {
            f"{FIGURES}/{name}": spec for name, spec in pair.items() if spec and spec.panels
        }
    names = [
        *texts,
        f"{TABLES}/{SCORES}",
        *(f"{name}.{suffix}" for name in figures for suffix in ("png", "svg")),
    ]
    output_dir.prepare_report_dir(output, earlier, names)
    for name, (table, form) in texts.items():
        atomic_write(output / name, form(table))
    with ProgressLine("drawing", total=len(figures), closing=False) as progress:
        for index, (name, spec) in enumerate(figures.items()):
            progress.update(index)
            with atomic_files(output / f"{name}.png") as [temporary]:
                spec.figure.savefig(temporary, format="png", metadata={"Software": None})
            atomic_write(output / f"{name}.svg", spec.svg)
    atomic_write(output / TABLES / SCORES, report.scores)
    atomic_write(output / PAGE, render_page(report))
    output_dir.remove_stale_files(output, earlier, names)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc study report`: write the report to --output, and print verdicts.

    Missing scores are printed too. Invalid input ends the process with code 2 and a line on stderr.

    Args:
        argv: Command line without the program's name; None for that of the process.
    """
    silence_libraries()
    config = flags.parse(ReportConfig, argv, prog="megaenc study report", description=__doc__)
    output = Path(config.output)
    output_dir.check_report_dir(output)
    with create_parent_with_rollback(output / PAGE, "--output"):
        report = build_report(config)
        write_report(report, output)
    for verdict in report.verdicts:
        print_rank_0(f"{verdict.claim}{verdict.part} {verdict.title}: {verdict.label}")
    for text in filter(None, (report.missing_scores, *report.notices)):
        print_rank_0(text)
    count = sum(bool(report_figure.figure.panels) for report_figure in report.figures)
    tables = f"{len(report.tables)} tables in {output / TABLES}"
    print_rank_0(f"{tables}, {count} figures in {output / FIGURES}, page: {output / PAGE}")
