"""The convert command: interrupted or with bad input, it leaves no files."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from megaenc.convert import from_hf, to_hf
from megaenc.convert.command import main


@pytest.fixture
def llama(came_in):
    """Return a Hugging Face directory and its run directory. Not to be changed."""
    return came_in("llama with stretched positions")


@pytest.fixture(params=["from-hf", "to-hf"])
def conversion(request, llama):
    """Return the first words of one direction, and the function to interrupt.

    The function is the last one before the directory gets its name: its module and its name.
    """
    hf, core = llama
    if request.param == "from-hf":
        return ["from-hf", "--input", str(hf)], from_hf, "_load_weights"
    return ["to-hf", "--load", str(core)], to_hf, "verify_export"


def test_sigterm_leaves_nothing(conversion, tmp_path, monkeypatch):
    words, module, last = conversion
    seen = []

    def stopped(*given, **options):
        seen.extend(path.name for path in tmp_path.iterdir())
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(module, last, stopped)
    with pytest.raises(SystemExit) as stop:
        main([*words, "--output", "out"])
    assert stop.value.code == 143
    assert len(seen) == 1 and seen[0].startswith(".out.") and not list(tmp_path.iterdir())


def test_a_place_that_another_command_takes_is_one_line(conversion, tmp_path, monkeypatch, refusal):
    words, module, last = conversion
    right = getattr(module, last)

    def slow(*given, **options):
        Path("out").mkdir()
        Path("out/a").touch()
        return right(*given, **options)

    monkeypatch.setattr(module, last, slow)
    assert "created meanwhile by another process" in refusal(main, [*words, "--output", "out"])
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "a"]


@pytest.mark.parametrize("kilobytes", [8, 400])
def test_a_full_disk_is_one_line_and_leaves_nothing(kilobytes, conversion, tmp_path, refusal):
    """tokenizers, torch and this package write; each of them fills the disk."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(tmp_path)],
        capture_output=True,
    ).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        words, *_ = conversion
        assert "cannot be written to: No space left on device" in refusal(
            main, [*words, "--output", "out"]
        )
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_checkpoint_that_its_run_removes_meanwhile_is_one_line(
    llama, tmp_path, monkeypatch, refusal
):
    from megaenc.training.checkpoint.chunk_files import ChunkReader

    run = shutil.copytree(llama[1], Path("run"))
    read = ChunkReader.read

    def removed(self, chunks):
        shutil.rmtree(run / "checkpoints" / "iter_0000000")
        read(self, chunks)

    monkeypatch.setattr(ChunkReader, "read", removed)
    line = refusal(main, ["to-hf", "--load", run, "--output", "out"])
    assert "iter_0000000: was removed while it was read" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
