import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from itertools import chain

import numpy as np
import psutil
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from small_data import write_files
from text_helpers import (
    HOSTILE,
    TEXTS,
    contents,
    corpus_settings,
    documents_of,
    every_source,
    reference_ids,
    serve_hub,
    small_tokenizer,
    write_jsonl,
)
from waiting import wait_until_ended

from megaenc.data.indexed.metadata import read_corpus_metadata
from megaenc.data.indexed.verify import verify_corpus
from megaenc.data.preprocess.command import prepare_job, preprocess
from megaenc.data.sources import resolve, text_files
from megaenc.data.tokenizer.fast_encode import replace_surrogates
from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_special_tokens
from megaenc.data.tokenizer.tokenizer import read_vocabulary
from megaenc.errors import InputError


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", TEXTS)


def test_sidecar_tells_what_the_files_are(corpus, tokenizer_directory):
    write_jsonl(corpus, [*TEXTS, "", ""])
    with corpus.open("a") as stream:
        stream.write("no json\n")
    (prefix,) = preprocess(
        corpus_settings(corpus, tokenizer_directory, skip_bad_lines=True, workers=3)
    )
    sidecar = read_corpus_metadata(prefix)
    data, index = contents(prefix)
    assert (
        sidecar.documents,
        sidecar.sequences,
        sidecar.empty_documents,
        sidecar.skipped_lines,
    ) == (5, 5, 2, 1)
    assert sidecar.tokens == sum(len(reference_ids(small_tokenizer(), text)) + 1 for text in TEXTS)
    assert (sidecar.vocab_size, sidecar.eod, sidecar.append_eod) == (
        len(small_tokenizer()),
        0,
        True,
    )
    assert sidecar.dtype == "uint16"
    assert sidecar.tokenizer.name == "small"
    assert sidecar.tokenizer.fingerprint == read_vocabulary(small_tokenizer()).fingerprint
    assert sidecar.sha256 == {
        "bin": hashlib.sha256(data).hexdigest(),
        "idx": hashlib.sha256(index).hexdigest(),
    }
    assert sidecar.sources == [{"path": "corpus.jsonl", "bytes": corpus.stat().st_size}]
    assert str(corpus.parent) not in (prefix.parent / "out_text_document.json").read_text()
    verify_corpus(prefix)


@pytest.mark.parametrize("is_local", [True, False])
def test_texts_of_every_source_give_the_bytes_that_they_give_in_one_file(
    tmp_path, tokenizer_directory, monkeypatch, is_local
):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 100)  # many blocks, so that order could be lost
    monkeypatch.setattr(text_files, "LINES_BYTES", 100)
    serve_hub(tmp_path, monkeypatch, [{"text": TEXTS[:3]}, {"text": TEXTS[3:]}])
    paths, texts = every_source(tmp_path) if is_local else (["someone/small"], TEXTS)
    one_file = write_jsonl(tmp_path / "all.jsonl", texts)
    (expected,) = preprocess(corpus_settings(one_file, tokenizer_directory, "expected"))
    settings = corpus_settings(one_file, tokenizer_directory, workers=2, partitions=3)
    (prefix,) = preprocess(dataclasses.replace(settings, input=tuple(map(str, paths))))
    assert contents(prefix) == contents(expected)
    sources = read_corpus_metadata(prefix).sources
    assert str(tmp_path) not in json.dumps(sources)
    if is_local:
        assert [source["path"] for source in sources] == [path.name for path in paths]
    else:
        assert sources == [
            {"path": "someone/small", "bytes": None, "config": None, "split": "train"}
        ]


SURROGATES = ["half a pair \ud800 and \udfff the other way, \ud83d", *HOSTILE, *TEXTS]


