"""Findings of several ranks, merged and printed as a page."""

import json
import pickle
from dataclasses import asdict, replace

import pytest

from megaenc.doctor.report import WIDTH, RankFindings, format_report, merge_findings, parse_findings
from megaenc.doctor.result import note, ok, problem


def rank_findings(rank, *findings, scope="rank"):
    """Return the findings of one of two ranks per node, with one of its own."""
    complete = [
        replace(each, subject="versions", scope=scope) for each in (ok("megaenc", "1"), *findings)
    ]
    return RankFindings(rank, f"node{rank // 2}", complete)


def merged(*ranks):
    return [
        replace(finding, subject="", scope="")
        for finding in merge_findings(ranks)
        if finding.name != "megaenc"
    ]


def torch(version):
    return ok("torch", version, mismatch_level="problem")


DIFFERS = "ranks differ: configure all nodes alike"
BROKEN = problem("sdpa", "off by 1", "do")
RIGHT = ok("sdpa", "right")
SPLIT = problem("sdpa", "off by 2", "do that")
APEX = ok("apex", "1", mismatch_level="note")
NOISY = note("NCCL_DEBUG", "INFO", "unset it", mismatch_level="note")


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([[torch("2"), note("x", "y", "z")]], [torch("2"), note("x", "y", "z")]),
        # The odd one out, also if it is rank 0; of two that differ rank 0's counts.
        (
            [[torch("1")], [torch("2")], [torch("2")]],
            [torch("2"), problem("torch elsewhere", "1 on rank 0 (node0)", DIFFERS)],
        ),
        (
            [[torch("b")], [torch("a")]],
            [torch("b"), problem("torch elsewhere", "a on rank 1 (node0)", DIFFERS)],
        ),
        (
            [[APEX], [], [APEX]],
            [APEX, note("apex elsewhere", "nothing on rank 1 (node0)", DIFFERS)],
        ),
        (
            [[], [APEX], []],
            [APEX, note("apex elsewhere", "nothing on rank 0, 2 (node0, node1)", DIFFERS)],
        ),
        (
            [[APEX], [problem("apex", "broken", "mend it", mismatch_level="note")]],
            [APEX, problem("apex elsewhere", "broken on rank 1 (node0)", "mend it")],
        ),
        (
            [[NOISY], [NOISY], []],
            [
                replace(NOISY, result="INFO on rank 0-1 (node0)"),
                note("NCCL_DEBUG elsewhere", "nothing on rank 2 (node1)", DIFFERS),
            ],
        ),
        # Figures may differ.
        ([[ok("writing", "1 MB/s")], [ok("writing", "2 MB/s")]], [ok("writing", "1 MB/s")]),
        (
            [[RIGHT], [RIGHT], [BROKEN]],
            [RIGHT, problem("sdpa elsewhere", "off by 1 on rank 2 (node1)", "do")],
        ),
        ([[BROKEN], [BROKEN]], [BROKEN]),
        (
            [[BROKEN], [BROKEN], [RIGHT]],
            [RIGHT, problem("sdpa elsewhere", "off by 1 on rank 0-1 (node0)", "do")],
        ),
        (
            [[BROKEN], [SPLIT]],
            [
                replace(BROKEN, result="off by 1 on rank 0 (node0)"),
                problem("sdpa elsewhere", "off by 2 on rank 1 (node0)", "do that"),
            ],
        ),
    ],
)
def test_findings_of_ranks_are_merged(by_rank, expected):
    assert (
        merged(*(rank_findings(rank, *findings) for rank, findings in enumerate(by_rank)))
        == expected
    )


def test_what_one_rank_of_a_node_has_looked_at_is_not_missed_on_the_others():
    processor = ok("processor", "EPYC", mismatch_level="note")
    ranks = [rank_findings(0, processor, scope="node"), rank_findings(1)]
    assert merged(*ranks) == [processor]
    ranks += [rank_findings(2, replace(processor, result="Xeon"), scope="node"), rank_findings(3)]
    assert merged(*ranks) == [
        processor,
        note("processor elsewhere", "Xeon on rank 2 (node1)", DIFFERS),
    ]


def test_findings_come_back_as_they_were_but_for_what_steers_a_terminal():
    sent = json.dumps(
        asdict(rank_findings(3, torch("2"), problem("x", "\x1b[2Jgone\n", "y")))
    ).encode()
    assert parse_findings(sent, 3) == rank_findings(
        3, torch("2"), problem("x", r"\x1b[2Jgone\n", "y")
    )
    assert parse_findings(sent, 1).rank == 1, "a rank cannot speak for another"


ROW = {
    "subject": "disk",
    "name": "a",
    "result": "b",
    "level": "ok",
    "advice": "",
    "mismatch_level": "ok",
    "scope": "",
}
SENT = {"host": "a", "findings": [ROW]}


@pytest.mark.parametrize(
    "content",
    [
        SENT | {"findings": None},
        SENT | {"findings": [["disk", ROW]]},
        SENT | {"findings": [ROW | {"level": "fatal"}]},
        SENT | {"findings": [ROW | {"mismatch_level": "fatal"}]},
        SENT | {"findings": [ROW | {"result": ["b"]}]},
        SENT | {"findings": [ROW | {"more": "b"}]},
        SENT | {"findings": [{"name": "a"}]},
        SENT | {"findings": [ROW | {"result": "b" * (1 << 20)}]},
        SENT | {"host": None},
        {},
        [],
        pickle.dumps(ROW),
        b"",
        b"[" * 100_000,
    ],
)
def test_what_is_no_finding_is_refused(content):
    parse_findings(json.dumps(SENT).encode(), 1)
    with pytest.raises(ValueError, match=r"."):
        parse_findings(content if isinstance(content, bytes) else json.dumps(content).encode(), 1)


LONG = (
    "so many words that they do not fit into one line of the page, however wide that page may be, "
    "so that it goes on below"
)
FINDINGS = [
    replace(ok("space", "1 GiB"), subject="disk"),
    replace(problem("torch", LONG, LONG), subject="versions"),
    replace(
        note("a name that is much longer than others are", "found", "do this"), subject="versions"
    ),
]


def test_subjects_stand_in_order_and_problems_again_at_the_end():
    lines = format_report(FINDINGS).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert [line for line in lines if line in ("versions", "machine", "disk")] == [
        "versions",
        "disk",
    ]
    end = lines[lines.index("1 problem: 3 findings, 1 note") + 1 :]
    assert " ".join(line.strip() for line in end) == f"versions, torch: {LONG} -> {LONG}"
    assert format_report(FINDINGS[:1]).splitlines()[-1] == "no problem: 1 finding, 0 notes"
