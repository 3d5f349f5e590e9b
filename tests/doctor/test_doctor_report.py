"""The page of findings and its JSON."""

import json
from dataclasses import replace

from megaenc.doctor.report import WIDTH, RankFindings, format_json, format_report
from megaenc.doctor.result import note, ok, problem

LONG = "so many words that they do not fit into one line of the page, however wide that page may be, so that it goes on below"
FINDINGS = [
    replace(ok("space", "1 GiB"), subject="disk"),
    replace(problem("torch", LONG, LONG), subject="versions"),
    replace(note("a name that is much longer than others are", "found", "do this"), subject="versions"),
]
SUBJECTS = ("versions", "machine", "disk")


def test_subjects_stand_in_order_and_problems_again_at_the_end():
    lines = format_report(FINDINGS, SUBJECTS).splitlines()
    assert [line for line in lines if line in SUBJECTS] == ["versions", "disk"]
    assert "1 problem: 3 findings, 1 note" in lines
    end = " ".join(line.strip() for line in lines[lines.index("1 problem: 3 findings, 1 note") + 1 :])
    assert end == f"versions, torch: {LONG} -> {LONG}"


def test_no_line_is_too_long_and_what_is_found_is_aligned():
    lines = format_report(FINDINGS, SUBJECTS).splitlines()
    assert max(map(len, lines)) <= WIDTH
    torch = next(line for line in lines if "torch" in line)
    following = lines[lines.index(torch) + 1]
    assert len(following) - len(following.lstrip()) == torch.index("so many")


def test_without_problems_that_is_what_is_said():
    assert format_report(FINDINGS[:1], SUBJECTS).splitlines()[-1] == "no problem: 1 finding, 0 notes"


def test_json_holds_what_each_rank_found():
    rank_findings = [RankFindings(0, "a", tuple(FINDINGS), frozenset()), RankFindings(1, "b", (), frozenset())]
    read = json.loads(format_json(rank_findings, FINDINGS, {"command": "--only disk"}))
    assert read["command"] == "--only disk" and read["worst"] == "problem"
    assert read["findings"][0] == {"subject": "disk", "what": "space", "level": "ok", "found": "1 GiB", "advice": ""}
    assert [(rank["host"], len(rank["findings"])) for rank in read["ranks"]] == [("a", 3), ("b", 0)]