@pytest.mark.parametrize("append_eod", [True, False])
def test_hostile_texts_have_the_ids_of_the_hugging_face_tokenizer(
    corpus, tokenizer_directory, capsys, append_eod
):
    write_jsonl(corpus, SURROGATES)
    (prefix,) = preprocess(
        corpus_settings(corpus, tokenizer_directory, workers=2, append_eod=append_eod)
    )
    assert prefix.name == "out_text_document"
    want = [
        reference_ids(small_tokenizer(), replace_surrogates(text)) + [0] * append_eod
        for text in SURROGATES
        if text
    ]
    assert [document for (document,) in documents_of(prefix)] == want
    report = "no EOS token is appended to documents; --append-eod appends <|eos|>\n"
    assert (report in capsys.readouterr().out) != append_eod


LONG = 50_000_000


def test_a_document_of_50_mb_has_the_ids_of_the_hugging_face_tokenizer(corpus, tokenizer_directory):
    # A paragraph that ends in one line feed, before a letter, has the same ids everywhere. Only one
    # is encoded by the Hugging Face tokenizer, which would take a minute and gigabytes for all.
    paragraphs = [
        f"Paragraph {number}, <|mask|> and <|eos|>. {text.strip()}\n"
        for number, text in enumerate(TEXTS)
    ]
    known = [reference_ids(small_tokenizer(), paragraph) for paragraph in paragraphs]
    assert reference_ids(small_tokenizer(), "".join(paragraphs * 2)) == list(chain(*known, *known))
    repeats = LONG // sum(map(len, paragraphs)) + 1
    write_jsonl(corpus, ["".join(paragraphs * repeats)])
    (prefix,) = preprocess(corpus_settings(corpus, tokenizer_directory))
    dataset = IndexedDataset(str(prefix))
    assert len(dataset) == 1
    assert np.array_equal(dataset[0][:-1], np.tile([*chain(*known)], repeats))
    assert dataset[0][-1] == 0


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    """Return the small tokenizer with `<|mask|> ... <|eos|>` around a text."""
    template = SpecialTokens("template", (1, 1), (0,))
    directory = tmp_path_factory.mktemp("templated") / "tokenizer"
    set_special_tokens(small_tokenizer(), template).save_pretrained(directory)
    return str(directory)


def template_flags(corpus, tokenizer, name="out", **changes):
    return corpus_settings(
        corpus, tokenizer, name, append_eod=False, **({"special_tokens": "template"} | changes)
    )


def test_sentences_are_the_sequences_and_the_first_and_last_have_the_special_tokens(
    tmp_path, templated, capsys
):
    texts = ["One dog. Two foxes!\n\nThree? Mr. Fox sleeps.  ", "", "No end", "\ud800 One. Two."]
    corpus = write_jsonl(tmp_path / "a.jsonl", texts)
    (prefix,) = preprocess(template_flags(corpus, templated, split_sentences=True, partitions=3))
    documents = documents_of(prefix)
    assert [
        [small_tokenizer().decode(sequence) for sequence in document] for document in documents
    ] == [
        ["<|mask|><|mask|>One dog.", " Two foxes!", "\n\nThree?", " Mr. Fox sleeps.  <|eos|>"],
        ["<|mask|><|mask|>No end<|eos|>"],
        ["<|mask|><|mask|>\ufffd One.", " Two.<|eos|>"],
    ]
    sidecar = read_corpus_metadata(prefix)
    assert (sidecar.documents, sidecar.sequences, sidecar.empty_documents) == (3, 7, 1)
    assert sidecar.sentences["method"] == "punkt" and sidecar.sentences["language"] in (
        "learnt",
        "english",
    )
    assert "sentences: " in capsys.readouterr().out


