import dataclasses
import json
import os

import numpy as np
import pytest
from backports import zstd
from text_helpers import (
    TEXTS,
    contents,
    corpus_settings,
    documents_of,
    parse_blocks,
    reference_ids,
    small_tokenizer,
    write_jsonl,
    write_mds,
)

from megaenc.data.indexed.metadata import read_corpus_metadata
from megaenc.data.preprocess.command import preprocess
from megaenc.data.sources import text_files
from megaenc.data.sources.resolve import (
    DocumentRange,
    InputConfig,
    read_blocks,
    read_texts,
    resolve_inputs,
)
from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_special_tokens
from megaenc.errors import InputError

SAMPLES = [{"text": text.encode()} for text in TEXTS]


def open_mds(directory, keys=("text",), token_dtype=None):
    return resolve_inputs(InputConfig((str(directory),)), keys, token_dtype)


def texts_of(directory):
    return list(read_texts(open_mds(directory), "text"))


def encode_array(ids, dtype, code=b"", shape_bytes=1):
    """Return the bytes of an `ndarray` with its shape and, by `code`, its dtype."""
    shape = len(ids).to_bytes(shape_bytes, "little")
    shape_code = bytes([1 << 2 | {1: 0, 2: 1, 4: 2, 8: 3}[shape_bytes]])
    return code + shape_code + shape + np.array(ids, dtype).tobytes()


@pytest.mark.parametrize(("compress", "encoding"), [(False, "str"), (True, "bytes")])
@pytest.mark.parametrize("block_bytes", [100, 1 << 20])
def test_texts_of_columns_with_and_without_fixed_sizes(
    tmp_path, monkeypatch, compress, encoding, block_bytes
):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", block_bytes)
    samples = [
        {"a": bytes(8), "image": b"\xff", "text": text.encode(), "z": b"ab", "meta": b'"m"'}
        for text in TEXTS
    ]
    encodings = {"a": "int", "image": "jpeg", "text": encoding, "z": "new", "meta": "json"}
    directory = write_mds(tmp_path / "d", encodings, samples, {"a": 8, "z": 2}, compress=compress)
    inputs = open_mds(directory, ("meta", "text"))
    blocks = list(read_blocks(inputs))
    assert parse_blocks(blocks, ("meta", "text")) == ([("m", text) for text in TEXTS], 0)
    assert len(blocks) == (len(TEXTS) if block_bytes == 100 else 3)
    assert blocks[-1].position == inputs.size
    assert inputs.origins == [{"path": "d", "bytes": inputs.size, "files": 4}]
    (source,) = inputs.sources
    assert source.find_split_point(1) == 1
    assert parse_blocks(source.read_blocks(1, 2, 0)) == ([(text,) for text in TEXTS[2:4]], 0)


def test_a_raw_shard_may_begin_with_the_first_bytes_of_gzip(tmp_path):
    samples = [{"text": b"x"}] * 0x8B1F
    directory = write_mds(tmp_path / "d", {"text": "str"}, samples, shard_samples=len(samples))
    assert (directory / "shard.00000.mds").read_bytes()[:2] == b"\x1f\x8b"
    assert texts_of(directory) == ["x"] * len(samples)


def test_shards_listed_by_several_indices_are_read_once_and_nothing_next_to_them(tmp_path):
    entries = []
    for place, name in enumerate(("a", "b")):
        part = write_mds(
            tmp_path / "train" / name, {"text": "str"}, SAMPLES[place::2], compress=place == 1
        )
        (part / "stats.json").write_text('{"tokens": 1}')
        for entry in json.loads((part / "index.json").read_text())["shards"]:
            for file in (entry["raw_data"], entry["zip_data"] or {"basename": ""}):
                file["basename"] = f"{name}/{file['basename']}"
            entries.append(entry)
    expected = TEXTS[::2] + TEXTS[1::2]
    assert texts_of(tmp_path) == expected
    index = tmp_path / "train" / "index.json"
    index.write_text(json.dumps({"version": 2, "shards": entries}))
    for path in (tmp_path, tmp_path / "train", index):
        assert texts_of(path) == expected
    for name in ("a", "b"):
        (tmp_path / "train" / name / "index.json").unlink()
        (tmp_path / "train" / name / "stats.json").unlink()
    (tmp_path / "train" / "notes.txt").write_text("not read")
    assert texts_of(tmp_path) == expected
    assert open_mds(tmp_path).messages == [
        f"{tmp_path}: 1 left out, next to an index of MDS shards: train/notes.txt",
        f"{tmp_path}: 1 indices of MDS shards",
    ]


