"""The pretraining command: what a YAML file, a preset and the command line say together, and one line for what is wrong."""

import json
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
from megaenc.training.planning import build_plan


def test_command_line_wins_over_yaml_and_yaml_over_the_preset(tmp_path):
    (tmp_path / "run.yaml").write_text("model: 610m\nnum-layers: 13\nlr: 5e-4\ntrain_iters: 7\n")
    settings = parse_config(["--config", str(tmp_path / "run.yaml"), "--train-iters", "9"], "test")
    assert (settings.model, settings.shape.num_layers, settings.shape.hidden_size) == ("610m", 13, 1152)
    assert (settings.optimizer.lr, settings.train_iters) == (5e-4, 9)
    assert parse_config(["--model", "1B", "--num-layers", "4"], "test").shape.hidden_size == 1728


def test_last_of_a_repeated_flag_counts_for_the_preset_too():
    settings = parse_config(["--model", "tiny", "--model=610m"], "test")
    assert (settings.model, settings.shape.num_layers) == ("610m", 26)


def test_fraction_on_the_command_line_overrules_steps_in_yaml(tmp_path):
    (tmp_path / "run.yaml").write_text("lr_warmup_iters: 2000\nlr_wsd_decay_iters: 1000\n")
    optimizer = parse_config(["--config", str(tmp_path / "run.yaml"), "--lr-warmup-fraction", "0.1"], "test").optimizer
    assert (optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction, optimizer.lr_wsd_decay_iters) == (None, 0.1, 1000)


def test_a_decay_may_be_a_fraction_of_the_run(small_corpus):
    flags = [
        *small_corpus.flags,
        "--train-iters",
        "20",
        "--lr",
        "1.0",
        "--lr-warmup-iters",
        "0",
        "--lr-wsd-decay-fraction",
        "0.25",
    ]
    rate = build_plan(parse_config(flags, "test")).learning_rate
    assert [rate(step) for step in range(15, 21)] == pytest.approx([1, 1, 0.8, 0.6, 0.4, 0.2])


