"""The report as one HTML file: verdicts, figures, tables, how it was made. Nothing is fetched and nothing runs."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from megaenc.study.claims import Verdict
from megaenc.study.figures.every import Shown
from megaenc.study.figures.panels import NARROW, Missing, Picture, as_svg, inline
from megaenc.study.made import Fact
from megaenc.study.page_tables import table_card, text
from megaenc.study.page_verdicts import verdict_cards
from megaenc.study.setups import FAMILIES
from megaenc.study.table import Table


@dataclass(frozen=True)
class Report:
    """All that a page shows."""

    title: str
    lead: str
    """Whose numbers these are, in a sentence or two."""
    verdicts: Sequence[Verdict]
    published: Sequence[Verdict]
    """The same claims, judged by the published tables; none where these are what is reported."""
    figures: Sequence[Shown]
    tables: Sequence[Table]
    scores: str
    """All scores as CSV, for whoever wants to compute with them."""
    facts: Sequence[Fact]
    lacking: str = ""
    """Which models have no score, in sentences."""


MARK = '<meta name="generator" content="megaenc study report">'
"""In the head of every page: by this a report is known, and only such may be replaced."""


def page(report: Report) -> str:
    """The whole file. Whatever comes from results, runs or manifests is escaped."""
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    drawn = [_figure(one) for one in report.figures if isinstance(one.drawn, Picture)]
    tables = [table_card(table) for table in report.tables]
    parts = {
        "verdicts": ("Verdicts", verdict_cards(report.verdicts, report.published)),
        "figures": ("Figures", [*drawn, _missing(report.figures)]),
        "tables": ("Tables", [_ABBREVIATIONS, _lacking(report.lacking), *tables, _download(report.scores)]),
        "made": ("How it was made", [_facts(report.facts)]),
    }
    sections = [_section(name, title, inside) for name, (title, inside) in parts.items()]
    links = " ".join(f'<a href="#{name}">{title}</a>' for name, (title, _) in parts.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{MARK}
<title>{text(report.title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header>
<h1>{text(report.title)}</h1>
<p class="muted">{text(report.lead)}</p>
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{"".join(sections)}</main>
</body>
</html>
"""


def _section(name: str, title: str, parts: Sequence[str]) -> str:
    body = "\n".join(part for part in parts if part)
    return f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{title}</h2>\n{body}\n</section>\n'


def _figure(one: Shown) -> str:
    picture = one.drawn
    beside = ""
    if one.published is not None:
        theirs = _drawings(one.published, f"{picture.key}-published", f"Published: {picture.title}")
        beside = f"<details><summary>The published numbers, drawn the same way</summary>{theirs}</details>"
    return (
        f'<figure class="card" id="figure-{picture.key}">\n<h3>{text(picture.title)}</h3>\n'
        f'<figcaption class="muted">{text(picture.caption)}</figcaption>\n'
        f"{_drawings(picture, picture.key, f'{picture.title}. {picture.caption}')}{beside}</figure>"
    )


def _drawings(picture: Picture, name: str, alt: str) -> str:
    """Wide for a page and narrow for a phone; the style shows one of them."""
    of_kind = {"wide": picture.svg, "narrow": as_svg(picture.draw(NARROW), picture.key)}
    return "\n".join(f'<div class="{kind}">{inline(svg, f"{name}-{kind}", alt)}</div>' for kind, svg in of_kind.items())


def _missing(figures: Sequence[Shown]) -> str:
    """A sentence for each figure that there is nothing to draw of."""
    lacking = [one.drawn for one in figures if isinstance(one.drawn, Missing)]
    listed = "".join(f"<li>{text(one.title)}: {text(one.why)}</li>" for one in lacking)
    return f'<div class="card"><h3>Not drawn</h3><ul>{listed}</ul></div>' if lacking else ""


_ABBREVIATIONS = (
    f'<p class="muted">{", ".join(f"{short} {name.lower()}" for short, name in FAMILIES.items())}; CLM and MLM: causal and '
    'masked language modelling; CPT: continued pretraining. <a href="#made">How it was made</a>.</p>'
)


def _lacking(said: str) -> str:
    return f'<p class="card">{text(said)}</p>' if said else ""


def _download(scores: str) -> str:
    data = base64.b64encode(scores.encode()).decode()
    link = f'<a download="scores.csv" href="data:text/csv;base64,{data}">All scores as one CSV file</a>'
    return f"<p>{link}, in the columns of the published one.</p>"


def _facts(facts: Sequence[Fact]) -> str:
    listed = "".join(f"<dt>{text(name)}</dt><dd>{text(said)}</dd>" for name, said in facts)
    return f'<div class="card"><dl>{listed}</dl></div>'
