import json
import threading

import pytest

from megaenc.data import demo
from megaenc.data.indexed.metadata import read_corpus_metadata
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.errors import InputError

DOCSTRING = '''
def f(x):
    """Return the largest value of the array along the axis that was asked for.

    The array is copied first, so that the caller's data are
    never changed by it; see :func:`numpy.sort` and ``copy`` for more.

    Parameters
    ----------
    x : array_like
        The values among which the largest one is looked for by this function.

    Args:
        axis (`int`, *optional*, defaults to 0): The axis along which to look for the largest \
value of the array

    >>> f([1, 2])
    This line is the output of the example and so it is left out of the demo.

    For example, this is how it is used by most of the people who use it::

        This is indented below a double colon and for that reason it is a block of code.

    .. code-block:: python
        This is a directive of a kind that does not hold any prose for us to read here.

    - The first item of a list is a paragraph of its own when it is a sentence.
    - x, y, z, w, u, v
    """
    raise ValueError("x = {}, y = {}, and that is not what we had hoped to see in it".format(x, 0))
'''


def test_prose_is_what_reads_as_english_and_nothing_else():
    assert [
        paragraph
        for _, text in demo.find_long_strings(DOCSTRING)
        for paragraph in demo.extract_paragraphs(text)
    ] == [
        "Return the largest value of the array along the axis that was asked for.",
        "The array is copied first, so that the caller's data are never changed by it; "
        "see numpy.sort and copy for more.",
        "The values among which the largest one is looked for by this function.",
        "The axis along which to look for the largest value of the array.",
        "For example, this is how it is used by most of the people who use it:",
        "The first item of a list is a paragraph of its own when it is a sentence.",
    ]
    assert demo.find_long_strings("def broken(:") == []


def test_likeness_ignores_names_and_numbers():
    first = "Constructs the BertModel with 12 layers, as it was first described."
    second = "Constructs the GPT2Model with 24 layers as it was first described"
    assert (
        demo.similarity_key(first)
        == demo.similarity_key(second)
        != demo.similarity_key("Constructs a model.")
    )


@pytest.fixture
def few_packages(monkeypatch):
    """Use the sources of three small packages and of a part of Python."""
    everything = demo._find_source_files
    monkeypatch.setattr(demo, "_PACKAGES", ["psutil", "rich", "tyro", "zipp"])
    monkeypatch.setattr(
        demo,
        "_find_source_files",
        lambda: (
            source
            for source in everything()
            if not source[0].startswith("python/") or source[0].startswith("python/json")
        ),
    )
    monkeypatch.setattr(demo, "_HELD_OUT_PERCENT", 20)


def test_parts_are_recognised_by_their_prefixes():
    python = "demo/python_text_document"
    packages = "./demo/packages_text_document"
    corpus = "demo/corpus_text_document"
    assert demo.find_demo_parts([]) == demo.find_demo_parts([corpus]) == ()
    assert demo.find_demo_parts([corpus, packages, python, packages]) == ("packages", "python")
    assert demo.find_demo_parts([python, "out/a_text_document"]) is None


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_demo_is_deterministic_complete_and_kept(few_packages, tmp_path):
    paths = demo.ensure_demo(tmp_path / "a", vocab_size=600, parts=demo.PARTS)
    corpus = records(paths.corpus)
    heldout = records(paths.heldout)
    assert len(corpus) > 20 and len(heldout) > 2
    ids = [record["id"] for record in corpus]
    assert ids == sorted(ids) and not any(map(demo.is_held_out, ids))
    assert all(demo.is_held_out(record["id"]) for record in heldout)
    paragraphs = [
        paragraph for record in corpus + heldout for paragraph in record["text"].split("\n\n")
    ]
    assert len(paragraphs) == len(set(paragraphs))
    assert read_corpus_metadata(paths.data_prefix).documents == len(corpus)
    counts = [read_corpus_metadata(paths.part_prefix(part)).documents for part in demo.PARTS]
    assert counts[0] == sum(name.startswith("python/") for name in ids) > 0
    assert sum(counts) == len(corpus)
    assert len(load_tokenizer(paths.tokenizer)) == 600

    before = {
        path: path.stat().st_mtime_ns for path in paths.corpus.parent.rglob("*") if path.is_file()
    }
    assert demo.ensure_demo(tmp_path / "a", vocab_size=600) == paths
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(InputError, match="holds a demo of 600 token ids, expected 700"):
        demo.ensure_demo(tmp_path / "a", vocab_size=700)

    again = demo.build_demo_corpus(tmp_path / "b")
    assert again.corpus.read_bytes() == paths.corpus.read_bytes()
    assert again.heldout.read_bytes() == paths.heldout.read_bytes()


