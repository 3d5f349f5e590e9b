"""Links between documents lead to files and headings.

Only the form of external addresses is checked.
"""

import re
import unicodedata
from urllib.parse import unquote, urlsplit

import pytest
from docs.documents import LINK, ROOT, documents, mask_code, read, without_blocks

from megaenc import cli

_PATH = re.compile(r"`((?:megaenc|tests|docs|configs|tools|examples|benchmarks|docker)/[\w./*-]*)`")
_HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$")


def links(name: str) -> list[tuple[int, str]]:
    """Return the targets of a document's links with the line that each begins in."""
    text = mask_code("\n".join(read(name)))
    return [
        (text.count("\n", 0, found.start()) + 1, found["target"]) for found in LINK.finditer(text)
    ]


def anchors(name: str) -> set[str]:
    """Return the anchors of the headings of a document, as GitHub makes them."""
    found: set[str] = set()
    for line in without_blocks(read(name)):
        if heading := _HEADING.match(line):
            text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            kept = "".join(c for c in text if c in " -_" or unicodedata.category(c)[0] in "LN")
            anchor = kept.replace(" ", "-")
            again = 0
            while (numbered := f"{anchor}-{again}" if again else anchor) in found:
                again += 1
            found.add(numbered)
    return found


def complaint(name: str, target: str) -> str:
    """Return the problem of a link in the document `name`, or an empty text."""
    parts = urlsplit(target)
    if parts.scheme:
        return (
            ""
            if re.match(r"https://[\w-]+(\.[\w-]+)+(/|$)", target)
            else "expected https:// and a host"
        )
    if not target:
        return "leads nowhere"
    path = (ROOT / name).parent / unquote(parts.path) if parts.path else ROOT / name
    if not path.exists():
        return "no such file"
    if not path.resolve().is_relative_to(ROOT):
        return "lies outside of the repository"
    if parts.fragment and path.suffix == ".md":
        there = str(path.resolve().relative_to(ROOT))
        return "" if parts.fragment in anchors(there) else f"no such heading in {there}"
    return ""


@pytest.mark.parametrize("name", documents())
def test_links_lead_somewhere(name):
    wrong = [
        f"{name}:{line}: {target}: {why}"
        for line, target in links(name)
        if (why := complaint(name, target))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", documents())
def test_files_of_the_repository_that_are_named_are_there(name):
    """Paths in code spans exist, except those with words in capitals like NAME."""
    spans = _PATH.findall("\n".join(without_blocks(read(name))))
    missing = [
        span for span in spans if not re.search(r"[A-Z]{3}", span) and not list(ROOT.glob(span))
    ]
    assert not missing, f"{name}: {missing}"


def test_the_index_has_every_document_and_every_command():
    """Readers find every document and command in docs/README.md."""
    assert "docs/README.md" in [target for _, target in links("README.md")]
    linked = {
        (ROOT / "docs" / urlsplit(target).path).resolve() for _, target in links("docs/README.md")
    }
    assert [name for name in documents() if ROOT / name not in linked] == ["docs/README.md"]
    first_cells = " ".join(
        line.split("|")[1] for line in read("docs/README.md") if line.startswith("| `")
    )
    shown = re.findall(r"`megaenc ([a-z -]*)`", first_cells)
    assert {re.sub(r" (to-hf|from-hf|merge)$", "", name) for name in shown} == set(cli.COMMANDS)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("docs/design.md#five-ideas", ""),
        ("https://arxiv.org/abs/2507.00994", ""),
        ("docs/no-such-file.md", "no such file"),
        ("docs/design.md#six-ideas", "no such heading in docs/design.md"),
        ("http://example.org", "expected https:// and a host"),
        ("", "leads nowhere"),
    ],
)
def test_a_wrong_link_is_found(target, why):
    assert complaint("README.md", target) == why
