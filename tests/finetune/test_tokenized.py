"""Tokenized rows against the tokenizer, and a cache that is whole or absent."""

import copy
import multiprocessing

import numpy as np
import pytest
import tokenizer_shapes
from text_helpers import text_encoder

from megaenc.data.tokenizer.special_tokens import (
    SpecialTokens,
    read_template,
    resolve_special_tokens,
    set_special_tokens,
)
from megaenc.data.tokenizer.tokenizer import load_tokenizer, train_tokenizer
from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.tokenized import (
    TextEncoder,
    TokenizedTexts,
    choose_special_tokens,
    load_or_compute,
    resolve_protocol,
)

TEXTS = [
    "The small garden behind the house was full of yellow flowers.",
    "",
    "A text that spells <|eos|> and <|mask|> means the characters.",
    "  spaces  inside, \u65e5\u672c\u8a9e \U0001f44d\U0001f3fd e\u0301",
    "word " * 40,
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 20, 330)


@pytest.fixture(scope="module")
def plain(tokenizer):
    return [
        tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        for text in TEXTS
    ]


def test_a_text_that_just_fits_is_not_counted_as_cut(tokenizer, plain):
    for room in (0, 1):
        encoded = text_encoder(tokenizer, len(plain[0]) + room).encode(TEXTS[:1])
        assert encoded.tokens.dtype == np.int32
        assert (encoded.truncated_count, encoded.lengths.tolist()) == (
            1 - room,
            [len(plain[0]) + room],
        )


def test_beginnings_and_ends_are_a_choice(tokenizer, plain):
    assert (
        text_encoder(tokenizer, 8, add_eos=False).encode(TEXTS[:1]).tokens.tolist() == plain[0][:8]
    )
    with pytest.raises(InputError, match=r"--add-bos: .* has no BOS token"):
        text_encoder(tokenizer, 8, add_bos=True)
    for role in ("bos_token", "cls_token"):  # what BERT begins texts with
        named = copy.deepcopy(tokenizer)
        setattr(named, role, "<|mask|>")
        both = text_encoder(named, 8, add_bos=True).encode(TEXTS[:1])
        assert both.tokens.tolist() == [
            tokenizer.mask_token_id,
            *plain[0][:6],
            tokenizer.eos_token_id,
        ]


def test_refusals(tokenizer):
    with pytest.raises(InputError, match="--max-length: found 1, expected room for text"):
        text_encoder(tokenizer, 1)
    with pytest.raises(InputError, match="text 2: found no token"):
        text_encoder(tokenizer, 8, add_eos=False).encode(TEXTS)
    with pytest.raises(
        InputError,
        match="--max-length: found 3, expected room for text next to the special tokens of a pair",
    ):
        text_encoder(tokenizer, 3).encode([("one", "two")])
    assert text_encoder(tokenizer, 4).encode([("one", "two")]).lengths.tolist() == [4]
    with pytest.raises(
        InputError,
        match=r"pairs of texts: found --special-tokens none, .*except in reranking, with a --pair-",
    ):
        text_encoder(tokenizer, 20, add_eos=False).encode([("one", "two")])


def test_offsets_say_the_characters_of_each_token(tokenizer, plain):
    encoded = list(text_encoder(tokenizer, 4).encode_with_offsets(TEXTS))
    for text, ids, (tokens, offsets) in zip(TEXTS, plain, encoded, strict=True):
        assert tokens.tolist() == ids  # whole, whatever the model reads
        assert offsets.shape == (len(ids), 2)
        covered = {at for start, end in offsets for at in range(start, end)}
        assert covered == set(range(len(text)))
    # "\ud83d" alone is no character; a pair of halves is one.
    [(_, offsets)] = text_encoder(tokenizer, 4).encode_with_offsets(["a\ud83d\udc4db\ud83d"])
    assert offsets.max() == 4


def test_the_cache_makes_once_for_each_key(tokenizer, tmp_path):
    encoder = text_encoder(tokenizer, 20)
    calls = []

    def make() -> dict[str, TokenizedTexts]:
        calls.append(1)
        both = {"queries": encoder.encode(TEXTS), "documents": encoder.encode(TEXTS[:2])}
        both["queries"].columns["labels"] = np.arange(5)
        return both

    made = load_or_compute(tmp_path / "cache", encoder.cache_key, make)
    read = load_or_compute(tmp_path / "cache", encoder.cache_key, make)
    assert len(calls) == 1 and list(read) == list(made)
    for name, texts in made.items():
        for field in ("tokens", "starts", "truncated_count"):
            np.testing.assert_array_equal(
                getattr(read[name], field), getattr(texts, field), strict=True
            )
    assert (
        read["queries"].columns["labels"].tolist() == [0, 1, 2, 3, 4]
        and not read["documents"].columns
    )
    load_or_compute(tmp_path / "cache", text_encoder(tokenizer, 21).cache_key, make)
    assert len(calls) == 2


