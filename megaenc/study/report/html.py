"""The report as one HTML file: verdicts, figures, tables, how it was made. Nothing is fetched and nothing runs."""

import base64
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megaenc.study.claims.verdicts import Verdict, format_p_value
from megaenc.study.report.figures.base import NARROW, FigureSpec, figure_to_svg, embed_svg
from megaenc.study.report.figures.registry import ReportFigure
from megaenc.study.report.methods import Fact
from megaenc.study.report.table import Table, format_cell
from megaenc.study.results.groups import FAMILY_LABELS, dataset_label


@dataclass(frozen=True)
class ReportPage:
    """All that a page shows."""

    title: str
    lead: str
    """a sentence or two on whose numbers these are"""
    verdicts: Sequence[Verdict]
    published: Sequence[Verdict]
    """the same claims, judged by the published tables; none if these are what is reported"""
    figures: Sequence[ReportFigure]
    tables: Sequence[Table]
    scores: str
    """all scores as CSV, for whoever wants to compute with them"""
    facts: Sequence[Fact]
    missing_scores: str = ""
    """sentences that name models without a score"""


GENERATOR_TAG = '<meta name="generator" content="megaenc study report">'
"""In the head of every page: by this a report is known, and only such may be replaced."""

_OUTCOME_LABELS = {
    "holds": {"css": "holds", "words": "\u2713 holds", "counted": "hold"},
    "reversed": {"css": "reversed", "words": "\u21c4 reversed", "counted": "reversed"},
    "not resolved": {"css": "open", "words": "? not resolved", "counted": "not resolved"},
    "no data": {"css": "none", "words": "\u2013 no data", "counted": "without data"},
}
"""Class and words of each verdict (a sign and a word, for readers who do not see the colour), and its word after a number."""


def render_page(report: ReportPage) -> str:
    """Return the whole file, from report.html.j2. Whatever comes from results, runs or manifests is escaped."""
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        finalize=_keep_percent_together,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "shown": format_cell,
        "signed": lambda value: "" if math.isnan(value) else _use_minus_signs(f"{value:+.2f}"),
        "minus": _use_minus_signs,
        "reach": _axis_limit,
        "twins": _twins,
        "p_value": lambda value: "" if math.isnan(value) else format_p_value(value),
        "place": lambda value, reach: f"{75 + 70 * value / reach:.1f}",
        "seeds": lambda needed: "" if needed is None else "never" if math.isinf(needed) else f"{needed:,}",
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
    }
    environment.tests |= {"finite": math.isfinite, "nan": math.isnan}
    verdicts = Counter(one.verdict for one in report.verdicts)
    counts = ", ".join(f"{verdicts[name]} {sign['counted']}" for name, sign in _OUTCOME_LABELS.items() if verdicts[name])
    names = {"mark": Markup(GENERATOR_TAG), "signs": _OUTCOME_LABELS, "families": FAMILY_LABELS, "classes": _class_attribute, "dataset_label": dataset_label}
    environment.globals |= names  # macros have them too
    return environment.get_template("report.html.j2").render(report=report, counts=counts)


def _keep_percent_together(value: object) -> object:
    """Return text with percent signs kept next to their numbers; anything else as it is."""
    return value.replace(" %", "\u00a0%") if isinstance(value, str) and not isinstance(value, Markup) else value


def _class_attribute(**on: bool) -> Markup:
    """Return the attribute that names the classes that are on, or nothing."""
    names = " ".join(name for name, is_on in on.items() if is_on)
    return Markup(' class="{}"').format(names) if names else Markup()


def _use_minus_signs(said: str) -> str:
    """Return text with the sign that is as wide as a plus before numbers; hyphens in names stay."""
    return re.sub(r"(?<![\w.)-])-(?=\.?\d)", "\u2212", said)


def _axis_limit(verdict: Verdict) -> float:
    """Return the farthest end of a verdict's intervals from 0, which are drawn on one axis."""
    listed = filter(None, [*verdict.comparisons, verdict.overall])
    ends = [abs(end) for one in listed for end in (one.low, one.high, one.difference) if math.isfinite(end)]
    return max(ends, default=1.0) or 1.0


def _twins(picture: FigureSpec, name: str, alt: str) -> list[tuple[str, Markup]]:
    """Return a figure's drawings for the width of a page and of a phone."""
    of_kind = {"wide": picture.svg, "narrow": figure_to_svg(picture.draw(NARROW), picture.key)}
    return [(kind, Markup(embed_svg(svg, f"{name}-{kind}", alt))) for kind, svg in of_kind.items()]