@pytest.mark.parametrize(
    ("encoding", "encode", "suffix"),
    [
        ("ndarray:uint16", lambda ids: encode_array(ids, np.uint16, shape_bytes=2), ""),
        ("ndarray:int32", lambda ids: encode_array(ids, np.int32), ""),
        ("ndarray", lambda ids: encode_array(ids, np.int64, b"\x41", 8), ""),
        ("bytes", lambda ids: np.array(ids, np.int64).tobytes(), ":int64"),
    ],
)
def test_token_ids_give_the_corpus_of_their_texts(
    tmp_path, tokenizer_directory, encoding, encode, suffix
):
    """A document keeps the EOS (id 0) that it has, and gets the one that it lacks."""
    texts = [*TEXTS[:4], "dog"]
    lines = write_jsonl(tmp_path / "a.jsonl", texts)
    (expected,) = preprocess(corpus_settings(lines, tokenizer_directory, "expected"))
    samples = []
    for place, text in enumerate(texts):
        ids = reference_ids(small_tokenizer(), text) + [0] * (place % 2)
        samples.append({"input_ids": encode(ids)})
    directory = write_mds(tmp_path / "d", {"input_ids": encoding}, samples)
    (directory.parent / "README.md").write_text("not read")
    settings = corpus_settings(
        directory, tokenizer_directory, input_tokens=f"input_ids{suffix}", partitions=2
    )
    (prefix,) = preprocess(settings)
    assert prefix.name == "out_input_ids_document"
    assert contents(prefix) == contents(expected)
    metadata = read_corpus_metadata(prefix)
    assert metadata.sources[0]["tokens"] == "input_ids"
    assert metadata.special_tokens == read_corpus_metadata(expected).special_tokens


def test_special_tokens_that_no_flag_names_are_refused(tmp_path):
    tokenizer = set_special_tokens(small_tokenizer(), SpecialTokens("template", (1,), (0,)))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    samples = [{"ids": encode_array(ids, np.uint16)} for ids in ([5, 7], [1, 5, 6])]
    directory = write_mds(tmp_path / "d", {"ids": "ndarray:uint16"}, samples)
    settings = corpus_settings(
        directory, str(tmp_path / "tokenizer"), input_tokens="ids", append_eod=False
    )
    with pytest.raises(InputError) as error:
        preprocess(settings)
    assert "around a document, expected --special-tokens template" in str(error.value)
    for mode, documents in (
        ("template", [[1, 5, 7, 0], [1, 5, 6, 0]]),
        ("none", [[5, 7], [1, 5, 6]]),
    ):
        changed = dataclasses.replace(
            settings, special_tokens=mode, output_prefix=str(tmp_path / mode)
        )
        (prefix,) = preprocess(changed)
        assert documents_of(prefix) == [[ids] for ids in documents]


def test_an_eos_that_no_flag_names_is_refused(tmp_path, tokenizer_directory):
    samples = [{"ids": encode_array(ids, np.uint16)} for ids in ([5, 7], [5, 6, 0])]
    directory = write_mds(tmp_path / "d", {"ids": "ndarray:uint16"}, samples)
    settings = corpus_settings(directory, tokenizer_directory, input_tokens="ids", append_eod=False)
    with pytest.raises(InputError, match="around a document, expected --special-tokens eod, "):
        preprocess(settings)


def test_an_array_of_a_fixed_shape_is_a_document(tmp_path):
    samples = [{"ids": np.array([5, 6, 7], np.uint16).tobytes()}]
    directory = write_mds(tmp_path / "d", {"ids": "ndarray:uint16:3"}, samples, {"ids": 6})
    (((document,),), _) = parse_blocks(read_blocks(open_mds(directory, ("ids",), "")), ("ids",))
    assert document.tolist() == [5, 6, 7]


