import io
import os
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from megaenc import flags
from megaenc.data.preprocess.command import PreprocessConfig
from megaenc.data.tokenizer.train_command import TrainTokenizerConfig
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.fill_mask import FillMaskConfig


@dataclass(frozen=True)
class Layout:
    """Nested group whose fields are flags."""

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


@dataclass(frozen=True)
class Choices:
    """Words to choose from, and lists of words."""

    packing: Literal["", "concat", "sentences", "0.5"] = "concat"
    """How."""
    data_path: tuple[str, ...] = ()
    """What."""


DEFAULT = Settings("here")


def parse(*arguments, **options):
    return flags.parse(Settings, arguments, prog="command", description="What it does.", **options)


def test_flags_are_flat_and_have_the_fields_names():
    settings = parse(
        "--save",
        "there",
        "--lr",
        "0.5",
        "--no-bf16",
        "--split",
        "98",
        "2",
        "--tensor-model-parallel-size",
        "4",
    )
    assert settings == Settings("there", 0.5, False, (98, 2), Layout(4))
    assert parse("--save", "there") == Settings("there")
    assert parse("--lr", "2", default=DEFAULT) == Settings("here", 2.0)
    assert list(flags.flatten(DEFAULT)) == [
        "save",
        "lr",
        "bf16",
        "split",
        "tensor_model_parallel_size",
    ]


