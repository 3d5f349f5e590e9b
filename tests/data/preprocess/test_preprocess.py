import dataclasses
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from megatron.core.datasets.indexed_dataset import IndexedDataset
from text_helpers import TEXTS, contents, documents_of, reference_ids, small_tokenizer, write_csv, write_jsonl

from megaenc.data.indexed.corpus import Corpus
from megaenc.data.indexed.indexed_dataset import IndexedWriter, token_dtype
from megaenc.data.indexed.metadata import read_corpus_metadata
from megaenc.data.indexed.verify import verify_corpus
from megaenc.data.preprocess.command import PreprocessConfig, main, prepare_job, preprocess
from megaenc.data.sources import resolve, text_files
from megaenc.data.tokenizer.fast_encode import replace_surrogates
from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_special_tokens
from megaenc.data.tokenizer.tokenizer import read_vocabulary
from megaenc.errors import InputError


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", TEXTS)


def flags(corpus, tokenizer_folder, name="out", **changes):
    settings = {"append_eod": True, "workers": 1, **changes}
    return PreprocessConfig((str(corpus),), str(corpus.parent / name), tokenizer_folder, **settings)


@pytest.mark.parametrize("append_eod", [True, False])
def test_megatron_reads_back_every_document(corpus, tokenizer_folder, append_eod):
    write_jsonl(corpus, [TEXTS[0], "", *TEXTS[1:], "\ud800"])
    (prefix,) = preprocess(flags(corpus, tokenizer_folder, append_eod=append_eod))
    assert prefix.name == "out_text_document"
    dataset = IndexedDataset(str(prefix))
    want = [reference_ids(small_tokenizer(), text) + [0] * append_eod for text in [*TEXTS, "\ufffd"]]
    assert [dataset[at].tolist() for at in range(len(dataset))] == want
    assert dataset[0].dtype == np.uint16
    assert dataset.document_indices.tolist() == list(range(len(want) + 1))


def test_sidecar_tells_what_the_files_are(corpus, tokenizer_folder):
    write_jsonl(corpus, [*TEXTS, "", ""])
    with corpus.open("a") as stream:
        stream.write("no json\n")
    (prefix,) = preprocess(flags(corpus, tokenizer_folder, skip_bad_lines=True))
    sidecar = read_corpus_metadata(prefix)
    vocabulary = read_vocabulary(small_tokenizer())
    data, index = contents(prefix)
    assert (sidecar.documents, sidecar.sequences, sidecar.empty_documents, sidecar.skipped_lines) == (5, 5, 2, 1)
    assert sidecar.tokens == sum(len(reference_ids(small_tokenizer(), text)) + 1 for text in TEXTS)
    assert (sidecar.vocab_size, sidecar.eod, sidecar.append_eod, sidecar.dtype) == (vocabulary.size, 0, True, "uint16")
    assert (sidecar.tokenizer.name, sidecar.tokenizer.fingerprint) == ("small", vocabulary.fingerprint)
    assert (sidecar.bin_bytes, sidecar.idx_bytes) == (len(data), len(index))
    assert sidecar.sha256 == {"bin": hashlib.sha256(data).hexdigest(), "idx": hashlib.sha256(index).hexdigest()}
    assert sidecar.sources == [{"path": "corpus.jsonl", "bytes": corpus.stat().st_size}]
    assert str(corpus.parent) not in (prefix.parent / "out_text_document.json").read_text()


def test_bytes_depend_on_neither_workers_nor_compression(corpus, tokenizer_folder, monkeypatch):
    write_jsonl(corpus, [f"{text} {number}" for number in range(40) for text in TEXTS])
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 2000)  # many blocks, so that order could be lost
    monkeypatch.setattr(text_files, "LINES_BYTES", 2000)  # many blocks, so that order could be lost
    compressed = corpus.with_name("c.gz"), corpus.with_name("c.zst")
    compressed[0].write_bytes(gzip.compress(corpus.read_bytes()))
    compressed[1].write_bytes(zstd.compress(corpus.read_bytes()))
    (one,) = preprocess(flags(corpus, tokenizer_folder, "one"))
    (three,) = preprocess(flags(corpus, tokenizer_folder, "three", workers=3))
    assert contents(one) == contents(three)
    assert one.with_name("one_text_document.json").read_text() == one.with_name("three_text_document.json").read_text()
    for path in compressed:
        (other,) = preprocess(flags(path, tokenizer_folder, path.name, workers=2))
        assert contents(one) == contents(other)