def test_an_id_outside_the_vocabulary_is_named_by_its_sample_or_skipped(
    tmp_path, tokenizer_directory
):
    arrays = [encode_array([5, 6], np.uint16)] * 3 + [encode_array([5, 400], np.uint16)]
    samples = [{"ids": array} for array in arrays]
    directory = write_mds(tmp_path / "d", {"ids": "ndarray:uint16"}, samples)
    settings = corpus_settings(directory, tokenizer_directory, input_tokens="ids")
    with pytest.raises(InputError) as error:
        preprocess(settings)
    last = len(small_tokenizer()) - 1
    assert (
        f"d/shard.00001.mds: sample 1: found token id 400, expected 0 to {last} of --tokenizer"
        in str(error.value)
    )
    (prefix,) = preprocess(dataclasses.replace(settings, skip_bad_lines=True))
    metadata = read_corpus_metadata(prefix)
    assert (metadata.documents, metadata.skipped_lines) == (3, 1)


@pytest.mark.parametrize(
    ("encoding", "value", "message"),
    [
        (
            "ndarray:uint16",
            b"\x08\x01\x02\x05\x00\x06\x00",
            "an array of 2 dimensions, expected one",
        ),
        ("ndarray:uint16", b"\x04\x02\x05\x00\x06", "damaged array of 5 bytes"),
        ("ndarray:uint16", b"\x04\x02\x05\x00", "damaged array of 4 bytes"),
        ("ndarray", b"\x22\x04\x01\x00\x00\x00\x00", "an array of dtype 34, expected integers"),
        ("ndarray", b"", "damaged array of 0 bytes"),
    ],
)
def test_what_is_no_array_of_token_ids_is_one_line(tmp_path, encoding, value, message):
    directory = write_mds(tmp_path / "d", {"ids": encoding}, [{"ids": value}])
    with pytest.raises(InputError) as error:
        parse_blocks(read_blocks(open_mds(directory, ("ids",), "")), ("ids",))
    assert f"shard.00000.mds: sample 0: {message}" in str(error.value).replace("found ", "")


def change_index(directory, **changes):
    path = directory / "index.json"
    index = json.loads(path.read_text())
    index["shards"][1] |= changes
    path.write_text(json.dumps(index))


def change_file(directory, **changes):
    path = directory / "index.json"
    index = json.loads(path.read_text())
    index["shards"][1]["raw_data"] |= changes
    path.write_text(json.dumps(index))


def replace_by_fifo(directory):
    change_file(directory, bytes=1000)
    (directory / "shard.00001.mds").unlink()
    os.mkfifo(directory / "shard.00001.mds")


def drop_last_shard(directory):
    path = directory / "index.json"
    path.write_text(
        json.dumps({"version": 2, "shards": json.loads(path.read_text())["shards"][:2]})
    )


