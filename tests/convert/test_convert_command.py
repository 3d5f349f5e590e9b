"""The command as such: stopped at any time it leaves nothing, and bad input leaves no trace."""

import shutil
import signal
import subprocess
from types import SimpleNamespace

import hf_models
import pytest

from megaenc.convert import from_hf, to_hf
from megaenc.convert.command import main
from megaenc.errors import InputError


@pytest.fixture(scope="module")
def llama(small_corpus, tmp_path_factory):
    """A Hugging Face folder, and the run folder made of it. Not to be changed."""
    folder = tmp_path_factory.mktemp("llama")
    hf = hf_models.write(hf_models.build("llama with stretched positions"), folder / "hf", small_corpus.tokenizer)
    main(["from-hf", "--input", str(hf), "--output", str(folder / "core")])
    return hf, folder / "core"


@pytest.fixture(params=["from-hf", "to-hf"])
def conversion(request, llama):
    """One of the directions: its first words, and the module and function that come last before the folder gets its name."""
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
        main([*words, "--output", str(tmp_path / "out")])
    assert stop.value.code == 143
    assert len(seen) == 1 and seen[0].startswith(".out.") and not list(tmp_path.iterdir())


def test_what_was_killed_is_told(conversion, tmp_path, capsys):
    words, *_ = conversion
    left = tmp_path / ".out.12-0123abcd.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(1_000_000))
    main([*words, "--output", str(tmp_path / "out")])
    first = capsys.readouterr().out.splitlines()[0]
    assert f"{tmp_path}: 1 unfinished by a stopped run, 1.0 MB; remove them unless" in first and first.endswith(left.name)
    assert left.exists() and (tmp_path / "out").exists()


def test_a_place_that_another_command_takes_is_one_line(conversion, tmp_path, monkeypatch, refusal):
    words, module, last = conversion
    right = getattr(module, last)

    def slow(*given, **options):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "a").touch()
        return right(*given, **options)

    monkeypatch.setattr(module, last, slow)
    assert "created meanwhile by another process" in refusal(main, [*words, "--output", tmp_path / "out"])
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "a"]


def test_bad_input_leaves_no_parent_folders(llama, tmp_path, refusal):
    hf, core = llama
    for words, complaint in (
        (["from-hf", "--input", tmp_path / "none"], "no such folder"),
        (["from-hf", "--input", hf, "--add-mask-token"], "--add-mask-token: the tokenizer has a mask token"),
        (["to-hf", "--load", tmp_path / "none"], "no config.yaml there"),
        (["to-hf", "--load", core, "--as", "qwen3"], "--as qwen3: has no"),
        (["to-hf", "--load", core, "--all", "--as", "qwen3"], "--as qwen3: has no"),
    ):
        assert complaint in refusal(main, [*words, "--output", tmp_path / "new" / "out"])
        assert not list(tmp_path.iterdir())


def test_a_dtype_that_is_none_is_not_taken_for_the_default(llama, tmp_path):
    hf, core = llama
    with pytest.raises(InputError, match="--dtype: found 'float32', expected source, fp32 or bf16"):
        from_hf.from_hf(hf, tmp_path / "out", dtype="float32")
    with pytest.raises(InputError, match="--dtype: found 'float16', expected run, fp32 or bf16"):
        to_hf.to_hf(core, tmp_path / "out", dtype="float16")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["/proc/nowhere", "/proc/self/nowhere", "n" * 300, "file", "file/out", "n" * 300 + "/out"])
def test_a_place_that_cannot_be_written_to_is_one_line(place, conversion, tmp_path, refusal):
    words, *_ = conversion
    (tmp_path / "file").write_text("kept")
    line = refusal(main, [*words, "--output", tmp_path / place])
    assert str(tmp_path / place) in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", ["--input", "--load"])
def test_a_name_that_is_too_long_to_be_read_is_one_line(name, tmp_path, refusal):
    direction = {"--input": "from-hf", "--load": "to-hf"}[name]
    line = refusal(main, [direction, name, tmp_path / ("n" * 300), "--output", tmp_path / "out"])
    assert f"{name} {tmp_path}/nnn" in line and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kilobytes", [8, 20, 64, 400])
def test_a_full_disk_is_one_line_and_leaves_nothing(kilobytes, conversion, tmp_path, refusal):
    """tokenizers, torch and this package write; each of them meets the end of the disk."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        words, *_ = conversion
        assert "cannot be written to: No space left on device" in refusal(main, [*words, "--output", tmp_path / "out"])
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("at", ["torch", "tokenizers"])
def test_a_library_that_cannot_say_why_it_failed_is_one_line_on_a_full_disk(at, conversion, tmp_path, monkeypatch, refusal):
    words, module, last = conversion

    def fail(*given, **options):
        if at == "torch":
            monkeypatch.setattr("os.statvfs", lambda place: SimpleNamespace(f_blocks=8, f_bavail=0))
            raise RuntimeError("basic_ios::clear: iostream error")
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(module, last, fail)
    assert "cannot be written to: No space left on device" in refusal(main, [*words, "--output", tmp_path / "out"])
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_its_run_removes_meanwhile_is_one_line(llama, tmp_path, monkeypatch, refusal):
    from megaenc.training.checkpoint.chunk_files import ChunkReader

    run = shutil.copytree(llama[1], tmp_path / "run")
    read = ChunkReader.read

    def removed(self, chunks):
        shutil.rmtree(run / "checkpoints" / "iter_0000000")
        read(self, chunks)

    monkeypatch.setattr(ChunkReader, "read", removed)
    line = refusal(main, ["to-hf", "--load", run, "--output", tmp_path / "out"])
    assert "iter_0000000: was removed while it was read" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
