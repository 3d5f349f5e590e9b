"""Output files never replace inputs, nor costly results without --overwrite."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_data import write_file

from megaenc.atomic_io import atomic_dir, atomic_write
from megaenc.embed.command import eval_main
from megaenc.embed.hard_negatives import mine_main
from megaenc.embed.text_pairs import pairs_main
from megaenc.errors import InputError
from megaenc.estimate.command import main as estimate_main
from megaenc.finetune.predict import predict_main
from megaenc.finetune.results.summary import summary_main
from megaenc.output_paths import (
    check_output_file,
    create_parent_dir,
    create_parent_with_rollback,
    refuse_existing,
)

PREDICT = (predict_main, "--model kept --input in.jsonl")
MINE = (mine_main, "--model kept --data in.jsonl --corpus beir")
PAIRS = (pairs_main, "--input in.jsonl --method adjacent --min-words 1 --max-words 4")
EVAL = (eval_main, "--data x=beir --no-bm25 --model y=kept")
ESTIMATE = (estimate_main, "--gpu h100 --config run.json --data-path corpus")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Make a directory with inputs of every command, links to some, and a result."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"text": f"one {n}\n\ntwo {n}", "query": f"q {n}", "document": f"d {n}"} for n in range(4)
    ]
    write_file(Path("in.jsonl"), rows)
    os.link("in.jsonl", "hard.jsonl")
    os.symlink("in.jsonl", "soft.jsonl")
    for name in (
        "beir/corpus.jsonl",
        "beir/queries.jsonl",
        "kept/scores.json",
        "done.jsonl",
        "done.json",
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}\n")
    os.symlink("beir", "linked")
    Path("run.json").write_text('{"train_iters": 10}')
    Path("corpus.json").write_text("{}")
    run = Path("tree/m/SC/d/lr1e-04_sd0")
    run.mkdir(parents=True)
    (run / "results.json").write_text('{"validation": {"score": 0.5}, "test": {"score": 0.5}}')
    return tmp_path


def read_all(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("command", "output", "found"),
    [
        (PREDICT, "in.jsonl", "is the input in.jsonl"),
        (PREDICT, "hard.jsonl", "is the input in.jsonl"),
        (PREDICT, "kept/scores.json", "is a file of the input kept"),
        (MINE, "kept/../in.jsonl", "is the input in.jsonl"),
        (MINE, "linked/corpus.jsonl", "is a file of the input beir"),
        (PAIRS, "hard.jsonl", "is the input in.jsonl"),
        (EVAL, "kept/scores.json", "is a file of the input kept"),
        ((eval_main, "--config run.json --data beir"), "run.json", "is the input run.json"),
        (ESTIMATE, "run.json", "is the input run.json"),
        (ESTIMATE, "corpus.json", "is the input corpus.json"),
        (
            (summary_main, "tree"),
            "tree/m/SC/d/lr1e-04_sd0/results.json",
            "is a file of the input tree/m/SC/d/lr1e-04_sd0",
        ),
    ],
)
def test_an_input_is_never_replaced(directory, refusal, command, output, found):
    main, flags = command
    if main is eval_main and "--config" in flags:
        Path("run.json").write_text('{"bm25": true}')
    before = read_all(directory)
    overwrite = ["--overwrite"] if main in (predict_main, mine_main, pairs_main, eval_main) else []
    message = refusal(main, [*flags.split(), "--output", output, *overwrite])
    assert message.startswith(f"error: --output {Path(output)}: {found}, expected another name")
    assert read_all(directory) == before


@pytest.mark.parametrize(
    ("command", "output"),
    [(PREDICT, "done.jsonl"), (MINE, "done.jsonl"), (PAIRS, "done.jsonl"), (EVAL, "done.json")],
)
def test_results_that_cost_work_are_replaced_only_on_request(directory, refusal, command, output):
    main, flags = command
    before = read_all(directory)
    message = refusal(main, [*flags.split(), "--output", output])
    assert message == (
        f"error: --output {output}: exists already; give --overwrite to replace it, or choose "
        f"another name"
    )
    assert read_all(directory) == before


def test_with_the_flag_results_are_replaced(directory):
    main, flags = PAIRS
    main([*flags.split(), "--output", "done.jsonl", "--overwrite"])
    assert len(Path("done.jsonl").read_text().splitlines()) == 4


def test_summaries_and_estimates_replace_their_own_file(directory):
    shutil.rmtree("kept")
    for main, flags in (ESTIMATE, (summary_main, "tree")):
        flags = flags.replace(" --data-path corpus", "").replace(
            "run.json", "run.json --no-suggest"
        )
        for _ in range(2):
            main([*flags.split(), "--output", "done.json"])
            assert Path("done.json").read_text() != "{}\n"
        Path("done.json").write_text("{}\n")


def test_new_files_in_an_input_directory_are_allowed(directory):
    check_output_file(Path("beir/new.json"), "--output", inputs=["beir"], overwrite=False)
    check_output_file(Path("done.json"), "--output", inputs=["beir", "nobody/model", ""])
    with pytest.raises(
        InputError, match="is a file of the input"
    ):  # the link would be replaced, which the input contains
        os.symlink(Path("done.json").resolve(), "beir/more.json")
        check_output_file(Path("beir/more.json"), "--output", inputs=["beir"])


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_name_of_an_output_file_is_checked_and_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("old")
    os.mkfifo(tmp_path / "fifo")
    for path in ("new", "file", "a/b/new", "none/../new"):
        check_output_file(tmp_path / path, "--output")
    for path, message in (
        (".", "found a directory, expected the name of a file"),
        ("fifo", "found no regular file, expected the name of a file"),
        ("file/new", "cannot write to the directory .*: Not a directory"),
        ("a/file" * 2000, "cannot be accessed: File name too long"),
        ("n" * 240, "cannot write to the directory .*: File name too long"),
        ("/proc/none/new", "cannot write to the directory"),
    ):
        with pytest.raises(InputError, match=rf"--output \S+: {message}"):
            check_output_file(tmp_path / path, "--output")
    assert names(tmp_path) == ["fifo", "file"] and (tmp_path / "file").read_text() == "old"


def test_what_stands_in_the_place_of_an_output_directory(tmp_path, monkeypatch):
    """An output directory may be empty, also behind a link, and its path may go up."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for path in ("empty", "link", "new", "empty/new/.."):
        refuse_existing(tmp_path / path, "--output")
    (tmp_path / "file").touch()
    for path in ("file", ".", "none/.."):
        with pytest.raises(InputError, match=r"--output .*: exists already"):
            refuse_existing(tmp_path / path, "--output")
    for name in ("a\0b", "\udcff"):
        with pytest.raises(
            InputError, match=r"--output '.*': not UTF-8, or holds a null character"
        ):
            refuse_existing(Path(name), "--output")
    monkeypatch.chdir(tmp_path / "empty")
    for path in (Path(), tmp_path / "link", Path("none/..")):
        with pytest.raises(
            InputError,
            match=r"--output .*: the directory that this command runs in, expected another name",
        ):
            refuse_existing(path, "--output")


