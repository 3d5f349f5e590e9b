"""Output files: an input is never replaced, and neither are results that cost work, unless --overwrite is given."""

import json
import os
import shutil
from pathlib import Path

import pytest

from megaenc.embed.command import eval_main
from megaenc.embed.hard_negatives import mine_main
from megaenc.embed.text_pairs import pairs_main
from megaenc.embed.train_command import train_main
from megaenc.errors import InputError
from megaenc.estimate.command import main as estimate_main
from megaenc.finetune.predict import predict_main
from megaenc.finetune.results.summary import summary_main
from megaenc.objectives.units.collocations import main as collocations_main
from megaenc.output_paths import check_output_file

PREDICT = (predict_main, "--model kept --input in.jsonl")
MINE = (mine_main, "--model kept --data in.jsonl --corpus beir")
PAIRS = (pairs_main, "--input in.jsonl --method adjacent --min-words 1 --max-words 4")
EVAL = (eval_main, "--data x=beir --no-bm25 --model y=kept")
ESTIMATE = (estimate_main, "--gpu h100 --config run.json --data-path corpus")


LONG = "x" * 300


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with inputs of every command, links to some, and a result."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"one {n}\n\ntwo {n}", "query": f"q {n}", "document": f"d {n}"} for n in range(4)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.link("in.jsonl", "hard.jsonl")
    os.symlink("in.jsonl", "soft.jsonl")
    for name in ("beir/corpus.jsonl", "beir/queries.jsonl", "kept/scores.json", "done.jsonl", "done.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}\n")
    os.symlink("beir", "linked")
    Path("run.json").write_text('{"train_iters": 10}')
    Path("corpus.json").write_text("{}")
    run = Path("tree/m/SC/d/lr1e-04_sd0")
    run.mkdir(parents=True)
    (run / "results.json").write_text('{"validation": {"score": 0.5}, "test": {"score": 0.5}}')
    return tmp_path


def read_all(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("command", "output", "found"),
    [
        (PREDICT, "in.jsonl", "is the input in.jsonl"),
        (PREDICT, "hard.jsonl", "is the input in.jsonl"),
        (PREDICT, "soft.jsonl", "is the input in.jsonl"),
        (PREDICT, "kept/scores.json", "is a file of the input kept"),
        (MINE, "kept/../in.jsonl", "is the input in.jsonl"),
        (MINE, "hard.jsonl", "is the input in.jsonl"),
        (MINE, "linked/corpus.jsonl", "is a file of the input beir"),
        (PAIRS, "hard.jsonl", "is the input in.jsonl"),
        (EVAL, "kept/scores.json", "is a file of the input kept"),
        ((eval_main, "--config run.json --data beir"), "run.json", "is the input run.json"),
        (ESTIMATE, "run.json", "is the input run.json"),
        (ESTIMATE, "corpus.json", "is the input corpus.json"),
        ((summary_main, "tree"), "tree/m/SC/d/lr1e-04_sd0/results.json", "is a file of the input tree/m/SC/d/lr1e-04_sd0"),
    ],
)
def test_an_input_is_never_replaced(folder, refusal, command, output, found):
    main, flags = command
    if main is eval_main and "--config" in flags:
        Path("run.json").write_text('{"bm25": true}')
    before = read_all(folder)
    overwrite = ["--overwrite"] if main in (predict_main, mine_main, pairs_main, eval_main) else []
    message = refusal(main, [*flags.split(), "--output", output, *overwrite])
    assert message.startswith(f"error: --output {Path(output)}: {found}, expected another name")
    assert read_all(folder) == before


@pytest.mark.parametrize(
    ("command", "output"), [(PREDICT, "done.jsonl"), (MINE, "done.jsonl"), (PAIRS, "done.jsonl"), (EVAL, "done.json")]
)
def test_results_that_cost_work_are_replaced_only_on_request(folder, refusal, command, output):
    main, flags = command
    before = read_all(folder)
    message = refusal(main, [*flags.split(), "--output", output])
    assert message == f"error: --output {output}: exists already; give --overwrite to replace it, or choose another name"
    assert read_all(folder) == before


def test_with_the_flag_results_are_replaced(folder):
    main, flags = PAIRS
    main([*flags.split(), "--output", "done.jsonl", "--overwrite"])
    assert len(Path("done.jsonl").read_text().splitlines()) == 4


def test_summaries_and_estimates_replace_their_own_file(folder):
    shutil.rmtree("kept")
    for main, flags in (ESTIMATE, (summary_main, "tree")):
        flags = flags.replace(" --data-path corpus", "").replace("run.json", "run.json --no-suggest")
        for _ in range(2):
            main([*flags.split(), "--output", "done.json"])
            assert Path("done.json").read_text() != "{}\n"
        Path("done.json").write_text("{}\n")


def test_new_files_in_an_input_folder_are_allowed(folder):
    check_output_file(Path("beir/new.json"), "--output", inputs=["beir"], overwrite=False)
    check_output_file(Path("done.json"), "--output", inputs=["beir", "nobody/model", ""])
    with pytest.raises(InputError, match="is a file of the input"):  # the link would be replaced, which the input contains
        os.symlink(Path("done.json").resolve(), "beir/more.json")
        check_output_file(Path("beir/more.json"), "--output", inputs=["beir"])


@pytest.mark.parametrize(
    ("main", "flags", "found"),
    [
        (predict_main, f"--model {LONG} --input in.jsonl", f"--model {LONG}: no finetuning.json"),
        (predict_main, f"--model kept --input {LONG}", f"--input {LONG}: no such file"),
        (predict_main, f"--model kept --input in.jsonl --output {LONG}", f"--output {LONG}: cannot be accessed: File name too"),
        (
            predict_main,
            f"--model kept --input in.jsonl --output {LONG[:250]}",
            "cannot write to the folder .: File name too long",
        ),
        (train_main, f"--model kept --data in.jsonl --output {LONG}", f"--output {LONG}: cannot be accessed: File name too long"),
        (train_main, f"--model kept --data in.jsonl --output {LONG}/a", f"--output {LONG}/a: cannot be accessed: File name too"),
        (collocations_main, f"--tokenizer kept --output new --data-path {LONG}", f"{LONG}.idx: no such file"),
        (collocations_main, f"--tokenizer kept --output new --data-path {LONG}.bin", f"{LONG}.bin.idx: no such file"),
        (collocations_main, f"--tokenizer kept --output new --data-path {LONG}/a", f"{LONG}/a.idx: no such file"),
    ],
)
def test_names_that_are_too_long_are_one_line(folder, refusal, main, flags, found):
    Path("kept/finetuning.json").write_text('{"family": "SC", "protocol": {}}')
    before = read_all(folder)
    assert found in refusal(main, flags.split())
    assert read_all(folder) == before
