"""The study's statistics, on printed numbers or those worked out by hand."""

import math
import statistics

import pytest
import trees
from scipy import stats

from megaenc.finetune.results import aggregate
from megaenc.finetune.results.files import read_result_tree

PRINTED = [0.9102, 0.9154, 0.9137, 0.9200, 0.9233]  # 610M MLM-40 on MS MARCO: 91.65 (0.45)


def test_intervals():
    """That which the study printed, scipy's, and none of one score."""
    found = aggregate.compute_interval(PRINTED)
    assert f"{100 * found.mean:.2f} ({100 * found.half:.2f})" == "91.65 (0.45)"
    low, high = stats.t.interval(0.95, 4, loc=statistics.mean(PRINTED), scale=stats.sem(PRINTED))
    found = aggregate.compute_interval(PRINTED, "t")
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx(
        (low, high), abs=1e-12
    )
    found = aggregate.compute_interval([0.5])
    assert found.mean == 0.5 and math.isnan(found.half)


def cells(root):
    return {
        (cell.model, cell.dataset): cell for cell in aggregate.group_cells(read_result_tree(root))
    }


def test_the_rate_is_chosen_by_the_mean_on_validation(tmp_path):
    for seed in range(2):  # the better one on test does not count
        trees.published(tmp_path, "toy", "SC/sst2", 1e-5, seed, [0.80, 0.90][seed], 0.3)
        trees.published(tmp_path, "toy", "SC/sst2", 2e-5, seed, [0.95, 0.70][seed], 0.9)
    cell = cells(tmp_path)["toy", "sst2"]
    assert cell.chosen_rate == 1e-5
    assert aggregate.average_by_seed([cell]) == {0: 0.3, 1: 0.3}
    assert cell.scores_by_rate("accuracy") == {}  # which these files lack


def test_a_rate_that_lacks_a_seed_is_named_with_what_it_would_have_been(tmp_path):
    """On the seeds of both rates: 0.9 and 0.55; a failed run is no missing one."""
    rates = {
        1e-5: [0.5, 0.6, 0.1],
        2e-5: [0.9, None, None],
        5e-5: [0.55, 0.58, 0.2],
        1e-4: [0.1, None, 0.1],
    }
    trees.cell(tmp_path, "toy", "SC/sst2", rates)
    trees.cell(tmp_path, "other", "SC/sst2", {2e-4: [0.5]})
    failed = tmp_path / "toy/SC/sst2/lr1e-04_sd1"
    failed.mkdir()
    (failed / "failed.json").write_text('{"reason": "the loss is nan"}')
    cell = cells(tmp_path)["toy", "sst2"]
    found = cell.find_incomplete_rates()
    assert cell.chosen_rate == 5e-5 and [(one.rate, one.missing_seeds) for one in found] == [
        (2e-5, (1, 2)),
        (2e-4, (0, 1, 2)),
    ]
    assert found[0].validation_lead == pytest.approx(0.35) and found[1].validation_lead is None
    unchosen = cells(tmp_path)["other", "sst2"].find_incomplete_rates()
    assert [one.missing_seeds for one in unchosen] == [(0, 1, 2)] * 4 + [(1, 2)]
    assert {one.validation_lead for one in unchosen} == {None}


def test_a_model_that_has_not_got_so_far_is_not_whole(tmp_path):
    """Each model needs all that is asked for, else it would be the best of fewer."""
    trees.cell(tmp_path, "done", "SC/sst2", {1e-5: [0.5, 0.6, 0.7], 2e-5: [0.6, 0.7, 0.8]})
    trees.cell(tmp_path, "begun", "SC/sst2", {1e-5: [0.5, 0.6]})
    trees.cell(tmp_path, "half", "SC/sst2", {1e-5: [0.5, 0.6, 0.7]})
    trees.cell(tmp_path, "begun", "SC/other", {1e-5: [0.5, 0.6]})
    found = cells(tmp_path)
    assert (
        found["begun", "sst2"].chosen_rate is None and found["begun", "other"].chosen_rate == 1e-5
    )
    assert found["half", "sst2"].chosen_rate == 1e-5 and (
        len(found["half", "sst2"].runs),
        found["half", "sst2"].planned_run_count,
    ) == (3, 6)


