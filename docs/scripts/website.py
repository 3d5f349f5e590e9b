"""Stage the pages of this repository as the source of a site.

    PYTHONPATH=tests python docs/scripts/website.py

`make docs` then builds build/website/site. The README is the front page, and the others stand in
the order of docs/README.md. The files keep their places, so that links between them stay as they
are. Links to other files lead to the repository if pyproject.toml has its address
(`project.urls.Repository`); otherwise they become text.
"""

import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

from docs.documents import CODE, LINK, ROOT, mask_code, read

OUTPUT = ROOT / "build/website"
INDEX = "docs/README.md"
_TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_SECTION = re.compile(r"^- \*\*(.+?)\*\*:", re.MULTILINE)


def navigation() -> list[dict]:
    """Return the `nav` of mkdocs: titles with a page or a list of titles and pages."""
    nav: list[dict] = [{"Introduction": "README.md"}, {"Documentation": INDEX}]
    text = "\n".join(read(INDEX)).split("\n## Pages\n")[1]
    _, *sections = _SECTION.split(text)
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        entries = []
        for link in LINK.finditer(body.split("\n\n")[0]):
            label = link["text"]
            entries.append({label[0].upper() + label[1:]: resolve(INDEX, link["target"])})
        nav.append({title: entries})
    return nav


def page_names(nav: list[dict]) -> list[str]:
    """Return the documents of a `nav` in order."""
    names = []
    for entry in nav:
        for value in entry.values():
            names += [value] if isinstance(value, str) else page_names(value)
    return names


def resolve(name: str, target: str) -> str:
    """Return the path of a link in the document `name`, relative to the root."""
    return os.path.normpath(Path(name).parent / urlsplit(target).path)


def is_asset(path: str) -> bool:
    """Return whether a linked file of docs/ is copied, such as a picture or a report."""
    return path.startswith("docs/") and not path.endswith(".md") and (ROOT / path).is_file()


def rewrite(name: str, pages: list[str], repository: str) -> tuple[str, list[str]]:
    """Return a document's text for the site, and the files that it needs.

    Args:
        name: the document, relative to the root.
        pages: all documents of the site.
        repository: address of the repository, or an empty text.
    """
    text = "\n".join(read(name)) + "\n"
    parts = []
    assets = []
    end = 0
    for link in LINK.finditer(mask_code(text)):
        target = urlsplit(link["target"])
        if target.scheme or not target.path:
            continue
        path = resolve(name, link["target"])
        if path in pages or not (ROOT / path).exists():  # mkdocs refuses the latter
            continue
        if is_asset(path):
            assets.append(path)
            continue
        label = text[link.start("text") : link.end("text")]
        if repository:
            label = f"[{label}]({repository}/blob/main/{path})"
        elif path not in label:
            label = f"{label} (`{path}`)"
        parts += [text[end : link.start()], label]
        end = link.end()
    parts.append(text[end:])
    return _TABLE_ROW.sub(_unescape_pipes, "".join(parts)), assets


def _unescape_pipes(row: re.Match) -> str:
    """Show `|` in a cell's code, which GitHub needs escaped, without its backslash."""
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def stage(directory: Path) -> None:
    """Write `mkdocs.yml` and the folder `pages` into a directory; older pages are removed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project.get("urls", {}).get("Repository", "").rstrip("/")
    nav = navigation()
    pages = page_names(nav)
    shutil.rmtree(directory / "pages", ignore_errors=True)
    for name in pages:
        text, assets = rewrite(name, pages, repository)
        page = directory / "pages" / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        for asset in assets:
            copy = directory / "pages" / asset
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / asset, copy)
    settings = (ROOT / "docs/mkdocs.yml").read_text()
    if repository:
        settings += f"repo_url: {repository}\n"
    settings += f"nav: {json.dumps(nav, indent=2)}\n"
    (directory / "mkdocs.yml").write_text(settings, encoding="utf-8")


if __name__ == "__main__":
    stage(OUTPUT)
