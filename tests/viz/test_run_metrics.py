"""Files of a run directory that no run wrote end in one line, whichever command reads them."""

import json
import os

import pytest
from run_folders import write_run
from study_folders import settings, write_results

from megaenc.study.report import command as report_command
from megaenc.viz import plot, run_summary

METRICS, VALIDATION, FACTS = "metrics.jsonl", "validation.jsonl", "run.json"

GOOD = {
    METRICS: '{"step": 5, "objective": "mlm", "phase": 0, "loss": 8.0, "learning_rate": 0.002, "tokens": 10240, '
    '"predicted_tokens": 5120, "flops": 5e12, "step_seconds": 0.5}',
    VALIDATION: '{"step": 5, "tokens": 10240, "predicted_tokens": 5120, "flops": 5e12, "held_out": "0a1b", '
    '"objectives": {"mlm": {"loss": 8.0, "accuracy": 0.1, "most_frequent": 0.05}}}',
    FACTS: '{"parameters": 1400000, "identity": {"train_iters": 300}, "start": {"kind": "branch", "run": "a", "at": 1, '
    '"tokens": 5, "predicted_tokens": 5, "flops": 1.0}}',
}


def changed(file: str, old: str, new: str) -> tuple[str, bytes]:
    """The whole row or object of a file with `new` in the place of `old`."""
    assert old in GOOD[file]
    return file, (GOOD[file].replace(old, new) + "\n").encode()


DAMAGED = [
    # Rows that are no object, or not JSON.
    *((file, text) for file in (METRICS, VALIDATION) for text in (b"[]\n", b"3\n", b"null\n", b'"x"\n', b"NaN\n", b"{\n", b"\n")),
    *((file, text) for file in (METRICS, VALIDATION) for text in (b"\xff\xfe\n", b'{"step": "\xe9"}\n', b"\0\n", b"{}\n")),
    *((file, b"[" * 100_000 + b"\n") for file in (METRICS, VALIDATION)),
    *((file, b'{"step": ' + b"1" * 5000 + b"}\n") for file in (METRICS, VALIDATION)),
    *((file, b'{"step": 1, "x": "' + b"x" * (1 << 20) + b'"}\n') for file in (METRICS, VALIDATION)),
    *(
        (file, (GOOD[file].replace('"step": 5', '"step": 7') + "\n" + GOOD[file] + "\n").encode())
        for file in (METRICS, VALIDATION)
    ),
    # Fields of another kind.
    *(changed(METRICS, '"step": 5', f'"step": {value}') for value in ('"x"', "null", "[]", "{}", "-1", "1.5", "1e308", "true")),
    *(changed(METRICS, '"loss": 8.0', f'"loss": {value}') for value in ('"8"', "[8]", "1e308", "-1e308", "true", "{}")),
    *(changed(METRICS, '"tokens": 10240', f'"tokens": {value}') for value in ('"x"', "null", "-5", "NaN", "1" * 400)),
    *(changed(METRICS, '"learning_rate": 0.002', f'"learning_rate": {value}') for value in ("null", "Infinity", "-1", '"x"')),
    *(changed(METRICS, '"step_seconds": 0.5', f'"step_seconds": {value}') for value in ("null", "NaN", "1e308", "[]")),
    *(changed(METRICS, '"objective": "mlm"', f'"objective": {value}') for value in ("1", "[]", "null", r'"a\nb"', r'"\ud800"')),
    *(changed(METRICS, '"phase": 0', f'"phase": {value}') for value in ("null", "[]", "{}", "0.5", '"x"')),
    changed(METRICS, '"flops": 5e12', '"flops": "many"'),
    *(changed(VALIDATION, '"loss": 8.0', f'"loss": {value}') for value in ('"8"', "[8]", "1e308", "{}", "false")),
    *(changed(VALIDATION, '"accuracy": 0.1', f'"accuracy": {value}') for value in ('"8"', "[8]", "2", "-1", "{}")),
    *(
        changed(VALIDATION, '"objectives": {', f'"objectives": {value}, "x": {{')
        for value in ("[]", "null", '"mlm"', '{"mlm": 3}')
    ),
    changed(VALIDATION, '"most_frequent": 0.05', '"most_frequent": "x"'),
    *(
        changed(VALIDATION, '"most_frequent": 0.05', f'"most_frequent": 0.05, "by_position": {value}')
        for value in ("[]", "null", "3", '{"0-127": "x"}', '{"0-127": [1]}', r'{"\u001b": 1}')
    ),
    changed(VALIDATION, '"mlm": {', r'"\u001b[31m": {'),
    changed(VALIDATION, '"held_out": "0a1b"', '"held_out": []'),
    changed(VALIDATION, '"loss": 8.0, ', ""),
    # run.json
    *((FACTS, text) for text in (b"", b"[]", b"3", b"null", b"{", b"\xff", b'"x"', b"[" * 100_000)),
    *(changed(FACTS, '"at": 1', f'"at": {value}') for value in ('"x"', "null", "[]", "-1", "1e308", "true")),
    *(changed(FACTS, '"tokens": 5', f'"tokens": {value}') for value in ('"x"', "null", "{}", "NaN")),
    *(changed(FACTS, '"start": {', f'"start": {value}, "x": {{') for value in ("[]", "3", '"branch"', "null")),
    changed(FACTS, '"run": "a"', '"run": 5'),
]
KINDS = [(file, kind) for file in (METRICS, VALIDATION, FACTS) for kind in ("a FIFO", "a folder")]


