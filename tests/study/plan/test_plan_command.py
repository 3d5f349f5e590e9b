"""`megaenc study plan`: what it prints, the picture that it writes, and that it needs no torch."""

import subprocess
import sys

import manifests
import pytest

from megaenc.study.plan.command import main


def printed(capsys, *flags):
    main([str(flag) for flag in flags])
    return capsys.readouterr().out


def test_the_plan_of_the_paper(capsys):
    out = printed(capsys, manifests.STUDY / "paper.yaml")
    first = out.splitlines()[0]
    assert first.endswith("38 models and 12 intermediate checkpoints")
    cells = {line.split()[0]: line.split()[1:] for line in out.splitlines() if " models, " in line}
    assert {name: (*row[:2], row[4]) for name, row in cells.items()} == {
        "base": ("15", "630,000", "80,956"),
        "pfs": ("17", "130,000", "16,705"),
        "cpt": ("6", "52,000", "6,682"),
        "together": ("38", "812,000", "104,344"),
    }
    assert {name: " ".join(row[7:]) for name, row in cells.items()} == {
        "base": "15 models, 630,000 steps, 81,000 h",
        "pfs": "17 models, 120,000 steps, 16,000 h",
        "cpt": "6 models, 26,000 steps, 4,000 h",
        "together": "38 models, 776,000 steps, 101,000 h",
    }
    assert "18,000 results, 50 checkpoints x 12 data sets x 6 rates x 5 seeds" in out
    assert "15,000 runs" in out
    assert "the paper reports 15,120, 42 checkpoints x 360: 30 models and 12 intermediate checkpoints, the count of its" in out
    assert "113,272.8 hours together with pretraining; the paper reports 110,000" in out
    marked = [line for line in out.splitlines() if line.endswith(", inferred")]
    assert len(marked) == 6 and all("-dec42k-mlm40-" in line for line in marked)
    assert out.count("\n    inferred") == 2  # decay, continued pretraining
    for name in ("610m-clm-dec42k-mlm40-64k", "1b-mlm50-42k"):
        assert out.count(f" {name} ") == 1


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_written(tmp_path, capsys, ending):
    output = tmp_path / "pictures" / f"plan.{ending}"
    assert str(output) in printed(capsys, manifests.write(tmp_path), "--picture", output)
    content = output.read_bytes()
    assert content.startswith(b"\x89PNG") if ending == "png" else b"toy-clm-100-mlm40-400" in content or b"<svg" in content
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_a_plan_without_rates_or_fine_tuning_says_what_is_missing(tmp_path, capsys):
    out = printed(capsys, manifests.write(tmp_path, finetune=None))
    assert "hours: unknown; set `hardware: {tokens_per_second: ...}`" in out
    assert "fine-tuning" not in out


def test_nothing_is_written_and_torch_stays_out(tmp_path):
    path = manifests.write(tmp_path)
    code = "import sys; from megaenc.cli import main; main(['study', 'plan', sys.argv[1]]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_bad_input_is_one_line(tmp_path, refusal):
    assert "No such file" in refusal(main, [tmp_path / "none.yaml"])
    path = manifests.write(tmp_path, **manifests.models({"size": "toy", "steps": 15, "mask": 0.4}))
    assert "a decay of 20 steps in a run of 15" in refusal(main, [path])
    assert "--picture plan.gif: found the ending '.gif'" in refusal(main, [manifests.write(tmp_path), "--picture", "plan.gif"])
    assert "sst2" in refusal(main, [manifests.write(tmp_path, finetune={"datasets": ["sst"]})])