def test_a_document_has_the_special_tokens_of_the_template(tmp_path, templated, capsys):
    """Several workers and partitions add them too; deduplication removes documents."""
    corpus = write_jsonl(tmp_path / "a.jsonl", [TEXTS[0], "", *TEXTS, *TEXTS])
    (prefix,) = preprocess(template_flags(corpus, templated, partitions=3, workers=2))
    assert (
        "special tokens of a document: <|mask|> <|mask|> ... <|eos|> (template)\n"
        in capsys.readouterr().out
    )
    want = [[[1, 1, *reference_ids(small_tokenizer(), text), 0]] for text in TEXTS]
    assert documents_of(prefix) == [want[0], *want, *want]
    metadata = read_corpus_metadata(prefix)
    assert metadata.special_tokens == {"mode": "template", "before": [1, 1], "after": [0]}
    assert (metadata.eod, metadata.append_eod, metadata.empty_documents) == (0, True, 1)
    verify_corpus(prefix)
    # Parts of another mode are refused.
    assert (
        "special_tokens" in prepare_job(template_flags(corpus, templated, "planned")).build_plan()
    )
    (unique,) = preprocess(template_flags(corpus, templated, "unique", deduplicate="exact"))
    assert documents_of(unique) == want


def test_each_key_or_column_makes_a_corpus(tmp_path, tokenizer_directory):
    rows = [{"title": "The fox", "text": "The lazy\ndog"}, {"title": "", "text": "sleeps"}]
    write_files(tmp_path, {"pairs.csv": rows, "pairs.jsonl": rows})
    keys = ("title", "text")
    from_csv = preprocess(
        corpus_settings(tmp_path / "pairs.csv", tokenizer_directory, "csv", json_keys=keys)
    )
    from_jsonl = preprocess(
        corpus_settings(
            tmp_path / "pairs.jsonl", tokenizer_directory, "jsonl", json_keys=keys, partitions=2
        )
    )
    assert [prefix.name for prefix in from_csv] == ["csv_title_document", "csv_text_document"]
    assert list(map(contents, from_csv)) == list(map(contents, from_jsonl))
    assert [len(IndexedDataset(str(prefix))) for prefix in from_csv] == [1, 2]
    assert [read_corpus_metadata(prefix).empty_documents for prefix in from_csv] == [1, 0]


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("\n\n", {}, "no document holds any text"),
        (
            '{"text": "x"}\n\n{"body": "y"}\n',
            {},
            "corpus.jsonl:3: no key `text`; found `body`; set --json-key",
        ),
        (
            '{"text": "x"}\n',
            {"special_tokens": "none"},
            "--append-eod: found with --special-tokens none, expected one of them",
        ),
        (
            '{"text": "x"}\n',
            {"json_keys": ("k" * 300,)},
            "--output-prefix and --json-keys: a file name of 3",
        ),
    ],
)
def test_bad_input_leaves_nothing(corpus, tokenizer_directory, content, changes, message):
    corpus.write_text(content)
    with pytest.raises(InputError) as error:
        preprocess(corpus_settings(corpus, tokenizer_directory, "made/out", **changes))
    assert message in str(error.value)
    assert not (corpus.parent / "made").exists()


@pytest.mark.parametrize(
    ("change", "message", "partitions"),
    [
        (
            lambda data: data + b'{"text": "more"}\n',
            r"found 1,\d{3} bytes, expected 1,\d{3}; start again",
            1,
        ),
        (lambda data: data.replace(b"fox", b"cat"), "found another modification time", 1),
        (lambda data: data.replace(b"fox", b"cat"), "found another modification time", 3),
        (lambda data: data[:300], "changed while it was read", 3),
    ],
)
def test_input_that_changes_during_the_run_is_refused(
    corpus, tokenizer_directory, monkeypatch, change, message, partitions
):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 100)
    monkeypatch.setattr(text_files, "LINES_BYTES", 100)
    real = resolve.read_blocks

    def read_blocks(inputs, spans):
        for number, block in enumerate(real(inputs, spans)):
            yield block
            if number == 0:
                corpus.write_bytes(change(corpus.read_bytes()))

    monkeypatch.setattr(resolve, "read_blocks", read_blocks)
    with pytest.raises(
        InputError,
        match=rf"corpus\.jsonl: changed while it was read: .*{message}|corpus\.jsonl: {message}",
    ):
        preprocess(corpus_settings(corpus, tokenizer_directory, partitions=partitions))
    assert [path.name for path in corpus.parent.iterdir()] == ["corpus.jsonl"]