def test_a_broken_file_is_made_again(tokenizer, tmp_path):
    encoder = text_encoder(tokenizer, 20)
    made = load_or_compute(tmp_path, {}, lambda: encoder.encode(TEXTS))
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    for broken in (
        b"",
        whole[:-30],
        whole.replace(made.tokens.tobytes(), made.tokens.tobytes()[::-1]),
    ):
        file.write_bytes(broken)
        assert np.array_equal(
            load_or_compute(tmp_path, {}, lambda: encoder.encode(TEXTS)).tokens, made.tokens
        )
        assert file.read_bytes() == whole


def test_several_processes_make_it_once_together(tmp_path):
    """Forks, of which all but the first wait."""
    context = multiprocessing.get_context("fork")
    directory = tmp_path / "cache"
    made = tmp_path / "made"
    begun = context.Event()
    all_wait = context.Semaphore(0)

    def make() -> TokenizedTexts:
        with open(made, "a") as file:
            file.write("once\n")
        begun.set()
        for _ in range(2):  # until both others have said that they wait
            assert all_wait.acquire(timeout=60)
        return TokenizedTexts.from_rows([np.arange(3)], 0)

    def want(first: bool) -> None:
        assert first or begun.wait(60)
        said = []
        found = load_or_compute(
            directory, {"one": 1}, make, lambda: said or (said.append(1), all_wait.release())
        )
        assert found.tokens.tolist() == [0, 1, 2] and len(said) == (not first)

    processes = [context.Process(target=want, args=(at == 0,)) for at in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert made.read_text() == "once\n" and [path.suffix for path in directory.iterdir()] == [
        ".npz"
    ]


def test_what_a_killed_process_left_is_removed_when_it_is_made_again(tmp_path):
    load_or_compute(tmp_path, {}, lambda: TokenizedTexts.from_rows([np.arange(3)], 0))
    [path] = tmp_path.iterdir()
    path.rename(tmp_path / f".{path.name}.123-0123abcd.tmp")
    (tmp_path / f".{path.stem}.lock").touch()
    load_or_compute(tmp_path, {}, lambda: TokenizedTexts.from_rows([np.arange(3)], 0))
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        load_or_compute(tmp_path, {}, lambda: 1 / 0)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module", params=tokenizer_shapes.SHAPES)
def shape(request, tmp_path_factory):
    directory = tokenizer_shapes.save(
        tokenizer_shapes.SHAPES[request.param](), tmp_path_factory.mktemp("shapes") / request.param
    )
    return load_tokenizer(directory)


@pytest.mark.parametrize("length", [9, 1000])
def test_texts_and_pairs_are_those_of_transformers(shape, length):
    """Template, cuts from the right of the longer text, special tokens as text."""
    special = resolve_special_tokens(shape, "")
    client = set_special_tokens(shape, special)
    pairs = [(first, second) for first in TEXTS for second in (TEXTS[0], TEXTS[4], "")]
    encoder = TextEncoder(shape, length, special)
    encoded = encoder.encode([*TEXTS, *pairs])
    options = {"truncation": True, "max_length": length, "split_special_tokens": True}
    expected = client(TEXTS, **options)["input_ids"]
    # Alone, an empty second text is none
    expected += client(*map(list, zip(*pairs, strict=True)), **options)["input_ids"]
    assert [row.tolist() for row in encoded.gather_rows(np.arange(len(expected)))] == expected
    whole = client(TEXTS, split_special_tokens=True)["input_ids"]
    assert encoder.encode(TEXTS).truncated_count == sum(len(ids) > length for ids in whole)


def test_the_default_is_the_template_and_an_eos_is_recorded_as_before(shape):
    protocol = resolve_protocol(FinetuneConfig(), shape)
    special = choose_special_tokens(shape, protocol)
    template = read_template(shape)
    if template.count and template.after != (shape.eos_token_id,):
        assert (protocol.special_tokens, protocol.add_bos, protocol.add_eos) == (
            "template",
            None,
            None,
        )
    assert special.is_same(
        template if template.count else SpecialTokens("eod", after=(shape.eos_token_id,))
    )
    if special.after == (shape.eos_token_id,) and not special.before:
        assert (protocol.special_tokens, protocol.add_bos, protocol.add_eos) == ("", False, True)


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ({"add_eos": True}, (False, True)),
        ({"add_eos": False}, (False, False)),
        ({"special_tokens": "none"}, (False, False)),
    ],
)
def test_add_bos_and_add_eos_are_aliases(given, normal):
    protocol = FinetuneConfig(**given).normalize_special_tokens()
    assert (protocol.special_tokens, protocol.add_bos, protocol.add_eos) == ("", *normal)
