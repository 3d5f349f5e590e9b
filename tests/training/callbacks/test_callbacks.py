"""Callbacks of other packages observe a run and end it, and change nothing else."""

from typing import ClassVar

import pytest
import runs

from megaenc.errors import InputError
from megaenc.training.callbacks import Callback
from megaenc.training.callbacks.registry import CALLBACKS, parse_callbacks
from megaenc.training.command import main


@pytest.fixture
def stop_at_loss(monkeypatch):
    """The example callback, as if its package was installed."""
    monkeypatch.syspath_prepend(runs.ROOT / "examples" / "callback_plugin")
    from stop_at_loss import StopAtLoss

    monkeypatch.setitem(CALLBACKS._registered, "stop_at_loss", StopAtLoss)


class QuotedOptions(Callback):
    """Options with annotations as texts, one of which has no import."""

    def __init__(self, trainer: "Trainer", limit: "float", values: "Values" = None):  # noqa: F821
        super().__init__(trainer)


class Recorder(Callback):
    """Calls of all hooks, with their steps."""

    calls: ClassVar[list] = []

    def __enter__(self):
        self.calls.append(("enter", None))
        return self

    def __exit__(self, *error):
        self.calls.append(("exit", None))

    def before_step(self, step):
        self.calls.append(("before_step", step))

    def before_optimizer(self, step, metrics):
        assert metrics.predicted > 0
        assert (
            sum(
                float(parameter.main_grad.abs().sum())
                for parameter in self.trainer.engine.chunks[0].parameters()
            )
            > 0
        )
        self.calls.append(("before_optimizer", step))

    def after_step(self, report):
        assert report.result.is_applied and report.progress["tokens"] == 512 * report.step
        self.calls.append(("after_step", report.step))

    def before_validation(self, step):
        self.calls.append(("before_validation", step))

    def after_validation(self, step, scores):
        self.calls.append(("after_validation", step))

    def before_save(self, step):
        self.calls.append(("before_save", step))

    def after_save(self, step):
        self.calls.append(("after_save", step))


def test_all_hooks_are_called_in_order(short_run, tmp_path, monkeypatch):
    monkeypatch.setitem(CALLBACKS._registered, "recorder", Recorder)
    monkeypatch.setattr(Recorder, "calls", [])
    flags = [
        *short_run,
        "--exit-interval",
        "2",
        "--eval-interval",
        "2",
        "--callbacks",
        "{name: recorder}",
    ]
    main([*flags, "--save", str(tmp_path / "run")])
    steps = []
    for step in (1, 2):
        steps += [("before_step", step), ("before_optimizer", step), ("after_step", step)]
    validations = {
        step: [("before_validation", step), ("after_validation", step)] for step in (0, 2)
    }
    save = [("before_save", 2), ("after_save", 2)]
    assert Recorder.calls == [
        ("enter", None),
        *validations[0],
        *steps,
        *validations[2],
        *save,
        ("exit", None),
    ]


def test_a_callback_ends_a_run_that_is_otherwise_the_same(
    short_run, tmp_path, stop_at_loss, capsys
):
    flags = [*short_run, "--eval-interval", "2"]
    main([*flags, "--save", str(tmp_path / "complete")])
    losses = {
        row["step"]: row["objectives"]["mlm"]["loss"]
        for row in runs.validations(tmp_path / "complete")
    }
    limit = losses[12]
    end = min(step for step, loss in losses.items() if loss <= limit)
    assert 0 < end < 20
    stopping = [
        *flags,
        "--callbacks",
        f"{{name: stop_at_loss, loss: {limit}}}",
        "--save",
        str(tmp_path / "stopped"),
    ]
    main(stopping)
    assert (
        f"step {end} of 20" in (output := capsys.readouterr().out)
        and "stopped by stop_at_loss: " in output
    )
    rows = runs.metrics(tmp_path / "stopped")
    complete = runs.metrics(tmp_path / "complete")
    assert [row["loss"] for row in rows] == [row["loss"] for row in complete[: len(rows)]]
    assert rows[-1]["step"] == end

    # Without it the run goes on, as if it had never been stopped.
    main([*flags, "--save", str(tmp_path / "stopped")])
    assert runs.metrics(tmp_path / "stopped")[-1]["loss"] == complete[-1]["loss"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("stop", 0, "step 3 of 20: "),
        ("fail", 1, "error: rank 1: found no disk"),
    ],
)
def test_what_a_callback_asks_on_one_rank_counts_for_all(how, code, line, short_run, tmp_path):
    """The other rank neither trains on nor waits for the time-out."""
    script = runs.WORKERS / "callback_on_one_rank.py"
    flags = [how, *short_run, "--save", str(tmp_path / "run")]
    ended = runs.script(script, flags, processes=2, expect=code, timeout=120)
    assert line in ended.stdout + ended.stderr
    assert runs.metrics(tmp_path / "run")[-1]["step"] == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "stop_at_loss",
            "--callbacks: found 'stop_at_loss', "
            "expected fields such as {name: NAME, OPTION: VALUE}",
        ),
        ("{loss: 3}", "found no name, expected {name: NAME, OPTION: VALUE}"),
        (
            "{name: stop_at_lose, loss: 3}",
            "unknown callback `stop_at_lose`, expected one of stop_at_loss; did you mean",
        ),
        ("{name: stop_at_loss, loss: low}", "loss: found 'low', expected"),
        ("{name: stop_at_loss}", "missing a required argument: 'loss'"),
        (
            "{name: stop_at_loss, loss: 3, patience: 2}",
            "got an unexpected keyword argument 'patience'",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(text, complaint, short_run, stop_at_loss, refusal):
    assert complaint in refusal(main, [*short_run, "--callbacks", text])


def test_options_are_converted_if_their_annotations_are_texts(monkeypatch):
    monkeypatch.setitem(CALLBACKS._registered, "quoted", QuotedOptions)
    [(_, options)] = parse_callbacks(["{name: quoted, limit: 5e-1, values: [1]}"])
    assert options == {"limit": 0.5, "values": [1]}
    with pytest.raises(InputError, match="limit: found 'low', expected a float"):
        parse_callbacks(["{name: quoted, limit: low}"])
