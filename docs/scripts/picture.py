"""Draw docs/way.svg, the data flow through the package.

    python docs/scripts/picture.py

Boxes have their own background and all else is grey, so the picture is readable in light and dark
mode.
"""

from html import escape
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "way.svg"
WIDTH = 1000
BOX = 168
HIGH = 104
GAP = 28
LEFT = 22
GREY = "#768390"
LINE = "#768390"
INK = "#1f2328"
STATION = "#d7e8fb"
THING = "#f6f3e6"

# (title, lines below it, whether it is a package of the code)
ROWS = [
    [
        ("text", ["JSONL, Parquet, files,", "directories, the Hub"], False),
        ("data", ["megaenc tokenizer", "megaenc preprocess", "packs of equal length"], True),
        ("objectives", ["clm, mlm, mntp, ...", "set by a schedule,", "step by step"], True),
        ("model", ["megatron-core layers;", "loss at predicted", "positions only"], True),
        ("training", ["megaenc pretrain;", "tensor x pipeline", "x data parallel"], True),
    ],
    [
        ("report", ["tables, figures,", "verdicts on claims"], False),
        ("study", ["megaenc study plan,", "run, status, report"], True),
        ("finetune", ["megaenc finetune grid:", "rates x seeds,", "with intervals"], True),
        ("convert", ["megaenc convert to-hf;", "verified: same", "logits as the run"], True),
        ("run directory", ["checkpoints, metrics;", "resume, branch,", "init from weights"], False),
    ],
]
# labels of the arrows
BETWEEN = [["", "packs", "targets", "loss"], ["", "results", "HF directory", ""]]


def box(column: int, top: int, title: str, lines: list[str], code: bool) -> list[str]:
    """Return the SVG of a package or of files on the disk."""
    x = LEFT + column * (BOX + GAP)
    middle = x + BOX / 2
    drawn = [
        f'<rect x="{x}" y="{top}" width="{BOX}" height="{HIGH}" rx="8" '
        f'fill="{STATION if code else THING}" stroke="{LINE}"/>'
    ]
    drawn.append(
        f'<text x="{middle}" y="{top + 25}" font-weight="600" font-size="15">{escape(title)}</text>'
    )
    drawn += [
        f'<text x="{middle}" y="{top + 48 + 18 * at}">{escape(line)}</text>'
        for at, line in enumerate(lines)
    ]
    return drawn


def arrow(x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> str:
    """A line with a head at its end."""
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.8" '
        f'marker-end="url(#head)"{dash}/>'
    )


def label(x: float, y: float, words: str) -> str:
    """Words beside an arrow, on whatever background the page has."""
    return f'<text x="{x}" y="{y}" class="between">{escape(words)}</text>'


def picture() -> str:
    """The SVG."""
    first = 34
    second = 216
    drawn = []
    for top, row in zip((first, second), ROWS, strict=True):
        for column, (title, lines, code) in enumerate(row):
            drawn += box(column, top, title, lines, code)
    for at in range(4):
        right = LEFT + at * (BOX + GAP) + BOX
        left = LEFT + (at + 1) * (BOX + GAP)
        drawn.append(arrow(right + 2, first + HIGH / 2, left - 3, first + HIGH / 2))
        drawn.append(arrow(left - 2, second + HIGH / 2, right + 3, second + HIGH / 2))
        drawn.append(label((right + left) / 2, first - 12, BETWEEN[0][at]))
        drawn.append(label((right + left) / 2, second + HIGH + 22, BETWEEN[1][at]))
    last = LEFT + 4 * (BOX + GAP) + BOX / 2
    drawn += [
        arrow(last - 30, first + HIGH + 2, last - 30, second - 3),
        label(last - 84, (first + HIGH + second) / 2 + 4, "checkpoints"),
    ]
    drawn += [arrow(last + 30, second - 2, last + 30, first + HIGH + 3, dashed=True)]
    drawn += [
        label(last + 62, (first + HIGH + second) / 2 - 4, "goes"),
        label(last + 62, (first + HIGH + second) / 2 + 12, "on"),
    ]
    convert = LEFT + 3 * (BOX + GAP) + BOX / 2
    drawn.append(arrow(convert + 18, second + HIGH + 40, last - 3, second + HIGH + 40, dashed=True))
    drawn.append(arrow(last, second + HIGH + 40, last, second + HIGH + 3, dashed=True))
    drawn.append(label(convert - 75, second + HIGH + 44, "from-hf: a decoder comes in"))
    drawn.append(
        label(
            LEFT + BOX + 20,
            second + HIGH + 44,
            "blue: a package of megaenc; imports go the way of the data",
        )
    )
    title = (
        "Data flow: text, data, objectives, model, training, run directory, convert, finetune, "
        "study, report"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 376" width="{WIDTH}" '
            'role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
            'font-size="12.5" '
            f'text-anchor="middle" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f"<style>.between {{ fill: {GREY}; font-size: 12.5px }}</style>",
            '<defs><marker id="head" markerWidth="9" markerHeight="9" refX="7" refY="4" '
            'orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>',
            *drawn,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
    print(FILE.name)
