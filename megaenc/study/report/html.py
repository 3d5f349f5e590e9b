"""Report as one self-contained HTML file without scripts.

It has verdicts, figures, tables and methods.
"""

import base64
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megaenc.study.claims.decision import format_p_value
from megaenc.study.claims.verdicts import Verdict
from megaenc.study.report.figures.base import embed_svg
from megaenc.study.report.figures.registry import ReportFigure
from megaenc.study.report.methods import Fact
from megaenc.study.report.table import Table, format_cell
from megaenc.study.results.groups import FAMILY_LABELS, dataset_label


@dataclass(frozen=True)
class ReportPage:
    """Content of a report page, from which `render_page` makes HTML.

    `build_report` builds it. `title` and `lead` head the page, `verdicts` (Verdict) are those on
    its results, `published` those of the published tables (empty in a report of these). `figures`
    are ReportFigures and `tables` Tables, in order. `scores` is CSV text, `facts` are (name, text)
    pairs of the methods section. `missing_scores`, a text, and `notices`, a list, are sentences, or
    empty. No text is HTML.
    """

    title: str
    lead: str
    """source of the results, in one or two sentences"""
    verdicts: Sequence[Verdict]
    published: Sequence[Verdict]
    """verdicts on the same claims from the published tables; empty for a report of those"""
    figures: Sequence[ReportFigure]
    tables: Sequence[Table]
    scores: str
    """all scores as CSV text"""
    facts: Sequence[Fact]
    missing_scores: str = ""
    """sentences that name the models without a score"""
    notices: Sequence[str] = ()
    """sentences on missing runs"""


_OUTCOME_LABELS = {
    "holds": {"css": "holds", "label": "\u2713 holds", "after_count": "hold"},
    "reversed": {"css": "reversed", "label": "\u21c4 reversed", "after_count": "reversed"},
    "mixed": {"css": "reversed", "label": "\u2260 mixed", "after_count": "mixed"},
    "not resolved": {"css": "open", "label": "? not resolved", "after_count": "not resolved"},
    "no data": {"css": "none", "label": "\u2013 no data", "after_count": "without data"},
}
"""CSS class of each outcome, its label (with a sign, for readers who do not see the colour), and
its word after a count."""


def render_page(report: ReportPage) -> str:
    """Return the report as the text of one HTML file, without scripts or other files.

    Figures with panels are drawn for it, as SVG; of others only title and caption are shown. All
    inserted text is escaped. Nothing is written.
    """
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        # no break before %
        finalize=lambda value: value.replace(" %", "\u00a0%") if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "cell": format_cell,
        "signed": lambda value: "" if math.isnan(value) else _use_minus_signs(f"{value:+.2f}"),
        "minus": _use_minus_signs,
        "reach": _axis_limits,
        "inline_svg": lambda figure, name, alt: Markup(embed_svg(figure.svg, name, alt)),
        "p_value": lambda value: "" if math.isnan(value) else format_p_value(value),
        "place": lambda value, reach: f"{75 + 70 * value / reach:.1f}",
        "seeds": _format_needed_seeds,
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
    }
    environment.tests |= {"finite": math.isfinite, "nan": math.isnan}
    verdicts = Counter(
        (verdict.verdict, verdict.label.removeprefix(verdict.verdict))
        for verdict in report.verdicts
    )
    counts = ", ".join(
        f"{verdicts[name, runs]} {label['after_count']}{runs}"
        for name, label in _OUTCOME_LABELS.items()
        for runs in ("", " for these runs")
        if verdicts[name, runs]
    )
    names = {
        "outcomes": _OUTCOME_LABELS,
        "families": FAMILY_LABELS,
        "classes": _class_attribute,
        "dataset_label": dataset_label,
    }
    environment.globals |= names  # macros see globals only
    return environment.get_template("report.html.j2").render(report=report, counts=counts)


def _format_needed_seeds(needed: float | None) -> str:
    if needed is None:
        return ""
    return "never" if math.isinf(needed) else f"{needed:,}"


def _class_attribute(**on: bool) -> Markup:
    """Return an HTML class attribute with the names whose value is True, or nothing."""
    names = " ".join(name for name, is_on in on.items() if is_on)
    return Markup(' class="{}"').format(names) if names else Markup()


def _use_minus_signs(text: str) -> str:
    """Replace hyphens before numbers by minus signs; hyphens in names stay."""
    return re.sub(r"(?<![\w.)-])-(?=\.?\d)", "\u2212", text)


def _axis_limits(verdict: Verdict) -> dict[str, float]:
    """Return by unit the limit of the bars of a verdict.

    It is the largest absolute value of differences and interval ends.
    """
    limits: dict[str, float] = {}
    for comparison in filter(None, [verdict.overall, *verdict.families, *verdict.comparisons]):
        ends = [
            abs(end)
            for end in (comparison.low, comparison.high, comparison.difference)
            if math.isfinite(end)
        ]
        limits[comparison.unit] = max([*ends, limits.get(comparison.unit, 0.0)])
    return {unit: limit or 1.0 for unit, limit in limits.items()}
