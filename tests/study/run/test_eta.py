"""The time that a study still takes follows what its stages took here."""

from dataclasses import replace

import manifests
from fake_stages import FakeStage

from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.dag import build_graph
from megaenc.study.run import stage_log
from megaenc.study.run.stage_log import EtaEstimator


def test_time_left_follows_what_was_measured(tmp_path):
    nodes = [FakeStage(f"pretrain/{number}", tmp_path, work=number, planned_seconds=1.0 * number) for number in (1, 2, 4)]
    remaining = EtaEstimator(nodes, tmp_path)
    assert remaining.remaining_seconds(1) == 7 and remaining.remaining_seconds(7) == 4
    remaining.record_duration(nodes[0], 10.0)
    assert remaining.remaining_seconds(1) == 60 and remaining.remaining_seconds(2) == 40
    remaining.record_progress(nodes[2], 0.75)
    assert remaining.remaining_seconds(1) == 30
    unknown = [*nodes, FakeStage("export/x", tmp_path, planned_seconds=None)]
    assert EtaEstimator(unknown, tmp_path).remaining_seconds(1) is None


def test_what_was_killed_on_the_way_says_nothing_of_the_whole(tmp_path):
    """Ten hours and a kill, of which no end is known; the six minutes that were left are not what such a run takes."""
    nodes = [FakeStage("pretrain/a", tmp_path), FakeStage("pretrain/b", tmp_path, planned_seconds=36_000.0)]
    log = stage_log.log_path(tmp_path, "pretrain/a")
    log.parent.mkdir(parents=True)
    begin, end = "==> 2026-01-01T10:00:00Z $ x\n", "<== 2026-01-01T10:06:00Z finished\n"
    log.write_text("==> 2026-01-01T00:00:00Z $ x\n" + begin + end)
    nodes[0].made.touch()
    assert EtaEstimator(nodes, tmp_path).remaining_seconds(1) == 36_000
    log.write_text("==> 2026-01-01T00:00:00Z $ x\n<== 2026-01-01T09:54:00Z stopped\n" + begin + end)
    assert EtaEstimator(nodes, tmp_path).remaining_seconds(1) == 36_000
    assert EtaEstimator([nodes[0], replace(nodes[1], work=0.5)], tmp_path).remaining_seconds(1) == 18_000


def test_a_part_of_a_stage_is_credited_with_a_part_of_its_work(tmp_path):
    nodes = [FakeStage("pretrain/a", tmp_path), FakeStage("pretrain/b", tmp_path)]
    remaining = EtaEstimator(nodes, tmp_path)
    remaining.record_duration(nodes[0], 360.0, 0.01)
    assert remaining.remaining_seconds(1) == 36_000


def test_the_plans_time_is_that_of_the_processes_that_train(tmp_path):
    hardware = {"devices": 4, "tokens_per_second": 1000}
    manifest = read_manifest(manifests.write(tmp_path, hardware=hardware))
    planned = [build_graph(manifest, processes=count).runs["toy-clm-400"].planned_seconds for count in (0, 4, 1)]
    assert planned[0] == planned[1] == planned[2] / 4 > 0
