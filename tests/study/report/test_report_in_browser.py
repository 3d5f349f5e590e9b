"""The page of a report in Chromium: on a desktop, on a phone and on paper."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from docs.documents import ROOT

from megaenc.study.report.command import ReportConfig, build_report
from megaenc.study.report.html import render_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
WIDTHS = (1280, 390)
# A paragraph wider than any screen, a figure without a size, a table that nothing scrolls.
BROKEN = """<body><p style="width: 2000px">wide</p><figure><svg width="0" height="9"></svg></figure>
<table style="width: 3000px; font-size: 6px"><tr><td>cut off</td></tr></table></body>"""
# Opens each folded part, so that nothing is without a size because it is hidden.
MEASURE = """<script>
function measure(frame) {
  const page = frame.contentDocument;
  page.querySelectorAll("details").forEach(details => details.open = true);
  const shown = selector =>
    [...page.querySelectorAll(selector)].filter(element => element.checkVisibility());
  const rectangles = selector => shown(selector).map(element => ({
    width: element.getBoundingClientRect().width,
    height: element.getBoundingClientRect().height,
    box: element.parentElement.clientWidth,
    overflow: getComputedStyle(element.parentElement).overflowX,
    font: parseFloat(getComputedStyle(element).fontSize),
  }));
  return {
    width: page.documentElement.clientWidth,
    content: page.documentElement.scrollWidth,
    titles: shown("figure").length,
    figures: rectangles("svg"),
    tables: rectangles("table"),
  };
}
onload = () => {
  const measured = [...document.querySelectorAll("iframe")].map(measure);
  document.body.textContent = JSON.stringify(measured);
};
</script>"""

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; on Debian: apt-get install chromium"),
]


def browse(directory: Path, page: Path, *flags: str) -> str:
    """Open a page in Chromium and return its standard output."""
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    switches += ["--hide-scrollbars", f"--user-data-dir={directory}/profile", *flags]
    command = [CHROMIUM, *switches, page.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    return done.stdout


def measure(directory: Path) -> None:
    """Write the pages, and the sizes of their parts at each width as measured.json."""
    pages = {
        "published": render_page(build_report(ReportConfig(published=True))),
        "small-two-cores": (ROOT / "docs/study/small-two-cores/index.html").read_text(),
        "broken": BROKEN,
    }
    frames = []
    for name, text in pages.items():
        (directory / f"{name}.html").write_text(text)
        for width in WIDTHS:
            style = f"border: 0; width: {width}px; height: 800px"
            frames.append(f'<iframe style="{style}" srcdoc="{html.escape(text)}"></iframe>')
    (directory / "frames.html").write_text(f"<body>{''.join(frames)}{MEASURE}</body>")
    dumped = browse(directory, directory / "frames.html", "--dump-dom")
    body = re.search(r"<body>(.*)</body>", dumped, re.DOTALL)[1]
    keys = [f"{name} {width}" for name in pages for width in WIDTHS]
    measured = dict(zip(keys, json.loads(html.unescape(body)), strict=True))
    (directory / "measured.json").write_text(json.dumps(measured))


@pytest.fixture(scope="module")
def pages(shared_directory):
    return shared_directory("browser", measure)


def complaints(measured: dict) -> list[str]:
    """Return what a reader of a page could not see."""
    found = []
    if measured["content"] > measured["width"]:
        found.append(f"the page is {measured['content']} px wide")
    drawings = [figure for figure in measured["figures"] if figure["width"] > 300]
    if len(drawings) < measured["titles"]:
        found.append("a figure is missing")
    for figure in measured["figures"]:
        if not figure["width"] * figure["height"]:
            found.append("a figure has no size")
    for table in measured["tables"]:
        if table["width"] > table["box"] and table["overflow"] != "auto":
            found.append("a table is cut off")
        if table["font"] < 12:
            found.append(f"the text of a table has {table['font']} px")
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["published", "small-two-cores"])
def test_all_of_a_page_can_be_read(pages, name, width):
    measured = json.loads((pages / "measured.json").read_text())[f"{name} {width}"]
    assert measured["width"] == width
    assert len(measured["figures"]) > 5 and len(measured["tables"]) > 5
    assert complaints(measured) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_parts_that_are_cut_off_are_found(pages, width):
    measured = json.loads((pages / "measured.json").read_text())[f"broken {width}"]
    assert complaints(measured) == [
        "the page is 3008 px wide",
        "a figure is missing",
        "a figure has no size",
        "a table is cut off",
        "the text of a table has 6 px",
    ]


@pytest.mark.parametrize("name", ["published", "small-two-cores"])
def test_a_page_is_printed(pages, name, tmp_path):
    paper = tmp_path / "page.pdf"
    browse(tmp_path, pages / f"{name}.html", f"--print-to-pdf={paper}")
    sheets = re.findall(rb"/MediaBox \[0 0 (\d+)\S* (\d+)", paper.read_bytes())
    assert sheets
    if name == "published":  # an older page has its own style
        assert {int(width) > int(height) for width, height in sheets} == {False, True}
