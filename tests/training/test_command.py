"""The pretraining command: YAML file, preset and flags together, and their errors."""

import shutil
import subprocess
import sys
import time

import psutil
import pytest
import runs
import yaml

from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.training.command import main
from megaenc.training.config import parse_config
from megaenc.training.config_groups import StartConfig
from megaenc.training.lr_schedule import LearningRateConfig


def test_command_line_wins_over_yaml_and_yaml_over_the_preset(tmp_path):
    (tmp_path / "run.yaml").write_text("model: 610m\nnum-layers: 13\nlr: 5e-4\ntrain_iters: 7\n")
    settings = parse_config(["--config", str(tmp_path / "run.yaml"), "--train-iters", "9"], "test")
    assert (settings.model, settings.shape.num_layers, settings.shape.hidden_size) == (
        "610m",
        13,
        1152,
    )
    assert (settings.learning_rate.lr, settings.train_iters) == (5e-4, 9)
    assert parse_config(["--model", "1B", "--num-layers", "4"], "test").shape.hidden_size == 1728


def test_last_of_a_repeated_flag_counts_for_the_preset_too():
    settings = parse_config(["--model", "tiny", "--model=610m"], "test")
    assert (settings.model, settings.shape.num_layers) == ("610m", 26)


def test_a_given_field_replaces_its_alternative(tmp_path):
    """This holds on the command line, in a file over its base, and in a phase."""
    base = tmp_path / "base.yaml"
    base.write_text(
        "train_iters: 7\nlr_warmup_iters: 2000\nlr_wsd_decay_iters: 1000\n"
        "lr_wsd_decay_style: cosine\nbranch_from: a\nbranch_at: 3\n"
    )
    over = tmp_path / "over.yaml"
    over.write_text(
        "config: base.yaml\ntrain_tokens: 2048\n"
        "lr_warmup_fraction: 0.1\nlr_wsd_decay_fraction:\ninit_from: b\n"
    )
    words = ["--train-tokens", "2048", "--lr-warmup-fraction", "0.1", "--init-from", "b"]
    for argv in (["--config", str(over)], ["--config", str(base), *words]):
        settings = parse_config(argv, "test")
        assert (settings.train_iters, settings.train_tokens) == (None, 2048)
        rates = settings.learning_rate
        assert (rates.lr_warmup_iters, rates.lr_warmup_fraction, rates.lr_wsd_decay_iters) == (
            None,
            0.1,
            1000,
        )
        assert settings.start == StartConfig(init_from="b")
    phase = "{objective: clm, train_iters: 9, lr_warmup_fraction: 0.2, lr_decay_style: cosine}"
    [phase] = parse_config(["--config", str(base), "--phases", phase], "test").phase_configs
    rates = phase.settings.learning_rate
    assert (rates.lr_warmup_iters, rates.lr_warmup_fraction, rates.lr_wsd_decay_iters) == (
        None,
        0.2,
        None,
    )
    linear = parse_config(
        ["--config", str(base), "--lr-decay-style", "linear"], "test"
    ).learning_rate
    assert (linear.lr_wsd_decay_iters, linear.lr_wsd_decay_style) == (
        None,
        LearningRateConfig.lr_wsd_decay_style,
    )


@pytest.mark.slow
def test_run_directory_holds_what_it_promises(short_run, tmp_path):
    """Its config.yaml, given to --config, starts the same run."""
    flags = [
        *short_run,
        "--train-iters",
        "4",
        "--lr-warmup-iters",
        "1",
        "--lr-wsd-decay-iters",
        "1",
    ]
    result = runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "run")], fresh=True)
    assert result.stderr == "", "the console is quiet, also while all is imported"
    directory = tmp_path / "run"
    assert (
        directory / "checkpoints" / "latest_checkpointed_iteration.txt"
    ).read_text().strip() == "4"
    assert (directory / "checkpoints" / "iter_0000004").is_dir()
    assert yaml.safe_load((directory / "config.yaml").read_text())["train_iters"] == 4
    row = runs.metrics(directory)[-1]
    assert row.keys() >= {
        "step", "objective", "phase", "loss", "accuracy", "learning_rate", "grad_norm",
        "tokens", "predicted_tokens", "tokens_per_second", "model_flops_utilization",
        "step_seconds",
    }  # fmt: skip
    assert (row["step"], row["objective"], row["phase"], row["tokens"]) == (4, "mlm", 1, 4 * 8 * 64)

    again = runs.run(
        [sys.executable, "-m", "megaenc", "pretrain", "--config", str(directory / "config.yaml")]
    )
    assert "is complete: step 4 of 4" in again.stdout


def test_tokenizer_without_a_mask_is_refused_for_mlm_alone(small_corpus, tmp_path, refusal):
    for extension in (".bin", ".idx"):
        shutil.copy(f"{small_corpus.prefix}{extension}", tmp_path / f"copy{extension}")
    tokenizer = load_tokenizer(small_corpus.tokenizer)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "maskless")
    data = ["--tokenizer", str(tmp_path / "maskless"), "--data-path", str(tmp_path / "copy")]
    flags = [*data, *runs.SHORT_RUN, "--exit-interval", "1"]
    assert "no mask token" in refusal(main, flags)
    main([*flags, "--objective-schedule", "clm"])


@pytest.mark.multiprocess
def test_what_one_rank_alone_finds_is_printed_too(short_run, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os\n"
        "from megaenc.data.indexed.corpus import Corpus\n"
        "if __name__ == '__main__':\n"
        "    if os.environ['RANK'] == '1':\n"
        "        Corpus.read_spans = lambda self, *_: "
        "self._check_ids(self.document_lengths + 400, 'document 7', LocalInputError)\n"
        "    from megaenc.errors import LocalInputError\n"
        "    from megaenc.training.command import main\n"
        "    main()\n"
    )
    flags = [*short_run, "--eval-interval", "0"]
    result = runs.script(worker, flags, processes=2, expect=1)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (
        len(lines) == 1
        and lines[0].startswith("error: rank 1: ")
        and "document 7 holds token id" in lines[0]
    )


@pytest.mark.multiprocess
def test_workers_die_with_a_launcher_that_is_killed_at_the_start(short_run):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(runs.PRETRAIN),
    ]
    launcher = subprocess.Popen(
        [*command, *short_run], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        workers = wait_for(
            lambda: psutil.Process(launcher.pid).children(), lambda children: len(children) == 2
        )
        time.sleep(1)  # into their imports
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(
        lambda: [worker for worker in workers if is_alive(worker)], lambda running: not running
    )


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != "zombie"


def wait_for(look, enough, seconds: float = 30):
    """Poll until the value is `enough`; return it."""
    until = time.monotonic() + seconds
    while not enough(value := look()):
        assert time.monotonic() < until, value
        time.sleep(0.05)
    return value


def test_numbers_that_are_none_are_null_in_the_metrics(short_run, tmp_path):
    flags = [*short_run, "--lr", "1e30", "--clip-grad", "0", "--eval-interval", "0"]
    main(
        [*flags, "--lr-warmup-iters", "0", "--exit-interval", "3", "--save", str(tmp_path / "run")]
    )
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert runs.metrics(tmp_path / "run")[-1]["grad_norm"] is None
