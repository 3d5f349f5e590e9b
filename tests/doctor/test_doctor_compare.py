"""What ranks have found, laid over each other."""

import json
import pickle
from dataclasses import replace

import pytest

from megaenc.doctor.report import RankFindings, merge_findings, parse_findings, serialize_findings
from megaenc.doctor.result import note, ok, problem


def rank_findings(rank, *findings, scope="rank"):
    """Return findings of one of two ranks per node."""
    by_name = tuple(replace(each, subject="versions", scope=scope) for each in findings)
    return RankFindings(rank, f"node{rank // 2}", by_name, frozenset({("versions", scope)}))


def by_name(*ranks):
    return {finding.name: replace(finding, subject="", scope="") for finding in merge_findings(ranks)}


def test_one_rank_is_itself():
    findings = (ok("torch", "2.13.0", mismatch_level="problem"), note("x", "y", "z"))
    assert list(by_name(rank_findings(0, *findings)).values()) == list(findings)


def test_what_all_have_is_said_once():
    findings = by_name(*(rank_findings(rank, ok("torch", "2.13.0", mismatch_level="problem")) for rank in range(4)))
    assert findings == {"torch": ok("torch", "2.13.0", mismatch_level="problem")}


def test_the_odd_one_out_is_named_even_if_it_is_rank_0():
    theirs = [rank_findings(rank, ok("torch", "2.13.0" if rank else "2.11.0", mismatch_level="problem")) for rank in range(4)]
    findings = by_name(*theirs)
    assert findings["torch"].result == "2.13.0"
    odd = findings["torch elsewhere"]
    assert (odd.level, odd.result) == ("problem", "2.11.0 on rank 0 (node0)")
    assert odd.advice


def test_of_two_that_differ_rank_0_s_counts():
    findings = by_name(
        rank_findings(0, ok("torch", "b", mismatch_level="problem")), rank_findings(1, ok("torch", "a", mismatch_level="problem"))
    )
    assert findings["torch"].result == "b" and findings["torch elsewhere"].result == "a on rank 1 (node0)"


def test_a_package_that_is_missing_on_a_rank_is_another_version():
    findings = by_name(
        rank_findings(0, ok("apex", "1.0", mismatch_level="note")),
        rank_findings(1),
        rank_findings(2, ok("apex", "1.0", mismatch_level="note")),
    )
    assert (findings["apex elsewhere"].level, findings["apex elsewhere"].result) == ("note", "nothing on rank 1 (node0)")


def test_what_one_rank_of_a_node_has_looked_at_is_not_missed_on_the_others():
    theirs = [rank_findings(0, ok("processor", "EPYC", mismatch_level="note"), scope="node"), rank_findings(1)]
    assert set(by_name(*theirs)) == {"processor"}
    theirs += [rank_findings(2, ok("processor", "Xeon", mismatch_level="note"), scope="node"), rank_findings(3)]
    assert by_name(*theirs)["processor elsewhere"].result == "Xeon on rank 2 (node1)"


def test_figures_may_differ_and_those_of_rank_0_stand():
    findings = by_name(*(rank_findings(rank, ok("writing", f"{rank} MB/s")) for rank in range(4)))
    assert findings == {"writing": ok("writing", "0 MB/s")}


def test_what_is_bad_on_one_rank_alone_is_told_with_it():
    findings = by_name(
        rank_findings(0, ok("sdpa", "right")),
        rank_findings(1, problem("sdpa", "off by 1", "do")),
        rank_findings(2, ok("sdpa", "right")),
    )
    assert findings["sdpa"].level == "ok"
    assert (findings["sdpa, rank 1"].level, findings["sdpa, rank 1"].result) == ("problem", "off by 1 (node0)")


def test_what_is_bad_everywhere_is_told_once():
    findings = by_name(*(rank_findings(rank, problem("sdpa", "off by 1", "do")) for rank in range(3)))
    assert findings == {"sdpa": problem("sdpa", "off by 1", "do")}


def test_what_is_bad_on_every_node_is_told_once():
    theirs = [
        rank_findings(0, note("swap", "full", "see"), scope="node"),
        rank_findings(1),
        rank_findings(2, note("swap", "full", "see"), scope="node"),
    ]
    assert by_name(*theirs) == {"swap": note("swap", "full", "see")}


def test_a_problem_of_the_odd_one_stays_a_problem():
    findings = by_name(
        rank_findings(0, ok("apex", "1", mismatch_level="note")),
        rank_findings(1, problem("apex", "broken", "mend it", mismatch_level="note")),
    )
    assert (findings["apex elsewhere"].level, findings["apex elsewhere"].advice) == ("problem", "mend it")


def test_findings_come_back_as_they_were_but_for_what_steers_a_terminal():
    flags = rank_findings(3, ok("torch", "2.13.0", mismatch_level="problem"), problem("x", "\x1b[2Jgone\n", "y"))
    back = parse_findings(serialize_findings(flags).encode(), 3)
    assert back == rank_findings(3, ok("torch", "2.13.0", mismatch_level="problem"), problem("x", r"\x1b[2Jgone\n", "y"))
    assert parse_findings(serialize_findings(flags).encode(), 1).rank == 1, "a rank cannot speak for another"


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


ROW = {"subject": "disk", "name": "a", "result": "b", "level": "ok", "advice": "", "mismatch_level": "ok", "scope": ""}


@pytest.mark.parametrize(
    ("findings", "more"),
    [
        (None, {}),
        (["disk"], {}),
        ([["disk", ROW]], {}),
        ([ROW | {"subject": 1}], {}),
        ([ROW | {"level": "fatal"}], {}),
        ([ROW | {"result": ["b"]}], {}),
        ([{"name": "a"}], {}),
        ([ROW], {"host": None}),
        ([ROW], {"probed_scopes": [["disk", {}]]}),
        ([ROW | {"result": "b" * (1 << 20)}], {}),
    ],
)
def test_what_is_no_finding_is_refused(findings, more):
    parse_findings(json.dumps({"host": "a", "findings": [ROW], "probed_scopes": []}).encode(), 1)
    with pytest.raises(ValueError, match=r"."):
        parse_findings(json.dumps({"host": "a", "findings": findings, "probed_scopes": []} | more).encode(), 1)


def test_code_from_the_store_does_not_run(tmp_path):
    for content in (pickle.dumps(Attack(tmp_path / "ran")), b"", b"[" * 100_000, b"{}", b"3"):
        with pytest.raises(ValueError, match=r"."):
            parse_findings(content, 1)
    assert not (tmp_path / "ran").exists()