SOURCES = {
    "jsonl": lambda folder: [write_jsonl(folder / "a.jsonl", TEXTS)],
    "gzip": lambda folder: [_packed(folder / "a.jsonl.gz", gzip.compress)],
    "zstd": lambda folder: [_packed(folder / "a.jsonl.zst", zstd.compress)],
    "csv": lambda folder: [write_csv(folder / "a.csv", TEXTS)],
    "csv gzip": lambda folder: [_packed(folder / "a.csv.gz", gzip.compress, write_csv)],
    "parquet": lambda folder: [_parquet(folder / "a.parquet", TEXTS)],
    "text folder": lambda folder: [_text_files(folder / "text", TEXTS)],
    "mixed folder": lambda folder: [_mixed(folder / "mixed")],
    "saved": lambda folder: [_saved(folder / "saved")],
    "several": lambda folder: [_text_files(folder / "text", TEXTS[:2]), _parquet(folder / "b", TEXTS[2:])],
    "hub": lambda folder: ["someone/small"],
}


def _packed(path, pack, write=write_jsonl):
    write(path, TEXTS)
    path.write_bytes(pack(path.read_bytes()))
    return path


def _parquet(path, texts, **options):
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, **{"row_group_size": 2, **options})
    return path


def _text_files(folder, texts):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return folder


