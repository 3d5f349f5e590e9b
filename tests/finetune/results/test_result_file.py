"""Malformed results end in one line with file and field, in every command."""

import os

import pytest
import trees

from megaenc.errors import InputError
from megaenc.finetune.results import files as result_files
from megaenc.finetune.results.files import read_example_scores, read_result
from megaenc.finetune.results.summary import summary_main
from megaenc.study.report import command as report_command

SPLIT = (
    '{"score": 0.5, "metrics": {"accuracy": 0.5}, "baseline": {"score": 0.25}, "collapsed": null, '
    '"scores_i": [0, 1], "metrics_i": {"accuracy": [0, 1]}}'
)
GOOD = '{"validation": ' + SPLIT + ', "test": ' + SPLIT + "}"


def changed(old: str, new: str) -> str:
    """A whole result with `new` in the place of `old` in its test split."""
    assert old in SPLIT
    return f'{{"validation": {SPLIT}, "test": {SPLIT.replace(old, new)}}}'


def test_a_score_of_regression_may_be_negative(tmp_path):
    split = SPLIT.replace('"score": 0.5', '"score": -0.5', 1)
    for family in ("regression", "SC"):
        file = trees.published(tmp_path, "model", f"{family}/set", 2e-5, 0, 0.5, 0.5)
        file.write_text(f'{{"validation": {split}, "test": {split}}}')
    assert read_result(tmp_path / "model/regression/set/lr2e-05_sd0").test.score == -0.5
    with pytest.raises(
        InputError, match=r"`validation.score`: found -0.5, expected .* from 0 to 1"
    ):
        read_result(tmp_path / "model/SC/set/lr2e-05_sd0")


DAMAGED = [
    # what results.json holds, and words of the line
    *(
        (changed('"score": 0.5', f'"score": {value}'), "test.score")
        for value in ("NaN", "-0.1", "1.1", "true", '"0.5"')
    ),
    (changed('"score": 0.5', '"score": ' + "1" * 5000), "not JSON"),
    (
        changed('"accuracy": 0.5', '"accuracy": 1.1'),
        "test.metrics.accuracy`: found 1.1, expected a number from 0 to 1",
    ),
    (
        changed('"accuracy": 0.5', '"matthews_correlation": -1.1'),
        "found -1.1, expected a number from -1 to 1",
    ),
    (changed('{"score": 0.25}', '{"score": null}'), "test.baseline.score"),
    (changed('"metrics": {', '"metrics": [1], "x": {'), "test.metrics"),
    (changed('"collapsed": null', '"collapsed": 3'), "test.collapsed"),
    (changed('"accuracy": 0.5', r'"a\nb": 0.5'), "test.metrics"),
    (changed('"score": 0.5', '"score": 0.5, "score": 0.6'), "'score' twice"),
    (changed("[0, 1]", '["a", "b"]'), "not JSON"),
    (f'{{"validation": {SPLIT}, "test": 3}}', "field `test`"),
    (f'{{"test": {SPLIT}}}', "no field `validation`"),
    ("[]", "found a list"),
    (GOOD[:-1], "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("\0", "not JSON"),
]


def names(value):
    return repr(value)[:60]


@pytest.fixture
def tree(tmp_path):
    """Two seeds of a model, of which the second can be damaged."""
    for seed in range(2):
        trees.published(
            tmp_path / "results", "610m-clm-42k", "SC/sst2", 2e-5, seed, 0.5, 0.5
        ).write_text(GOOD)
    return tmp_path / "results"


@pytest.fixture
def refused(tree, tmp_path, refusal):
    """The line in which the summary of the tree ends."""

    def summarise() -> str:
        line = refusal(summary_main, [tree, "--output", tmp_path / "new" / "all.json"])
        assert not (tmp_path / "new").exists()
        return line

    return summarise


@pytest.fixture
def run(tree):
    """The directory of the second run."""
    return tree / "610m-clm-42k" / "SC" / "sst2" / "lr2e-05_sd1"


@pytest.mark.parametrize(("content", "words"), DAMAGED, ids=names)
def test_a_damaged_result_is_one_line(content, words, run, refused):
    (run / "results.json").write_text(content)
    line = refused()
    assert "lr2e-05_sd1/results.json: " in line and words in line


def test_a_report_of_a_damaged_result_is_one_line(tree, run, tmp_path, refusal):
    (run / "results.json").write_text("[]")
    line = refusal(
        report_command.main, ["--results", tree, "--output", tmp_path / "new" / "report"]
    )
    assert "lr2e-05_sd1/results.json: found a list" in line and not (tmp_path / "new").exists()


FILES = {
    "a FIFO": os.mkfifo,
    "a directory": os.mkdir,
    "bytes that are no UTF-8": lambda file: file.write_bytes(b'{"\xff": 1}'),
    "a failure without a text": lambda file: file.write_text('{"reason": 3}'),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["results.json", "failed.json"])
def test_a_file_of_another_kind_is_one_line(kind, name, run, refused):
    (run / "results.json").unlink()
    FILES[kind](run / name)
    assert f"lr2e-05_sd1/{name}: " in refused()


@pytest.mark.parametrize(
    "name", ["lr1.2.3_sd0", "lr0_sd0", "lr1e999_sd0", "lr_sd0", "lr2e-05_sd-1"]
)
def test_a_directory_that_is_named_after_no_rate_and_seed_is_passed_by(name, tree, run):
    run.rename(run.with_name(name))
    assert len(result_files.read_result_tree(tree)) == 1


def test_the_same_run_twice_is_one_line(run, refused):
    run.rename(run.with_name("lr2.0e-5_sd00"))
    assert "the same run as lr2" in refused()


def test_a_model_whose_name_is_not_utf_8_is_one_line(tree, refused):
    os.mkdir(os.fsencode(tree) + b"/\xff")
    assert "expected a name in UTF-8" in refused()


def test_names_are_escaped_in_every_form_of_a_report(tmp_path, monkeypatch):
    """Names of models in a tree may be anything: HTML, Markdown, LaTeX, formulas."""
    monkeypatch.setattr(report_command, "build_figures", lambda *given: [])
    hostile = "$a_{b^<script>alert(1)</script>|c\nd&\\e%~`"
    trees.cell(
        tmp_path / "results",
        hostile.replace("/", ""),
        "SC/sst2",
        {2e-5: [0.5, 0.6], 5e-5: [0.4, 0.5]},
    )
    output = tmp_path / "report"
    report_command.main(["--results", str(tmp_path / "results"), "--output", str(output)])
    page = (output / "index.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;script&gt;" in page
    markdown = (output / "tables/other.md").read_text()
    assert r"$a_{b^&lt;script>alert(1)&lt;script>\|c d&\\e%~\`" in markdown
    latex = (output / "tables/other.tex").read_text()
    assert (
        r"\$a\_\{b\textasciicircum{}$<$script$>$alert(1)$<$script$>$|c "
        r"d\&\textbackslash{}e\%\textasciitilde{}`" in latex
    )


@pytest.mark.parametrize("value", ['["a"]', "[[0], [1]]", "[1e308, 1e308]", "3", "[null]", "[NaN]"])
def test_damaged_scores_of_examples_are_one_line(value, tmp_path):
    (tmp_path / "results.json").write_text(changed('"scores_i": [0, 1]', f'"scores_i": {value}'))
    with pytest.raises(InputError, match=r"results\.json: field `test`"):
        read_example_scores(tmp_path / "results.json", None)
