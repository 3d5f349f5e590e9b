"""Functions of `megaenc` for Python programs: keywords, results and errors."""

import functools
import logging
import os
import signal
import sys
import threading
import warnings

import numpy as np
import pytest
import runs
import torch
import yaml
from docs.documents import blocks, read

import megaenc
from megaenc import flags
from megaenc.data.preprocess.config import PreprocessConfig
from megaenc.errors import InputError
from megaenc.training.checkpoint_dir import CheckpointDir
from megaenc.training.config import PretrainConfig, merge_given, parse_config
from megaenc.training.config_groups import DataConfig

SHORT = {
    "objective_schedule": "mlm",
    "train_iters": 3,
    "eval_interval": 3,
    "seq_length": 64,
    "num_layers": 1,
    "split": "90,10,0",
    "bf16": False,
}


class StopAfter(megaenc.Callback):
    def __init__(self, trainer, step: int, signum: int = 0):
        super().__init__(trainer)
        self.step = step
        self.signum = signum

    def before_step(self, step):
        if step == self.step and self.signum:
            os.kill(os.getpid(), self.signum)
        elif step == self.step:
            self.trainer.request_stop("enough")


def pretrain(small_corpus, **fields):
    return megaenc.pretrain(
        data_path=small_corpus.prefix, tokenizer=small_corpus.tokenizer, **SHORT | fields
    )


def build(settings: PretrainConfig | None = None, **fields) -> PretrainConfig:
    merge = functools.partial(merge_given, source="pretrain()")
    return flags.build_from_keywords(
        PretrainConfig, settings, fields, caller="pretrain", merge=merge
    )


def test_the_package_is_imported_without_torch():
    code = "import sys, megaenc; megaenc.pretrain; print('torch' in sys.modules)"
    assert runs.run([sys.executable, "-c", code]).stdout == "False\n"
    assert {name for name in megaenc.__all__ if not hasattr(megaenc, name)} == set()


