"""Verdicts of the page: what each claim came to, with its comparisons folded behind it and their intervals drawn."""

import math
import re
from collections import Counter
from collections.abc import Sequence

from megaenc.study.claims import Verdict, p_value
from megaenc.study.comparisons import Comparison
from megaenc.study.page_tables import classes, scroll, text
from megaenc.study.setups import dataset_label

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


def verdict_cards(verdicts: Sequence[Verdict], published: Sequence[Verdict]) -> list[str]:
    """A sentence that counts them, a card for each, how to read them; `published` are the same claims, judged by the tables."""
    theirs = {(one.claim, one.part): one for one in published}
    return [_summary(verdicts), *(_verdict(one, theirs.get((one.claim, one.part))) for one in verdicts), _METHOD]


def _verdict(one: Verdict, published: Verdict | None) -> str:
    parts = [
        f"<h3>{one.claim}{text(one.part)}. {text(one.title)} {_badge(one.verdict)}</h3>",
        f'<p class="muted">{text(one.question)}</p>',
        f"<p>{text(_minus(one.reason))}</p>",
    ]
    if published is not None and published.verdict != "no data":
        said = f"The published tables, judged the same way: {_badge(published.verdict)}. {text(_minus(published.reason))}"
        parts.append(f'<p class="muted">{said}</p>')
    if one.comparisons:
        listed = [one.overall, *one.comparisons] if one.overall is not None else one.comparisons
        count = "1 comparison" if len(one.comparisons) == 1 else f"{len(one.comparisons)} comparisons"
        parts.append(f"<details><summary>{count}</summary>{_comparisons(listed, one.overall)}</details>")
    inside = "\n".join(parts)
    return f'<article class="card verdict is-{_SIGNS[one.verdict][0]}">\n{inside}</article>'


def _minus(said: str) -> str:
    """With the sign that is as wide as a plus before numbers; hyphens in names stay."""
    return re.sub(r"(?<![\w.)-])-(?=\.?\d)", "\u2212", said)


def _comparisons(listed: Sequence[Comparison], overall: Comparison | None) -> str:
    """The comparisons of a verdict with their intervals drawn on one axis."""
    ends = [end for one in listed for end in (one.low, one.high, one.difference) if math.isfinite(end)]
    reach = max((abs(end) for end in ends), default=1.0) or 1.0
    head = "".join(f'<th scope="col"{classes(number=number)}>{name}</th>' for name, number in _HEADS)
    rows = []
    for at, one in enumerate(listed):
        whole = one is overall
        needed = one.seeds_needed
        cells = [
            text("all together" if whole else one.where),
            text(f"{one.family} {dataset_label(one.family, one.dataset)}" if one.family else one.dataset),
            _signed(one.difference),
            ("" if math.isnan(one.low) else _range(one.low, one.high)) + (_bootstrap(one) if whole else ""),
            _interval(one, reach),
            _badge(one.verdict),
            _p(one.p),
            _p(one.p_adjusted),
            "" if math.isnan(one.effect) else _minus(f"{one.effect:.2f}"),
            "" if needed is None else "never" if math.isinf(needed) else f"{needed:,}",
        ]
        numbers = (number for _, number in _HEADS[1:])
        body = "".join(f"<td{classes(number=number)}>{cell}</td>" for cell, number in zip(cells, numbers, strict=True))
        rule = classes(rule=at == 1 and overall is not None)
        rows.append(f'<tr{rule}><th scope="row">{text(one.left)} less {text(one.right)}</th>{body}</tr>')
    return scroll(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>", "comparisons")


_HEADS = (
    ("what", False),
    ("where", False),
    ("data", False),
    ("difference", True),
    ("95\u00a0% interval", True),
    ("drawn about 0", False),
    ("verdict", False),
    ("p", True),
    ("p corrected", True),
    ("effect size", True),
    ("seeds needed", True),
)
"""Columns of the comparisons, and whether they are numbers."""


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


def _bootstrap(one: Comparison) -> str:
    """Its two intervals under that of the t test; nothing where there are none."""
    if one.bootstrap is None or math.isnan(one.bootstrap[0][0]):
        return ""
    percentile, studentised = (_range(*interval) for interval in one.bootstrap)
    return f'<br/><span class="muted">bootstrap {percentile}, studentised {studentised}</span>'


def _range(low: float, high: float) -> str:
    return f"{_signed(low)} to {_signed(high)}"


def _signed(value: float) -> str:
    return "" if math.isnan(value) else f"{value:+.2f}".replace("-", "\u2212")


def _p(value: float) -> str:
    return "" if math.isnan(value) else text(p_value(value))


_METHOD = (
    '<details class="card"><summary>How to read this</summary><p>Differences are points of the score, left less right. A '
    "verdict rests on all comparisons of its claim together; it holds, or is reversed, where that goes the one way or the "
    "other with p below 5\u00a0% after Holm&rsquo;s correction over the claims, and is not resolved otherwise, nor where "
    "some comparison clearly goes against the whole. Tests are t tests of paired differences over fine-tuning seeds and, "
    "where results have them, test examples; of printed tables, of their means and intervals. Where models were pretrained "
    "once, a verdict is about these trained models, and another pretraining run may differ by more; where they were pretrained "
    "several times, tests are over those runs. The bootstrap resamples seeds and examples; no verdict rests on it. The effect "
    "size is Hedges&rsquo; g: the difference over the spread of seeds. Seeds needed: with which a true difference as large as "
    "the one seen is found by the same test, before any correction, in four of five studies; never: the examples are too few "
    "for any number of seeds; empty where that is not known.</p></details>"
)