@pytest.fixture
def commands(tmp_path, results):
    """By name, what reads the run directory `run`: the command and its flags."""
    run, output = tmp_path / "runs" / "run", tmp_path / "output"
    return {
        "plot": (plot.main, [run, "--output", output / "loss.png"]),
        "compare": (plot.main, [run, write_run(tmp_path / "other"), "--output", output / "loss.png"]),
        "summary": (run_summary.main, [run]),
        "report": (report_command.main, ["--results", results, "--runs", tmp_path / "runs", "--output", output / "report"]),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    models = {name: one for name, one in settings().items() if name in ("mini-mlm40-300", "mini-clm-300")}
    return write_results(tmp_path_factory.mktemp("results"), models)


READS = {
    METRICS: ("plot", "summary", "report"),
    VALIDATION: ("plot", "compare", "summary", "report"),
    FACTS: ("plot", "summary", "report"),
}


def names(value):
    return repr(value)[:60] if isinstance(value, bytes) else value


@pytest.mark.parametrize(("file", "content"), DAMAGED, ids=names)
def test_a_damaged_file_is_one_line(file, content, tmp_path, commands, refusal):
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    for name, text in GOOD.items():
        (run / name).write_text(text + "\n")
    (run / file).write_bytes(content)
    for command in READS[file]:
        assert file in refusal(*commands[command]), command
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(("file", "kind"), KINDS)
def test_a_file_of_another_kind_is_one_line(file, kind, tmp_path, commands, refusal):
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    for name, text in GOOD.items():
        if name != file:
            (run / name).write_text(text + "\n")
    os.mkfifo(run / file) if kind == "a FIFO" else (run / file).mkdir()
    for command in READS[file]:
        line = refusal(*commands[command])
        assert file in line or (command == "report" and "holds no run with a step" in line)
    assert not (tmp_path / "output").exists()


def test_a_whole_run_is_read(tmp_path, commands):
    """So that the damage, and nothing else, is refused above."""
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    for name, text in GOOD.items():
        (run / name).write_text(text + "\n")
    for command in ("plot", "summary"):
        main, flags = commands[command]
        main([str(flag) for flag in flags])
    assert (tmp_path / "output/loss.png").exists()


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "null"])
def test_a_validation_that_diverged_has_no_point(loss, tmp_path, commands):
    run = write_run(tmp_path / "runs" / "run")
    rows = (run / VALIDATION).read_text().splitlines()
    last = json.loads(rows[-1])
    last["objectives"]["clm"]["loss"] = float(loss.replace("null", "NaN").lower())
    (run / VALIDATION).write_text("\n".join([*rows[:-1], json.dumps(last)]) + "\n")
    for command in ("plot", "compare", "summary"):
        main, flags = commands[command]
        main([str(flag) for flag in flags])
    assert [one.objective for one in run_summary.summarise(run).gains] == ["mlm(mask=0.3)"]


@pytest.mark.parametrize("loss", ["1e99", "-1e99", "1e-320"])
def test_the_largest_losses_are_drawn(loss, tmp_path, commands):
    run = write_run(tmp_path / "runs" / "run")
    for file, old in ((METRICS, '"loss": 8.0'), (VALIDATION, '"loss": 8.5')):
        text = (run / file).read_text()
        assert old in text
        (run / file).write_text(text.replace(old, f'"loss": {loss}'))
    for command in ("plot", "compare", "summary"):
        main, flags = commands[command]
        main([str(flag) for flag in flags])


def test_a_run_whose_numbers_are_all_zero_is_drawn(tmp_path, commands):
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    row = json.loads(GOOD[METRICS])
    (run / METRICS).write_text(
        json.dumps({name: 0 if not isinstance(value, str) else value for name, value in row.items()}) + "\n"
    )
    validation = json.loads(GOOD[VALIDATION]) | {"step": 0, "tokens": 0}
    validation["objectives"]["mlm"] = dict.fromkeys(validation["objectives"]["mlm"], 0)
    (run / VALIDATION).write_text(json.dumps(validation) + "\n")
    (run / FACTS).write_text('{"parameters": 0, "identity": {"train_iters": 0}}')
    for command in ("plot", "summary"):
        main, flags = commands[command]
        main([str(flag) for flag in flags])


@pytest.mark.parametrize("name", ["[red]", "[/]", "$x^{", "_hidden", "a|b<c>&\\"])
def test_objectives_are_shown_as_they_are(name, tmp_path, commands, capsys):
    run = write_run(tmp_path / "runs" / "run")
    for file in (METRICS, VALIDATION):
        text = (run / file).read_text().replace(json.dumps("clm"), json.dumps(name))
        (run / file).write_text(text)
    for command in ("plot", "summary"):
        main, flags = commands[command]
        main([str(flag) for flag in flags])
    assert f"{name}: loss" in capsys.readouterr().out
