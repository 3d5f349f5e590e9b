"""What was found, for the eye and as JSON."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from megaenc.doctor.compare import Looked
from megaenc.doctor.findings import LEVELS, Finding

WIDTH = 100
_MARK, _NAME = 11, 25


def text(findings: Sequence[tuple[str, Finding]], subjects: Sequence[str]) -> str:
    """A paragraph for each of `subjects` that has findings, and at the end what is to be done, the worst last."""
    lines: list[str] = []
    for subject in subjects:
        of_it = [finding for name, finding in findings if name == subject]
        if of_it:
            lines += [subject, *(line for finding in of_it for line in _lines(finding)), ""]
    return "\n".join([*lines, *_conclusion(findings)])


def _lines(finding: Finding) -> list[str]:
    mark = f"  {finding.level:<{_MARK - 2}}"
    first = f"{mark}{finding.what:<{_NAME}}" if len(finding.what) < _NAME else f"{mark}{finding.what}  "
    beyond = " " * (_MARK + _NAME)
    lines = textwrap.wrap(finding.found or "-", WIDTH, initial_indent=first, subsequent_indent=beyond, break_on_hyphens=False)
    if finding.advice:
        lines += textwrap.wrap(
            finding.advice, WIDTH, initial_indent=f"{beyond}-> ", subsequent_indent=f"{beyond}   ", break_on_hyphens=False
        )
    return lines


def _conclusion(findings: Sequence[tuple[str, Finding]]) -> list[str]:
    problems = [(subject, finding) for subject, finding in findings if finding.level == "problem"]
    notes = sum(finding.level == "note" for _, finding in findings)
    looked = f"{len(findings)} finding{'s' * (len(findings) != 1)}, {notes} note{'s' * (notes != 1)}"
    if not problems:
        return [f"no problem: {looked}"]
    lines = [f"{len(problems)} problem{'s' * (len(problems) != 1)}: {looked}"]
    for subject, finding in problems:
        said = f"{subject}, {finding.what}: {finding.found}"
        lines += textwrap.wrap(said, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        lines += textwrap.wrap(
            finding.advice, WIDTH, initial_indent="    -> ", subsequent_indent="       ", break_on_hyphens=False
        )
    return lines


def as_json(looked: Sequence[Looked], findings: Sequence[tuple[str, Finding]], about: dict[str, Any]) -> str:
    """`about` the call, the findings of all ranks together, and those of each rank."""
    worst = max((finding.level for _, finding in findings), key=LEVELS.index, default="ok")
    ranks = [{"rank": each.rank, "host": each.host, "findings": [_row(*pair) for pair in each.findings]} for each in looked]
    return json.dumps(about | {"worst": worst, "findings": [_row(*pair) for pair in findings], "ranks": ranks}, indent=1) + "\n"


def _row(subject: str, finding: Finding) -> dict[str, str]:
    return {
        "subject": subject,
        "what": finding.what,
        "level": finding.level,
        "found": finding.found,
        "advice": finding.advice,
    }
