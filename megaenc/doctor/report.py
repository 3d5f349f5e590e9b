"""What all ranks have found: laid over each other, with the odd ones named, for the eye and as JSON."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megaenc.console import printable
from megaenc.doctor.findings import LEVELS, Finding
from megaenc.doctor.ranks import named
from megaenc.json_files import parse_json

WIDTH = 100
_MARK, _NAME = 11, 25
_MOST_BYTES = 1 << 20  # of the findings of a rank, which take some kilobytes
_SHOWN = 6  # ranks with something of their own, of one finding


@dataclass(frozen=True)
class Looked:
    """What one rank has found."""

    rank: int
    host: str
    findings: tuple[tuple[str, Finding], ...]
    """With the subject of each."""
    looked_at: frozenset[tuple[str, str]]
    """(subject, where) of the probes that it has carried out: each node's are left to its first rank."""


def to_json(looked: Looked) -> str:
    """Return `looked` as the text that `from_json` reads."""
    findings = [[subject, asdict(finding)] for subject, finding in looked.findings]
    return json.dumps({"host": looked.host, "findings": findings, "looked_at": sorted(looked.looked_at)})


def from_json(content: bytes, rank: int) -> Looked:
    """Return the findings that `rank` has put into the store of the launcher. Raises ValueError for anything else.

    Anybody who reaches the store's port can write to it, so that nothing of the text is believed: it has a largest size, the
    types of `Looked`, and nothing that a terminal would not print.
    """
    if len(content) > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES:,} bytes")
    values = parse_json(content)
    try:
        findings = tuple((_text(subject), _finding(value)) for subject, value in values["findings"])
        looked_at = frozenset((_text(subject), _text(where)) for subject, where in values["looked_at"])
        return Looked(rank, _text(values["host"]), findings, looked_at)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the findings of a rank ({type(error).__name__}: {error})") from None


def _finding(values: dict[str, Any]) -> Finding:
    finding = Finding(**{field.name: _text(values[field.name]) for field in fields(Finding)})
    if finding.level not in LEVELS or finding.alike not in LEVELS:
        raise ValueError(f"found the level {finding.level[:20]!r}, expected one of {', '.join(LEVELS)}")
    return finding


def _text(value: Any) -> str:
    """Return a string with the characters that would steer a terminal spelled. Raises ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"found {type(value).__name__}, expected a string")
    return printable(value)


def together(looked: Sequence[Looked]) -> list[tuple[str, Finding]]:
    """Return the findings of all, in the order of the first that has each; of one rank alone they stay as they are."""
    found: dict[tuple[str, str], dict[int, Finding]] = {}
    for each in looked:
        for subject, finding in each.findings:
            found.setdefault((subject, finding.what), {})[each.rank] = finding
    hosts = {each.rank: each.host for each in looked}
    merged: list[tuple[str, Finding]] = []
    for (subject, what), by_rank in found.items():
        first = next(iter(by_rank.values()))
        if not any(finding.alike != "ok" for finding in by_rank.values()):
            merged += [(subject, finding) for finding in _own(by_rank, hosts)]
            continue
        for each in looked:
            if (subject, first.where) in each.looked_at:
                by_rank.setdefault(each.rank, Finding(what, "nothing", alike=first.alike, where=first.where))
        merged += [(subject, finding) for finding in _compared(by_rank, hosts)]
    return merged


def _own(by_rank: dict[int, Finding], hosts: dict[int, str]) -> list[Finding]:
    """Return one finding where all say the same; else the first if it is harmless, and with their ranks those that are not."""
    by_text: dict[tuple[str, str], list[int]] = {}
    for rank, finding in by_rank.items():
        by_text.setdefault((finding.found, finding.level), []).append(rank)
    first = by_rank[min(by_rank)]
    if len(by_text) == 1:
        return [first]
    worse = [ranks for (_, level), ranks in by_text.items() if level != "ok"][:_SHOWN]
    odd = [
        replace(by_rank[ranks[0]], what=f"{first.what}, rank {named(ranks)}", found=f"{text} ({hosts[ranks[0]]})")
        for ranks in worse
        for text in [by_rank[ranks[0]].found]
    ]
    return [*([first] if first.level == "ok" else []), *odd]


def _compared(by_rank: dict[int, Finding], hosts: dict[int, str]) -> list[Finding]:
    """Return the finding of most ranks, and one of those which have found something else."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(by_rank):
        by_text.setdefault(by_rank[rank].found, []).append(rank)
    usual = by_rank[max(by_text.values(), key=len)[0]]  # of as many each, the lowest rank's
    odd = [ranks for text, ranks in by_text.items() if text != usual.found]
    if not odd:
        return [usual]
    parts = [
        f"{by_rank[ranks[0]].found} on rank {named(ranks)} ({', '.join(dict.fromkeys(hosts[rank] for rank in ranks))})"
        for ranks in odd[:_SHOWN]
    ]
    parts += [f"{len(odd) - _SHOWN} others"] if len(odd) > _SHOWN else []
    findings = [by_rank[rank] for ranks in odd for rank in ranks]
    level = max([usual.alike, *(finding.level for finding in findings)], key=LEVELS.index)
    advice = next((finding.advice for finding in findings if finding.advice), "ranks differ: give all nodes the same")
    return [usual, Finding(f"{usual.what} elsewhere", "; ".join(parts), level, advice)]


