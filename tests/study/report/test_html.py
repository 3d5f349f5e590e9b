"""The page holds everything, escapes everything, and needs nothing from outside."""

import dataclasses
import math
import re
from html.parser import HTMLParser

import pytest
from scipy import stats

from megaenc.study.claims.verdicts import Verdict
from megaenc.study.report.figures.base import FigureLine, FigurePanel, FigurePoint, FigureSpec
from megaenc.study.report.figures.registry import ReportFigure
from megaenc.study.report.html import ReportPage, render_page
from megaenc.study.report.table import Column, Table, TableRow
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import Comparison

EVIL = '<b onclick="x">&'
_WITHOUT_END = {"meta", "link", "br", "img"}
TEST = inference.TestResult(
    0.02, [(0.01 / stats.t.ppf(0.975, 4), 4)], inference.VarianceComponents(1e-5, math.nan), 5
)
ONE = Comparison(
    left="MLM",
    right=EVIL,
    where="610M",
    family="SC",
    dataset="sst2",
    test=TEST,
    p=0.00001,
    p_adjusted=0.004,
    effect=-1.5,
    verdict="holds",
)
NEVER = dataclasses.replace(
    TEST, components=inference.VarianceComponents(1e-6, 4e-5), difference=0.01
)
UNKNOWN = dataclasses.replace(
    ONE,
    test=inference.TestResult(0.02, [], inference.VarianceComponents(math.nan, math.nan), 1),
    p=math.nan,
    effect=math.nan,
    verdict="not resolved",
)


class Checked(HTMLParser):
    """Reads a page and fails where tags do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open = []
        self.tags = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in _WITHOUT_END:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()


@pytest.fixture(scope="module")
def text() -> str:
    reason = "because 5 % less, -1.29 points (-4.39 to +1.80) of 610m-mlm40-42k, p = 2e-05."
    verdicts = [
        Verdict(1, f"title {EVIL}", "question?", [ONE, UNKNOWN], "holds", reason, "a", ONE),
        Verdict(2, "second", "question?", [], "no data", "Needs more."),
        Verdict(3, "third", "question?", [ONE], "reversed", "the other way."),
        Verdict(
            4,
            "fourth",
            "question?",
            [dataclasses.replace(ONE, test=NEVER)],
            "not resolved",
            "who knows.",
        ),
    ]
    published = [Verdict(3, "third", "question?", [ONE], "holds", "as printed.")]
    line = FigureLine("CLM", "#0072B2", "o", (FigurePoint(1, 50.0, 1.0), FigurePoint(2, 60.0)))
    picture = FigureSpec(
        "objectives", "CLM and MLM", f"caption {EVIL}", (FigurePanel("SC", (line,), "step"),)
    )
    figures = [
        ReportFigure(picture, picture),
        ReportFigure(FigureSpec("losses", "Losses", "No runs were given.")),
    ]
    columns = (Column("Size", numeric=False), Column("Steps"), Column("SST-2", "SC"))
    first = TableRow(("1B", 42_000, "91.65 (0.45)"), name="1b-clm-42k")
    rows = (first, TableRow((EVIL, 1, None), light=True, rule=True, name=EVIL))
    tables = [
        Table("base", "Base models", "Percent.", columns, rows),
        Table("base-standard", "Standard", "Note.", columns, rows, folded=True),
    ]
    facts = [("Hardware", EVIL), ("Commit", "1a2b3c")]
    missing = f"No run yet: {EVIL}."
    page = ReportPage(
        f"A study {EVIL}",
        "lead",
        verdicts,
        published,
        figures,
        tables,
        "a,b\n1,2\n",
        facts,
        missing,
    )
    return render_page(page)


def test_it_is_well_formed_with_ids_of_their_own_and_fetches_and_runs_nothing(text):
    tags = Checked(text).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [
        attributes["href"][1:]
        for tag, attributes in tags
        if tag == "a" and attributes["href"].startswith("#")
    ]
    assert links == ["verdicts", "figures", "tables", "made", "made"] and set(links) <= set(ids)
    assert not {tag for tag, _ in tags} & {"script", "iframe", "object", "embed", "img"}
    for _, attributes in tags:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        href = attributes.get("href") or attributes.get("xlink:href") or "#"
        assert href.startswith(("#", "data:"))
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_everything_is_escaped_in_a_page_that_says_that_it_is_a_report(text):
    head, body = text.split("<body>")
    assert (
        '<meta name="generator" content="megaenc study report">' in head
        and "No run yet: &lt;b" in body
    )
    assert EVIL not in text and text.count("&lt;b onclick=&#34;x&#34;&gt;&amp;") >= 9


def test_verdicts_come_first_with_a_sign_and_a_word_each(text):
    headings = re.findall(r"<h(\d)[^>]*>(.*?)</h\d>", text)
    assert [level for level, _ in headings[:3]] == ["1", "2", "3"] and headings[1][1] == "Verdicts"
    for words in (
        *("✓ holds", "⇄ reversed", "? not resolved", "– no data"),
        "1 hold for these runs, 1 reversed for these runs, 1 not resolved, 1 without data",
        "The same test on the published tables",
        "5\u00a0% less, \u22121.29 points (\u22124.39 to +1.80) of 610m-mlm40-42k, p = 2e-05.",
        *(">\u22121.50<", "+1.00 to +3.00", "&lt; 0.0001", '<td class="number">never</td></tr>'),
    ):
        assert words in text
    assert "nan" not in re.sub(r"base64,\S+", "", text)


def test_figures_are_drawn_once_with_an_alternative_text(text):
    drawn = [
        attributes
        for tag, attributes in Checked(text).tags
        if tag == "svg" and attributes.get("role") == "img"
    ]
    assert len(drawn) == 2  # ours and published
    assert drawn[0]["aria-label"] == f"CLM and MLM. caption {EVIL}"
    assert "<li>Losses: No runs were given.</li>" in text


def test_tables_align_numbers_and_move_by_themselves(text):
    # Two tables and three with comparisons
    assert text.count('<div class="scroll" tabindex="0" role="region"') == 5
    for part in (
        '<td class="number first">91.65 (0.45)</td>',
        '<th scope="row"><span class="wide">1B</span><span class="narrow">1b-clm-42k</span></th>',
        '<td class="number head">42,000</td>',
        '<tr class="rule light">',
        '<details class="card" id="table-base" open>',
        'id="table-base-standard">',
        'download="scores.csv" href="data:text/csv;base64,YSxiCjEsMgo="',
    ):
        assert part in text
