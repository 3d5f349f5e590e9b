"""What a real run writes is what the picture and the summary read."""

import shutil

import pytest
import runs

from megaenc.viz import plot, run_summary


def test_a_run_can_be_drawn_and_summed_up(small_corpus, tmp_path):
    run = tmp_path / "run"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--train-iters", "4", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1"]
    runs.script(runs.PRETRAIN, [*flags, "--eval-interval", "2", "--eval-iters", "1", "--save", str(run)])

    plot.write_plot([run], tmp_path / "loss.png", "flops")
    phases = plot.split_phases(plot.read_steps(run))
    assert [(phase.objective, phase.start, phase.end) for phase in phases] == [("clm", 0, 2), ("mlm", 2, 4)]

    summary = run_summary.summarise(run)
    assert (summary.step, summary.train_iters, summary.first_validation, summary.last_validation) == (4, 4, 0, 4)
    assert [one.objective for one in summary.gains] == ["clm", "mlm"]
    first, *_, last = runs.validations(run)
    mlm = summary.gains[1]
    assert mlm.loss == (first["objectives"]["mlm"]["loss"], last["objectives"]["mlm"]["loss"])
    plot.write_plot([run, shutil.copytree(run, tmp_path / "again")], tmp_path / "runs.png", "predicted_tokens")
    assert summary.seconds == pytest.approx(sum(row["step_seconds"] for row in runs.metrics(run)))
