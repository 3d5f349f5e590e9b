"""The report as one HTML file: verdicts, figures, tables, how it was made. Nothing is fetched and nothing runs."""

import base64
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import groupby

from megaenc.study.claims import Verdict
from megaenc.study.comparisons import Comparison
from megaenc.study.figures.every import Shown
from megaenc.study.figures.panels import NARROW, WIDE, Missing, Picture, as_svg, inline
from megaenc.study.made import Fact
from megaenc.study.setups import FAMILIES, dataset_label
from megaenc.study.table import Column, Row, Table, shown


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


def page(report: Report) -> str:
    """The whole file. Whatever comes from results, runs or manifests is escaped."""
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    sections = [
        _section("verdicts", "Verdicts", [_summary(report.verdicts), *_verdicts(report), _method()]),
        _section(
            "figures", "Figures", [*(_figure(one) for one in report.figures if isinstance(one.drawn, Picture)), _missing(report)]
        ),
        _section("tables", "Tables", [_abbreviations(), *(_table(table) for table in report.tables), _download(report.scores)]),
        _section("made", "How it was made", [_facts(report.facts)]),
    ]
    names = (("verdicts", "Verdicts"), ("figures", "Figures"), ("tables", "Tables"), ("made", "How it was made"))
    links = " ".join(f'<a href="#{name}">{text}</a>' for name, text in names)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(report.title)}</h1>
<p class="muted">{escape(report.lead)}</p>
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


_SIGNS = {
    "holds": ("holds", "\u2713 holds"),
    "reversed": ("reversed", "\u21c4 reversed"),
    "not resolved": ("open", "? not resolved"),
    "no data": ("none", "\u2013 no data"),
}
"""Class and words of each verdict: a sign and a word, for whoever does not see the colour."""


def _badge(verdict: str) -> str:
    kind, words = _SIGNS[verdict]
    return f'<span class="badge {kind}">{words}</span>'


