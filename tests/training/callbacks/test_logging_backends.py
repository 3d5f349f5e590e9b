"""Numbers of a run at TensorBoard and Weights & Biases, repeated steps included."""

import shutil
import threading
import time

import pytest
import runs
import wandb
from board_helpers import numbers, tensorboard_shows, wandb_records, wandb_shows

from megaenc.errors import InputError
from megaenc.training.callbacks.backends import (
    BackgroundLogger,
    TensorBoardLogger,
    WandbLogger,
    flatten_row,
)
from megaenc.training.command import main
from megaenc.training.config_groups import MonitoringConfig


@pytest.fixture(scope="module")
def shown_run(short_run, tmp_path_factory):
    """A run stopped after step 12 and resumed from step 10: steps 11 and 12 run twice."""
    directory = tmp_path_factory.mktemp("shown") / "run"
    flags = [*short_run, "--save", str(directory), "--save-interval", "10"]
    flags += [
        "--tensorboard-dir",
        str(directory / "events"),
        "--wandb-project",
        "encoders",
        "--wandb-exp-name",
        "short",
    ]
    environment = {"WANDB_MODE": "offline"}
    runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "12"], environment=environment)
    shutil.rmtree(directory / "checkpoints" / "iter_0000012")
    (directory / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10")
    runs.script(runs.PRETRAIN, flags, environment=environment)
    return directory


def test_tensorboard_holds_every_number_and_no_step_twice(shown_run):
    events, logged = tensorboard_shows(shown_run / "events")
    assert logged == numbers(shown_run)
    assert {"train/loss", "train/tokens", "validation/mlm/loss"} <= logged.keys()
    assert list(logged["train/loss"]) == list(range(1, 21))
    objective = [
        (event.step, event.tensor_proto.string_val[0])
        for event in events.Tensors("train/objective/text_summary")
    ]
    assert objective == [(1, b"clm"), (11, b"mlm")]
    assert (
        b"global_batch_size: 8"
        in events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0]
    )


def test_the_events_of_another_run_are_refused(tmp_path):
    TensorBoardLogger(str(tmp_path), "0123456789abcdef", {})
    TensorBoardLogger(str(tmp_path), "0123456789abcdef", {})
    with pytest.raises(InputError, match="holds the events of another run"):
        TensorBoardLogger(str(tmp_path), "fedcba9876543210", {})


def test_wandb_goes_on_in_one_run_and_the_later_row_is_that_of_the_directory(shown_run):
    (first_id, config, before), (second_id, _, after) = wandb_records(shown_run)
    assert first_id == second_id == (shown_run / "wandb_run_id").read_text().strip()
    assert (config["global_batch_size"], config["identity"]["train_iters"]) == (8, 20)
    assert [row["step"] for row in before if "train/loss" in row] == list(range(1, 13))
    assert [row["step"] for row in after if "train/loss" in row] == list(range(11, 21))
    assert wandb_shows([*before, *after]) == numbers(shown_run)


def test_nested_numbers_have_flat_names():
    scores = {
        "loss": 2.0,
        "by_position": {"0-127": 3.0, "128-255": float("nan")},
        "by_corpus": {"data/web": 1.5},
    }
    assert flatten_row({"step": 5, "tokens": 7, "objectives": {"mlm": scores}}, "validation") == {
        "validation/tokens": 7,
        "validation/mlm/loss": 2.0,
        "validation/mlm/by_position/0-127": 3.0,
        "validation/mlm/by_corpus/data/web": 1.5,
    }


def test_without_a_network_wandb_is_offline_and_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    board = WandbLogger(
        MonitoringConfig(wandb_project="encoders"),
        str(tmp_path),
        "abcd1234",
        {"seed": 1},
        patience=2,
    )
    board.log("train", {"step": 3, "loss": 0.1})
    board.close()
    # Its own process may still be writing; it ends here if none is left at the end of a run.
    wandb.teardown()
    [(_, config, rows)] = wandb_records(tmp_path)
    assert (config["seed"], rows) == (1, [{"step": 3, "train/loss": 0.1}])
    assert f"logging to {tmp_path / 'wandb'}, `wandb sync` uploads it" in capfd.readouterr().out


def test_a_board_that_fails_is_one_line_and_the_run_goes_on(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    board = BackgroundLogger(
        "TensorBoard", lambda: TensorBoardLogger(str(tmp_path / "file"), "0123456789abcdef", {})
    )
    board.submit("drop_rows_after", -1)
    for step in range(5):
        board.submit("log", "train", {"step": step, "loss": 1.0})
    board.flush()
    board.close()
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith("TensorBoard: ") and "the run continues without it" in out


def test_a_board_that_hangs_holds_nothing_up(capfd):
    called = threading.Event()

    class Hanging:
        def log(self):
            called.set()
            time.sleep(60)

    board = BackgroundLogger("slow", Hanging)
    began = time.monotonic()
    board.submit("log")
    called.wait()
    board.flush(seconds=0.1)
    board.close(seconds=0.1)
    assert time.monotonic() - began < 30
    assert "slow: not closed after 0 seconds, its last rows may be lost" in capfd.readouterr().out


def test_wandb_needs_a_directory(small_corpus, refusal):
    line = refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--wandb-project", "a"])
    assert "--wandb-project a: found neither --save nor --wandb-save-dir" in line


IMPORTED = """
import sys
UNUSED = ("wandb", "tensorboard", "torch.utils.tensorboard", "torch._inductor.lowering")
from megaenc.training.command import main
if __name__ == "__main__":
    main()
    print([name for name in UNUSED if name in sys.modules])
"""


def test_neither_is_imported_unless_asked_for(small_corpus, tmp_path):
    """Nor is torch's compiler, which megatron-core's decorators would import."""
    (tmp_path / "worker.py").write_text(IMPORTED)
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--exit-interval", "1", "--eval-interval", "0"]
    assert runs.script(tmp_path / "worker.py", flags).stdout.splitlines()[-1] == "[]"


def test_the_environment_decides_over_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    board = WandbLogger(MonitoringConfig(wandb_project="encoders"), str(tmp_path), "abcd1234", {})
    board.log("train", {"step": 3, "loss": 0.1})
    board.close()
    assert list(tmp_path.rglob("offline-run*")) == []
