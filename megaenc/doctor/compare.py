"""What all ranks have found, laid over each other: said once where they agree, with the odd ones named where they do not."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megaenc.console import printable
from megaenc.doctor.findings import LEVELS, Finding, Level
from megaenc.doctor.ranks import named
from megaenc.json_files import parse_json

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
    """The findings of all, in the order of the first that has each; of one rank alone they stay as they are."""
    found: dict[tuple[str, str], dict[int, Finding]] = {}
    for each in looked:
        for subject, finding in each.findings:
            found.setdefault((subject, finding.what), {})[each.rank] = finding
    hosts = {each.rank: each.host for each in looked}
    merged: list[tuple[str, Finding]] = []
    for (subject, what), by_rank in found.items():
        first = next(iter(by_rank.values()))
        for each in looked:
            if _compared(by_rank) and each.rank not in by_rank and (subject, first.where) in each.looked_at:
                by_rank[each.rank] = Finding(what, "nothing", alike=first.alike, where=first.where)
        merged += [(subject, finding) for finding in _merged(by_rank, hosts)]
    return merged


def _compared(by_rank: dict[int, Finding]) -> bool:
    return any(finding.alike != "ok" for finding in by_rank.values())


def _merged(by_rank: dict[int, Finding], hosts: dict[int, str]) -> list[Finding]:
    """One finding where all ranks say the same or need not; otherwise that of most, and one for those which differ."""
    first = by_rank[min(by_rank)]
    if _compared(by_rank):
        counted = Counter(finding.found for finding in by_rank.values())
        usual = max(counted, key=lambda text: (counted[text], text == first.found))
        of_most = next(by_rank[rank] for rank in sorted(by_rank) if by_rank[rank].found == usual)
        odd = {rank: finding for rank, finding in by_rank.items() if finding.found != usual}
        return [of_most, *([_odd(of_most, odd, hosts)] if odd else [])]
    worse = {rank: finding for rank, finding in by_rank.items() if finding.level != "ok"}
    if len({(finding.found, finding.level) for finding in by_rank.values()}) == 1:
        return [first]
    return [*([first] if first.level == "ok" else []), *_named(worse, hosts)]


def _odd(usual: Finding, odd: dict[int, Finding], hosts: dict[int, str]) -> Finding:
    by_text: dict[str, list[int]] = {}
    for rank, finding in odd.items():
        by_text.setdefault(finding.found, []).append(rank)
    parts = [f"{text} on rank {_place(ranks, hosts)}" for text, ranks in list(by_text.items())[:_SHOWN]]
    parts += [f"{len(by_text) - _SHOWN} others"] if len(by_text) > _SHOWN else []
    levels: list[Level] = [usual.alike, *(finding.level for finding in odd.values())]
    advice = next((finding.advice for finding in odd.values() if finding.advice), "") or "ranks differ: give all nodes the same"
    return Finding(f"{usual.what} elsewhere", "; ".join(parts), max(levels, key=LEVELS.index), advice)


def _named(found: dict[int, Finding], hosts: dict[int, str]) -> list[Finding]:
    """A finding for each text, with the ranks that have it."""
    by_text: dict[tuple[str, str], list[int]] = {}
    for rank, finding in found.items():
        by_text.setdefault((finding.found, finding.level), []).append(rank)
    merged = []
    for ranks in list(by_text.values())[:_SHOWN]:
        finding = found[ranks[0]]
        merged.append(replace(finding, what=f"{finding.what}, rank {named(ranks)}", found=f"{finding.found} ({hosts[ranks[0]]})"))
    return merged


def _place(ranks: list[int], hosts: dict[int, str]) -> str:
    return f"{named(ranks)} ({', '.join(dict.fromkeys(hosts[rank] for rank in ranks))})"