def test_the_grid_that_was_asked_for_is_all_that_counts(tmp_path):
    trees.cell(tmp_path, "toy", "SC/sst2", {1e-5: [0.5, 0.6, 0.9], 2e-5: [0.8, 0.9, 0.9]})
    [cell] = aggregate.group_cells(
        read_result_tree(tmp_path), aggregate.GridSpec((1e-5, 5e-5), (0, 1))
    )
    assert cell.chosen_rate == 1e-5 and aggregate.average_by_seed([cell]) == {0: 0.5, 1: 0.6}
    assert (len(cell.runs), cell.planned_run_count, cell.rates) == (2, 4, (1e-5, 5e-5))
    [cell] = aggregate.group_cells(
        read_result_tree(tmp_path), aggregate.GridSpec((1e-5,), (0, 1, 2, 3))
    )
    assert cell.chosen_rate is None


def test_of_equal_rates_the_lower_is_chosen_and_none_of_incomplete_ones(tmp_path):
    trees.cell(tmp_path, "toy", "SC/sst2", {1e-5: [0.5, 0.6], 2e-5: [0.6, 0.5]})
    trees.cell(tmp_path, "toy", "SC/other", {1e-5: [0.5, None], 2e-5: [None, 0.5]})
    assert cells(tmp_path)["toy", "sst2"].chosen_rate == 1e-5
    cell = cells(tmp_path)["toy", "other"]
    assert cell.chosen_rate is None and aggregate.average_by_seed([cell]) is None
    assert aggregate.compute_sensitivity(cell.scores_by_rate(), cell.seeds) is None


def test_the_average_is_formed_by_seed(tmp_path):
    """Opposite scores: their average hardly varies, though each does."""
    trees.cell(tmp_path, "toy", "SC/a", {1e-5: [0.1, 0.2, 0.3]})
    trees.cell(tmp_path, "toy", "SC/b", {2e-5: [0.5, 0.4, 0.3]})
    found = aggregate.average_by_seed(list(cells(tmp_path).values()))
    assert found == pytest.approx({0: 0.3, 1: 0.3, 2: 0.3})
    assert aggregate.compute_interval(list(found.values())).half == pytest.approx(0, abs=1e-12)
    trees.cell(tmp_path, "toy", "SC/c", {2e-5: [0.5, 0.4]})  # of other seeds
    assert aggregate.average_by_seed(list(cells(tmp_path).values())) is None


def test_the_average_is_over_the_studys_three_where_they_are_there(tmp_path):
    for name in ("squad", "qed", "squad_v2"):
        trees.cell(tmp_path, "toy", f"QA/{name}", {1e-5: [0.5]})
    found = list(cells(tmp_path).values())
    assert aggregate.group_for_averages("QA", found) == [found]
    trees.cell(tmp_path, "toy", "QA/record", {1e-5: [0.5]})
    [found] = aggregate.group_for_averages("QA", list(cells(tmp_path).values()))
    assert [cell.dataset for cell in found] == ["squad", "squad_v2", "record"]


def test_sensitivity_to_the_learning_rate(tmp_path):
    trees.cell(
        tmp_path,
        "toy",
        "SC/sst2",
        {1e-5: [0.80, 0.90], 2e-5: [0.84, 0.84], 5e-5: [0.20, 0.30], 1e-4: [0.83, None]},
    )
    cell = cells(tmp_path)["toy", "sst2"]
    found = aggregate.compute_sensitivity(cell.scores_by_rate(), cell.seeds)
    assert found.means == pytest.approx({1e-5: 0.85, 2e-5: 0.84, 5e-5: 0.25})
    assert found.spread == pytest.approx(0.6) and found.count_near_best() == 2
