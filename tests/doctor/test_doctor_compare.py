"""What ranks have found, laid over each other."""

import json
import pickle
from dataclasses import replace

import pytest

from megaenc.doctor.report import RankFindings, from_json, to_json, together
from megaenc.doctor.result import note, ok, problem


def looked(rank, *findings, where="rank"):
    """Two ranks a node."""
    found = tuple(replace(each, subject="versions", where=where) for each in findings)
    return RankFindings(rank, f"node{rank // 2}", found, frozenset({("versions", where)}))


def by_name(*ranks):
    return {finding.what: replace(finding, subject="", where="") for finding in together(ranks)}


def test_one_rank_is_itself():
    findings = (ok("torch", "2.13.0", alike="problem"), note("x", "y", "z"))
    assert list(by_name(looked(0, *findings)).values()) == list(findings)


def test_what_all_have_is_said_once():
    found = by_name(*(looked(rank, ok("torch", "2.13.0", alike="problem")) for rank in range(4)))
    assert found == {"torch": ok("torch", "2.13.0", alike="problem")}


def test_the_odd_one_out_is_named_even_if_it_is_rank_0():
    theirs = [looked(rank, ok("torch", "2.13.0" if rank else "2.11.0", alike="problem")) for rank in range(4)]
    found = by_name(*theirs)
    assert found["torch"].found == "2.13.0"
    odd = found["torch elsewhere"]
    assert (odd.level, odd.found) == ("problem", "2.11.0 on rank 0 (node0)")
    assert odd.advice


def test_of_two_that_differ_rank_0_s_counts():
    found = by_name(looked(0, ok("torch", "b", alike="problem")), looked(1, ok("torch", "a", alike="problem")))
    assert found["torch"].found == "b" and found["torch elsewhere"].found == "a on rank 1 (node0)"


def test_a_package_that_is_missing_on_a_rank_is_another_version():
    found = by_name(looked(0, ok("apex", "1.0", alike="note")), looked(1), looked(2, ok("apex", "1.0", alike="note")))
    assert (found["apex elsewhere"].level, found["apex elsewhere"].found) == ("note", "nothing on rank 1 (node0)")


def test_what_one_rank_of_a_node_has_looked_at_is_not_missed_on_the_others():
    theirs = [looked(0, ok("processor", "EPYC", alike="note"), where="node"), looked(1)]
    assert set(by_name(*theirs)) == {"processor"}
    theirs += [looked(2, ok("processor", "Xeon", alike="note"), where="node"), looked(3)]
    assert by_name(*theirs)["processor elsewhere"].found == "Xeon on rank 2 (node1)"


def test_figures_may_differ_and_those_of_rank_0_stand():
    found = by_name(*(looked(rank, ok("writing", f"{rank} MB/s")) for rank in range(4)))
    assert found == {"writing": ok("writing", "0 MB/s")}


def test_what_is_bad_on_one_rank_alone_is_told_with_it():
    found = by_name(looked(0, ok("sdpa", "right")), looked(1, problem("sdpa", "off by 1", "do")), looked(2, ok("sdpa", "right")))
    assert found["sdpa"].level == "ok"
    assert (found["sdpa, rank 1"].level, found["sdpa, rank 1"].found) == ("problem", "off by 1 (node0)")


def test_what_is_bad_everywhere_is_told_once():
    found = by_name(*(looked(rank, problem("sdpa", "off by 1", "do")) for rank in range(3)))
    assert found == {"sdpa": problem("sdpa", "off by 1", "do")}


def test_what_is_bad_on_every_node_is_told_once():
    theirs = [
        looked(0, note("swap", "full", "see"), where="node"),
        looked(1),
        looked(2, note("swap", "full", "see"), where="node"),
    ]
    assert by_name(*theirs) == {"swap": note("swap", "full", "see")}


def test_a_problem_of_the_odd_one_stays_a_problem():
    found = by_name(looked(0, ok("apex", "1", alike="note")), looked(1, problem("apex", "broken", "mend it", alike="note")))
    assert (found["apex elsewhere"].level, found["apex elsewhere"].advice) == ("problem", "mend it")


def test_findings_come_back_as_they_were_but_for_what_steers_a_terminal():
    given = looked(3, ok("torch", "2.13.0", alike="problem"), problem("x", "\x1b[2Jgone\n", "y"))
    back = from_json(to_json(given).encode(), 3)
    assert back == looked(3, ok("torch", "2.13.0", alike="problem"), problem("x", r"\x1b[2Jgone\n", "y"))
    assert from_json(to_json(given).encode(), 1).rank == 1, "a rank cannot speak for another"


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


ROW = {"subject": "disk", "what": "a", "found": "b", "level": "ok", "advice": "", "alike": "ok", "where": ""}


@pytest.mark.parametrize(
    ("findings", "more"),
    [
        (None, {}),
        (["disk"], {}),
        ([["disk", ROW]], {}),
        ([ROW | {"subject": 1}], {}),
        ([ROW | {"level": "fatal"}], {}),
        ([ROW | {"found": ["b"]}], {}),
        ([{"what": "a"}], {}),
        ([ROW], {"host": None}),
        ([ROW], {"looked_at": [["disk", {}]]}),
        ([ROW | {"found": "b" * (1 << 20)}], {}),
    ],
)
def test_what_is_no_finding_is_refused(findings, more):
    from_json(json.dumps({"host": "a", "findings": [ROW], "looked_at": []}).encode(), 1)
    with pytest.raises(ValueError, match=r"."):
        from_json(json.dumps({"host": "a", "findings": findings, "looked_at": []} | more).encode(), 1)


def test_code_from_the_store_does_not_run(tmp_path):
    for content in (pickle.dumps(Attack(tmp_path / "ran")), b"", b"[" * 100_000, b"{}", b"3"):
        with pytest.raises(ValueError, match=r"."):
            from_json(content, 1)
    assert not (tmp_path / "ran").exists()
