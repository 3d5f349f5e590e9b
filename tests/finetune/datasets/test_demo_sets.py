import importlib.util
from pathlib import Path

import pytest
from small_data import write_file, write_files

from megaenc.data import demo as corpus
from megaenc.data.preprocess.outputs import compute_sha256
from megaenc.errors import InputError
from megaenc.finetune.datasets import demo
from megaenc.finetune.datasets.registry import find_dataset

SOURCE = '''
def scale(x, factor=1.0):
    """Multiply the values of the array by a factor that is given.

    The array is copied first, and if `factor` is ``None`` nothing is done with the values of `x`.

    Args:
        x (`array`): The values that are to be multiplied. They are not changed.
        factor (`float`, *optional*): What every one of the values is multiplied with
        short: no.
    """

def clip(x, low):
    """
    Clip the values of an array to a lower limit.

    Parameters
    ----------
    x : array_like
        The values that are to be clipped by this function.
    low : float
        The smallest value that may be left; see :func:`scale` and `low` for more.
    """
'''


@pytest.fixture
def parsed(tmp_path):
    (tmp_path / "m.py").write_text(SOURCE)
    return demo._parse_documented_functions(("p/m.py", str(tmp_path / "m.py")))


def test_parameters_are_read_out_of_docstrings_of_several_styles(parsed):
    assert [list(parameters) for _, _, parameters in parsed] == [
        ["x", "factor", "short"],
        ["x", "low"],
    ]
    assert parsed[0][0] == "p/m.py:3" and parsed[0][1].startswith("Multiply the values")
    assert parsed[1][2]["x"] == "The values that are to be clipped by this function."


def test_names_of_parameters_are_tagged_where_they_are_marked(parsed):
    rows = list(demo.build_tagging_rows(parsed))
    tagged = [
        [(word, tag) for word, tag in zip(row["tokens"], row["tags"], strict=True) if tag != "O"]
        for row in rows
    ]
    assert tagged == [
        [("factor", "B-PARAM"), ("None", "B-CODE"), ("x", "B-PARAM")],
        [("scale", "B-CODE"), ("low", "B-PARAM")],
    ]
    [code] = demo.build_tagging_rows(
        [("i", "This is what `dim` is for, as in `dim = 0` and so on.", {"dim": "d"})]
    )
    # The whole of marked code is one span; what says nothing of a parameter is no sentence of the
    # set.
    assert (
        code["tags"]
        == ["O"] * 3 + ["B-PARAM"] + ["O"] * 5 + ["B-CODE", "I-CODE", "I-CODE"] + ["O"] * 4
    )


def test_the_answer_is_the_sentence_that_describes_the_parameter(parsed):
    asked = list(demo.build_question_rows(parsed))
    lines = asked[0]["context"].splitlines()
    assert lines[0] == "x: The values that are to be multiplied. They are not changed." and lines[
        1
    ].startswith("factor: ")
    answers = [row["answers"]["text"][0] for row in asked]
    assert answers[:2] == [
        "The values that are to be multiplied.",
        "What every one of the values is multiplied with.",
    ]
    for row, answer in zip(asked, answers, strict=True):
        assert row["context"][row["answers"]["answer_start"][0] :].startswith(answer)


def test_the_summary_asks_for_the_rest(parsed):
    first, second = demo.build_retrieval_rows(parsed)
    assert first["query"] == "Multiply the values of the array by a factor that is given."
    assert first["query"] not in first["document"] and "They are not changed." in first["document"]
    assert second["query"] == "Clip the values of an array to a lower limit."


def test_what_is_documented_twice_is_there_once(parsed):
    for examples in (demo.build_tagging_rows, demo.build_question_rows, demo.build_retrieval_rows):
        assert len(list(examples([*parsed, *parsed]))) == len(list(examples(parsed)))


@pytest.fixture
def few_sources(monkeypatch):
    """The documentation of part of networkx instead of everything."""
    [directory] = importlib.util.find_spec("networkx").submodule_search_locations
    sources = [
        (f"networkx/{path.relative_to(directory)}", str(path))
        for path in Path(directory).glob("algorithms/[c-d]*.py")
    ]
    monkeypatch.setattr(corpus, "_find_source_files", lambda: iter(sources))


WORDS = "is a paragraph of more than ten words for the purposes of this."


def with_corpus(directory):
    """Write a corpus of two packages, and one too small for a class, to `directory`.

    One package has twice as many paragraphs.
    """
    rows = []
    for package, count in (("big", 80), ("less", 40), ("tiny", 1)):
        for at in range(count):
            text = f"One {package} {at} {WORDS}\n\nTwo {package} {at} {WORDS}\n\nShort."
            rows.append({"id": f"{package}/{at}.py", "text": text})
    write_files(directory, {"corpus.jsonl": rows, "heldout.jsonl": ""})
    hashes = {name: compute_sha256(directory / name) for name in ("corpus.jsonl", "heldout.jsonl")}
    write_file(directory / "demo.json", {"generator": "megaenc demo", "sha256": hashes})
    return directory / "finetune"


