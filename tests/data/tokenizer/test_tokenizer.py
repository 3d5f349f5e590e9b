import json
import random
import signal
import string
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizer_shapes
from text_helpers import HOSTILE, TEXTS, reference_ids, small_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from megaenc.data.tokenizer import tokenizer as tokenizer_module
from megaenc.data.tokenizer.fast_encode import FastEncoder, replace_surrogates
from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_special_tokens
from megaenc.data.tokenizer.tokenizer import (
    decode_in_spans,
    encode_documents,
    get_encoder,
    load_tokenizer,
    read_vocabulary,
    train_tokenizer,
)


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer of a family, with EOS and an added mask token.

    The mask token is outside of the model's own vocabulary.
    """
    backend, config = tokenizer_shapes.with_mask(tokenizer_shapes.SHAPES[name]())
    roles = {
        role: token
        for role, token in config.items()
        if role.endswith("_token") and isinstance(token, str)
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


LLAMA3 = partial(tokenizer_of, "llama3")
BERT = partial(tokenizer_of, "bert")
LLAMA2 = partial(tokenizer_of, "llama2")


def with_added_word():
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.add_tokens(["newword", AddedToken("dog", single_word=True)])
    return tokenizer


def test_words_are_cut_only_for_training_and_only_if_long(monkeypatch):
    before = train_tokenizer(TEXTS, 400).backend_tokenizer.to_str()
    monkeypatch.setattr(tokenizer_module, "MAX_WORD_BYTES", 32)
    assert train_tokenizer(TEXTS, 400).backend_tokenizer.to_str() == before
    cut = train_tokenizer(["x" * 100, " " * 100, "é" * 100], 400)
    assert max(len(token) for token in cut.get_vocab() if not token.startswith("<|")) == 32
    assert cut.decode(cut.encode("x" * 1000)) == "x" * 1000


def test_a_signal_ends_the_training(tmp_path):
    (tmp_path / "a.txt").write_text(
        "".join(random.Random(0).choices(string.ascii_lowercase, k=2_000_000))
    )
    arguments = ["tokenizer", "--input", "a.txt", "--vocab-size", "200000", "--output", "new/tok"]
    process = subprocess.Popen(
        [sys.executable, "-m", "megaenc", *arguments], cwd=tmp_path, stderr=subprocess.PIPE
    )
    try:
        while process.poll() is None and not list(tmp_path.glob("new/.tok.*")):
            time.sleep(0.05)
        time.sleep(2)  # from reading to merging, which takes minutes
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("make", "fast"),
    [(small_tokenizer, True), (LLAMA3, True), (with_added_word, True), (BERT, False)],
)
def test_ids_are_those_of_the_hugging_face_tokenizer(make, fast):
    tokenizer = make()
    assert get_encoder(tokenizer).is_fast == fast
    generator = random.Random(0)
    pieces = [*"a \n\r!\x00\u00a0\u200b\u0301\u2009é中👍", "the", "'s", "'S", "12", "<|"]
    pieces += [chr(generator.randrange(0x20, 0xD800)) for _ in range(100)]
    noise = ["".join(generator.choices(pieces, k=generator.randrange(60))) for _ in range(200)]
    texts = HOSTILE + TEXTS + noise
    for text, ids in zip(texts, encode_documents(tokenizer, texts), strict=True):
        assert ids.dtype == np.uint32
        assert ids.tolist() == reference_ids(tokenizer, text), ascii(text[:80])


def test_text_that_spells_special_tokens_goes_the_fast_way(monkeypatch):
    encoder = FastEncoder(small_tokenizer().backend_tokenizer.to_str())
    monkeypatch.setattr(
        encoder, "_encode_reference", lambda texts: [] if not texts else pytest.fail("the slow way")
    )
    (ids,) = encoder(["<|mask|> and <|eos|>"])
    assert ids.tolist() == reference_ids(small_tokenizer(), "<|mask|> and <|eos|>")


def test_a_lone_surrogate_becomes_the_replacement_character():
    assert replace_surrogates(json.loads(r'"a\ud800b"')) == "a\ufffdb"
    assert replace_surrogates("\ud83d" + "\udc4d") == "👍"
    first, second = encode_documents(small_tokenizer(), ["a\udfffb", "a\ufffdb"])
    assert first.tolist() == second.tolist()


def fast_way(encode):
    """Return a stand-in for a gigatoken tokenizer that encodes with `encode`.

    `encode` turns UTF-8 into uint32[tokens].
    """

    def encode_batch(texts, parallel):
        rows = [encode(text.encode()) for text in texts]
        content = SimpleNamespace(data=np.concatenate(rows))
        offsets = SimpleNamespace(data=np.cumsum([0, *map(len, rows)]))
        return SimpleNamespace(layout=SimpleNamespace(content=content, offsets=offsets))

    return SimpleNamespace(encode=encode, encode_batch=encode_batch)


def test_a_fast_way_that_differs_is_not_taken(monkeypatch):
    import megaenc.data.tokenizer.fast_encode as encoding

    serialised = small_tokenizer().backend_tokenizer.to_str()
    honest = encoding._load_gigatoken(serialised)
    single_wrong = fast_way(lambda data: honest.encode(data.replace(b"\r", b"")))
    single_wrong.encode_batch = honest.encode_batch
    batch_wrong = fast_way(lambda data: honest.encode(data.replace(b"\r", b"")))
    batch_wrong.encode = honest.encode
    ways = {
        "honest": fast_way(honest.encode),
        "single wrong": single_wrong,
        "batch wrong": batch_wrong,
        "short": fast_way(lambda data: honest.encode(data)[:40]),
        "broken": fast_way(lambda data: 1 / 0),
    }
    for name, quick in ways.items():
        monkeypatch.setattr(encoding, "_load_gigatoken", lambda serialised, quick=quick: quick)
        encoder = FastEncoder(serialised)
        assert encoder.is_fast == (name == "honest"), name
        assert encoder(["a\rb"])[0].tolist() == honest.encode(b"a\rb").tolist()


def test_trained_tokenizer_is_deterministic_lossless_and_whole():
    tokenizer = small_tokenizer()
    assert (
        train_tokenizer(TEXTS, 400).backend_tokenizer.to_str()
        == tokenizer.backend_tokenizer.to_str()
    )
    vocabulary = read_vocabulary(tokenizer)
    for text, ids in zip(HOSTILE, encode_documents(tokenizer, HOSTILE), strict=True):
        assert tokenizer.decode(ids) == text
        assert not set(ids.tolist()) & set(
            vocabulary.special_ids
        )  # spelled special tokens stay text
    assert (vocabulary.eos_id, vocabulary.mask_id, vocabulary.special_ids) == (0, 1, (0, 1))
    assert vocabulary.size == len(tokenizer) <= 400
    assert tokenizer.pad_token == "<|eos|>"


def test_sep_ends_documents_only_without_an_eos():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizer().backend_tokenizer, sep_token="<|mask|>"
    )
    assert read_vocabulary(tokenizer).eos_id == 1
    tokenizer.eos_token = "<|eos|>"
    assert read_vocabulary(tokenizer).eos_id == 0


def test_fingerprint_survives_saving_and_notices_changes(tmp_path):
    before = read_vocabulary(small_tokenizer())
    small_tokenizer().save_pretrained(tmp_path / "one")
    again = load_tokenizer(tmp_path / "one")
    again(
        "padded and cut", padding="max_length", truncation=True, max_length=4
    )  # leaves its settings in the backend
    again.save_pretrained(tmp_path / "two")
    assert read_vocabulary(again) == before == read_vocabulary(load_tokenizer(tmp_path / "two"))
    assert read_vocabulary(train_tokenizer(TEXTS, 290)).fingerprint != before.fingerprint
    again.mask_token = "dog"
    assert read_vocabulary(again).fingerprint != before.fingerprint


@pytest.mark.parametrize("make", [LLAMA3, BERT, LLAMA2])
def test_runs_hold_every_token_once_and_no_half_character(make):
    tokenizer = make()
    for text in [*TEXTS, *HOSTILE[:-2], "日本語 a\ufffdb\ufffd\ufffd", "it 's 3 . 14 , n't"]:
        ids = reference_ids(tokenizer, text)
        full_ids = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        runs = decode_in_spans(tokenizer, ids)
        assert sum(count for count, _ in runs) == len(ids)
        assert "".join(piece for _, piece in runs) == full_ids
        assert (
            "".join(piece for _, piece in runs).count("\ufffd") == text.count("\ufffd")
            or make is BERT
        )


def test_runs_are_as_short_as_characters_allow():
    tokenizer = small_tokenizer()  # é and ö are two tokens, one a byte
    ids = reference_ids(tokenizer, "Zöé x")
    assert decode_in_spans(tokenizer, ids) == [(1, "Z"), (2, "ö"), (2, "é"), (1, " "), (1, "x")]
    assert decode_in_spans(tokenizer, ids[:-3]) == [(1, "Z"), (2, "ö"), (1, "\ufffd")]
    assert decode_in_spans(tokenizer, ids[2:]) == [(1, "\ufffd"), (2, "é"), (1, " "), (1, "x")]
    assert decode_in_spans(tokenizer, []) == []


@pytest.mark.parametrize("fast", [True, False])
def test_joined_is_the_documents_end_to_end(fast):
    encoder = FastEncoder(small_tokenizer().backend_tokenizer.to_str(), fast)
    for texts in (["", *TEXTS, "half a pair \ud800 here", "", "x" * 5000], [], [""]):
        tokens, lengths = encoder.encode_concatenated(texts)
        rows = encoder(texts)
        assert tokens.dtype == np.uint32
        assert tokens.tolist() == [token for row in rows for token in row.tolist()]
        assert lengths.tolist() == [len(row) for row in rows]


def test_the_text_fingerprint_depends_on_all_but_the_template():
    plain = small_tokenizer()
    template = set_special_tokens(plain, SpecialTokens("eod", after=(plain.eos_token_id,)))
    without = read_vocabulary(plain)
    with_eos = read_vocabulary(template)
    assert (
        without.fingerprint
        == without.text_fingerprint
        == with_eos.text_fingerprint
        != with_eos.fingerprint
    )
    assert with_eos.is_of_tokenizer(without.fingerprint) and without.is_of_tokenizer(
        with_eos.fingerprint, with_eos.text_fingerprint
    )
    other = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, eos_token="<|mask|>")
    assert read_vocabulary(other).text_fingerprint != without.text_fingerprint
