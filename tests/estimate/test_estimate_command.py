"""The estimate command: its text, its JSON, its errors, and no import of torch."""

import json

import pytest
import runs

from megaenc import cli
from megaenc.backend.device import peak_bf16_flops
from megaenc.estimate.command import main
from megaenc.estimate.devices import DEVICES

RECIPE = ["--config", str(runs.ROOT / "configs" / "pretrain" / "encoder-610m.yaml")]
STUDY = [*RECIPE, "--gpu", "mi250x", "--gpus", "192"]


def test_the_studys_run_in_words(capsys):
    """Overlap of communication can be planned on a machine without an accelerator."""
    cli.main(
        [
            "estimate",
            *STUDY,
            "--use-distributed-optimizer",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
        ]
    )
    output = capsys.readouterr().out
    assert "610m: 755.6M parameters in bf16, vocabulary of 128,256" in output
    assert "192 x AMD MI250X, one die" in output
    for words in ("DP 192", "AdamW's moments", "device hours"):
        assert words in output


def test_the_json_holds_memory_and_hours(tmp_path):
    file = tmp_path / "said.json"
    stages = [
        "--pipeline-model-parallel-size",
        "4",
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
    ]
    main([*STUDY, *stages, "--objective-schedule", "clm:0.25,mlm:0.75", "--output", str(file)])
    output = json.loads(file.read_text())
    results = output["estimate"]
    assert output["parameters"] == 755_625_600
    assert results["layout"]["split"] == [6, 7, 7, 6]
    memory = results["memory"]
    assert sum(memory["terms"].values()) == pytest.approx(memory["bytes"])
    assert [phase["text"] for phase in results["phases"]] == ["clm", "mlm"]
    validation = results["validation_seconds"] * 192 / 3600
    assert results["device_hours"] == pytest.approx(
        sum(phase["device_hours"] for phase in results["phases"]) + validation
    )
    assert output["suggestion"]["device_hours"] < results["device_hours"]


@pytest.mark.parametrize("name", DEVICES)
def test_peaks_are_those_that_training_counts_utilization_of(name):
    known = peak_bf16_flops(name.upper().removesuffix("-40GB").replace("-PCIE", " PCIe"))
    assert DEVICES[name].peak == known > 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--gpus", "4"], "--gpu: missing"),
        (["--gpu", "h10"], "--gpu: unknown device 'h10', did you mean h100?"),
        (["--gpu", "h100", "--no-bf16"], "--no-bf16: the table's speeds"),
        (["--gpu", "h100", "--gpus", "2", "--micro-batch-size", "1",
          "--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et|tL"],
         "layout Et|tL: expected E, t for each of the 4 layers"),
        (["--gpu", "h100", "--phases", "{objective: mlm, train_iters: 9, lr_warmup_iters: 20}"],
         "phase 1: warm-up of 20"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(refusal, flags, expected):
    assert expected in refusal(main, flags)


def test_a_size_of_the_study_has_its_recipe(capsys):
    """Flags take precedence over the recipe, as over a file."""
    printed = []
    for start in (["--model", "610m"], RECIPE):
        main(
            [
                *start,
                "--train-tokens",
                "20000000000",
                "--objective-schedule",
                "clm",
                "--gpu",
                "h100",
                "--no-suggest",
            ]
        )
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    main([*RECIPE, "--gpu", "h100", "--no-suggest"])
    assert capsys.readouterr().out != printed[0]


def test_the_largest_batch_is_searched_at_once(capsys):
    """Micro-batches have up to 4,096 packs, whatever the global batch size."""
    flags = ["--gpu", "h100", "--gpus", "2", "--tensor-model-parallel-size", "2", "--model", "tiny"]
    main([*flags, "--global-batch-size", "10000000", "--train-iters", "2"])
    assert "--micro-batch-size 4000" in capsys.readouterr().out
