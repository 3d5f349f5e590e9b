"""`megaenc study plan`: its output and picture, without torch."""

import subprocess
import sys

import manifests

from megaenc.study.plan.command import main


def printed(capsys, *flags):
    main([str(flag) for flag in flags])
    return capsys.readouterr().out


def test_the_plan_of_the_paper(capsys):
    out = printed(capsys, manifests.STUDY / "paper.yaml")
    first = out.splitlines()[0]
    assert first.endswith("38 models and 12 intermediate checkpoints")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for row in (
        "base 15 630,000 1.49T 5.80e+21 80,956 630,000 80,956",
        "pfs 17 130,000 307G 1.09e+21 16,705 464,000 59,625",
        "cpt 6 52,000 123G 4.35e+20 6,682 72,000 9,252",
        "together 38 812,000 1.92T 7.32e+21 104,344 1,166,000 149,833",
    ):
        assert row in rows
    assert "18,000 results, 50 checkpoints x 12 data sets x 6 rates x 5 seeds" in out
    assert "15,000 runs" in out
    assert "113,272.8 hours together with pretraining" in out
    marked = [line for line in out.splitlines() if line.endswith(", inferred")]
    assert len(marked) == 6 and all("-dec42k-mlm40-" in line for line in marked)


def test_the_picture_is_written_and_what_the_plan_lacks_is_said(tmp_path, capsys):
    output = tmp_path / "pictures" / "plan.svg"
    out = printed(capsys, manifests.write(tmp_path, finetune=None), "--picture", output)
    assert str(output) in out and "<svg" in output.read_text()
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    assert "hours: unknown; set `hardware: {tokens_per_second: ...}`" in out
    assert "fine-tuning" not in out


def test_nothing_is_written_and_torch_stays_out(tmp_path):
    path = manifests.write(tmp_path)
    code = (
        "import sys; from megaenc.cli import main; main(['study', 'plan', sys.argv[1]]); assert "
        "'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True, cwd=tmp_path
    )
    assert list(tmp_path.iterdir()) == [path]