def _mixed(folder):
    (folder / "b" / ".git").mkdir(parents=True)
    (folder / "b" / ".git" / "config.txt").write_text("hidden")
    write_jsonl(folder / "a.jsonl", TEXTS[:1])
    (folder / "b" / "one.md.gz").write_bytes(gzip.compress(TEXTS[1].encode()))
    _parquet(folder / "b" / "two.parquet", TEXTS[2:3])
    (folder / "b" / "two.tsv.zst").write_bytes(zstd.compress(f"id\ttext\n0\t{TEXTS[3]}\n".encode()))
    (folder / "c.text").write_bytes(TEXTS[4].encode())
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def _saved(folder):
    datasets.Dataset.from_dict({"text": ["left out", *TEXTS]}).select(range(1, 6)).save_to_disk(folder, num_shards=2)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The Hub has one data set, `someone/small`, of two files: everything but the name goes through the real load_dataset."""
    (tmp_path / "hub").mkdir()
    for number, texts in enumerate((TEXTS[:3], TEXTS[3:])):
        _parquet(tmp_path / "hub" / f"train-0000{number}-of-00002.parquet", texts)
    real = datasets.load_dataset

    def load_dataset(name, config=None, **options):
        assert name == "someone/small"
        return real(str(tmp_path / "hub"), config, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def from_jsonl(tmp_path_factory, tokenizer_folder):
    """What TEXTS become, read from JSONL by one worker."""
    corpus = write_jsonl(tmp_path_factory.mktemp("jsonl") / "a.jsonl", TEXTS)
    (prefix,) = preprocess(flags(corpus, tokenizer_folder))
    return contents(prefix)


@pytest.mark.parametrize("kind", SOURCES)
def test_the_same_texts_from_every_source_give_the_same_bytes(tmp_path, tokenizer_folder, from_jsonl, hub, kind):
    paths = tuple(map(str, SOURCES[kind](tmp_path)))
    settings = PreprocessConfig(paths, str(tmp_path / "out"), tokenizer_folder, append_eod=True, workers=2)
    (prefix,) = preprocess(settings)
    assert contents(prefix) == from_jsonl
    (parted,) = preprocess(dataclasses.replace(settings, output_prefix=str(tmp_path / "parted"), partitions=3))
    assert contents(parted) == from_jsonl
    sources = read_corpus_metadata(prefix).sources
    assert [source["path"] for source in sources] == [name.split("/")[-1] if kind != "hub" else name for name in paths]
    assert sources == read_corpus_metadata(parted).sources and str(tmp_path) not in json.dumps(sources)
    if kind == "hub":
        assert sources[0] == {"path": "someone/small", "bytes": None, "config": None, "split": "train"}


HOSTILE = [
    "<|mask|> The<|eos|> <|eos|><|mask|>",
    "half a pair \ud800 and \udfff the other way, \ud83d",
    "",
    "NUL \x00\x01\x7f and line ends \r\n\r\u2028\x85\x0b\x0c",
    "zero\u200bwidth \u200d\ufeff\u00ad 👩‍👩‍👧‍👦 \u0130 e\u0301",
    " " * 5000 + "x" * 20000 + "\n" * 3000,
    *TEXTS,
]


def test_hostile_texts_have_the_ids_of_the_hugging_face_tokenizer(tmp_path, tokenizer_folder):
    corpus = write_jsonl(tmp_path / "hostile.jsonl", HOSTILE)
    (prefix,) = preprocess(flags(corpus, tokenizer_folder, workers=2))
    want = [[*reference_ids(small_tokenizer(), replace_surrogates(text)), 0] for text in HOSTILE if text]
    assert [document for (document,) in documents_of(prefix)] == want
    assert read_corpus_metadata(prefix).empty_documents == 1


LONG = 50_000_000


@pytest.mark.parametrize("kind", ["jsonl", "text", "parquet"])
def test_a_document_of_50_mb_has_the_ids_of_the_hugging_face_tokenizer(tmp_path, tokenizer_folder, kind):
    # A paragraph that ends in one line feed, before a letter, is encoded alike whatever surrounds it: what a paragraph gives the
    # Hugging Face tokenizer, which would take a minute and gigabytes for the whole document, is then known for all of them.
    paragraphs = [f"Paragraph {number}, <|mask|> and <|eos|>. {text.strip()}\n" for number, text in enumerate(TEXTS)]
    known = [reference_ids(small_tokenizer(), paragraph) for paragraph in paragraphs]
    assert reference_ids(small_tokenizer(), "".join(paragraphs * 2)) == list(chain(*known, *known))
    order = np.random.default_rng(0).integers(len(paragraphs), size=LONG // (sum(map(len, paragraphs)) // len(paragraphs)))
    text = "".join([paragraphs[at] for at in order.tolist()])
    assert len(text.encode()) > LONG
    path = tmp_path / {"jsonl": "long.jsonl", "text": "long.txt", "parquet": "long.parquet"}[kind]
    {"jsonl": write_jsonl, "text": lambda path, texts: path.write_text(texts[0]), "parquet": _parquet}[kind](path, [text])
    (prefix,) = preprocess(flags(path, tokenizer_folder, workers=1))
    dataset = IndexedDataset(str(prefix))
    known = [np.array(ids, np.uint16) for ids in known]
    want = np.concatenate([known[at] for at in order.tolist()])
    assert len(dataset) == 1
    assert np.array_equal(dataset[0][:-1], want) and dataset[0][-1] == 0


def test_sentences_are_the_sequences_of_a_document(tmp_path, tokenizer_folder, capsys):
    texts = ["One dog. Two foxes!\n\nThree? Mr. Fox sleeps.  ", "", "No end", "\ud800 One. Two."]
    corpus = write_jsonl(tmp_path / "a.jsonl", texts)
    (prefix,) = preprocess(flags(corpus, tokenizer_folder, split_sentences=True))
    documents = documents_of(prefix)
    spelled = [[small_tokenizer().decode(sequence) for sequence in document] for document in documents]
    assert spelled == [
        ["One dog.", " Two foxes!", "\n\nThree?", " Mr. Fox sleeps.  <|eos|>"],
        ["No end<|eos|>"],
        ["\ufffd One.", " Two.<|eos|>"],
    ]
    sidecar = read_corpus_metadata(prefix)
    assert (sidecar.documents, sidecar.sequences, sidecar.empty_documents) == (3, 7, 1)
    assert sidecar.sentences["method"] == "punkt" and sidecar.sentences["language"] in ("learnt", "english")
    assert "sentences: " in capsys.readouterr().out
    corpus = Corpus.open(prefix)
    assert corpus.tokens(0, 0, int(corpus.document_lengths[0])).tolist() == list(chain(*documents[0]))
    (parted,) = preprocess(flags(tmp_path / "a.jsonl", tokenizer_folder, "parted", split_sentences=True, partitions=3))
    assert contents(parted) == contents(prefix)


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    """The small tokenizer with `<|mask|> ... <|eos|>` around a text."""
    template = SpecialTokens("template", (1, 1), (0,))
    folder = tmp_path_factory.mktemp("templated") / "tokenizer"
    set_special_tokens(small_tokenizer(), template).save_pretrained(folder)
    return str(folder)


def template_flags(corpus, tokenizer, name="out", **changes):
    return flags(corpus, tokenizer, name, append_eod=False, **({"special_tokens": "template"} | changes))


def test_a_document_has_the_special_tokens_of_the_template(tmp_path, templated, capsys):
    """Also of several workers and partitions, and without the documents that deduplication removes."""
    corpus = write_jsonl(tmp_path / "a.jsonl", [TEXTS[0], "", *TEXTS, *TEXTS])
    (prefix,) = preprocess(template_flags(corpus, templated))
    assert "special tokens of a document: <|mask|> <|mask|> ... <|eos|> (template)\n" in capsys.readouterr().out
    want = [[1, 1, *reference_ids(small_tokenizer(), text), 0] for text in TEXTS]
    assert documents_of(prefix) == [[document] for document in [want[0], *want, *want]]
    metadata = read_corpus_metadata(prefix)
    assert metadata.special_tokens == {"mode": "template", "before": [1, 1], "after": [0]}
    assert (metadata.eod, metadata.append_eod, metadata.empty_documents) == (0, True, 1)
    assert metadata.tokens == sum(map(len, [want[0], *want, *want]))
    (parted,) = preprocess(template_flags(corpus, templated, "parted", partitions=3, workers=2))
    assert contents(parted) == contents(prefix)
    (unique,) = preprocess(template_flags(corpus, templated, "unique", deduplicate="exact"))
    assert documents_of(unique) == [[document] for document in want]
    verify_corpus(prefix)


def test_the_first_and_the_last_sentence_have_the_special_tokens(tmp_path, templated):
    corpus = write_jsonl(tmp_path / "a.jsonl", ["One dog. Two foxes! Three?", "No end"])
    (prefix,) = preprocess(template_flags(corpus, templated, split_sentences=True))
    spelled = [[small_tokenizer().decode(sequence) for sequence in document] for document in documents_of(prefix)]
    assert spelled == [
        ["<|mask|><|mask|>One dog.", " Two foxes!", " Three?<|eos|>"],
        ["<|mask|><|mask|>No end<|eos|>"],
    ]


def test_a_template_that_adds_nothing_is_an_end(corpus, tokenizer_folder, capsys):
    (prefix,) = preprocess(template_flags(corpus, tokenizer_folder))
    assert f"(eod, as the template of {tokenizer_folder} adds none)" in capsys.readouterr().out
    (ended,) = preprocess(flags(corpus, tokenizer_folder, "ended"))
    assert contents(prefix) == contents(ended)
    assert read_corpus_metadata(prefix).special_tokens == read_corpus_metadata(ended).special_tokens


def test_without_special_tokens_the_template_is_named(corpus, templated, capsys):
    preprocess(template_flags(corpus, templated, special_tokens=None))
    expected = "no special token is added to documents; --special-tokens template writes <|mask|> <|mask|> ... <|eos|>\n"
    assert expected in capsys.readouterr().out


def test_append_eod_and_another_mode_are_refused(corpus, tokenizer_folder):
    with pytest.raises(InputError, match="--append-eod: found with --special-tokens none, expected one of them"):
        preprocess(flags(corpus, tokenizer_folder, special_tokens="none"))


def test_partitions_of_another_mode_are_refused(corpus, templated, monkeypatch):
    monkeypatch.setattr("megaenc.data.preprocess.partitions.PartitionStore.merge", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        preprocess(template_flags(corpus, templated, partitions=2))
    with pytest.raises(InputError, match=r"field `append_eod`: found false, expected true"):
        preprocess(template_flags(corpus, templated, partitions=2, special_tokens="eod"))
    with pytest.raises(InputError, match=r"field `special_tokens`: found .*template.*, expected null"):
        preprocess(template_flags(corpus, templated, partitions=2, special_tokens="none"))


@pytest.mark.parametrize("special", [{"append_eod": True}, {"append_eod": False}, {"append_eod": False, "special_tokens": "eod"}])
def test_the_plan_of_partitions_is_that_of_earlier_versions_without_a_template(corpus, tokenizer_folder, special):
    plan = prepare_job(flags(corpus, tokenizer_folder, **special)).build_plan()
    assert "special_tokens" not in plan
    assert plan["append_eod"] == (special["append_eod"] or "special_tokens" in special)


@pytest.mark.parametrize("append_eod", [True, False])
def test_a_sidecar_from_before_special_tokens_has_those_of_append_eod(corpus, tokenizer_folder, append_eod):
    (prefix,) = preprocess(flags(corpus, tokenizer_folder, append_eod=append_eod))
    path = prefix.with_name(prefix.name + ".json")
    values = json.loads(path.read_text())
    del values["special_tokens"]
    path.write_text(json.dumps(values))
    expected = SpecialTokens("eod", after=(0,)) if append_eod else SpecialTokens()
    assert Corpus.open(prefix).find_special_tokens(0) == expected
    for damaged in ({"mode": "eod"}, {"mode": "eod", "before": [], "after": [10**6]}):
        path.write_text(json.dumps(values | {"special_tokens": damaged}))
        with pytest.raises(InputError, match=r"out_text_document\.json: field `special_tokens`: found .*, expected"):
            Corpus.open(prefix)


def test_a_sidecar_from_before_sentences_is_read(corpus, tokenizer_folder):
    (prefix,) = preprocess(flags(corpus, tokenizer_folder))
    path = prefix.with_name(prefix.name + ".json")
    values = json.loads(path.read_text())
    del values["sentences"]
    path.write_text(json.dumps(values))
    assert read_corpus_metadata(prefix).sentences is None
    assert Corpus.open(prefix).metadata.sequences == len(TEXTS)


def test_each_key_makes_a_corpus(tmp_path, tokenizer_folder):
    corpus = tmp_path / "pairs.jsonl"
    corpus.write_text('{"title": "The fox", "text": "The lazy dog"}\n{"title": "", "text": "sleeps"}\n')
    title, text = preprocess(flags(corpus, tokenizer_folder, json_keys=("title", "text")))
    assert (title.name, text.name) == ("out_title_document", "out_text_document")
    assert [len(IndexedDataset(str(prefix))) for prefix in (title, text)] == [1, 2]
    assert read_corpus_metadata(title).empty_documents == 1


def test_rows_of_csv_give_the_same_bytes_with_two_workers(tmp_path, tokenizer_folder, monkeypatch):
    table = write_csv(tmp_path / "a.csv", [f"{text} {number}" for number in range(20) for text in TEXTS])
    with table.open("a") as stream:
        stream.write("one cell\n")
    monkeypatch.setattr(text_files, "LINES_BYTES", 2000)  # many blocks, so that order could be lost
    (one,) = preprocess(flags(table, tokenizer_folder, "one", skip_bad_lines=True))
    (two,) = preprocess(flags(table, tokenizer_folder, "two", skip_bad_lines=True, workers=2))
    assert contents(one) == contents(two)
    assert read_corpus_metadata(two).skipped_lines == 1


def test_columns_of_csv_make_a_corpus_each(tmp_path, tokenizer_folder):
    rows = [("The fox", "The lazy\ndog"), ("", "sleeps")]
    table = tmp_path / "pairs.csv"
    table.write_text('title,n,text\nThe fox,1,"The lazy\ndog"\n,2,sleeps\n')
    lines = tmp_path / "pairs.jsonl"
    lines.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in rows))
    from_csv = preprocess(flags(table, tokenizer_folder, "csv", json_keys=("title", "text")))
    from_jsonl = preprocess(flags(lines, tokenizer_folder, "jsonl", json_keys=("title", "text")))
    assert list(map(contents, from_csv)) == list(map(contents, from_jsonl))
    assert [read_corpus_metadata(prefix).empty_documents for prefix in from_csv] == [1, 0]


def test_a_bad_row_of_csv_is_one_line_and_leaves_nothing(tmp_path, tokenizer_folder, capsys):
    table = tmp_path / "a.csv"
    table.write_text("id,text\n1,x\n2\n")
    output = tmp_path / "made" / "out"
    with pytest.raises(SystemExit):
        main(["--input", str(table), "--output-prefix", str(output), "--tokenizer", tokenizer_folder])
    error = f"error: {table}:3: found 1 columns, expected 2 as in the header\n"
    assert capsys.readouterr().err == error
    assert not output.parent.exists()


def test_vocabularies_from_65500_ids_are_stored_as_int32(tmp_path):
    assert (token_dtype(65_499), token_dtype(65_500)) == ("uint16", "int32")
    writer = IndexedWriter(tmp_path / "wide.bin", tmp_path / "wide.idx", "int32")
    writer.add_documents(np.array([70_000, 1, 2], np.int32), np.array([1, 2], np.int32), np.array([1, 1], np.int32))
    writer.add_documents(np.array([128_255], np.int32), np.array([1], np.int32), np.array([1], np.int32))
    writer.finish()
    dataset = IndexedDataset(str(tmp_path / "wide"))
    assert [dataset[at].tolist() for at in range(3)] == [[70_000], [1, 2], [128_255]]


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("", [], "is empty"),
        ("\n\n", [], "no document holds any text"),
        ('{"text": "x"}\n{"text": \n', [], "corpus.jsonl:2: not JSON"),
        ('{"text": "x"}\n\n{"body": "y"}\n', [], "corpus.jsonl:3: no key `text`; found `body`; set --json-key"),
        ('{"text": "x"}\n', ["--workers", "0"], "--workers 0: expected at least 1"),
        ('{"text": "x"}\n', ["--workers", "100000"], "--workers: found 100,000, expected at most "),
        ('{"text": "x"}\n', ["--partitions", "0"], "--partitions 0: expected at least 1"),
        ('{"body": "y"}\n{"text": "x"}\n', ["--partitions", "2"], "corpus.jsonl:1: no key `text`; found `body`"),
        ('{"text": "x"}\n', ["--sample-by", "line"], "--sample-by line: none of --input is a text file"),
        ('{"text": "x"}\n', ["--sample-by", "word"], "--sample-by"),
        ('{"text": "x"}\n', ["--dataset-config", "a"], "--dataset-config a: none of --input is a data set"),
        ('{"text": "x"}\n', ["--dataset-split", "test"], "--dataset-split test: none of --input is a data set"),
        ('{"text": "x"}\n', ["--punkt-language", "german"], "--punkt-language german: expected --split-sentences"),
        ('{"text": "x"}\n', ["--json-keys", "a/b"], "--json-keys 'a/b'"),
        ('{"text": "x"}\n', ["--json-keys", "k" * 300], "--output-prefix and --json-keys: a file name of 3"),
        ('{"text": "x"}\n', ["--output-prefix", "x" * 225], "--output-prefix and --json-keys: a file name of 2"),
        ('{"text": "x"}\n', ["--output-prefix", "x/" * 3000 + "x"], "cannot be accessed: File name too long"),
        ('{"text": "x"}\n', ["--tokenizer", "./none"], "--tokenizer ./none: no such folder"),
        ('{"text": "x"}\n', ["--input", "./none.jsonl"], "none.jsonl: no such file"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(corpus, tokenizer_folder, capsys, content, changes, message):
    corpus.write_text(content)
    output = corpus.parent / "made" / "out"
    arguments = ["--input", str(corpus), "--output-prefix", str(output), "--tokenizer", tokenizer_folder, "--workers", "1"]
    with pytest.raises(SystemExit) as stop:
        main(arguments + changes)
    errors = capsys.readouterr().err
    assert stop.value.code == 2
    assert errors.startswith("error: ") and errors.count("\n") == 1 and message in errors
    assert not output.parent.exists()


def test_output_that_exists_is_refused(corpus, tokenizer_folder):
    (prefix,) = preprocess(flags(corpus, tokenizer_folder))
    before = contents(prefix)
    with pytest.raises(InputError, match=r"out_text_document\.idx: exists already; remove it or choose another name"):
        preprocess(flags(corpus, tokenizer_folder, append_eod=False))
    assert contents(prefix) == before


def changing(monkeypatch, change):
    """Have `change` called when the first block of the input has been read."""
    real = resolve.read_blocks

    def read_blocks(inputs, spans):
        for number, block in enumerate(real(inputs, spans)):
            yield block
            if number == 0:
                change()

    monkeypatch.setattr(resolve, "read_blocks", read_blocks)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data + b'{"text": "more"}\n', r"found 1,\d{3} bytes, expected 1,\d{3}; start again"),
        (lambda data: data.replace(b"fox", b"cat"), "found another modification time"),
        (lambda data: data.replace(b"}", b"?"), "found another modification time"),
        (lambda data: data[:300], "changed while it was read"),
        (lambda data: b"", "changed while it was read"),
    ],
)
def test_input_that_changes_during_the_run_is_refused(corpus, tokenizer_folder, monkeypatch, change, message, partitions):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 100)
    monkeypatch.setattr(text_files, "LINES_BYTES", 100)
    changing(monkeypatch, lambda: corpus.write_bytes(change(corpus.read_bytes())))
    with pytest.raises(InputError, match=rf"corpus\.jsonl: changed while it was read: .*{message}|corpus\.jsonl: {message}"):
        preprocess(flags(corpus, tokenizer_folder, partitions=partitions))
    assert [path.name for path in corpus.parent.iterdir()] == ["corpus.jsonl"]


def test_two_that_end_together_do_not_overwrite_each_other(corpus, tokenizer_folder, monkeypatch):
    theirs = corpus.parent / "out_text_document.idx"
    real = os.fsync

    def fsync(stream):  # while this run's files go to the disk another's are renamed
        theirs.write_text("theirs")
        real(stream)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InputError, match=r"out_text_document\.idx: exists already"):
        preprocess(flags(corpus, tokenizer_folder))
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus.jsonl", theirs.name]
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize("stop", ["bin", "json", "idx"])
def test_nothing_opens_before_all_is_there(corpus, tokenizer_folder, monkeypatch, stop):
    real = os.replace

    def replace(source, target):
        if str(target).endswith(f"out_text_document.{stop}"):
            for suffix in ("bin", "json", "idx"):  # what a kill here would leave
                path = corpus.parent / f"out_text_document.{suffix}"
                if path.exists():
                    path.with_name(f"killed.{suffix}").write_bytes(path.read_bytes())
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    (prefix,) = preprocess(flags(corpus, tokenizer_folder))
    with pytest.raises(InputError, match=r"killed\.idx: no such file"):
        Corpus.open(corpus.parent / "killed")
    assert len(Corpus.open(prefix)) == len(TEXTS)


def test_a_note_of_somebody_elses_parts_does_not_let_output_be_overwritten(corpus, tokenizer_folder):
    (prefix,) = preprocess(flags(corpus, tokenizer_folder))
    before = contents(prefix)
    (corpus.parent / "out_parts").mkdir()
    noted = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in corpus.parent.glob("out_text_document.*")}
    for hashes in ({}, noted, dict.fromkeys(noted, "0" * 64)):
        (corpus.parent / "out_parts" / "merged").write_text(json.dumps(hashes))
        with pytest.raises(InputError, match=r"out_text_document\.idx: exists already"):
            preprocess(flags(corpus, tokenizer_folder, append_eod=False))
        if hashes != noted:
            with pytest.raises(InputError, match=r"out_text_document\.idx: exists already|out_parts: holds no plan\.json"):
                preprocess(flags(corpus, tokenizer_folder, append_eod=False, partitions=2))
    assert contents(prefix) == before


def test_what_a_killed_run_left_behind_is_said(corpus, tokenizer_folder, capsys):
    leftovers = corpus.parent / ".out_text_document.bin.123-0123abcd.tmp"
    leftovers.write_bytes(bytes(1_000_000))
    preprocess(flags(corpus, tokenizer_folder))
    output = " ".join(capsys.readouterr().out.split())
    assert f"{corpus.parent}: 1 unfinished by a stopped run, 1.0 MB; remove them unless another process is writing" in output
    assert leftovers.name in output
    assert leftovers.exists(), "its number may be a process on another machine"


def test_append_eod_needs_an_end_of_sequence_token(corpus, tmp_path, capsys):
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "endless"
    PreTrainedTokenizerFast(tokenizer_object=small_tokenizer().backend_tokenizer).save_pretrained(folder)
    with pytest.raises(InputError, match="no end-of-sequence token"):
        preprocess(flags(corpus, str(folder)))
    capsys.readouterr()
    (prefix,) = preprocess(flags(corpus, str(folder), append_eod=False))
    assert read_corpus_metadata(prefix).eod is None
    assert "no EOS token is appended to documents; the tokenizer has none\n" in capsys.readouterr().out


def test_sep_is_appended_by_a_tokenizer_without_eos(corpus, tmp_path, capsys):
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "separated"
    PreTrainedTokenizerFast(tokenizer_object=small_tokenizer().backend_tokenizer, sep_token="<|eos|>").save_pretrained(folder)
    preprocess(flags(corpus, str(folder), append_eod=False))
    assert "--append-eod appends <|eos|>\n" in capsys.readouterr().out


@pytest.mark.parametrize("append_eod", [True, False])
def test_documents_without_an_end_are_reported(corpus, tokenizer_folder, capsys, append_eod):
    preprocess(flags(corpus, tokenizer_folder, append_eod=append_eod))
    report = "no EOS token is appended to documents; --append-eod appends <|eos|>\n"
    assert (report in capsys.readouterr().out) != append_eod


def test_a_killed_worker_is_named_and_nothing_is_left(corpus, tokenizer_folder, monkeypatch):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 50)
    monkeypatch.setattr(text_files, "LINES_BYTES", 50)
    blocks = list(text_files.read_line_blocks(str(corpus)))
    others = psutil.Process().children()  # of other tests

    def read_blocks(inputs, spans):
        yield blocks[0]
        [*_, worker] = [child for child in psutil.Process().children() if child not in others]
        worker.kill()
        yield from blocks * 50

    monkeypatch.setattr(resolve, "read_blocks", read_blocks)
    with pytest.raises(InputError, match=r"worker \d of 5 \(process \d+\) was killed by SIGKILL"):
        preprocess(flags(corpus, tokenizer_folder, workers=5))
    assert [path.name for path in corpus.parent.iterdir()] == ["corpus.jsonl"]


SUICIDE = """
import os, signal, sys, psutil
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
from megaenc.data.preprocess import command as preprocess
from megaenc.data.sources import resolve
def read_blocks(found, spans, real=resolve.read_blocks):
    for block in real(found, spans):
        yield block
        print(*[child.pid for child in psutil.Process().children()], flush=True)
        os.kill(os.getpid(), int(sys.argv.pop()))
        yield block
