"""What all ranks have found: laid over each other, with the odd ones named, for the eye and as JSON."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megaenc.console import printable
from megaenc.doctor.cross_rank import format_ranks
from megaenc.doctor.result import LEVELS, Finding
from megaenc.json_files import parse_json

WIDTH = 100
_MARK, _NAME = 11, 25
_MOST_BYTES = 1 << 20  # of the findings of a rank, which take some kilobytes
_SHOWN = 6  # ranks with something of their own, of one finding


@dataclass(frozen=True)
class RankFindings:
    """What one rank has found."""

    rank: int
    host: str
    findings: tuple[Finding, ...]
    looked_at: frozenset[tuple[str, str]]
    """(subject, where) of the probes that it has carried out: each node's are left to its first rank."""


def to_json(looked: RankFindings) -> str:
    """Return `looked` as the text that `from_json` reads."""
    return json.dumps(asdict(looked) | {"looked_at": sorted(looked.looked_at)})


def from_json(content: bytes, rank: int) -> RankFindings:
    """Return the findings that `rank` has put into the store of the launcher. Raises ValueError for anything else.

    Anybody who reaches the store's port can write to it: size, types and what a terminal would not print are checked.
    """
    if len(content) > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES:,} bytes")
    values = parse_json(content)
    try:
        findings = tuple(
            Finding(**{field.name: _text(row[field.name]) for field in fields(Finding)}) for row in values["findings"]
        )
        looked_at = frozenset((_text(subject), _text(where)) for subject, where in values["looked_at"])
        looked = RankFindings(rank, _text(values["host"]), findings, looked_at)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the findings of a rank ({type(error).__name__}: {error})") from None
    for level in (level for finding in findings for level in (finding.level, finding.alike)):
        if level not in LEVELS:
            raise ValueError(f"found the level {level[:20]!r}, expected one of {', '.join(LEVELS)}")
    return looked


def _text(value: Any) -> str:
    """Return a string with the characters that would steer a terminal spelled. Raises ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"found {type(value).__name__}, expected a string")
    return printable(value)


def together(looked: Sequence[RankFindings]) -> list[Finding]:
    """Return the findings of all, in the order of the first that has each; of one rank alone they stay as they are."""
    found: dict[tuple[str, str], dict[int, Finding]] = {}
    for each in looked:
        for finding in each.findings:
            found.setdefault((finding.subject, finding.what), {})[each.rank] = finding
    hosts = {each.rank: each.host for each in looked}
    merged: list[Finding] = []
    for (subject, what), by_rank in found.items():
        first = next(iter(by_rank.values()))
        compared = any(finding.alike != "ok" for finding in by_rank.values())
        for each in looked if compared else ():
            if (subject, first.where) in each.looked_at:
                by_rank.setdefault(each.rank, Finding(what, "nothing", alike=first.alike, subject=subject, where=first.where))
        merged += _merged(by_rank, hosts, compared)
    return merged


def _merged(by_rank: dict[int, Finding], hosts: dict[int, str], compared: bool) -> list[Finding]:
    """Return what all say; else, if they are `compared`, what most say and one finding of the others.

    If they are not, the first if it is harmless, and with their ranks those that are not.
    """
    alike: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(by_rank):
        alike.setdefault((by_rank[rank].found, by_rank[rank].level), []).append(rank)
    groups = [(by_rank[ranks[0]], ranks) for ranks in alike.values()]
    usual, usual_ranks = max(groups, key=lambda group: len(group[1])) if compared else groups[0]  # of as many, the lowest rank's
    odd = [(finding, ranks) for finding, ranks in groups if ranks != usual_ranks]
    if not odd:
        return [usual]
    if not compared:
        return [usual] * (usual.level == "ok") + [
            replace(finding, what=f"{usual.what}, rank {format_ranks(ranks)}", found=f"{finding.found} ({hosts[ranks[0]]})")
            for finding, ranks in [group for group in groups if group[0].level != "ok"][:_SHOWN]
        ]
    parts = [
        f"{finding.found} on rank {format_ranks(ranks)} ({', '.join(dict.fromkeys(hosts[rank] for rank in ranks))})"
        for finding, ranks in odd[:_SHOWN]
    ]
    parts += [f"{len(odd) - _SHOWN} others"] if len(odd) > _SHOWN else []
    level = max([usual.alike, *(finding.level for finding, _ in odd)], key=LEVELS.index)
    advice = next((finding.advice for finding, _ in odd if finding.advice), "ranks differ: give all nodes the same")
    return [usual, Finding(f"{usual.what} elsewhere", "; ".join(parts), level, advice, subject=usual.subject)]


def text(findings: Sequence[Finding], subjects: Sequence[str]) -> str:
    """Return a paragraph for each of `subjects` that has findings, and at the end what is to be done, the worst last."""
    lines: list[str] = []
    for subject in subjects:
        of_it = [line for finding in findings if finding.subject == subject for line in _lines(finding)]
        lines += [subject, *of_it, ""] if of_it else []
    problems = [finding for finding in findings if finding.level == "problem"]
    notes = sum(finding.level == "note" for finding in findings)
    looked = f"{len(findings)} finding{'s' * (len(findings) != 1)}, {notes} note{'s' * (notes != 1)}"
    lines.append(f"{len(problems) or 'no'} problem{'s' * (len(problems) > 1)}: {looked}")
    for finding in problems:
        lines += _wrapped(f"{finding.subject}, {finding.what}: {finding.found}", "  ", "    ")
        lines += _wrapped(finding.advice, "    -> ", "       ")
    return "\n".join(lines)


def _lines(finding: Finding) -> list[str]:
    mark, beyond = f"  {finding.level:<{_MARK - 2}}", " " * (_MARK + _NAME)
    first = f"{mark}{finding.what:<{_NAME}}" if len(finding.what) < _NAME else f"{mark}{finding.what}  "
    return _wrapped(finding.found or "-", first, beyond) + _wrapped(finding.advice, f"{beyond}-> ", f"{beyond}   ")


def _wrapped(words: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(words, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def as_json(looked: Sequence[RankFindings], findings: Sequence[Finding], about: dict[str, Any]) -> str:
    """Return `about` the call, the findings of all ranks together, and those of each rank."""

    def rows(of: Sequence[Finding]) -> list[dict[str, str]]:
        return [{name: getattr(each, name) for name in ("subject", "what", "level", "found", "advice")} for each in of]

    worst = max((finding.level for finding in findings), key=LEVELS.index, default="ok")
    ranks = [{"rank": each.rank, "host": each.host, "findings": rows(each.findings)} for each in looked]
    return json.dumps(about | {"worst": worst, "findings": rows(findings), "ranks": ranks}, indent=1) + "\n"
