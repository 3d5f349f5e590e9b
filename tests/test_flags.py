import io
import os
from dataclasses import dataclass, field
from typing import Literal

import pytest

from megaenc import flags
from megaenc.bench.data import DataBenchConfig
from megaenc.data.preprocess.command import PreprocessConfig
from megaenc.data.tokenizer.train_command import TrainTokenizerConfig
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.fill_mask import FillMaskConfig


@dataclass(frozen=True)
class Layout:
    """Nested: its fields are flags of their own."""

    tensor_model_parallel_size: int = 1
    """Ranks that share a layer."""


@dataclass(frozen=True)
class Settings:
    """A command's settings."""

    save: str
    """Where to."""
    lr: float = 1e-3
    """How fast."""
    bf16: bool = True
    """Which arithmetic."""
    split: tuple[int, ...] = (99, 1)
    """Which shares."""
    layout: Layout = field(default_factory=Layout)


DEFAULT = Settings("here")


def parse(*arguments, **options):
    return flags.parse(Settings, arguments, prog="command", description="What it does.", **options)


def test_flags_are_flat_and_have_the_fields_names():
    settings = parse("--save", "there", "--lr", "0.5", "--no-bf16", "--split", "98", "2", "--tensor-model-parallel-size", "4")
    assert settings == Settings("there", 0.5, False, (98, 2), Layout(4))
    assert parse("--save", "there") == Settings("there")
    assert parse("--lr", "2", default=DEFAULT) == Settings("here", 2.0)


@pytest.mark.parametrize("flag", ["--json-key", "--json-keys", "--json_key"])
@pytest.mark.parametrize(
    ("kind", "required"),
    [
        (PreprocessConfig, ["--input", "a", "--output-prefix", "b", "--tokenizer", "c"]),
        (TrainTokenizerConfig, ["--input", "a", "--output", "b"]),
        (FillMaskConfig, ["--input", "a", "--model", "b"]),
        (DataBenchConfig, []),
    ],
)
def test_the_json_key_has_one_flag_in_every_command(kind, required, flag):
    settings = flags.parse(kind, [*required, flag, "title"], prog="command", description="What it does.")
    assert (settings.json_keys == ("title",)) if kind is PreprocessConfig else (settings.json_key == "title")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--save"]),
        (["--save", "x", "--lr", "fast"], ["lr", "fast"]),
        (["--save", "x", "--tensor-model-parallel-sise", "2"], ["--tensor-model-parallel-sise"]),
    ],
)
def test_a_wrong_flag_is_one_line(arguments, words):
    with pytest.raises(InputError) as error:
        parse(*arguments)
    message = str(error.value)
    assert "\n" not in message and "command --help" in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--save: missing, expected a value"),
        (["--save"], "--save: no value given, expected one"),
        (["--save", "x", "--lr", "fast"], "--lr: found 'fast', expected a number"),
        (["--save", "x", "--mode", "c"], "--mode: found 'c', expected one of a, b"),
        (["--save", "x", "--pooling", "c"], "--pooling: found 'c', expected one of mean, cls"),
        (["--save", "x", "--most", "many"], "--most: found 'many', expected a whole number or all"),
        (["--save", "x", "--mods", "a"], "--mods: no such flag; did you mean --mode?"),
        (["--save", "x", "--learning", "3"], "--learning: no such flag"),
        (["--save", "x", "y"], "y: found a word that belongs to no flag, expected none"),
    ],
)
def test_the_line_begins_with_the_flag(arguments, sentence):
    @dataclass(frozen=True)
    class Choices(Settings):
        mode: Literal["a", "b"] = "a"
        pooling: Literal["", "mean", "cls"] = ""
        most: int | Literal["all"] | None = None

    with pytest.raises(InputError) as error:
        flags.parse(Choices, arguments, prog="command", description="")
    assert str(error.value) == f"{sentence} (see command --help)"