resolve.read_blocks = read_blocks
preprocess.main([*sys.argv[1:-1], "--append-eod"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_run_leaves_nothing_that_is_taken_for_whole(corpus, tokenizer_folder, number, code):
    arguments = ["--input", corpus, "--output-prefix", corpus.parent / "out", "--tokenizer", tokenizer_folder, "--workers", "5"]
    command = [sys.executable, "-c", SUICIDE, *map(str, arguments), str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    leftovers = {path.name for path in corpus.parent.iterdir()} - {"corpus.jsonl"}
    if number == signal.SIGKILL:  # nobody could clean up: what is left has no name that anything opens
        assert all(name.startswith(".") and name.endswith(".tmp") for name in leftovers)
    else:
        assert not leftovers
    workers = [int(pid) for pid in ended.stdout.split("\n")[0].split()]
    assert len(workers) == 5
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    (prefix,) = preprocess(flags(corpus, tokenizer_folder))
    assert read_corpus_metadata(prefix).documents == len(TEXTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("tokens"), "no field `tokens`"),
        (lambda values: values["tokenizer"].pop("fingerprint"), "no field `tokenizer.fingerprint`"),
        (lambda values: values.update(documents="5"), 'field `documents`: found "5", expected a whole number'),
        (lambda values: values.update(documents=True), "field `documents`: found true, expected a whole number"),
        (lambda values: values.update(format=99), "field `format`: found 99, expected 1"),
        (lambda values: values["sha256"].pop("idx"), "no field `sha256.idx`"),
    ],
)
def test_a_sidecar_that_cannot_be_trusted_is_refused(corpus, tokenizer_folder, change, message):
    (prefix,) = preprocess(flags(corpus, tokenizer_folder))
    path = prefix.with_name(prefix.name + ".json")
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(InputError) as error:
        read_corpus_metadata(prefix)
    assert message in str(error.value) and str(path) in str(error.value)


def test_a_missing_or_broken_sidecar_is_one_line(tmp_path):
    with pytest.raises(InputError, match="no such file; expected a corpus made by"):
        read_corpus_metadata(tmp_path / "nothing")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_corpus_metadata(tmp_path / "broken")
    (tmp_path / "broken.json").write_text("[]")
    with pytest.raises(InputError, match="found a JSON list"):
        read_corpus_metadata(tmp_path / "broken")