def test_a_directory_is_made_for_a_name_that_goes_up(tmp_path):
    path = tmp_path / "new" / "directory" / ".."
    create_parent_dir(path, "--output")
    with atomic_dir(path) as directory:
        (directory / "a").touch()
    assert names(tmp_path) == ["new"] and names(tmp_path / "new") == ["a"]


def test_commands_that_write_into_one_new_directory_do_not_disturb_each_other(tmp_path):
    def write(directory: Path, number: int) -> None:
        path = directory / "deep" / f"file{number}"
        check_output_file(path, "--output")
        with create_parent_with_rollback(path, "--output"):
            atomic_write(path, "text")

    with ThreadPoolExecutor(8) as pool:
        for turn in range(30):
            list(pool.map(write, 8 * [tmp_path / f"new{turn}"], range(8)))
            assert len(names(tmp_path / f"new{turn}" / "deep")) == 8


def test_directories_that_were_created_for_what_failed_are_removed_unless_a_file_is_in_them(
    tmp_path,
):
    (tmp_path / "old").mkdir()
    for path in (tmp_path / "a" / "b" / "file", tmp_path / "old" / "c" / "file"):
        with pytest.raises(KeyError), create_parent_with_rollback(path, "--output"):
            raise KeyError
    assert names(tmp_path) == ["old"] and not names(tmp_path / "old")
    with (
        pytest.raises(KeyError),
        create_parent_with_rollback(tmp_path / "a" / "b" / "file", "--output"),
    ):
        (tmp_path / "a" / "kept").touch()
        raise KeyError
    assert names(tmp_path / "a") == ["kept"]
