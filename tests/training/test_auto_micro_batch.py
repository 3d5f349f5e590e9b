"""`--micro-batch-size auto`: the most packs that fit on every rank, by a stand-in for memory; the run is that with the number."""

import pytest
import runs
import yaml

from megaenc.estimate.command import main as estimate_main
from megaenc.training.command import main

WORKER = runs.WORKERS / "auto_batch.py"


@pytest.mark.multiprocess
def test_ranks_agree_on_the_smallest_and_train_as_with_the_number(small_corpus, tmp_path):
    """9 packs fit on the first rank and 5 on the second; a share of 8 is then two rows of 4. A resumed run measures again."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--seq-length", "32", "--global-batch-size", "16"]
    flags += ["--train-iters", "6", "--lr-wsd-decay-iters", "2"]
    auto = [*flags, "--micro-batch-size", "auto", "--save", str(tmp_path / "auto")]
    for more in (["--exit-interval", "4"], []):
        ended = runs.script(WORKER, [*auto, *more], processes=2)
        assert "--micro-batch-size auto: 5 packs at once, the most that fit" in ended.stdout
    runs.script(runs.PRETRAIN, [*flags, "--micro-batch-size", "4", "--save", str(tmp_path / "four")], processes=2)
    assert runs.curve(tmp_path / "auto") == runs.curve(tmp_path / "four")
    config = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())
    assert config["micro_batch_size"] == "auto"


def test_each_phase_has_its_own(small_corpus, tmp_path):
    """Of 16 packs 9 fit, of 6 all; the third phase has a number."""
    phases = [
        "{objective: mlm, train_iters: 2, global_batch_size: 16}",
        "{objective: clm, train_iters: 2, global_batch_size: 6, seq_length: 16}",
        "{objective: mlm, train_iters: 2, global_batch_size: 4, micro_batch_size: 2}",
    ]
    flags = [*small_corpus.flags, "--no-bf16", "--seq-length", "32", "--eval-interval", "0", "--lr-warmup-iters", "1"]
    flags += ["--lr-wsd-decay-iters", "1", "--phases", *phases]
    ended = runs.script(WORKER, [*flags, "--micro-batch-size", "auto", "--save", str(tmp_path / "run")])
    assert "--micro-batch-size auto: 9 and 6 and 2 packs at once" in ended.stdout
    assert [row["step"] for row in runs.metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (main, [], "--micro-batch-size auto: fills the memory of an accelerator, and this machine has none"),
        (estimate_main, ["--gpu", "h100"], "--micro-batch-size: found auto, expected a number of packs"),
    ],
)
def test_where_nothing_can_be_measured(command, flags, message, refusal):
    assert message in refusal(command, ["--micro-batch-size", "auto", *flags])


def test_model_parallelism_is_refused():
    from megaenc.errors import InputError
    from megaenc.training.config import parse_config

    settings = parse_config(["--micro-batch-size", "auto", "--tensor-model-parallel-size", "2"], "test")
    with pytest.raises(InputError, match="measures a model on one device, found tensor or pipeline parallelism"):
        settings.check(2)
