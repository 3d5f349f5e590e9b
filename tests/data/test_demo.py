import json

import pytest

from megaenc.data import demo, prose
from megaenc.data.sidecar import read_sidecar
from megaenc.data.tokenizer import load_tokenizer
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
        axis (`int`, *optional*, defaults to 0): The axis along which to look for the largest value of the array

    >>> f([1, 2])
    This line is the output of the example and so it is left out of the prose.

    For example, this is how it is used by most of the people who use it::

        This is indented below a double colon and for that reason it is a block of code.

    .. code-block:: python
        This is a directive of a kind that does not hold any prose for us to read here.

    - The first item of a list is a paragraph of its own when it is a sentence.
    - x, y, z, w, u, v
    """
    # A comment of more than one line counts too, because it is where
    # the people who write programs say what they think.
    raise ValueError("x = {}, y = {}, and that is not what we had hoped to see in it".format(x, 0))
'''


def test_prose_is_what_reads_as_english_and_nothing_else():
    assert list(prose.python_paragraphs(DOCSTRING)) == [
        "Return the largest value of the array along the axis that was asked for.",
        "The array is copied first, so that the caller's data are never changed by it; see numpy.sort and copy for more.",
        "The values among which the largest one is looked for by this function.",
        "The axis along which to look for the largest value of the array.",
        "For example, this is how it is used by most of the people who use it:",
        "The first item of a list is a paragraph of its own when it is a sentence.",
        "A comment of more than one line counts too, because it is where the people who write programs say what they think.",
    ]
    assert list(prose.python_paragraphs("def broken(:")) == []


def test_comments_of_headers_are_read():
    source = """
        int a; /* This is what the
                * function does when it is given more than one of them. */
        /// And this is a
        /// comment of the other kind that we have in the files of C.
        int b;
    """
    assert list(prose.header_paragraphs(source)) == [
        "This is what the function does when it is given more than one of them.",
        "And this is a comment of the other kind that we have in the files of C.",
    ]


def test_likeness_ignores_names_and_numbers():
    first = "Constructs the BertModel with 12 layers, as it was first described."
    second = "Constructs the GPT2Model with 24 layers as it was first described"
    assert prose.likeness(first) == prose.likeness(second) != prose.likeness("Constructs a model.")


@pytest.fixture
def few_packages(monkeypatch):
    """The documentation of three small packages instead of everything."""
    everything = demo._sources
    monkeypatch.setattr(demo, "_PACKAGES", ["psutil", "rich", "tyro", "zipp"])
    monkeypatch.setattr(demo, "_sources", lambda: (source for source in everything() if not source[0].startswith("python/")))
    monkeypatch.setattr(demo, "_HELD_OUT_PERCENT", 20)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_demo_is_deterministic_complete_and_kept(few_packages, tmp_path):
    made = demo.ensure_demo(tmp_path / "a", vocab_size=600)
    corpus, heldout = records(made.corpus), records(made.heldout)
    assert len(corpus) > 20 and len(heldout) > 2
    assert [record["id"] for record in corpus] == sorted(record["id"] for record in corpus)
    assert all(demo.is_held_out(record["id"]) for record in heldout) and not any(demo.is_held_out(r["id"]) for r in corpus)
    paragraphs = [paragraph for record in corpus + heldout for paragraph in record["text"].split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))

    sidecar = read_sidecar(made.data_prefix)
    assert sidecar.documents == len(corpus) and sidecar.append_eod
    assert len(load_tokenizer(made.tokenizer)) == 600

    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in made.corpus.parent.rglob("*") if path.is_file()}
    assert demo.ensure_demo(tmp_path / "a", vocab_size=600) == made
    after = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in before}
    lock = made.corpus.parent / ".lock"
    assert all(after[path] == before[path] for path in before if path != lock)
    with pytest.raises(InputError, match="holds a demo of 600 token ids, expected 700"):
        demo.ensure_demo(tmp_path / "a", vocab_size=700)

    again = demo.build_demo_corpus(tmp_path / "b")
    assert again.corpus.read_bytes() == made.corpus.read_bytes()
    assert again.heldout.read_bytes() == made.heldout.read_bytes()


def test_an_interrupted_build_leaves_nothing(few_packages, tmp_path, monkeypatch):
    def documents(sources):
        yield "psutil/a.py", "Some text that is whole."
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_documents", documents)
    with pytest.raises(KeyboardInterrupt):
        demo.build_demo_corpus(tmp_path)
    assert list(tmp_path.iterdir()) == []
