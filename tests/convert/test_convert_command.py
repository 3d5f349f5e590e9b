"""The command as such: stopped at any time it leaves nothing, and bad input leaves no trace."""

import signal

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
        return ["from-hf", "--input", str(hf)], from_hf, "_write_checkpoint"
    return ["to-hf", "--load", str(core)], to_hf, "certify"


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
    assert "something has come there meanwhile" in refusal(main, [*words, "--output", tmp_path / "out"])
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
