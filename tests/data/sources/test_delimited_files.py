import re

import pytest
from text_helpers import TEXTS, parse_blocks, write_csv

from megaenc.data.sources import delimited_files, text_files
from megaenc.data.sources.delimited_files import DelimitedFile
from megaenc.errors import InputError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parse(path, keys=("text",), skip_bad=False):
    """Return the texts and the number of skipped rows."""
    source = DelimitedFile(str(path), keys, is_csv=".csv" in path.name)
    return parse_blocks(source.read_blocks(0, source.end, 0), keys, skip_bad=skip_bad)


def texts_of(path):
    return [text for (text,) in parse(path)[0]]


def test_quoted_cells_hold_line_breaks_commas_and_quotes(tmp_path):
    cells = ["", "one\ntwo", "one\r\n\r\ntwo\n", 'a "quote", and more', "", '"', *TEXTS]
    assert texts_of(write_csv(tmp_path / "a.csv", cells)) == cells


def test_quotes_in_tsv_are_text(tmp_path):
    path = write(tmp_path / "a.tsv", 'text\tid\n"one\t1\ntwo ""\t2\n\'three"\t3\n')
    assert texts_of(path) == ['"one', 'two ""', "'three\""]


@pytest.mark.parametrize(("name", "comma"), [("a.csv", ","), ("a.tsv", "\t")])
def test_byte_order_mark_crlf_and_empty_lines_are_no_text(tmp_path, name, comma):
    lines = ["\ufefftext,id", "", "é,1", "", "\ufeffkept,2", " ,3", "", "last,4"]
    path = write(tmp_path / name, "\r\n".join(lines).replace(",", comma))
    assert texts_of(path) == ["é", "\ufeffkept", " ", "last"]


def test_columns_come_in_the_order_of_the_keys(tmp_path):
    path = write(tmp_path / "a.csv", "text,id,title\nx,1,y\n")
    assert parse(path, ("title", "text"))[0] == [("y", "x")]


def test_rows_come_in_blocks_and_the_last_ends_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LINES_BYTES", 100)
    path = write_csv(tmp_path / "a.csv", TEXTS)
    blocks = list(DelimitedFile(str(path), ["text"], is_csv=True).read_blocks(0, 1, 7))
    assert len(blocks) > 2
    assert blocks[-1].position == 7 + path.stat().st_size
    assert sum(block.size for block in blocks) == path.stat().st_size


def test_cells_may_be_longer_than_the_csv_module_allows_by_default(tmp_path):
    assert texts_of(write_csv(tmp_path / "a.csv", ["long " * 100_000])) == ["long " * 100_000]


def test_a_cell_longer_than_the_limit_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited_files, "MAX_CELL_LENGTH", 1000)
    path = write_csv(tmp_path / "a.csv", ["x", "long " * 1000])
    with pytest.raises(
        InputError, match=r"a\.csv:3: not CSV: field larger than field limit \(1000\)"
    ):
        parse(path)


NOT_UTF8 = "not UTF-8 (byte 0xff at position 1); expected UTF-8, or its --encoding, such as latin1"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            b'id,text\n1,"x\ny"\n\n2\n3,z\n',
            "a.csv:5: found 1 columns, expected 2 as in the header",
        ),
        (
            "a.tsv",
            b"id\ttext\n1\tx\ty\n3\tz\n",
            "a.tsv:2: found 3 columns, expected 2 as in the header",
        ),
        ("a.csv", b'id,text\n1,"y\n\xff"\n3,z\n', f"a.csv:3: {NOT_UTF8}"),
        ("a.tsv", b"id\ttext\n\xff\tx\n3\tz\n", f"a.tsv:2: {NOT_UTF8}"),
    ],
)
def test_a_bad_row_is_named_or_counted(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(InputError) as error:
        parse(path)
    assert str(error.value) == f"{tmp_path}/{message}"
    texts, skipped = parse(path, skip_bad=True)
    assert texts[-1] == ("z",)
    assert skipped == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            'id,text\n1,x\n\n2,"y\n3,z\n4,w\n',
            "a.csv:4: not CSV: unexpected end of data; expected cells with commas, quotes or",
        ),
        (
            "id,text\n1,x\ry\n",
            "a.csv:2: not CSV: new-line character seen in unquoted field; "
            "expected cells with commas",
        ),
        (
            'id,text\n1,"x\n2"y,z\n',
            "a.csv:2: not CSV: ',' expected after '\"'; expected cells with commas, quotes or",
        ),
    ],
)
def test_a_wrong_quote_is_never_skipped(tmp_path, content, message):
    path = write(tmp_path / "a.csv", content)
    for skip_bad in (False, True):
        with pytest.raises(InputError, match=re.escape(f"{tmp_path}/{message}")):
            parse(path, skip_bad=skip_bad)


def test_another_delimiter_is_named(tmp_path):
    for content, other in (("id;text\n1;x\n", "';'"), ('"id"\t"text"\n1\tx\n', r"'\t'")):
        path = write(tmp_path / "a.csv", content)
        with pytest.raises(InputError) as error:
            parse(path)
        assert (
            str(error.value)
            == f"{path}:1: found {other} between columns, expected ','; set --delimiter"
        )