def test_the_line_is_the_same_if_standard_output_is_not_utf_8(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    for argument, sentence in (("--lr=x", "--lr: found 'x', expected a number"), ("--savee=1", "did you mean --save?")):
        with pytest.raises(InputError) as error:
            flags.parse(Settings, [argument], prog="command", description="", default=DEFAULT)
        assert sentence in str(error.value) and "----" not in str(error.value)


def test_yaml_fills_in_nested_fields_under_either_spelling(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1\ntensor-model-parallel-size: 2\nsplit: [90, 10]\n")
    settings = flags.read_config_file(DEFAULT, path)
    assert settings == Settings("here", 1.0, True, (90, 10), Layout(2))
    assert isinstance(settings.lr, float) and isinstance(settings.split, tuple)
    path.write_text("")
    assert flags.read_config_file(DEFAULT, path) == DEFAULT


def test_a_yaml_file_goes_over_the_one_that_it_names(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/recipe.yaml").write_text("lr: 1\nbf16: false\n")
    (tmp_path / "layout.yaml").write_text("config: recipes/recipe.yaml\ntensor_model_parallel_size: 2\nlr: 3\n")
    assert flags.read_config_file(DEFAULT, tmp_path / "layout.yaml") == Settings("here", 3.0, False, layout=Layout(2))

    (tmp_path / "recipes/recipe.yaml").write_text("config: ../layout.yaml\n")
    with pytest.raises(InputError, match=r"layout.yaml: field `config` leads back to this file"):
        flags.read_config_file(DEFAULT, tmp_path / "layout.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor_model_paralel_size: 2", "unknown field `tensor_model_paralel_size`; did you mean `tensor_model_parallel_size`?"),
        ("lr: fast", "field `lr`: found 'fast', expected a float"),
        ("lr: 1e400", "field `lr`: found '1e400', expected a finite number"),
        ("bf16: 1", "field `bf16`: found 1, expected a bool"),
        ("- lr", "found a list"),
        ("lr: [", "not YAML"),
    ],
)
def test_a_wrong_yaml_names_the_file_and_the_field(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        flags.read_config_file(DEFAULT, path)
    assert message in str(error.value) and str(path) in str(error.value)
    with pytest.raises(InputError, match="No such file"):
        flags.read_config_file(DEFAULT, tmp_path / "none.yaml")


def doubled(levels: int) -> str:
    """YAML of some lines whose last value is a list of 2 ** `levels` numbers."""
    lines = ["a0: &a0 [1, 1]", *(f"a{level}: &a{level} [*a{level - 1}, *a{level - 1}]" for level in range(1, levels))]
    return "\n".join(lines) + "\n"


MERGED = "a0: &a0 {lr: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))
UNUSABLE = {
    "lists of lists": (doubled(40).encode(), "its aliases expand to more than 100,000 values"),
    "mappings merged": (MERGED.encode(), "its aliases expand to more than 100,000 values"),
    "in itself": (b"lr: &a [*a]", "its aliases expand to more than 100,000 values"),
    "deep": (b"lr: " + 5000 * b"[", "nested too deeply"),
    "deeper than can be written": (b"lr: " + 200 * b"[" + 200 * b"]", "nested too deeply"),
    "deep by aliases": (
        b"a0: &a0 1\n" + b"".join(b"a%d: &a%d [*a%d]\n" % (n, n, n - 1) for n in range(1, 3000)),
        "nested too deeply",
    ),
    "large": (b"#" * (1 << 20) + b"\n", "larger than 1,048,576 bytes"),
    "a key twice": (b"lr: 1\nsave: a\nlr: 2", "key `lr` is given twice"),
    "a nested key twice": (b"lr: {a: 1, 'a': 2}", "key `a` is given twice"),
    "two spellings": (b"tensor_model_parallel_size: 1\ntensor-model-parallel-size: 2", "is given twice, in two spellings"),
    "no text": (b"lr: \xff", "not UTF-8 text"),
    "no date": (b"lr: 2001-02-31", "not YAML: day is out of range"),
    "no float": (b"lr: 1" + 400 * b"0", "field `lr`: found 1000"),
    "a zero byte": (b'save: "a\\0b"', "found the character '\\x00', which neither texts nor file names have"),
    "half a character": (b'save: "\\uD83D"', "found the character '\\ud83d', which neither texts nor file names have"),
    "no text of an integer": (b'lr: !!int ""', "found '', expected a value of tag:yaml.org,2002:int"),
    "no text of a date": (b"save: !!timestamp x", "found 'x', expected a value of tag:yaml.org,2002:timestamp"),
    "no text of a bool": (b"bf16: !!bool x", "found 'x', expected a value of tag:yaml.org,2002:bool"),
    "a float to the base of 60": (b"lr: 1" + 300 * b":1" + b".5", "expected a value of tag:yaml.org,2002:float"),
    "an integer that cannot be printed": (b"save: 0x" + 4000 * b"f", "found a number of 4,002 characters"),
    "an integer to the base of 60": (b"lr: 1" + 400_000 * b":1", "found a number of 800,001 characters"),
    "long": (b"lr: [" + 900 * b"1," + b"1]", "field `lr`: found [1, 1"),
}


@pytest.mark.parametrize(("content", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_yaml_file_that_no_command_can_use_is_one_short_line(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        flags.read_config_file(DEFAULT, path)
    assert message in str(error.value) and str(path) in str(error.value) and len(str(error.value)) < 500


def test_a_pipe_is_no_yaml_file(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(InputError, match="not a regular file; expected a YAML file of flags"):
        flags.read_config_file(DEFAULT, tmp_path / "run.yaml")


def test_a_yaml_file_may_name_a_value_and_use_it_again(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("split: &parts [90, 10]\nlr: 1\n")
    assert flags.read_config_file(DEFAULT, path).split == (90, 10)
    path.write_text(doubled(10))
    with pytest.raises(InputError, match="unknown field `a0`"):
        flags.read_config_file(DEFAULT, path)


def test_flatten_lists_every_flag():
    assert list(flags.flatten(DEFAULT)) == ["save", "lr", "bf16", "split", "tensor_model_parallel_size"]


def test_input_errors_end_a_command_with_code_2_and_one_line_from_rank_0(capsys, monkeypatch):
    @handle_command_errors
    def main():
        raise InputError("line 3:\n  what was found")

    for rank, shown in [(None, "error: line 3: what was found\n"), ("0", "error: line 3: what was found\n"), ("1", "")]:
        monkeypatch.delenv("RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        assert capsys.readouterr().err == shown


@dataclass(frozen=True)
class Choices:
    """Words to choose from, and lists of words."""

    packing: Literal["", "concat", "sentences"] = "concat"
    """How."""
    data_path: tuple[str, ...] = ()
    """What."""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("packing: sentences", Choices("sentences")),
        ("data_path: out/a", Choices(data_path=("out/a",))),
        ("data_path: [0.3, out/a, 7, out/b]", Choices(data_path=("0.3", "out/a", "7", "out/b"))),
    ],
)
def test_yaml_takes_one_word_for_a_list_of_one_and_numbers_among_words(tmp_path, text, found):
    (tmp_path / "run.yaml").write_text(text)
    assert flags.read_config_file(Choices(), tmp_path / "run.yaml") == found


def test_yaml_names_the_words_to_choose_from(tmp_path):
    (tmp_path / "run.yaml").write_text("packing: words")
    with pytest.raises(InputError, match="field `packing`: found 'words', expected one of concat, sentences"):
        flags.read_config_file(Choices(), tmp_path / "run.yaml")


@dataclass(frozen=True)
class Inner:
    add_eos: bool | None = None
    seed: int = 0


@dataclass(frozen=True)
class WithSwitch:
    name: str = ""
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], None),
        (["--add-eos"], True),
        (["--no-add-eos"], False),
        (["--no_add_eos", "--seed", "3"], False),
        (["--add-eos", "--name", "x"], True),
        (["--name", "x", "--add_eos"], True),
    ],
)
def test_a_switch_that_may_be_unset_is_given_as_any_other(argv, expected):
    assert flags.parse(WithSwitch, argv, prog="test", description="").inner.add_eos is expected