def test_run_folder_holds_what_it_promises(small_corpus, tmp_path):
    """And its config.yaml, given to --config, is the same run again."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--train-iters", "4", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1"]
    result = runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "run")], fresh=True)
    assert result.stderr == "", "the console is quiet, also while all is imported"
    folder = tmp_path / "run"
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert (folder / "checkpoints" / "iter_0000004").is_dir()
    assert yaml.safe_load((folder / "config.yaml").read_text())["train_iters"] == 4
    row = runs.metrics(folder)[-1]
    assert row.keys() >= {
        "step", "objective", "phase", "loss", "accuracy", "learning_rate", "grad_norm", "tokens", "predicted_tokens",
        "tokens_per_second", "model_flops_utilization", "step_seconds",
    }  # fmt: skip
    assert (row["step"], row["objective"], row["phase"], row["tokens"]) == (4, "mlm", 1, 4 * 8 * 64)

    again = runs.run([sys.executable, "-m", "megaenc", "pretrain", "--config", str(folder / "config.yaml")])
    assert "is complete: step 4 of 4" in again.stdout


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--objective-schedule", "mlm:0.8,clm:0.3"], "character 13 of 'mlm:0.8,clm:0.3': shares add up to 1.1, expected 1"),
        (["--objective-schedule", "xlm:1.0"], "unknown objective"),
        (["--objective-schedule", "mlm:-0.5,clm:1.5"], "at character 5"),
        (["--objective-schedule", ""], "empty"),
        (["--global-batch-size", "0"], "--global-batch-size: found 0, expected 1 or more"),
        (["--num-attention-heads", "5"], "--hidden-size: found 64, expected a multiple of --num-attention-heads 5"),
        (["--split", "90,x,0"], "--split"),
        (["--num-layers", "two"], "--num-layers: found 'two', expected a number"),
        (["--num-layer", "2"], "did you mean --num-layers"),
        (["--lr", "0"], "--lr: found 0.0, expected a number above 0"),
        (["--norm-epsilon", "-1"], "--norm-epsilon: found -1.0, expected a number above 0"),
        (["--adam-beta1", "1.5"], "--adam-beta1: found 1.5, expected 0 or more and below 1"),
        (["--eval-interval", "-3"], "--eval-interval: found -3, expected 0 or more"),
        (["--split", "0,100,0"], "--split 0,100,0: leaves no text to train on"),
        (["--tensor-model-parallel-size", "2"], "1 processes cannot be laid out as tensor parallel 2"),
        (["--data-path", "nowhere"], "nowhere.idx: no such file"),
        (["--tokenizer", "./nowhere"], "./nowhere: no such folder"),
    ],
)
def test_wrong_flag_is_one_line(flags, complaint, small_corpus, refusal):
    assert complaint in refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, *flags])


@pytest.fixture
def corpus_copy(small_corpus, tmp_path):
    """The small corpus in a folder that a test may damage: its prefix."""
    for extension in (".bin", ".idx", ".json"):
        shutil.copy(f"{small_corpus.prefix}{extension}", tmp_path / f"copy{extension}")
    return tmp_path / "copy"


@pytest.mark.parametrize("extension", [".bin", ".idx"])
def test_truncated_corpus_is_one_line(extension, small_corpus, corpus_copy, refusal):
    file = corpus_copy.with_suffix(extension)
    file.write_bytes(file.read_bytes()[:-10])
    line = refusal(main, [*small_corpus.flags, "--data-path", corpus_copy])
    assert f"{file}: truncated" in line and "expected" in line


def test_corpus_of_another_tokenizer_is_one_line(small_corpus, corpus_copy, refusal):
    sidecar = json.loads(corpus_copy.with_suffix(".json").read_text())
    sidecar["tokenizer"]["fingerprint"] = "0" * 64
    corpus_copy.with_suffix(".json").write_text(json.dumps(sidecar))
    assert "made with another tokenizer" in refusal(main, [*small_corpus.flags, "--data-path", corpus_copy])


def test_token_beyond_the_vocabulary_is_one_line(small_corpus, corpus_copy, refusal):
    corpus_copy.with_suffix(".json").unlink()  # as Megatron's own tool leaves it
    tokens = bytearray(corpus_copy.with_suffix(".bin").read_bytes())
    tokens[20:22] = (401).to_bytes(2, "little")
    corpus_copy.with_suffix(".bin").write_bytes(tokens)
    line = refusal(main, [*small_corpus.flags, "--data-path", corpus_copy])
    assert "holds token id 401, expected 0 to 399" in line


def test_tokenizer_without_a_mask_is_refused_for_mlm_alone(small_corpus, corpus_copy, tmp_path, refusal):
    tokenizer = load_tokenizer(small_corpus.tokenizer)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "maskless")
    corpus_copy.with_suffix(".json").unlink()
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--tokenizer", tmp_path / "maskless", "--data-path", corpus_copy]
    assert "no mask token" in refusal(main, flags)
    read_only = [
        *flags,
        "--objective-schedule",
        "clm",
        "--train-iters",
        "1",
        "--lr-warmup-iters",
        "0",
        "--lr-wsd-decay-iters",
        "1",
    ]
    measured = [*read_only, "--eval-pseudo-perplexity-passes", "8"]
    assert "--eval-pseudo-perplexity-passes 8: the tokenizer (" in refusal(main, measured)
    runs.script(runs.PRETRAIN, [str(flag) for flag in read_only])


@pytest.mark.multiprocess
def test_what_one_rank_alone_finds_is_printed_too(small_corpus, tmp_path):
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
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--eval-interval", "0"]
    result = runs.script(worker, flags, processes=2, expect=1)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith("error: rank 1: ") and "document 7 holds token id" in lines[0]


@pytest.mark.multiprocess
def test_workers_die_with_a_launcher_that_is_killed_at_the_start(small_corpus, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(runs.PRETRAIN)]
    launcher = subprocess.Popen(
        [*command, *small_corpus.flags, *runs.SHORT_RUN], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        workers = wait_for(lambda: psutil.Process(launcher.pid).children(), lambda children: len(children) == 2)
        time.sleep(1)  # into their imports
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(
        lambda: [worker for worker in workers if worker.is_running() and worker.status() != "zombie"], lambda running: not running
    )


def wait_for(look, enough, seconds: float = 30):
    """Look until it is `enough`; returns what was seen."""
    until = time.monotonic() + seconds
    while not enough(value := look()):
        assert time.monotonic() < until, value
        time.sleep(0.05)
    return value


def test_numbers_that_are_none_are_null_in_the_metrics(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--lr", "1e30", "--clip-grad", "0", "--save", str(tmp_path / "run")]
    runs.script(runs.PRETRAIN, [*flags, "--max-skipped-updates", "20"])
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert runs.metrics(tmp_path / "run")[-1]["grad_norm"] is None


@pytest.mark.multiprocess
def test_under_torchrun_rank_0_prints_the_line_once(small_corpus):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--tensor-model-parallel-size", "2"]
    result = runs.script(runs.PRETRAIN, flags, processes=3, expect=1, fresh=True)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert lines == [
        "error: 3 processes cannot be laid out as tensor parallel 2 x pipeline parallel 1: "
        "expected a multiple of 2 (torchrun --nproc-per-node)"
    ]
