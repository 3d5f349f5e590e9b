"""Results that no run wrote end in one line that names file and field, whichever command reads them."""

import json
import os

import pytest
import trees

from megaenc.errors import InputError
from megaenc.finetune.results import files as result_files
from megaenc.finetune.results.files import read_example_scores
from megaenc.finetune.results.summary import summary_main
from megaenc.study.report import command as report_command

SPLIT = (
    '{"score": 0.5, "metrics": {"accuracy": 0.5}, "baseline": {"score": 0.25}, "collapsed": null, '
    '"scores_i": [0, 1], "metrics_i": {"accuracy": [0, 1]}}'
)
GOOD = '{"validation": ' + SPLIT + ', "test": ' + SPLIT + "}"
NO_SCORE = ("NaN", "Infinity", "-Infinity", "1e308", "-1e308", "1e999", "-0.1", "1.1", "101", "true", "null", '"0.5"', '"x"')
NO_SCORE += ("[]", "[0.5]", "{}", "1" * 400, "1" * 5000)


def changed(old: str, new: str, split: str = "test") -> str:
    """A whole result with `new` in the place of `old` in one of its splits."""
    assert old in SPLIT
    parts = {name: SPLIT.replace(old, new) if name == split else SPLIT for name in ("validation", "test")}
    return "{" + ", ".join(f'"{name}": {text}' for name, text in parts.items()) + "}"


DAMAGED = [
    # what results.json holds, and words of the line
    *((changed('"score": 0.5', f'"score": {value}'), "") for value in NO_SCORE),
    *((changed('"score": 0.5', f'"score": {value}', "validation"), "") for value in NO_SCORE),
    *((changed('"accuracy": 0.5', f'"accuracy": {value}'), "") for value in NO_SCORE),
    *((changed('{"score": 0.25}', f'{{"score": {value}}}'), "") for value in NO_SCORE),
    *((changed('"metrics": {', f'"metrics": {value}, "x": {{'), "test.metrics") for value in ("[1]", "3", '"x"', "true")),
    *((changed('"baseline": {', f'"baseline": {value}, "x": {{'), "test.baseline") for value in ("[1]", "3", '"x"', "true")),
    *((changed('"collapsed": null', f'"collapsed": {value}'), "test.collapsed") for value in ("[]", "3", "{}", "false")),
    (changed('"accuracy": 0.5', r'"\ud800": 0.5'), "test.metrics"),
    (changed('"accuracy": 0.5', r'"a\nb": 0.5'), "test.metrics"),
    (changed('"accuracy": 0.5', '"accuracy": 0.5, "accuracy": 0.6'), "'accuracy' twice"),
    (changed('"score": 0.5', '"score": 0.5, "score": 0.6'), "'score' twice"),
    (GOOD[:-1] + ', "test": ' + SPLIT + "}", "'test' twice"),
    (changed("[0, 1]", "[0, [1]]"), "not JSON"),
    (changed("[0, 1]", '["a", "b"]'), "not JSON"),
    *((f'{{"validation": {SPLIT}, "test": {value}}}', "test.score") for value in ("[]", "{}", "3", "null", '"x"', f"[{SPLIT}]")),
    (f'{{"test": {SPLIT}}}', "validation.score"),
    (f'{{"results": {GOOD}}}', "validation.score"),
    (f"[{GOOD}]", "found a list"),
    *((text, "found a") for text in ("[]", "3", "null", "true", '"x"', "NaN")),
    *((text, "not JSON") for text in ("", "{", GOOD[:-1], GOOD + GOOD, "[" * 100_000, '{"a":' * 100_000, "nonsense", "\0")),
    ('{"scores_i": [', "not JSON"),
    ('{"metrics_i": {"a": [', "not JSON"),
    ('{"scores_i": null}', "validation.score"),
]


def names(value):
    return repr(value)[:60]


@pytest.fixture
def tree(tmp_path):
    """Two seeds of a model, of which the second can be damaged."""
    for seed in range(2):
        trees.published(tmp_path / "results", "610m-clm-42k", "SC/sst2", 2e-5, seed, 0.5, 0.5).write_text(GOOD)
    return tmp_path / "results"


def commands(tree, tmp_path):
    return {
        "summary": (summary_main, [tree, "--output", tmp_path / "new" / "all.json"]),
        "report": (report_command.main, ["--results", tree, "--output", tmp_path / "new" / "report"]),
    }


@pytest.mark.parametrize(("content", "words"), DAMAGED, ids=names)
def test_a_damaged_result_is_one_line(content, words, tree, tmp_path, refusal):
    (tree / "610m-clm-42k/SC/sst2/lr2e-05_sd1/results.json").write_text(content)
    for main, flags in commands(tree, tmp_path).values():
        line = refusal(main, flags)
        assert "lr2e-05_sd1/results.json: " in line and words in line
        assert words or "field `" in line or "not JSON" in line
    assert not (tmp_path / "new").exists()


FILES = {
    "a FIFO": lambda file: os.mkfifo(file),
    "a folder": lambda file: file.mkdir(),
    "bytes that are no UTF-8": lambda file: file.write_bytes(b'{"\xff": 1}'),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["results.json", "failed.json"])