def test_an_interrupted_build_leaves_nothing(two_documents, tmp_path, monkeypatch):
    def documents(sources):
        yield "psutil/a.py", "Some text that is whole."
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_extract_documents", documents)
    with pytest.raises(KeyboardInterrupt):
        demo.build_demo_corpus(tmp_path)
    assert list(tmp_path.iterdir()) == []


def listing(directory):
    """Return the files below a directory with their content."""
    return {
        path.relative_to(directory): path.is_file() and path.read_bytes()
        for path in directory.rglob("*")
    }


@pytest.fixture
def two_documents(monkeypatch):
    """Replace the sources with two short documents, one of them held out."""
    monkeypatch.setattr(demo, "_find_source_files", lambda: iter(()))
    monkeypatch.setattr(demo, "is_held_out", lambda name: name == "held/out")
    monkeypatch.setattr(
        demo,
        "_extract_documents",
        lambda sources: iter([("a/b", "Some text."), ("held/out", "Another text.")]),
    )


@pytest.mark.parametrize(
    "name", ["corpus.jsonl", "heldout.jsonl", "demo.json", "tokenizer", "corpus_text_document.idx"]
)
def test_files_of_others_are_refused_and_kept(two_documents, tmp_path, name):
    (tmp_path / name).write_text('{"text": "mine"}\n')
    before = listing(tmp_path)
    with pytest.raises(
        InputError, match=f"{name}: found a file that .*move the file or name another directory"
    ):
        demo.ensure_demo(tmp_path)
    assert listing(tmp_path) == before


def test_a_link_is_refused_whatever_it_leads_to(two_documents, tmp_path):
    corpus = demo.build_demo_corpus(tmp_path).corpus
    corpus.rename(tmp_path / "elsewhere")
    corpus.symlink_to("elsewhere")
    with pytest.raises(InputError, match=r"corpus\.jsonl: found a file that"):
        demo.build_demo_corpus(tmp_path)
    assert corpus.is_symlink()


def test_a_changed_demo_corpus_is_refused(two_documents, tmp_path):
    paths = demo.build_demo_corpus(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "corpus.jsonl",
        "demo.json",
        "heldout.jsonl",
    ]
    assert demo.build_demo_corpus(tmp_path) == paths
    paths.corpus.write_text(paths.corpus.read_text().replace("Some", "More"))
    with pytest.raises(
        InputError,
        match=r"corpus\.jsonl: found a file that has changed since `megaenc demo` wrote it",
    ):
        demo.build_demo_corpus(tmp_path)
    assert "More" in paths.corpus.read_text()


@pytest.mark.parametrize("renames", [1, 2])
def test_a_build_killed_between_renames_continues(two_documents, tmp_path, monkeypatch, renames):
    """The packages have changed before the next build."""
    demo.build_demo_corpus(tmp_path)
    for name in ("corpus.jsonl", "heldout.jsonl")[: 3 - renames]:
        (tmp_path / name).unlink()
    monkeypatch.setattr(
        demo,
        "_extract_documents",
        lambda sources: iter([("a/b", "A new text."), ("held/out", "Another new text.")]),
    )
    paths = demo.build_demo_corpus(tmp_path)
    assert demo.find_demo_corpus(tmp_path) == paths
    assert (
        "A new text." in paths.corpus.read_text()
        and "Another new text." in paths.heldout.read_text()
    )


def test_a_second_process_waits_for_the_first(two_documents, tmp_path, monkeypatch):
    builds = []
    first = threading.Event()
    start = threading.Event()

    def documents(sources):
        builds.append(1)
        first.set()
        start.wait(60)
        yield "a/b", "Some text."

    monkeypatch.setattr(demo, "_extract_documents", documents)
    threads = [threading.Thread(target=demo.build_demo_corpus, args=(tmp_path,)) for _ in range(2)]
    threads[0].start()
    assert first.wait(60)
    threads[1].start()
    start.set()
    for thread in threads:
        thread.join(60)
    assert builds == [1] and demo.find_demo_corpus(tmp_path)