@pytest.mark.parametrize("flag", ["--json-key", "--json-keys", "--json_key"])
def test_the_json_key_has_one_flag_in_every_command(flag):
    for kind, required, value in (
        (PreprocessConfig, "--input a --output-prefix b --tokenizer c", ("title",)),
        (TrainTokenizerConfig, "--input a --output b", "title"),
        (FillMaskConfig, "--input a --model b", "title"),
    ):
        settings = flags.parse(
            kind, [*required.split(), flag, "title"], prog="command", description="What it does."
        )
        assert value in vars(settings).values()


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
def test_the_line_begins_with_the_flag(arguments, sentence, monkeypatch):
    """Standard output is not UTF-8 in one case, so tyro prints other characters."""

    @dataclass(frozen=True)
    class Choices(Settings):
        mode: Literal["a", "b"] = "a"
        pooling: Literal["", "mean", "cls"] = ""
        most: int | Literal["all"] | None = None

    for encoding in ("utf-8", "latin-1"):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        with pytest.raises(InputError) as error:
            flags.parse(Choices, arguments, prog="command", description="")
        assert str(error.value) == f"{sentence} (see command --help)"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", DEFAULT),
        (
            "lr: 1\ntensor-model-parallel-size: 2\nsplit: [90, 10]",
            Settings("here", 1.0, True, (90, 10), Layout(2)),
        ),
        ("split: &parts [90, 10]\nlr: 1\n", Settings("here", 1.0, split=(90, 10))),
        ("packing: sentences", Choices("sentences")),
        ("packing: 0.5", Choices("0.5")),
        ("data_path: out/a", Choices(data_path=("out/a",))),
        ("data_path: [0.3, out/a, 7, out/b]", Choices(data_path=("0.3", "out/a", "7", "out/b"))),
    ],
)
def test_yaml_fills_in_fields(tmp_path, text, found):
    """Nested fields have two spellings; a word may stand for a list of one."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    settings = flags.read_config_file(DEFAULT if isinstance(found, Settings) else Choices(), path)
    assert settings == found
    assert not isinstance(settings, Settings) or isinstance(settings.lr, float)


def test_a_yaml_file_goes_over_the_one_that_it_names(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/recipe.yaml").write_text("lr: 1\nbf16: false\n")
    (tmp_path / "layout.yaml").write_text(
        "config: recipes/recipe.yaml\ntensor_model_parallel_size: 2\nlr: 3\n"
    )
    assert flags.read_config_file(DEFAULT, tmp_path / "layout.yaml") == Settings(
        "here", 3.0, False, layout=Layout(2)
    )

    (tmp_path / "recipes/recipe.yaml").write_text("config: ../layout.yaml\n")
    with pytest.raises(InputError, match=r"layout.yaml: field `config` leads back to this file"):
        flags.read_config_file(DEFAULT, tmp_path / "layout.yaml")


def doubled(levels: int) -> str:
    """Return YAML whose last value is a list of 2 ** `levels` numbers."""
    lines = [
        "a0: &a0 [1, 1]",
        *(f"a{level}: &a{level} [*a{level - 1}, *a{level - 1}]" for level in range(1, levels)),
    ]
    return "\n".join(lines) + "\n"


MERGED = "a0: &a0 {lr: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40)
)
EXPAND = "its aliases expand to more than 100,000 values"
UNUSABLE = {
    b"tensor_model_paralel_size: 2": (
        "unknown field `tensor_model_paralel_size`; did you mean `tensor_model_parallel_size`?"
    ),
    b"lr: fast": "field `lr`: found 'fast', expected a float",
    b"lr: 1e400": "field `lr`: found '1e400', expected a finite number",
    b"bf16: 1": "field `bf16`: found 1, expected a bool",
    b"packing: words": "unknown field `packing`",
    b"- lr": "found a list",
    b"words": "found a str",
    b"lr: [": "not YAML",
    b"lr:\t- 1": "not YAML",
    doubled(40).encode(): EXPAND,
    doubled(10).encode(): "unknown field `a0`",
    MERGED.encode(): EXPAND,
    b"lr: &a [*a]": EXPAND,
    b"lr: " + 5000 * b"[": "nested too deeply",
    b"lr: " + 200 * b"[" + 200 * b"]": "nested too deeply",  # deeper than can be written
    b"a0: &a0 1\n"
    + b"".join(b"a%d: &a%d [*a%d]\n" % (n, n, n - 1) for n in range(1, 3000)): "nested too deeply",
    b"#" * (1 << 20) + b"\n": "larger than 1,048,576 bytes",
    b"lr: 1\nsave: a\nlr: 2": "key `lr` is given twice",
    b"lr: {a: 1, 'a': 2}": "key `a` is given twice",
    b"tensor_model_parallel_size: 1\ntensor-model-parallel-size: 2": (
        "is given twice, in two spellings"
    ),
    b"lr: \xff": "not UTF-8 text",
    b"lr: 2001-02-31": "not YAML: day is out of range",
    b"lr: 1" + 400 * b"0": "field `lr`: found 1000",
    b'save: "a\\0b"': "found the character '\\x00', which neither texts nor file names have",
    b'save: "\\uD83D"': "found the character '\\ud83d', which neither texts nor file names have",
    b'lr: !!int ""': "found '', expected a value of tag:yaml.org,2002:int",
    b"save: !!python/object/apply:os.system [x]": "not YAML: could not determine a constructor",
    b"lr: 1"
    + 300 * b":1"
    + b".5": "expected a value of tag:yaml.org,2002:float",  # to the base of 60
    b"save: 0x" + 4000 * b"f": "found a number of 4,002 characters",
    b"lr: [" + 900 * b"1," + b"1]": "field `lr`: found [1, 1",
}


@pytest.mark.parametrize(("content", "message"), UNUSABLE.items(), ids=range(len(UNUSABLE)))
def test_a_yaml_file_that_no_command_can_use_is_one_short_line(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        flags.read_config_file(DEFAULT, path)
    assert (
        message in str(error.value)
        and str(path) in str(error.value)
        and len(str(error.value)) < 500
    )


def test_only_a_regular_file_is_a_yaml_file_and_the_words_to_choose_from_are_named(tmp_path):
    path = tmp_path / "run.yaml"
    with pytest.raises(InputError, match="No such file"):
        flags.read_config_file(DEFAULT, path)
    os.mkfifo(path)
    with pytest.raises(InputError, match="not a regular file; expected a YAML file of flags"):
        flags.read_config_file(DEFAULT, path)
    path.unlink()
    path.write_text("packing: words")
    with pytest.raises(
        InputError, match="field `packing`: found 'words', expected one of concat, sentences"
    ):
        flags.read_config_file(Choices(), path)


def test_input_errors_end_a_command_with_code_2_and_one_line_from_rank_0(capsys, monkeypatch):
    @handle_command_errors
    def main():
        raise InputError("line 3:\n  what was found")

    for rank, shown in [
        (None, "error: line 3: what was found\n"),
        ("0", "error: line 3: what was found\n"),
        ("1", ""),
    ]:
        monkeypatch.delenv("RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        assert capsys.readouterr().err == shown


@dataclass(frozen=True)
class Numbers:
    """Numbers with bounds, in types of every form."""

    steps: flags.PositiveInt | Literal["all"] | None = None
    warmup: flags.FractionBelowOne = 0.1
    mask: flags.PositiveFraction = 0.4
    buckets: Annotated[int, flags.Bounds(low=1, high=1000)] = 14
    most: Annotated[float, flags.Bounds(high=2)] = 1.0
    rates: tuple[flags.PositiveFloat, ...] = ()


@dataclass(frozen=True)
class WithNumbers:
    """A group of numbers."""

    numbers: Numbers = field(default_factory=Numbers)
    """Some numbers."""


OUT_OF_BOUNDS = {
    "steps 0": "found 0, expected 1 or more",
    "warmup 1": "found 1.0, expected 0 or more and less than 1",
    "warmup -0.5": "found -0.5, expected 0 or more and less than 1",
    "mask 0": "found 0.0, expected more than 0 and at most 1",
    "mask nan": "found nan, expected a finite number",
    "buckets 1001": "found 1001, expected 1 to 1,000",
    "most 3": "found 3.0, expected at most 2",
    "rates 1 inf": "found inf, expected a finite number",
    "rates 1 0": "found 0.0, expected more than 0",
}


@pytest.mark.parametrize(("words", "sentence"), OUT_OF_BOUNDS.items())
def test_a_flag_out_of_bounds_is_refused(words, sentence):
    name, *numbers = words.split()
    with pytest.raises(InputError) as error:
        flags.parse(WithNumbers, [f"--{name}", *numbers], prog="command", description="")
    assert str(error.value) == f"--{name}: {sentence}"


def test_a_field_out_of_bounds_is_refused_with_its_file(tmp_path):
    path = tmp_path / "run.yaml"
    for text in ("steps: 0", "rates: [1, 0]"):
        path.write_text(text)
        with pytest.raises(
            InputError,
            match=(
                r"run.yaml: field `(steps|rates)`: found 0(\.0)?, "
                r"expected (1 or more|more than 0)"
            ),
        ):
            flags.read_config_file(WithNumbers(), path)


def test_the_ends_of_bounds_and_words_are_taken():
    argv = [
        "--steps",
        "all",
        "--warmup",
        "0",
        "--mask",
        "1",
        "--buckets",
        "1000",
        "--most",
        "-5",
        "--rates",
        "1e-30",
    ]
    expected = Numbers("all", 0.0, 1.0, 1000, -5.0, (1e-30,))
    assert flags.parse(WithNumbers, argv, prog="command", description="").numbers == expected
    values = {"steps": 1, "warmup": 0, "mask": 1, "buckets": 1}
    assert flags.replace_fields(WithNumbers(), values, source="").numbers == Numbers(1, 0.0, 1.0, 1)


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