def test_a_file_of_another_kind_is_one_line(kind, name, tree, tmp_path, refusal):
    folder = tree / "610m-clm-42k/SC/sst2/lr2e-05_sd1"
    (folder / "results.json").unlink()
    FILES[kind](folder / name)
    for main, flags in commands(tree, tmp_path).values():
        assert f"lr2e-05_sd1/{name}: " in refusal(main, flags)


@pytest.mark.parametrize("reason", ["[]", "3", "null", "{}"])
def test_a_failure_without_a_text_is_one_line(reason, tree, tmp_path, refusal):
    folder = tree / "610m-clm-42k/SC/sst2/lr2e-05_sd1"
    (folder / "results.json").unlink()
    (folder / "failed.json").write_text(f'{{"reason": {reason}}}')
    for main, flags in commands(tree, tmp_path).values():
        assert "failed.json: field `reason`" in refusal(main, flags)


@pytest.mark.parametrize(
    "name", ["lr1.2.3_sd0", "lr0_sd0", "lr1e999_sd0", "lr1e-999_sd0", "lr_sd0", "lr2e-05_sdx", "lr2e-05_sd-1"]
)
def test_a_folder_that_is_named_after_no_rate_and_seed_is_passed_by(name, tree):
    (tree / "610m-clm-42k/SC/sst2" / name).mkdir()
    (tree / "610m-clm-42k/SC/sst2" / name / "results.json").write_text("damaged")
    assert len(result_files.read_result_tree(tree)) == 2


def test_the_same_run_twice_is_one_line(tree, tmp_path, refusal):
    (tree / "610m-clm-42k/SC/sst2/lr2.0e-5_sd01").mkdir()
    (tree / "610m-clm-42k/SC/sst2/lr2.0e-5_sd01/results.json").write_text(GOOD)
    for main, flags in commands(tree, tmp_path).values():
        assert "the same run as lr2" in refusal(main, flags)


def test_a_model_whose_name_is_not_utf_8_is_one_line(tree, tmp_path, refusal):
    os.mkdir(os.fsencode(tree) + b"/\xff")
    for main, flags in commands(tree, tmp_path).values():
        assert "expected a name in UTF-8" in refusal(main, flags)


def test_names_are_escaped_in_every_form_of_a_report(tmp_path, monkeypatch):
    """Names of models in a tree of results are anybody's: HTML, Markdown, LaTeX and formulas."""
    monkeypatch.setattr(report_command, "build_figures", lambda *given: [])
    hostile = "$a_{b^<script>alert(1)</script>|c\nd&\\e%~`"
    trees.cell(tmp_path / "results", hostile.replace("/", ""), "SC/sst2", {2e-5: [0.5, 0.6], 5e-5: [0.4, 0.5]})
    output = tmp_path / "report"
    report_command.main(["--results", str(tmp_path / "results"), "--output", str(output)])
    page = (output / "index.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;script&gt;" in page
    markdown = (output / "tables/other.md").read_text()
    assert r"$a_{b^&lt;script>alert(1)&lt;script>\|c d&\\e%~\`" in markdown
    latex = (output / "tables/other.tex").read_text()
    assert r"\$a\_\{b\textasciicircum{}$<$script$>$alert(1)$<$script$>$|c d\&\textbackslash{}e\%\textasciitilde{}`" in latex


NO_EXAMPLES = [
    *(
        (changed('"scores_i": [0, 1]', f'"scores_i": {value}'))
        for value in ('["a"]', "[[0], [1]]", "[1e308, 1e308]", "[NaN]", "[{}]")
    ),
    *((changed('"scores_i": [0, 1]', f'"scores_i": {value}')) for value in ("3", "[null]", "[Infinity]")),
    *(("", "[]", '{"test": 3}', '{"test": {}}', "[" * 100_000)),
]


@pytest.mark.parametrize("content", NO_EXAMPLES, ids=names)
def test_damaged_scores_of_examples_are_one_line(content, tmp_path):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(InputError, match=r"results\.json: field `test`"):
        read_example_scores(tmp_path / "results.json", None)


def test_whole_results_are_read(tree, tmp_path):
    """So that the damage, and nothing else, is refused above."""
    assert [one.test.score for one in result_files.read_result_tree(tree)] == [0.5, 0.5]
    assert read_example_scores(tree / "610m-clm-42k/SC/sst2/lr2e-05_sd1/results.json", "accuracy") == [0.0, 1.0]
    summary_main([str(tree), "--output", str(tmp_path / "new" / "all.json")])
    assert json.loads((tmp_path / "new" / "all.json").read_text())["rows"][0]["mean"] == 50


def test_a_refused_output_of_the_summary_leaves_nothing(tree, tmp_path, refusal):
    before = {path for path in tmp_path.rglob("*")}
    for output in (tmp_path / "new/all.txt", "/proc/x/all.json", tmp_path / ("x" * 300 + ".json"), tree / "x/all.json/"):
        refusal(summary_main, [tmp_path / "none", "--output", output])
    assert {path for path in tmp_path.rglob("*")} == before
