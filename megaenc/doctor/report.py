"""Merged findings of all ranks, as text and as JSON."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megaenc.console import escape_unprintable
from megaenc.doctor.cross_rank import format_ranks
from megaenc.doctor.result import LEVELS, Finding
from megaenc.json_files import parse_json

WIDTH = 100
_MARK, _NAME = 11, 25
_MAX_BYTES = 1 << 20  # for one rank's findings, which take a few KiB
_MAX_ODD_GROUPS = 6  # groups of ranks reported for one finding


@dataclass(frozen=True)
class RankFindings:
    """Findings of one rank, with its number, its host's name and the (subject, scope) pairs that it probed."""

    rank: int
    host: str
    findings: tuple[Finding, ...]
    probed_scopes: frozenset[tuple[str, str]]
    """(subject, scope) of its probes; scope "node" only on the first rank of each node."""


def serialize_findings(rank_findings: RankFindings) -> str:
    """Return one rank's findings, host and probed scopes as JSON text."""
    return json.dumps(asdict(rank_findings) | {"probed_scopes": sorted(rank_findings.probed_scopes)})


def parse_findings(content: bytes, rank: int) -> RankFindings:
    """Return the RankFindings in `content`, the JSON that `rank` sent; raise ValueError for malformed content.

    Anyone who reaches the store's port can write to it: size and types are checked, control characters are escaped.
    """
    if len(content) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES:,} bytes")
    values = parse_json(content)
    try:
        findings = tuple(
            Finding(**{field.name: _text(row[field.name]) for field in fields(Finding)}) for row in values["findings"]
        )
        probed_scopes = frozenset((_text(subject), _text(scope)) for subject, scope in values["probed_scopes"])
        rank_findings = RankFindings(rank, _text(values["host"]), findings, probed_scopes)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the findings of a rank ({type(error).__name__}: {error})") from None
    for level in (level for finding in findings for level in (finding.level, finding.mismatch_level)):
        if level not in LEVELS:
            raise ValueError(f"found the level {level[:20]!r}, expected one of {', '.join(LEVELS)}")
    return rank_findings


def _text(value: Any) -> str:
    """Return a string with its control characters escaped; raise ValueError for other types."""
    if not isinstance(value, str):
        raise ValueError(f"found {type(value).__name__}, expected a string")
    return escape_unprintable(value)


def merge_findings(rank_findings: Sequence[RankFindings]) -> list[Finding]:
    """Return all ranks' findings merged by subject and name, in order of appearance, with deviating ranks reported."""
    by_name: dict[tuple[str, str], dict[int, Finding]] = {}
    for each in rank_findings:
        for finding in each.findings:
            by_name.setdefault((finding.subject, finding.name), {})[each.rank] = finding
    hosts = {each.rank: each.host for each in rank_findings}
    merged: list[Finding] = []
    for (subject, name), by_rank in by_name.items():
        first = next(iter(by_rank.values()))
        must_match = any(finding.mismatch_level != "ok" for finding in by_rank.values())
        for each in rank_findings if must_match else ():
            if (subject, first.scope) in each.probed_scopes:
                by_rank.setdefault(
                    each.rank, Finding(name, "nothing", mismatch_level=first.mismatch_level, subject=subject, scope=first.scope)
                )
        merged += _merge_finding(by_rank, hosts, must_match)
    return merged


