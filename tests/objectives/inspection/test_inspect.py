"""Output of `megaenc data inspect` against figures worked out by hand and a run."""

import io
import re
import sys

import numpy as np
import pytest
from text_helpers import reference_ids, small_tokenizer, write_jsonl

from megaenc.counter_rng import SampleRandomness
from megaenc.data.indexed.corpus import Corpus, split_documents
from megaenc.data.packing.packed_dataset import ConcatPackedDataset
from megaenc.data.preprocess import command as preprocess
from megaenc.data.tokenizer.tokenizer import read_vocabulary
from megaenc.objectives import MaskedLanguageModeling
from megaenc.objectives.inspection import inspect

# With the end of document 4, 2, 7 and 3 tokens: sixteen together.
DOCUMENTS = ["dog fox dog", "dog", "fox fox fox dog dog fox", "dog dog"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return prefix and tokenizer directory of a corpus in which each word is a token."""
    directory = tmp_path_factory.mktemp("inspected")
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(directory / "tokenizer")
    lengths = [len(reference_ids(tokenizer, " " + text)) for text in DOCUMENTS]
    assert lengths == [3, 1, 6, 2]
    text = write_jsonl(directory / "text.jsonl", [" " + text for text in DOCUMENTS])
    flags = [
        "--input",
        text,
        "--output-prefix",
        directory / "words",
        "--tokenizer",
        directory / "tokenizer",
        "--append-eod",
    ]
    preprocess.main([str(flag) for flag in flags])
    return str(directory / "words_text_document"), str(directory / "tokenizer")


def inspect_output(capsys, *flags) -> str:
    inspect.main([str(flag) for flag in flags])
    captured = capsys.readouterr()
    assert not captured.err
    return captured.out


def figures(text: str) -> dict[str, str]:
    """Return the named lines at the top, with continuation lines joined."""
    actual = {}
    name = ""
    for line in text.split("\n\n")[0].splitlines()[1:]:
        name = line[:20].strip() or name
        actual[name] = f"{actual.get(name, '')} {line[20:].strip()}".strip()
    return actual


def test_figures_worked_out_by_hand(corpus, capsys):
    out = inspect_output(capsys, corpus[0], "--seq-length", 5, "--split", "1,0,0")
    fingerprint = read_vocabulary(small_tokenizer()).fingerprint[:12]
    assert out.splitlines()[0].endswith("words_text_document")
    assert figures(out) == {
        "documents": "4",
        "tokens": "16",
        "dtype": "uint16",
        "tokenizer": f"tokenizer ({fingerprint}), {len(small_tokenizer())} ids",
        "end of document": "id 0, appended to each",
        # 34 for the header, 4 + 8 + 8 a document, 8 for the end.
        "size on disk": "32 bytes .bin + 122 bytes .idx",
        # They start at tokens 0, 5, 10 and 15.
        "packs of 5": "4 an epoch (concat, training documents of --split 1,0,0)",
        # In order 2 3 4 7: three twentieths of the way from 2 to 3, and as far from 7 to 4.
        "tokens a document": (
            "mean 4, median 3.5, p5 2.15, p95 6.55, longest 7 (document 2), 0 empty"
        ),
    }
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.split("\n\n")[1].splitlines()]
    assert rows == [
        ["tokens", "documents", "of tokens"],
        ["2 - 3", "2", "50.0 %", "█" * 20, "31.2 %"],
        ["4 - 7", "2", "50.0 %", "█" * 20, "68.8 %"],
    ]
    assert " ".join(out.split("\n\n")[2].split()) == (
        "Add --tokenizer DIR to see a decoded pack with the tokens that --objective hides and "
        "predicts."
    )


def test_split_and_packing_of_the_run_decide_what_is_packed(corpus, capsys):
    training, _, _ = split_documents(4, (50, 50, 0))
    tokens = sum([4, 2, 7, 3][document] for document in training)
    out = inspect_output(capsys, corpus[0], "--seq-length", 2, "--split", "50,50,0")
    assert figures(out)["packs of 2"].startswith(f"{-(-tokens // 2)} an epoch")
    flags = [
        "--tokenizer",
        corpus[1],
        "--seq-length",
        24,
        "--packing",
        "random-length",
        "--split",
        "1,0,0",
    ]
    out = inspect_output(capsys, corpus[0], *flags)
    assert (
        figures(out)["packs of 24"]
        == "1 an epoch (random-length, training documents of --split 1,0,0)"
    )
    assert "24 tokens of 2 documents" in out  # two chunks


@pytest.mark.parametrize(("pack", "seed"), [(3, 4), (7, 1)])
def test_the_pack_is_the_one_that_a_run_reads(corpus, capsys, pack, seed):
    """Words, brackets of hidden ones and rules at edges agree, also in epoch two."""
    flags = [
        "--tokenizer",
        corpus[1],
        "--seq-length",
        5,
        "--split",
        "1,0,0",
        "--pack",
        pack,
        "--seed",
        seed,
    ]
    out = inspect_output(capsys, corpus[0], *flags, "--objective", " mlm ( mask = 0.5 ) ")
    read = ConcatPackedDataset(Corpus.open(corpus[0]), np.arange(4), 5, seed)[pack]
    objective = MaskedLanguageModeling(read_vocabulary(small_tokenizer()), mask=0.5)
    targets = objective.targets(read, SampleRandomness(seed, read.sample, read.epoch))
    expected = []
    for at, token in enumerate(read.tokens.tolist()):
        if at in read.cu_seqlens:
            expected.append(f"tokens {at}")
        word = small_tokenizer().decode([token]).strip()
        expected.append(f"[{word}]" if at in targets.predict_at else word)
    body = out[out.index("document 1 of the pack") : out.index("legend ─")]
    assert re.findall(r"tokens \d+|\[\w+\]|<\|eos\|>|dog|fox", body) == expected
    assert (
        f"pack {pack} (epoch {read.epoch}): 5 tokens of {len(read.cu_seqlens) - 1} document" in out
    )
    assert f"{len(targets.predict_at)} tokens predicted" in out


def test_a_file_gets_no_colour_and_80_columns_and_a_terminal_colour(corpus, capsys, monkeypatch):
    flags = [corpus[0], "--tokenizer", corpus[1]]
    plain = inspect_output(capsys, *flags)
    assert "\x1b" not in plain and max(map(len, plain.splitlines()[1:])) <= 80
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    inspect.main(flags)
    assert "\x1b[1;30;43m[dog]" in terminal.getvalue()


@pytest.mark.parametrize(
    ("share", "drawn"), [(0, ""), (1, "████"), (0.5, "██"), (0.53, "██▏"), (1e-9, "▏")]
)
def test_bars(share, drawn):
    assert inspect.format_bar(share, 4) == drawn.ljust(4)
