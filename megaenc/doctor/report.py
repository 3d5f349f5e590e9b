"""Merged findings of all ranks, as text and as JSON."""

import json
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaenc.console import escape_unprintable, truncate_text
from megaenc.doctor.checks import SUBJECTS
from megaenc.doctor.cross_rank import format_ranks
from megaenc.doctor.result import LEVELS, Finding
from megaenc.json_files import parse_json

WIDTH = 100
_MARK = 11
_NAME = 25
_MAX_BYTES = 1 << 20  # for one rank's findings, which take a few KiB
_MAX_LENGTH = 1000  # characters on the ranks that deviate in one finding


@dataclass
class RankFindings:
    """List `findings` of one rank, with its global `rank` and the name of its `host`."""

    rank: int
    host: str
    findings: list[Finding]


def parse_findings(content: bytes, rank: int) -> RankFindings:
    """Return the RankFindings in `content`, the JSON that `rank` sent.

    Anyone who reaches the store's port can write to it: size and types are checked, control
    characters are escaped.

    Raises:
        ValueError: The content is malformed.
    """
    if len(content) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES:,} bytes")
    values = parse_json(content)
    findings = []
    try:
        host = escape_unprintable(values["host"])
        for row in values["findings"]:
            texts = {name: escape_unprintable(text) for name, text in row.items()}
            findings.append(Finding(**texts))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not the findings of a rank ({type(error).__name__}: {error})") from None
    for finding in findings:
        for level in (finding.level, finding.mismatch_level):
            if level not in LEVELS:
                raise ValueError(
                    f"found the level {level[:20]!r}, expected one of {', '.join(LEVELS)}"
                )
    return RankFindings(rank, host, findings)


def merge_findings(rank_findings: Sequence[RankFindings]) -> list[Finding]:
    """Merge the findings of all ranks by subject and name, in order of appearance.

    If all ranks agree, there is one finding of a name. Otherwise it has the most frequent ok
    result, or without one the most frequent of all, and a second one, "NAME elsewhere", has the
    others with their ranks and hosts, at the worst of their levels and of `mismatch_level`.
    Different ok results, and a missing one, count as disagreement only if a `mismatch_level` is not
    "ok".
    """
    by_name: dict[tuple[str, str], dict[int, Finding]] = defaultdict(dict)
    ranks_by_scope: dict[tuple[str, str], list[int]] = defaultdict(list)
    for entry in rank_findings:
        for finding in entry.findings:
            by_name[finding.subject, finding.name][entry.rank] = finding
            ranks_by_scope[finding.subject, finding.scope].append(entry.rank)
    hosts = {entry.rank: entry.host for entry in rank_findings}
    merged: list[Finding] = []
    for by_rank in by_name.values():
        first = next(iter(by_rank.values()))
        must_match = any(finding.mismatch_level != "ok" for finding in by_rank.values())
        if must_match:
            nothing = replace(first, result="nothing", level="note", advice="")
            by_rank = dict.fromkeys(ranks_by_scope[first.subject, first.scope], nothing) | by_rank
        merged += _merge_finding(by_rank, hosts, must_match)
    return merged


def _merge_finding(
    by_rank: dict[int, Finding], hosts: dict[int, str], must_match: bool
) -> list[Finding]:
    """Merge the findings of one name into the usual one and "NAME elsewhere".

    The usual finding is the most common of the ok ones, else of all. Without `must_match` all ok
    findings count as the same.
    """
    ranks_by_result: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in sorted(by_rank):
        finding = by_rank[rank]
        result = finding.result if must_match or finding.level != "ok" else ""
        ranks_by_result[finding.level, result].append(rank)
    groups = sorted(
        ranks_by_result.values(), key=lambda ranks: (by_rank[ranks[0]].level != "ok", -len(ranks))
    )
    usual = by_rank[groups[0][0]]
    others = [by_rank[ranks[0]] for ranks in groups[1:]]
    if not others:
        return [usual]
    texts = []
    for ranks in groups:
        names = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        texts.append(f"{by_rank[ranks[0]].result} on rank {format_ranks(ranks)} ({names})")
    if usual.level != "ok":
        usual = replace(usual, result=texts[0])
    level = max([usual.mismatch_level, *(finding.level for finding in others)], key=LEVELS.index)
    advice = next(
        (finding.advice for finding in others if finding.advice),
        "ranks differ: configure all nodes alike",
    )
    text = truncate_text("; ".join(texts[1:]), _MAX_LENGTH)
    return [usual, Finding(f"{usual.name} elsewhere", text, level, advice, subject=usual.subject)]


def format_report(findings: Sequence[Finding]) -> str:
    """Return findings and their advice as text by subject, then the problems again.

    Lines have up to 100 characters; the last one has no newline.

    Args:
        findings: As of `merge_findings`, each with one of `SUBJECTS`.
    """
    lines: list[str] = []
    beyond = " " * (_MARK + _NAME)
    for subject in SUBJECTS:
        of_subject = [finding for finding in findings if finding.subject == subject]
        if of_subject:
            lines.append(subject)
            for finding in of_subject:
                first = f"  {finding.level:<{_MARK - 2}}{finding.name:<{_NAME}}"
                if len(finding.name) >= _NAME:
                    first += "  "
                lines += _wrap(finding.result or "-", first, beyond)
                lines += _wrap(finding.advice, f"{beyond}-> ", f"{beyond}   ")
            lines.append("")
    problems = [finding for finding in findings if finding.level == "problem"]
    notes = sum(finding.level == "note" for finding in findings)
    summary = (
        f"{len(findings)} finding{'s' * (len(findings) != 1)}, {notes} note{'s' * (notes != 1)}"
    )
    lines.append(f"{len(problems) or 'no'} problem{'s' * (len(problems) > 1)}: {summary}")
    for finding in problems:
        lines += _wrap(f"{finding.subject}, {finding.name}: {finding.result}", "  ", "    ")
        lines += _wrap(finding.advice, "    -> ", "       ")
    return "\n".join(lines)


def _wrap(words: str, first: str, rest: str) -> list[str]:
    """Wrap words to `WIDTH`; `first` and `rest` are the indents of the lines."""
    return textwrap.wrap(
        words, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def format_json(
    rank_findings: Sequence[RankFindings], findings: Sequence[Finding], metadata: dict[str, Any]
) -> str:
    """Return findings as JSON text: merged, and as each rank has them.

    The keys are `worst`, the worst level, `findings` and `ranks`, after those of `metadata`. A
    finding has `subject`, `what` (its name), `level`, `found` (its result) and `advice`, a rank
    `rank`, `host` and `findings`.

    Args:
        rank_findings: Findings of each rank.
        findings: The same, merged by `merge_findings`.
        metadata: Further keys of the top level.
    """

    def rows(findings: Sequence[Finding]) -> list[dict[str, str]]:
        keys = {
            "subject": "subject",
            "what": "name",
            "level": "level",
            "found": "result",
            "advice": "advice",
        }
        return [
            {key: getattr(finding, field) for key, field in keys.items()} for finding in findings
        ]

    worst = max((finding.level for finding in findings), key=LEVELS.index, default="ok")
    ranks = [
        {"rank": entry.rank, "host": entry.host, "findings": rows(entry.findings)}
        for entry in rank_findings
    ]
    return (
        json.dumps(
            metadata | {"worst": worst, "findings": rows(findings), "ranks": ranks}, indent=1
        )
        + "\n"
    )