def contents(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def check_apart(splits):
    """Nothing is in two of them."""
    assert all(splits) and sum(map(len, splits)) == len(set().union(*splits))


def test_demo_sets_are_made_once_the_same_and_without_leaks(few_sources, tmp_path, monkeypatch):
    made = demo.ensure_demo_datasets(with_corpus(tmp_path / "a"))
    before = contents(made)
    monkeypatch.setattr(corpus, "usable_core_count", lambda: 1)
    assert contents(demo.ensure_demo_datasets(with_corpus(tmp_path / "b"))) == before
    labels = {
        "demo_sc": ("big", "less"),
        "demo_tc": ("O", "B-CODE", "B-PARAM", "I-CODE"),
        "demo_qa": (),
        "demo_ir": (),
    }
    assert tuple(labels) == demo.DEMO_DATASETS
    texts = {}
    for name in labels:
        found = find_dataset(name, demo_folder=str(made))
        assert (found.name, found.family, found.labels) == (name, name[-2:].upper(), labels[name])
        texts[name] = [found.load_split(split) for split in ("train", "validation", "test")]
    packages, tags, asked, (pairs, validation, test) = texts.values()
    # No text is in two splits, and nothing of one function or file.
    for splits, text_of in (
        (packages, lambda example: example.text),
        (tags, lambda example: " ".join(example.words)),
        (asked, lambda example: example.context),
    ):
        check_apart([{text_of(example) for example in split} for split in splits])
        check_apart([{example.id.rpartition("-")[0] for example in split} for split in splits])
    check_apart([{pair.document for pair in pairs}, set(test.documents.values())])
    check_apart(
        [
            {pair.query for pair in pairs},
            set(validation.queries.values()),
            set(test.queries.values()),
        ]
    )
    assert validation.documents == test.documents and len(test.documents) == len(
        validation.queries
    ) + len(test.queries)
    assert all(list(grades.values()) == [1] for grades in test.relevant.values())
    for split in packages:  # as many of each package
        assert 2 * sum(example.label for example in split) == len(split)
    assert all(2 in example.tags for split in tags for example in split)
    assert all(
        len(example.answers) == 1 and example.answers[0].start > 0
        for split in asked
        for example in split
    )


def test_what_is_there_is_kept(tmp_path):
    for name in demo.DEMO_DATASETS:
        (tmp_path / "finetune" / name).mkdir(parents=True)
    write_file(tmp_path / "finetune" / "demo_sc" / "train.jsonl", "mine")
    before = contents(tmp_path)
    demo.main(["--output", str(tmp_path / "finetune")])
    assert contents(tmp_path) == before


def test_one_set_is_made_without_the_others(few_sources, tmp_path, monkeypatch, capsys):
    """Texts of packages are made without functions, whose reading takes long."""
    directory = with_corpus(tmp_path / "a")
    reads = []
    read = demo.read_documentation
    monkeypatch.setattr(demo, "read_documentation", lambda: reads.append(1) or read())
    find_dataset("demo_sc", demo_folder=str(directory))
    assert ([path.name for path in directory.iterdir() if path.is_dir()], reads) == (
        ["demo_sc"],
        [],
    )
    assert (
        f"{directory}: building demo_sc from installed packages, once;" in capsys.readouterr().out
    )
    for name in demo.DEMO_DATASETS[::-1]:
        find_dataset(name, demo_folder=str(directory))
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == sorted(
        demo.DEMO_DATASETS
    ) and reads == [1]


def test_nothing_is_written_or_read_outside_the_directory(tmp_path, monkeypatch):
    """The directory above is somebody's, with a corpus of that name."""
    made = [
        (f"{name}/{number}", f"{name} {number} {WORDS}")
        for name in ("one", "two")
        for number in range(40)
    ]
    monkeypatch.setattr(corpus, "_extract_documents", lambda sources: iter(made))
    monkeypatch.setattr(corpus, "_find_source_files", lambda: iter(()))
    write_files(tmp_path, dict.fromkeys(("corpus.jsonl", "heldout.jsonl"), '{"text": "mine"}\n'))
    before = contents(tmp_path)
    demo.ensure_demo_datasets(tmp_path / "finetune", ["demo_sc"])
    after = contents(tmp_path)
    assert {path: after.get(path) for path in before} == before
    assert {path.parts[:2] for path in after.keys() - before} == {("finetune", "demo_sc")}
    assert "one 3 is a paragraph" in (tmp_path / "finetune/demo_sc/train.jsonl").read_text()


def test_a_file_in_the_place_of_a_set_is_refused_at_once(tmp_path):
    (tmp_path / "demo_qa").write_text("mine")
    with pytest.raises(
        InputError, match="demo_qa: found a file; expected the directory of a demo set"
    ):
        demo.ensure_demo_datasets(tmp_path)
    assert contents(tmp_path) == {Path("demo_qa"): b"mine"}
