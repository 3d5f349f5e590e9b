import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text_helpers import parse_blocks, serve_hub

from megaenc.data.sources import arrow_tables, text_files
from megaenc.errors import InputError

TEXTS = [f"document {row} " * (1 + row % 7) for row in range(100)]


def written(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def parquet_blocks(path, keys=("text",), start=0, stop=None):
    file = arrow_tables.ParquetFile(path, keys)
    return list(file.read_blocks(start, file.end if stop is None else stop, 0))


def texts_of(blocks, keys=("text",)):
    return parse_blocks(blocks, keys)[0]


@pytest.mark.parametrize(("row_group_size", "block_bytes"), [(7, 100), (1000, 100), (7, 1 << 24)])
def test_row_groups_are_cut_into_blocks_and_nothing_is_lost(
    tmp_path, monkeypatch, row_group_size, block_bytes
):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", block_bytes)
    path = written(
        tmp_path / "a.parquet", {"text": TEXTS, "n": range(100)}, row_group_size=row_group_size
    )
    blocks = parquet_blocks(path)
    assert texts_of(blocks) == [(text,) for text in TEXTS]
    ends = [block.first_row + len(texts_of([block])) for block in blocks]
    assert [block.first_row for block in blocks] == [1, *ends[:-1]]
    assert blocks[-1].position == (tmp_path / "a.parquet").stat().st_size
    assert len(blocks) > 10 if block_bytes == 100 else len(blocks) == 1


def test_text_that_repeats_and_takes_no_room_in_the_file_comes_in_blocks(tmp_path):
    texts = [str(row % 2) * 100_000 for row in range(400)]
    path = written(tmp_path / "a.parquet", {"text": pa.array(texts).dictionary_encode()})
    assert (tmp_path / "a.parquet").stat().st_size < 200_000
    before = pa.total_allocated_bytes()
    actual = []
    used = []
    for block in arrow_tables.ParquetFile(path, ["text"]).read_blocks(0, 1, 0):
        piece = texts_of([block])
        assert sum(len(text) for (text,) in piece) < text_files.BLOCK_BYTES + 100_000
        actual += piece
        used.append(pa.total_allocated_bytes() - before)
    assert actual == [(text,) for text in texts]
    assert max(used) < 8 << 20


def test_rows_of_a_saved_data_set_that_repeat_come_in_blocks(tmp_path):
    column = pa.array(["a" * 100_000] * 100 + ["b", None, "c"]).dictionary_encode()
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, pa.schema([("text", column.type)])) as out,
    ):
        out.write_batch(pa.record_batch([column], ["text"]))
    blocks = list(
        arrow_tables.SavedDatasetFile(str(tmp_path / "a.arrow"), ["text"]).read_blocks(0, 103, 0)
    )
    assert [len(block.parse(["text"], True).texts) for block in blocks] == [10] * 9 + [12]
    assert all(len(block.data) < 200_000 for block in blocks), "decoded, the rows take 10 MB"
    last = blocks[-1].parse(["text"], True)
    assert (last.texts[-2:], last.skipped) == ([("b",), ("c",)], 1)


def test_columns_of_several_types_of_text_and_several_keys(tmp_path):
    columns = {
        "text": pa.array(TEXTS, pa.large_string()),
        "title": pa.array(["a", "b"] * 50).dictionary_encode(),
        "a.b": pa.array(TEXTS, pa.string_view()),
    }
    path = written(tmp_path / "a.parquet", columns)
    keys = ("title", "text", "a.b")
    assert texts_of(parquet_blocks(path, keys), keys) == list(
        zip(["a", "b"] * 50, TEXTS, TEXTS, strict=True)
    )


def test_a_cell_without_text_is_named_by_its_row_or_counted(tmp_path):
    for wrong, found in ((None, "null"), (b"caf\xe9", r"b'caf\\xe9'")):
        cells = pa.array([b"good", b"good", wrong, b"good"]).cast(pa.binary()).view(pa.string())
        blocks = parquet_blocks(written(tmp_path / "a.parquet", {"text": cells}, row_group_size=2))
        with pytest.raises(
            InputError, match=rf"a\.parquet: row 3: key `text`: found {found}, expected text"
        ):
            texts_of(blocks)
        assert parse_blocks(blocks, skip_bad=True) == ([("good",)] * 3, 1)


def test_a_file_damaged_in_the_middle_is_one_line(tmp_path):
    path = written(tmp_path / "a.parquet", {"text": TEXTS}, compression="gzip")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[40:200] = bytes(160)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(InputError, match=r"a\.parquet: row \d+: cannot be read as Parquet \("):
        texts_of(parquet_blocks(path))


def streamed(tmp_path, monkeypatch, *tables):
    serve_hub(tmp_path, monkeypatch, tables)
    return arrow_tables.HubDataset("owner/name", None, "train", ["text"])


def test_a_stream_comes_in_blocks_and_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 300)
    data = streamed(
        tmp_path,
        monkeypatch,
        {"text": TEXTS[:60], "n": range(60)},
        {"text": TEXTS[60:], "n": range(40)},
    )
    blocks = list(data.read_blocks(0, 2, 0))
    assert texts_of(blocks) == [(text,) for text in TEXTS]
    assert len(blocks) > 5 and pa.ipc.open_stream(blocks[0].data).schema.names == ["text"]
    assert texts_of(data.read_blocks(1, 2, 0)) == [(text,) for text in TEXTS[60:]]


def test_a_stream_that_breaks_off_or_lacks_a_column_is_one_line(tmp_path, monkeypatch):
    data = streamed(tmp_path, monkeypatch, {"text": TEXTS}, {"text": TEXTS})
    with pytest.raises(
        InputError, match="owner/name: no column `body`; found `text`; set --json-key"
    ):
        arrow_tables.HubDataset("owner/name", None, "train", ["body"])
    (tmp_path / "hub" / "train-1.parquet").unlink()
    with pytest.raises(InputError, match=r"owner/name: no more rows after 100: ") as error:
        list(data.read_blocks(0, 2, 0))
    assert "\n" not in str(error.value)