def text(findings: Sequence[tuple[str, Finding]], subjects: Sequence[str]) -> str:
    """Return a paragraph for each of `subjects` that has findings, and at the end what is to be done, the worst last."""
    lines: list[str] = []
    for subject in subjects:
        of_it = [finding for name, finding in findings if name == subject]
        if of_it:
            lines += [subject, *(line for finding in of_it for line in _lines(finding)), ""]
    return "\n".join([*lines, *_conclusion(findings)])


def _wrapped(words: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(words, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _lines(finding: Finding) -> list[str]:
    mark, beyond = f"  {finding.level:<{_MARK - 2}}", " " * (_MARK + _NAME)
    first = f"{mark}{finding.what:<{_NAME}}" if len(finding.what) < _NAME else f"{mark}{finding.what}  "
    return _wrapped(finding.found or "-", first, beyond) + _wrapped(finding.advice, f"{beyond}-> ", f"{beyond}   ")


def _conclusion(findings: Sequence[tuple[str, Finding]]) -> list[str]:
    problems = [(subject, finding) for subject, finding in findings if finding.level == "problem"]
    notes = sum(finding.level == "note" for _, finding in findings)
    looked = f"{len(findings)} finding{'s' * (len(findings) != 1)}, {notes} note{'s' * (notes != 1)}"
    if not problems:
        return [f"no problem: {looked}"]
    lines = [f"{len(problems)} problem{'s' * (len(problems) != 1)}: {looked}"]
    for subject, finding in problems:
        lines += _wrapped(f"{subject}, {finding.what}: {finding.found}", "  ", "    ")
        lines += _wrapped(finding.advice, "    -> ", "       ")
    return lines


def as_json(looked: Sequence[Looked], findings: Sequence[tuple[str, Finding]], about: dict[str, Any]) -> str:
    """Return `about` the call, the findings of all ranks together, and those of each rank."""
    worst = max((finding.level for _, finding in findings), key=LEVELS.index, default="ok")
    ranks = [{"rank": each.rank, "host": each.host, "findings": [_row(*pair) for pair in each.findings]} for each in looked]
    return json.dumps(about | {"worst": worst, "findings": [_row(*pair) for pair in findings], "ranks": ranks}, indent=1) + "\n"


def _row(subject: str, finding: Finding) -> dict[str, str]:
    return {"subject": subject} | {name: getattr(finding, name) for name in ("what", "level", "found", "advice")}