def _merge_finding(by_rank: dict[int, Finding], hosts: dict[int, str], must_match: bool) -> list[Finding]:
    """Merge the findings of one name by rank into a list of findings that names deviating ranks.

    With `must_match`: the most common finding, and one for all deviating ranks. Without: the first rank's finding if it is ok,
    and each note or problem with its ranks.
    """
    ranks_by_result: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(by_rank):
        ranks_by_result.setdefault((by_rank[rank].result, by_rank[rank].level), []).append(rank)
    groups = [(by_rank[ranks[0]], ranks) for ranks in ranks_by_result.values()]
    usual, usual_ranks = (
        max(groups, key=lambda group: len(group[1])) if must_match else groups[0]
    )  # a tie goes to the lowest rank
    odd = [(finding, ranks) for finding, ranks in groups if ranks != usual_ranks]
    if not odd:
        return [usual]
    if not must_match:
        return [usual] * (usual.level == "ok") + [
            replace(finding, name=f"{usual.name}, rank {format_ranks(ranks)}", result=f"{finding.result} ({hosts[ranks[0]]})")
            for finding, ranks in [group for group in groups if group[0].level != "ok"][:_MAX_ODD_GROUPS]
        ]
    parts = [
        f"{finding.result} on rank {format_ranks(ranks)} ({', '.join(dict.fromkeys(hosts[rank] for rank in ranks))})"
        for finding, ranks in odd[:_MAX_ODD_GROUPS]
    ]
    parts += [f"{len(odd) - _MAX_ODD_GROUPS} others"] if len(odd) > _MAX_ODD_GROUPS else []
    level = max([usual.mismatch_level, *(finding.level for finding, _ in odd)], key=LEVELS.index)
    advice = next((finding.advice for finding, _ in odd if finding.advice), "ranks differ: configure all nodes alike")
    return [usual, Finding(f"{usual.name} elsewhere", "; ".join(parts), level, advice, subject=usual.subject)]


def format_report(findings: Sequence[Finding], subjects: Sequence[str]) -> str:
    """Return findings as text: a paragraph for each of `subjects`, the number of problems, and each with its advice."""
    lines: list[str] = []
    for subject in subjects:
        subject_lines = [line for finding in findings if finding.subject == subject for line in _format_finding(finding)]
        lines += [subject, *subject_lines, ""] if subject_lines else []
    problems = [finding for finding in findings if finding.level == "problem"]
    notes = sum(finding.level == "note" for finding in findings)
    summary = f"{len(findings)} finding{'s' * (len(findings) != 1)}, {notes} note{'s' * (notes != 1)}"
    lines.append(f"{len(problems) or 'no'} problem{'s' * (len(problems) > 1)}: {summary}")
    for finding in problems:
        lines += _wrap(f"{finding.subject}, {finding.name}: {finding.result}", "  ", "    ")
        lines += _wrap(finding.advice, "    -> ", "       ")
    return "\n".join(lines)


def _format_finding(finding: Finding) -> list[str]:
    """Return a finding as indented lines of at most `WIDTH` characters, with its advice below."""
    mark, beyond = f"  {finding.level:<{_MARK - 2}}", " " * (_MARK + _NAME)
    first = f"{mark}{finding.name:<{_NAME}}" if len(finding.name) < _NAME else f"{mark}{finding.name}  "
    return _wrap(finding.result or "-", first, beyond) + _wrap(finding.advice, f"{beyond}-> ", f"{beyond}   ")


def _wrap(words: str, first: str, rest: str) -> list[str]:
    """Return `words` wrapped to `WIDTH`, with one indent for the first line and one for the rest."""
    return textwrap.wrap(words, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def format_json(rank_findings: Sequence[RankFindings], findings: Sequence[Finding], metadata: dict[str, Any]) -> str:
    """Return JSON text: `metadata`, the worst level, the merged `findings`, and the host and findings of each rank."""

    def rows(findings: Sequence[Finding]) -> list[dict[str, str]]:
        keys = {"subject": "subject", "what": "name", "level": "level", "found": "result", "advice": "advice"}
        return [{key: getattr(finding, field) for key, field in keys.items()} for finding in findings]

    worst = max((finding.level for finding in findings), key=LEVELS.index, default="ok")
    ranks = [{"rank": each.rank, "host": each.host, "findings": rows(each.findings)} for each in rank_findings]
    return json.dumps(metadata | {"worst": worst, "findings": rows(findings), "ranks": ranks}, indent=1) + "\n"