def test_two_that_end_together_do_not_overwrite_each_other(
    corpus, tokenizer_directory, monkeypatch
):
    theirs = corpus.parent / "out_text_document.idx"
    real = os.fsync

    def fsync(stream):  # while this run's files go to the disk another's are renamed
        theirs.write_text("theirs")
        real(stream)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InputError, match=r"out_text_document\.idx: exists already"):
        preprocess(corpus_settings(corpus, tokenizer_directory))
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus.jsonl", theirs.name]
    assert theirs.read_text() == "theirs"


def test_output_that_exists_is_kept_whatever_a_note_of_parts_says(corpus, tokenizer_directory):
    (prefix,) = preprocess(corpus_settings(corpus, tokenizer_directory))
    before = contents(prefix)
    noted = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in corpus.parent.glob("out_text_document.*")
    }
    (corpus.parent / "out_parts").mkdir()
    (corpus.parent / "out_parts" / "merged").write_text(json.dumps(noted))
    with pytest.raises(InputError, match=r"out_text_document\.idx: exists already"):
        preprocess(corpus_settings(corpus, tokenizer_directory, append_eod=False))
    with pytest.raises(
        InputError, match=r"out_text_document\.idx: exists already|out_parts: holds no plan\.json"
    ):
        preprocess(corpus_settings(corpus, tokenizer_directory, append_eod=False, partitions=2))
    assert contents(prefix) == before


def test_what_a_killed_run_left_behind_is_said(corpus, tokenizer_directory, capsys):
    leftovers = corpus.parent / ".out_text_document.bin.123-0123abcd.tmp"
    leftovers.write_bytes(bytes(1_000_000))
    preprocess(corpus_settings(corpus, tokenizer_directory))
    output = " ".join(capsys.readouterr().out.split())
    assert (
        f"{corpus.parent}: 1 unfinished by a stopped run, 1.0 MB; "
        "remove them unless another process is writing" in output
    )
    assert leftovers.name in output
    assert leftovers.exists(), "its number may be a process on another machine"


def test_a_tokenizer_without_an_end_of_sequence_token_ends_no_document(corpus, tmp_path, capsys):
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path / "endless"
    PreTrainedTokenizerFast(tokenizer_object=small_tokenizer().backend_tokenizer).save_pretrained(
        directory
    )
    (prefix,) = preprocess(corpus_settings(corpus, str(directory), append_eod=False))
    assert read_corpus_metadata(prefix).eod is None
    assert (
        "no EOS token is appended to documents; the tokenizer has none\n" in capsys.readouterr().out
    )


def test_a_killed_worker_is_named_and_nothing_is_left(corpus, tokenizer_directory, monkeypatch):
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
    with pytest.raises(
        InputError, match=r"worker process \d+ was killed by SIGKILL, .*; try fewer --workers"
    ):
        preprocess(corpus_settings(corpus, tokenizer_directory, workers=5))
    assert [path.name for path in corpus.parent.iterdir()] == ["corpus.jsonl"]


SUICIDE = """
import os, signal, sys, psutil
# A background job inherits that the signal is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
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
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_an_interrupted_run_leaves_nothing_that_is_taken_for_whole(
    corpus, tokenizer_directory, number, code
):
    arguments = [
        "--input",
        corpus,
        "--output-prefix",
        corpus.parent / "out",
        "--tokenizer",
        tokenizer_directory,
        "--workers",
        "5",
    ]
    command = [sys.executable, "-c", SUICIDE, *map(str, arguments), str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    leftovers = {path.name for path in corpus.parent.iterdir()} - {"corpus.jsonl"}
    if (
        number == signal.SIGKILL
    ):  # nobody could clean up: what is left has no name that anything opens
        assert all(name.startswith(".") and name.endswith(".tmp") for name in leftovers)
    else:
        assert not leftovers
    workers = [int(pid) for pid in ended.stdout.split("\n")[0].split()]
    assert len(workers) == 5
    wait_until_ended(workers)
    (prefix,) = preprocess(corpus_settings(corpus, tokenizer_directory))
    assert read_corpus_metadata(prefix).documents == len(TEXTS)
