"""The tree and the picture: every run once, below and to the right of its parent."""

import io

import manifests
import pytest
from manifests import TOY, graph

from megaenc.errors import InputError
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.dag import build_graph
from megaenc.study.plan.render_dag import draw_graph, format_tree, layout_rows


def test_the_tree_says_where_each_run_begins_and_what_it_makes(tmp_path):
    entries = [
        {"size": "toy", "steps": 400, "clm_share": 1.0, "checkpoints": [50, 200]},
        TOY | {"steps": [200, 400], "clm_steps": 100},
        {"size": "toy", "steps": 200, "clm_share": 1.0, "evaluate": False},
        {"after": "toy-clm-400", "steps": [20, 120], "mask": 0.2},
        {"size": "toy", "steps": 400, "name": "turns", "schedule": "2x(mlm:100,clm:100)"},
    ]
    assert (
        "\n".join(line.rstrip() for line in format_tree(graph(tmp_path, *entries)))
        == """\
toy:
  toy-clm-400                                         +400  CLM to 400  also evaluated at 50 200
  ├─ toy-clm-dec400-mlm20-520  after its 400          +120  MLM 20 % to 120
  ├─ toy-clm-dec400-mlm20-420  after its 400           +20  MLM 20 % to 20, decay only
  ├─ toy-clm-200               from step 180           +20  CLM to 200, decay only  (not evaluated)
  └─ toy-clm-100-mlm40-400     from step 100          +300  MLM 40 % to 400
     └─ toy-clm-100-mlm40-200  from step 180           +20  MLM 40 % to 200, decay only
  turns                                               +400  MLM 40 % to 100, CLM to 200, \
MLM 40 % to 300, ... 1 more to 400"""
    )


def test_phases_with_other_options_than_the_mask_ratio_keep_them(tmp_path):
    schedule = "mlm(mask=0.3):100,mlm(span=3):100,mntp(mask=0.4->0.2):100"
    entry = {"size": "toy", "steps": 300, "name": "spans", "schedule": schedule}
    (line,) = [line for line in format_tree(graph(tmp_path, entry)) if "spans" in line]
    assert line.endswith("MLM 30 % to 100, mlm(span=3.0) to 200, mntp(mask=0.4->0.2) to 300")


def test_no_line_to_a_branch_crosses_a_bar():
    plan = build_graph(read_manifest(manifests.STUDY / "paper.yaml"))
    rows = layout_rows(plan)
    assert sorted(row.run.name for row in rows) == sorted(plan.runs)
    for number, row in enumerate(rows):
        if row.parent is None:
            assert row.start == 0 and row.end == row.run.steps
            continue
        parent = rows[row.parent]
        assert parent.run.name == row.run.parent and parent.start < row.start <= parent.end
        assert row.end == row.start + row.run.steps
        for between in rows[row.parent + 1 : number]:
            assert row.start <= between.start or row.start >= between.end


def test_the_picture_names_every_run_once_and_every_objective(tmp_path):
    plan = graph(tmp_path)
    drawn = draw_graph(plan, "a study")
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert sorted(texts) == sorted(plan.runs)
    (legend,) = drawn.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[:2] == ["CLM", "MLM 40 %"] and len(labels) == 4  # and both ways to begin
    drawn.savefig(io.BytesIO(), format="svg")


def test_thousands_of_phases_are_not_drawn(tmp_path):
    plan = graph(
        tmp_path, {"size": "toy", "steps": 6000, "schedule": "3000x(clm:1,mlm:1)", "name": "turns"}
    )
    with pytest.raises(
        InputError, match=r"--picture: .*study.yaml has 6,000 phases, expected at most 5,000"
    ):
        draw_graph(plan, "many")