def change_shard(directory, change):
    path = directory / "shard.00001.mds"
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: change_index(path, version=1),
            "index.json: field `shards.1.version`: found 1, expected 2; ",
        ),
        (
            lambda path: (path / "index.json").write_text('{"shards": [{"ver'),
            "index.json: not JSON (Unterminated string",
        ),
        (
            lambda path: (path / "index.json").write_text(""),
            "index.json: not JSON (Expecting value",
        ),
        (lambda path: (path / "index.json").write_text("{}"), "index.json: no field `version`"),
        (
            lambda path: (path / "index.json").unlink(),
            "holds nothing to read but shard.00000.mds, shard.00001.mds",
        ),
        (drop_last_shard, "shard.00002.mds: found MDS shards that no index.json lists"),
        (replace_by_fifo, "shard.00001.mds: cannot be read: not a regular file"),
        (lambda path: change_file(path, basename=""), "`basename`: found '', expected a file in"),
        (lambda path: change_file(path, basename="/etc/passwd"), "found '/etc/passwd', expected"),
        (lambda path: change_file(path, basename="a/../../b"), "found 'a/../../b', expected"),
        (lambda path: change_file(path, basename="a\0"), "`shards.1.raw_data.basename`: found "),
        (lambda path: change_file(path, basename="\ud800"), "`shards.1.raw_data.basename`: found "),
        (
            lambda path: change_index(path, samples=1 << 40),
            "1,099,511,627,776 samples, whose offsets do not fit",
        ),
        (
            lambda path: change_file(path, bytes=1 << 32),
            "shard.00001.mds: found 4,294,967,296 bytes",
        ),
        (lambda path: change_index(path, column_sizes=[]), "columns without encoding or size"),
        (
            lambda path: change_index(path, column_encodings=["pkl"]),
            "column `text`: found pkl, expected text (str, bytes, json)",
        ),
        (
            lambda path: change_index(path, column_names=["body"]),
            "no column `text`; found `body`; set --json-key, or --input-tokens",
        ),
        (
            lambda path: change_index(path, samples=3),
            "shard.00001.mds: found 2 samples, expected 3 as in ",
        ),
        (
            lambda path: (path / "shard.00001.mds").unlink(),
            "shard.00001.mds: cannot be read: No such file",
        ),
        (
            lambda path: change_shard(path, lambda data: data.pop()),
            "bytes, expected ",
        ),
        (
            lambda path: change_shard(path, lambda data: data.__setitem__(-1, 1)),
            "shard.00001.mds: found sha1 ",
        ),
        (
            lambda path: change_shard(path, lambda data: data.__setitem__(slice(4, 8), bytes(4))),
            "shard.00001.mds: damaged offsets of samples",
        ),
        (
            lambda path: change_shard(path, lambda data: data.__setitem__(-len(TEXTS[3]) - 4, 1)),
            "shard.00001.mds: sample 1: found 77 bytes, expected 5 by its columns",
        ),
    ],
)
def test_damaged_shards_and_indices_are_one_line(tmp_path, damage, message):
    directory = write_mds(tmp_path / "d", {"text": "str"}, SAMPLES)
    damage(directory)
    with pytest.raises(InputError) as error:
        texts_of(directory)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_shards_without_an_index_are_not_left_out(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    directory = write_mds(tmp_path / "d", {"text": "str"}, SAMPLES)
    (directory / "index.json").unlink()
    with pytest.raises(InputError, match="shards that no index"):
        texts_of(tmp_path)


def test_an_index_without_shards_is_refused(tmp_path):
    directory = write_mds(tmp_path / "d", {"text": "str"}, [])
    for path in (directory, directory / "index.json"):
        with pytest.raises(InputError, match="found no shard in its index"):
            texts_of(path)


def test_an_index_must_not_change_while_its_shards_are_read(tmp_path):
    directory = write_mds(tmp_path / "d", {"text": "str"}, SAMPLES)
    inputs = open_mds(directory)
    inputs.check_unchanged([DocumentRange(0, 0, 1)])
    change_file(directory, comment="other")
    with pytest.raises(InputError, match=r"index\.json: changed while it was read"):
        inputs.check_unchanged([DocumentRange(0, 0, 1)])


def test_a_raw_file_is_read_instead_of_its_compressed_one(tmp_path):
    directory = write_mds(tmp_path / "d", {"text": "str"}, SAMPLES, compress=True)
    change_index(directory, compression="br:11")
    with pytest.raises(InputError, match="zstd: found compression `br:11`, expected zstd or none"):
        texts_of(directory)
    compressed = directory / "shard.00001.mds.zstd"
    compressed.with_suffix("").write_bytes(zstd.decompress(compressed.read_bytes()))
    compressed.unlink()
    assert texts_of(directory) == TEXTS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"json_keys": ("body",)}, "--json-keys: found with --input-tokens, expected text"),
        ({"split_sentences": True}, "--split-sentences: found with --input-tokens"),
        ({"deduplicate": "exact"}, "--deduplicate: found with --input-tokens"),
        ({"input_tokens": "ids:float32"}, "--input-tokens ids:float32: unknown dtype, expected"),
        ({"input_tokens": "ids:int64"}, "found ndarray:uint16, expected bytes; for an array"),
        ({"input_tokens": "raw"}, "column `raw`: found bytes, expected ndarray of integers"),
        ({"input_tokens": "wide"}, "column `wide`: found ndarray:uint16:2,2, expected ndarray"),
        ({"input": ("a.jsonl",)}, "a.jsonl: not a directory, expected one of MDS shards"),
    ],
)
def test_flags_that_do_not_fit_token_ids_are_refused(
    tmp_path, tokenizer_directory, changes, message
):
    encodings = {"ids": "ndarray:uint16", "raw": "bytes", "wide": "ndarray:uint16:2,2"}
    directory = write_mds(tmp_path / "d", encodings, [dict.fromkeys(encodings, b"")])
    settings = corpus_settings(directory, tokenizer_directory, input_tokens="ids")
    with pytest.raises(InputError) as error:
        preprocess(dataclasses.replace(settings, **changes))
    assert message in str(error.value)
