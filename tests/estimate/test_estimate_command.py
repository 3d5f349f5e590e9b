"""The command: its words, its JSON, what it refuses, and that it needs no torch."""

import json
import subprocess
import sys

import pytest
import runs

from megaenc import cli
from megaenc.estimate.command import main
from megaenc.estimate.hardware import TABLE

STUDY = ["--config", str(runs.ROOT / "configs" / "pretrain" / "encoder-610m.yaml"), "--gpu", "mi250x", "--gpus", "192"]


def test_the_studys_run_in_words(capsys):
    cli.main(["estimate", *STUDY, "--explain"])
    output = capsys.readouterr().out
    assert "610m: 755.6M parameters in bf16, vocabulary of 128,256" in output
    assert "192 x AMD MI250X, one die" in output and "DP 192" in output
    for term in ("AdamW's moments", "gradients' all-reduce", "2 (d - 1) / d", "device hours"):
        assert term in output


def test_the_json_holds_every_term(tmp_path, capsys):
    file = tmp_path / "said.json"
    stages = ["--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    main([*STUDY, *stages, "--objective-schedule", "clm:0.25,mlm:0.75", "--price-per-hour", "2", "--output", str(file)])
    output = json.loads(file.read_text())
    results = output["estimate"]
    assert output["parameters"] == 755_625_600 and results["layout"]["split"] == [6, 7, 7, 6]
    assert sum(term["value"] for term in results["memory"]["terms"]) == pytest.approx(results["memory"]["bytes"])
    for step in results["steps"]:
        assert sum(term["value"] for term in step["terms"]) == pytest.approx(step["seconds"])
        assert step["model_flops_utilization"] == pytest.approx(step["flops"] / step["seconds"] / 192 / 191.5e12)
    assert [phase["text"] for phase in results["phases"]] == ["clm", "mlm"]
    hours = sum(phase["device_hours"] for phase in results["phases"]) + results["validation_seconds"] * 192 / 3600
    assert results["device_hours"] == pytest.approx(hours)
    assert output["suggestion"]["device_hours"] < results["device_hours"]
    assert "cost" in capsys.readouterr().out


def test_the_table_needs_no_torch():
    lines = ["import sys", "from megaenc.cli import main"]
    lines += [f"main({['estimate', *STUDY, '--pipeline-model-parallel-size', '2']})", "assert 'torch' not in sys.modules"]
    lines.append("assert 'megatron' not in sys.modules and 'transformers' not in sys.modules")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, env=runs.surroundings(), capture_output=True)


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert all(name in output for name in TABLE)
    for words in ("--gpu ", "--calibrate", "--explain", "--document-tokens", "--objective-schedule", "mi250x --gpus 192"):
        assert words in output


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--gpus", "4"], "--gpu: missing"),
        (["--gpu", "h10"], "--gpu: unknown machine 'h10', did you mean h100?"),
        (["--gpu", "h100", "--gpus", "0"], "--gpus: found 0"),
        (["--gpu", "h100", "--gpus", "3", "--tensor-model-parallel-size", "2"], "3 processes cannot be laid out"),
        (["--gpu", "h100", "--mfu", "40"], "--mfu: found 40.0"),
        (["--gpu", "h100", "--no-bf16"], "--no-bf16: the table's speeds"),
        (["--gpu", "h100", "--memory-gib", "-1"], "--memory-gib: found -1.0"),
        (["--gpu", "h100", "--tensor-model-parallel-size", "2"], "1 processes cannot be laid out"),
        (["--gpu", "h100", "--objective-schedule", "mlmm"], "mlm"),
        (["--gpu", "h100", "--config", "nowhere.yaml"], "--config nowhere.yaml"),
        (["--gpu", "h100", "--gpsu", "1"], "--gpsu"),
        (["--gpu", "h100", "--gpus", "2", "--micro-batch-size", "1", "--pipeline-model-parallel-size", "2",
          "--pipeline-model-parallel-layout", "Et|tL"], "layout Et|tL: expected E, t for each of the 4 layers"),
        (["--gpu", "h100", "--overlap-param-gather"], "--overlap-param-gather: needs"),
        (["--gpu", "h100", "--lr-warmup-iters", "300"], "warm-up of 300 and decay of 10 steps do not fit in the 200 steps"),
        (["--gpu", "h100", "--min-lr", "1"], "--min-lr: found 1, expected at most --lr"),
        (["--gpu", "h100", "--lr-decay-style", "cosine", "--lr-wsd-decay-iters", "5"], "--lr-wsd-decay-iters: found 5"),
        (["--gpu", "h100", "--phases", "{objective: mlm, train_iters: 9, lr_warmup_iters: 20}"], "phase 1: warm-up of 20"),
        (["--gpu", "h100", "--phases", "{objective: mlm, train_iters: 9, data_path: ''}"], "--data-path: found an empty text"),
        (["--gpu", "h100", "--vocab-size", "0"], "--vocab-size: found 0, expected 1 or more"),
        (["--gpu", "h100", "--split", "1,2,3,4"], "--split"),
        (["--gpu", "h100", "--eval-pseudo-perplexity-passes", "200"], "--eval-pseudo-perplexity-passes 200: expected at most"),
        (["--gpu", "h100", "--document-tokens", "0"], "--document-tokens: found 0"),
        (["--gpu", "h100", "--packing", "random-length", "--seq-length", "20"], "--packing random-length: found --seq-length 20"),
        (["--gpu", "h100", "--output", "/proc/nowhere/said.json"], "--output"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(refusal, flags, expected):
    assert expected in refusal(main, flags)


def test_overlap_can_be_planned_on_a_machine_without_an_accelerator(capsys):
    main([*STUDY, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--no-suggest"])
    assert "gradients overlap" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["210m", "610m", "1b"])
def test_a_size_of_the_study_has_its_recipe(size, capsys):
    """Flags take precedence over it, as over a file."""
    recipe = runs.ROOT / "configs" / "pretrain" / f"encoder-{size}.yaml"
    printed = []
    for start in (["--model", size], ["--config", str(recipe)]):
        for more in ([], ["--train-tokens", "20000000000", "--objective-schedule", "clm"]):
            main([*start, *more, "--gpu", "h100", "--gpus", "8", "--explain", "--no-suggest"])
            printed.append(capsys.readouterr().out)
    assert printed[:2] == printed[2:] and printed[0] != printed[1]


def test_the_largest_batch_is_searched_at_once(capsys):
    """Micro-batches have up to 4,096 packs, whatever the global batch size; 2,500 of 4,000 make up ten million."""
    main(["--gpu", "h100", "--model", "tiny", "--global-batch-size", "10000000", "--train-iters", "2"])
    assert "--micro-batch-size 4000" in capsys.readouterr().out