def test_keywords_are_the_flags(tmp_path):
    """A keyword overrides the preset, which overrides the file, as on a command line."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"train_iters": 9, "num_layers": 3, "seed": 4}))
    fields = {"config": file, "model": "small", "train_tokens": 64, "save": tmp_path, "lr": 1}
    lists = {"data_path": ["a", tmp_path], "save_steps": (2, 4)}
    words = ["--config", str(file), "--model", "small", "--train-tokens", "64", "--lr", "1"]
    words += ["--save", str(tmp_path), "--data-path", "a", str(tmp_path), "--save-steps", "2", "4"]
    assert build(**fields, **lists) == parse_config(words, "test")


def test_numbers_of_numpy_are_numbers():
    """As sweeps over `range` and over `numpy.arange` or `logspace` give them."""
    fields = {"train_iters": np.int64(3), "lr": np.float32(0.5), "bf16": np.bool_(False)}
    built = build(**fields, save_steps=np.arange(1, 3))
    assert built == build(train_iters=3, lr=0.5, bf16=False, save_steps=[1, 2])


def test_keywords_override_settings():
    settings = PretrainConfig(train_iters=7, seed=3, data=DataConfig(seq_length=64))
    built = build(settings, train_tokens=640)
    assert (built.train_iters, built.train_tokens, built.seed) == (None, 640, 3)
    assert built.data.seq_length == 64


@pytest.mark.parametrize(
    ("function", "arguments", "fields", "message"),
    [
        ("pretrain", (), {"trian_iters": 3}, "unknown field `trian_iters`; did you mean `train_it"),
        ("pretrain", (), {"train_iters": "3"}, "field `train_iters`: found '3', expected a int"),
        ("pretrain", (), {"train_iters": 0}, "field `train_iters`: found 0, expected 1 or more"),
        ("pretrain", (PretrainConfig(seed="x"),), {}, "field `seed`: found 'x', expected a int"),
        ("pretrain", ("run.yaml",), {}, "found a str, expected a PretrainConfig or its fields as"),
        ("pretrain", (), {"dry_run": True}, "field `dry_run`: found True, expected"),
        ("pretrain", (), {"callbacks": [3]}, "callbacks: found a int, expected a subclass of"),
        ("preprocess", (), {"input": "a"}, "field `output_prefix`: missing, expected a value"),
        ("preprocess", (), {"inptu": "a"}, "unknown field `inptu`; did you mean `input`?"),
        ("export", (), {"load": "run"}, "field `output`: missing, expected a value"),
        ("finetune_model", (), {"model": "hf"}, "field `dataset`: missing, expected a value"),
        ("train_embedder", (), {"temperature": 0}, "field `temperature`: found 0.0, expected more"),
        ("evaluate_embeddings", (), {"bm25": "no"}, "field `bm25`: found 'no', expected a bool"),
    ],
)
def test_a_wrong_argument_is_an_error_of_one_line(function, arguments, fields, message):
    with pytest.raises(InputError) as raised:
        getattr(megaenc, function)(*arguments, **fields)
    assert str(raised.value).startswith(f"{function}(): {message}")
    assert "\n" not in str(raised.value)


def test_an_error_of_a_command_is_raised(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.jsonl"):
        megaenc.preprocess(
            input=tmp_path / "nothing.jsonl", output_prefix=tmp_path / "out", tokenizer="none"
        )
    with pytest.raises(InputError, match=r"--ckpt-step 3: found --all too"):
        megaenc.export(load=tmp_path, output=tmp_path / "hf", ckpt_step=3, all=True)
    settings = PreprocessConfig(input=(), output_prefix="out", tokenizer="none")
    with pytest.raises(InputError, match="--input"):
        megaenc.preprocess(settings)


def test_a_run_has_a_result_and_leaves_the_process_as_it_was(small_corpus, tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    handler = signal.getsignal(signal.SIGINT)
    excepthook = sys.excepthook
    level = logging.getLogger("transformers").level
    filters = list(warnings.filters)
    steps = []

    def count_steps(trainer):
        callback = megaenc.Callback(trainer)
        callback.after_step = lambda report: steps.append(report.step)
        return callback

    first = pretrain(small_corpus, save=tmp_path / "run", callbacks=[count_steps])
    assert steps == [1, 2, 3]
    assert (first.directory, first.step, first.stop_reason) == (tmp_path / "run", 3, "")
    assert first.loss == runs.metrics(tmp_path / "run")[-1]["loss"]
    scores = runs.validations(tmp_path / "run")[-1]["objectives"]
    assert first.validation == {name: values["loss"] for name, values in scores.items()}
    assert pretrain(small_corpus, save=tmp_path / "run", callbacks=[count_steps]) == first
    assert len(steps) == 3  # the run is complete
    assert pretrain(small_corpus).loss == first.loss  # without a directory, once more
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert signal.getsignal(signal.SIGINT) is handler
    assert sys.excepthook is excepthook
    assert logging.getLogger("transformers").level == level
    assert warnings.filters == filters
    assert not torch.distributed.is_initialized()


def test_ended_runs_keep_no_threads_and_files(small_corpus):
    pretrain(small_corpus)
    before = [len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")]
    pretrain(small_corpus)
    assert [len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")] == before


def test_a_thread_cannot_save(tmp_path):
    errors = []

    def train():
        with pytest.raises(InputError) as raised:
            megaenc.pretrain(save=tmp_path / "run")
        errors.append(str(raised.value))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert [error.partition(", which")[0] for error in errors] == [
        "pretrain(): field `save`: found a thread other than the main one"
    ]


def test_a_callback_ends_a_run_and_the_next_call_resumes_it(small_corpus, tmp_path):
    stop = functools.partial(StopAfter, step=2)
    stopped = pretrain(small_corpus, save=tmp_path / "run", callbacks=[stop])
    assert (stopped.step, stopped.stop_reason, stopped.is_stopped) == (2, "enough", False)
    assert pretrain(small_corpus, save=tmp_path / "run").loss == pretrain(small_corpus).loss


def test_an_interrupt_saves_and_is_raised(small_corpus, tmp_path):
    interrupt = functools.partial(StopAfter, step=2, signum=signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pretrain(small_corpus, save=tmp_path / "run", callbacks=[interrupt])
    assert CheckpointDir(tmp_path / "run" / "checkpoints").steps() == [2]
    terminate = functools.partial(StopAfter, step=2, signum=signal.SIGTERM)
    ended = pretrain(small_corpus, save=tmp_path / "other", callbacks=[terminate])
    assert (ended.step, ended.stop_reason, ended.is_stopped) == (2, "SIGTERM", True)
    assert pretrain(small_corpus, save=tmp_path / "run").step == 3


def test_a_run_that_fails_can_be_repeated(small_corpus):
    def fail(trainer):
        raise ValueError("a mistake in a callback")

    with pytest.raises(ValueError, match="mistake"):
        pretrain(small_corpus, callbacks=[fail])
    with pytest.raises(InputError, match="callbacks: print returned a NoneType, expected a Callb"):
        pretrain(small_corpus, callbacks=[print])
    assert pretrain(small_corpus).step == 3


@pytest.mark.multiprocess
def test_torchrun_starts_the_same_program(small_corpus, tmp_path):
    """All ranks get the results and errors of what the first one does alone."""
    worker = runs.WORKERS / "api_on_ranks.py"
    output = runs.script(worker, [str(small_corpus.text), str(tmp_path)], processes=2).stdout
    lines = [line for line in output.splitlines() if line.startswith("rank ")]
    assert sum(line.endswith("validates") for line in lines) == 2
    for text in ("exists", "worker process 7 ended"):
        refusals = [line.partition(": ")[2] for line in lines if text in line]
        assert len(refusals) == 2 == refusals.count(refusals[0])
    results = [line.partition(": ")[2] for line in lines if "loss" in line]
    assert len(results) == 2 == results.count(results[0])
    assert results[0].endswith(", hf")


@pytest.mark.slow
def test_the_program_of_the_page_runs_twice_in_one_process(tmp_path):
    [program] = [block for block in blocks(read("docs/python.md")) if block.language == "python"]
    (tmp_path / "encoder.py").write_text("\n".join(program.lines) + "\n")
    code = "import runpy\nfor _ in range(2):\n    runpy.run_path('encoder.py')"
    output = runs.run([sys.executable, "-c", code], cwd=tmp_path).stdout
    lines = [line for line in output.splitlines() if line.startswith("loss ")]
    assert len(lines) == 2 == lines.count(lines[0])
