"""Pages of the site: each once, with whole links, as GitHub shows them."""

import re
from collections import Counter

import markdown
import pytest
from docs.documents import LINK, documents, mask_code, read
from docs.test_api_reference import load
from markdown_it import MarkdownIt

website = load("website")
_SHOWN = re.compile(r"<(h[1-6]|li|pre|code|table|th|td|a|img|strong|em)\b")


def test_the_navigation_has_each_page_once():
    pages = website.page_names(website.navigation())
    assert sorted(pages) == sorted(documents())
    assert pages[:2] == ["README.md", "docs/README.md"]


def test_links_between_staged_pages_lead_to_files(tmp_path):
    website.stage(tmp_path)
    staged = {path.relative_to(tmp_path / "pages") for path in (tmp_path / "pages").rglob("*.*")}
    for path in sorted(staged):
        if path.suffix == ".md":
            for link in LINK.finditer(mask_code((tmp_path / "pages" / path).read_text())):
                target = link["target"].split("#")[0]
                if target and not target.startswith("https://"):
                    assert (tmp_path / "pages" / path.parent / target).is_file(), link[0]
    assert {path.suffix for path in staged} == {".md", ".svg", ".png", ".html"}
    settings = (tmp_path / "mkdocs.yml").read_text()
    assert settings.startswith(read("docs/mkdocs.yml")[0]) and '"Data": [' in settings


@pytest.mark.parametrize(
    ("repository", "recipes", "tool"),
    [
        ("", "recipes (`configs/recipes`)", "`install.sh`"),
        (
            "https://example.org/m",
            "[recipes](https://example.org/m/blob/main/configs/recipes)",
            "[`install.sh`](https://example.org/m/blob/main/install.sh)",
        ),
    ],
)
def test_links_to_other_files_lead_to_the_repository_or_become_text(
    monkeypatch, repository, recipes, tool
):
    line = "[flags](flags.md), [recipes](../configs/recipes), [`install.sh`](../install.sh), "
    line += "[missing](missing.md), `[code](../LICENSE)`"
    monkeypatch.setattr(website, "read", lambda name: [line, "", "| `a\\|b` | c\\|d |"])
    text, assets = website.rewrite("docs/page.md", ["docs/flags.md"], repository)
    assert text.splitlines() == [
        f"[flags](flags.md), {recipes}, {tool}, [missing](missing.md), `[code](../LICENSE)`",
        "",
        "| `a|b` | c\\|d |",
    ]
    assert assets == []


@pytest.mark.parametrize("name", documents())
def test_a_page_has_the_same_parts_on_the_site_as_on_github(name):
    """The site's Markdown wants, among others, an empty line before a list."""
    text, _ = website.rewrite(name, [], "https://example.org")
    extensions = ["fenced_code", "sane_lists", "tables"]
    site = markdown.markdown(text, extensions=extensions)
    github = MarkdownIt("commonmark").enable("table").render("\n".join(read(name)))
    assert Counter(_SHOWN.findall(site)) == Counter(_SHOWN.findall(github))