def _summary(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(one.verdict for one in verdicts)
    said = ", ".join(f"{counts[name]} {word}" for name, word in _COUNTED.items() if counts[name])
    return f"<p>What the study claims, asked of these numbers: {said}.</p>" if said else "<p>No claim was judged.</p>"


_COUNTED = {"holds": "hold", "reversed": "reversed", "not resolved": "not resolved", "no data": "without data"}


def _verdicts(report: Report) -> list[str]:
    """A card for each verdict."""
    theirs = {(one.claim, one.part): one for one in report.published}
    return [_verdict(one, theirs.get((one.claim, one.part))) for one in report.verdicts]


def _verdict(one: Verdict, published: Verdict | None) -> str:
    beside = ""
    if published is not None and published.verdict != "no data":
        beside = f'<p class="muted">The published tables, judged the same way: {_badge(published.verdict)}. {escape(published.reason)}</p>'
    kind = _SIGNS[one.verdict][0]
    details = ""
    if one.comparisons:
        listed = [*([one.overall] if one.overall is not None else []), *one.comparisons]
        details = f"<details><summary>{_plural(len(one.comparisons), 'comparison')}</summary>{_comparisons(listed, one.overall)}</details>"
    return (
        f'<article class="card verdict is-{kind}">\n<h3>{one.claim}{escape(one.part)}. {escape(one.title)} {_badge(one.verdict)}</h3>\n'
        f'<p class="muted">{escape(one.question)}</p>\n<p>{escape(one.reason)}</p>\n{beside}{details}</article>'
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _comparisons(listed: Sequence[Comparison], overall: Comparison | None) -> str:
    """The comparisons of a verdict with their intervals drawn on one axis."""
    ends = [end for one in listed for end in (one.low, one.high, one.difference) if math.isfinite(end)]
    reach = max((abs(end) for end in ends), default=1.0) or 1.0
    heads = (
        "what",
        "where",
        "data",
        "difference",
        "95 % interval",
        "",
        "p",
        "p corrected",
        "effect size",
        "seeds needed",
        "verdict",
    )
    numbers = {"difference", "95 % interval", "p", "p corrected", "effect size", "seeds needed"}
    head = "".join(f'<th scope="col"{_class(name in numbers)}>{name or "<span hidden>drawn</span>"}</th>' for name in heads)
    rows = []
    for at, one in enumerate(listed):
        whole = one is overall
        data = f"{FAMILIES.get(one.family, one.family)}: {dataset_label(one.family, one.dataset)}" if one.family else one.dataset
        needed = one.seeds_needed
        cells = [
            (escape("all together" if whole else one.where), False),
            (escape(data), False),
            (_signed(one.difference), True),
            ("" if math.isnan(one.low) else f"{_signed(one.low)} to {_signed(one.high)}", True),
            (_interval(one, reach), False),
            (_p(one.p), True),
            (_p(one.p_adjusted), True),
            ("" if math.isnan(one.effect) else f"{one.effect:.2f}", True),
            ("" if needed is None else f"{needed:,}", True),
            (_badge(one.verdict), False),
        ]
        body = "".join(f"<td{_class(number)}>{cell}</td>" for cell, number in cells)
        rule = ' class="rule"' if at == 1 and overall is not None else ""
        rows.append(f'<tr{rule}><th scope="row">{escape(one.left)} less {escape(one.right)}</th>{body}</tr>')
    return _scroll(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>", "comparisons")


def _interval(one: Comparison, reach: float) -> str:
    """A difference and its interval as a dot on a bar, zero in the middle."""
    if not math.isfinite(one.difference):
        return ""
    place = [75 + 70 * value / reach if math.isfinite(value) else math.nan for value in (one.low, one.difference, one.high)]
    bar = ""
    if not math.isnan(place[0]):
        bar = f'<line x1="{place[0]:.1f}" x2="{place[2]:.1f}" y1="8" y2="8" stroke="currentColor" stroke-width="2"/>'
    zero = '<line x1="75" x2="75" y1="0" y2="16" stroke="var(--muted)"/>'
    dot = f'<circle cx="{place[1]:.1f}" cy="8" r="3.5" fill="currentColor"/>'
    return f'<svg viewBox="0 0 150 16" class="{_SIGNS[one.verdict][0]}" aria-hidden="true">{zero}{bar}{dot}</svg>'


def _signed(value: float) -> str:
    return "" if math.isnan(value) else f"{value:+.2f}".replace("-", "\u2212")


def _p(value: float) -> str:
    return "" if math.isnan(value) else "&lt; 0.0001" if value < 0.0001 else f"{value:.2g}" if value < 0.995 else "1"


def _method() -> str:
    return (
        '<details class="card"><summary>How to read this</summary><p>Differences are points of the score, left less right. A '
        "verdict rests on all comparisons of its claim together; it holds, or is reversed, where that goes the one way or the other "
        "with p below 5 % after Holm&rsquo;s correction over the claims, and is not resolved otherwise. Tests are t tests of "
        "paired differences over fine-tuning seeds and, where results have them, test examples; of printed tables, of their means "
        "and intervals. The effect size is Hedges&rsquo; g: the difference over the spread of seeds. Seeds needed: with which a true "
        "difference of this size would be seen in four of five studies; empty where not known, or where the examples are too few for "
        "any number. Intervals behind means are, unless it is said otherwise, 1.96 standard errors over the seeds, as the study prints "
        "them: with five seeds narrower than 95 %.</p></details>"
    )


def _figure(one: Shown) -> str:
    picture = one.drawn
    beside = ""
    if one.published is not None:
        theirs = _drawings(one.published, f"{picture.key}-published", f"Published: {picture.title}")
        beside = f"<details><summary>The published numbers, drawn the same way</summary>{theirs}</details>"
    return (
        f'<figure class="card" id="figure-{picture.key}">\n<h3>{escape(picture.title)}</h3>\n'
        f'<figcaption class="muted">{escape(picture.caption)}</figcaption>\n'
        f"{_drawings(picture, picture.key, f'{picture.title}. {picture.caption}')}{beside}</figure>"
    )


def _drawings(picture: Picture, name: str, alt: str) -> str:
    """Wide for a page and narrow for a phone; the style shows one of them."""
    made = []
    for kind, columns in (("wide", WIDE), ("narrow", NARROW)):
        label = f"{name}-{kind}"
        made.append(f'<div class="{kind}">{inline(as_svg(picture.draw(columns), label), label, alt)}</div>')
    return "\n".join(made)


def _missing(report: Report) -> str:
    """A sentence for each figure that there is nothing to draw of."""
    lacking = [one.drawn for one in report.figures if isinstance(one.drawn, Missing)]
    if not lacking:
        return ""
    listed = "".join(f"<li>{escape(one.title)}: {escape(one.why)}</li>" for one in lacking)
    return f'<div class="card"><h3>Not drawn</h3><ul>{listed}</ul></div>'


def _abbreviations() -> str:
    named = ", ".join(f"{short} {name.lower()}" for short, name in FAMILIES.items())
    return f'<p class="muted">{named}; CLM and MLM: causal and masked language modelling; CPT: continued pretraining.</p>'


def _table(table: Table) -> str:
    folded = table.key.endswith("-standard")
    return (
        f'<details class="card" id="table-{escape(table.key)}"{"" if folded else " open"}>'
        f"<summary><h3>{escape(table.title)}</h3></summary>\n"
        f'<p class="muted">{escape(table.note)}</p>\n{_scroll(_grid(table), table.title)}</details>'
    )


def _grid(table: Table) -> str:
    """The table itself: one row of heads, or two where columns stand in groups."""
    groups = ""
    if table.groups:
        spans = [(name, len(list(members))) for name, members in groupby(column.group for column in table.columns)]
        groups = "".join(f'<th colspan="{width}"{" scope=colgroup" if name else ""}>{escape(name)}</th>' for name, width in spans)
        groups = f'<tr class="groups">{groups}</tr>'
    heads = "".join(f'<th scope="col"{_class(column.number)}>{escape(column.name)}</th>' for column in table.columns)
    rows = "".join(_row(table.columns, row) for row in table.rows)
    return f"<table><thead>{groups}<tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _row(columns: Sequence[Column], row: Row) -> str:
    kinds = " ".join(name for name, on in (("rule", row.rule), ("light", row.light)) if on)
    cells = []
    for at, (column, cell) in enumerate(zip(columns, row.cells, strict=True)):
        tag = "th" if at == 0 else "td"
        scope = ' scope="row"' if at == 0 else ""
        cells.append(f"<{tag}{scope}{_class(column.number)}>{escape(shown(cell))}</{tag}>")
    return f"<tr{f' class={chr(34)}{kinds}{chr(34)}' if kinds else ''}>{''.join(cells)}</tr>"


def _class(number: bool) -> str:
    return ' class="number"' if number else ""


def _scroll(table: str, label: str) -> str:
    """A table wider than the page moves by itself; a keyboard can do that too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'


def _download(scores: str) -> str:
    data = base64.b64encode(scores.encode()).decode()
    return f'<p><a download="scores.csv" href="data:text/csv;base64,{data}">All scores as one CSV file</a>, in the columns of the published one.</p>'


def _facts(facts: Sequence[Fact]) -> str:
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f'<div class="card"><dl>{listed}</dl></div>'
