"""Prediction of hidden words: correct counts for any model, and fair examples."""

import copy
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from small_data import write_file
from small_models import save_model

from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_special_tokens
from megaenc.data.tokenizer.tokenizer import encode_documents, train_tokenizer
from megaenc.finetune import fill_mask
from megaenc.objectives import MaskedLanguageModeling

SENTENCE = "The small garden behind the house was full of yellow flowers in the early summer."
TEXTS = [
    f"{SENTENCE} {'Nobody came. ' * (number % 7)}The old man walked slowly down to the river with "
    f"his dog and a {word} book."
    for number, word in enumerate(["heavy", "green", "little", "borrowed"] * 6)
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 2, 400)


@pytest.fixture(scope="module")
def directories(tokenizer, tmp_path_factory):
    """Return random models as exports have them: encoder and bidirectional decoder."""
    root = tmp_path_factory.mktemp("models")
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 24}
    both_ways = {"head_dim": 16, "num_key_value_heads": 2, "is_causal": False}
    save_model(root / "encoder", "eurobert", tokenizer, transformers.AutoModelForMaskedLM, **small)
    save_model(
        root / "decoder",
        "qwen3",
        tokenizer,
        transformers.AutoModelForCausalLM,
        **small,
        **both_ways,
    )
    return root


@pytest.fixture
def text(tmp_path):
    """A file of TEXTS."""
    write_file(tmp_path / "heldout.jsonl", [{"text": one} for one in TEXTS])
    return str(tmp_path / "heldout.jsonl")


class Stub:
    """Model of windows of 16 tokens that returns `answer(input_ids)`.

    It keeps its inputs.
    """

    device = "cpu"
    config = SimpleNamespace(max_position_embeddings=16)

    named_modules = staticmethod(list)

    def __init__(self, answer, vocabulary: int):
        self.answer = answer
        self.vocabulary = vocabulary
        self.asked = []

    def __call__(self, input_ids, attention_mask):
        self.asked += [
            row[seen.bool()] for row, seen in zip(input_ids, attention_mask, strict=True)
        ]
        guesses = self.answer(input_ids)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(guesses, self.vocabulary).float())


def test_a_constant_guess_scores_what_the_baseline_says(tokenizer):
    counts = np.zeros(len(tokenizer), dtype=int)
    for token in {
        token for tokens in encode_documents(tokenizer, TEXTS[:6]) for token in tokens.tolist()
    }:
        stub = Stub(lambda ids, token=token: torch.full_like(ids, token), len(tokenizer))
        found = fill_mask.compute_mask_score(stub, tokenizer, iter(TEXTS[:6]), 0.4, 10_000)
        counts[token] = round(found.accuracy * found.token_count)
    assert counts.sum() == found.token_count and counts.max() / counts.sum() == pytest.approx(
        found.most_frequent_accuracy
    )


def test_masks_are_those_of_training_and_windows_those_of_the_documents(tokenizer):
    stub = Stub(lambda ids: ids, len(tokenizer))
    found = fill_mask.compute_mask_score(stub, tokenizer, iter(TEXTS), 0.4, 10_000)
    assert found.accuracy == 0  # it sees the mask, never what is under it
    # The first token of a window may be hidden too, but is not asked for.
    hidden = sum(int((row[1:] == tokenizer.mask_token_id).sum()) for row in stub.asked)
    lengths = [len(tokens) + 1 for tokens in encode_documents(tokenizer, TEXTS)]
    assert hidden == found.token_count == pytest.approx(0.4 * sum(lengths) * 15 / 16, rel=0.1)
    assert sorted(map(len, stub.asked)) == sorted(
        min(16, n - start) for n in lengths for start in range(0, n, 16)
    )
    ends = sum(int((row == tokenizer.eos_token_id).sum()) for row in stub.asked)
    assert ends == len(TEXTS)  # one each, never hidden


def test_the_loss_is_the_mean_of_transformers_own(directories, tokenizer, monkeypatch):
    """Each window by itself, with the labels of transformers' masked language models."""
    model, _ = fill_mask.load_masked_lm(directories / "encoder")
    windows = []
    targets = MaskedLanguageModeling.targets
    monkeypatch.setattr(
        MaskedLanguageModeling,
        "targets",
        lambda *given: windows.append(targets(*given)) or windows[-1],
    )
    score = fill_mask.compute_mask_score(model, tokenizer, iter(TEXTS), 0.4, 10_000)
    assert len({len(window.inputs) for window in windows}) > 3  # batches are padded
    total = 0.0
    right = 0
    for window in windows:
        labels = np.full(len(window.inputs), -100)
        labels[window.predict_at] = window.labels
        labels[0] = -100
        count = int((labels != -100).sum())
        if count:
            inputs = torch.from_numpy(window.inputs)[None]
            targets_of_window = torch.from_numpy(labels)[None]
            found = model(input_ids=inputs, labels=targets_of_window)
            total += count * found.loss.item()
            right += int((found.logits.argmax(-1) == targets_of_window).sum())
    assert score.loss == pytest.approx(total / score.token_count, rel=1e-5)
    assert score.accuracy == pytest.approx(right / score.token_count)


def test_documents_have_the_special_tokens_of_the_tokenizer(tokenizer):
    template = SpecialTokens("template", (tokenizer.mask_token_id,), (tokenizer.eos_token_id,))
    stub = Stub(lambda ids: ids, len(tokenizer))
    fill_mask.compute_mask_score(
        stub, set_special_tokens(tokenizer, template), iter(TEXTS[:3]), 0.4, 10_000
    )
    lengths = [len(tokens) + 2 for tokens in encode_documents(tokenizer, TEXTS[:3])]
    assert sorted(map(len, stub.asked)) == sorted(
        min(16, n - start) for n in lengths for start in range(0, n, 16)
    )


def test_seq_length_is_that_of_the_windows_and_is_printed(directories, text, capfd, refusal):
    argv = ["--model", str(directories / "encoder"), "--input", text, "--sentences", "0"]
    fill_mask.main([*argv, "--seq-length", "12"])
    short = capfd.readouterr().out
    assert "in windows of at most 12 tokens" in short and "surest" not in short
    fill_mask.main(argv)
    whole = capfd.readouterr().out
    assert "in windows of at most" in whole and whole != short
    assert "--seq-length: found 25, expected at most the 24 tokens" in refusal(
        fill_mask.main, [*argv, "--seq-length", "25"]
    )


def test_a_model_whose_positions_begin_later_reads_fewer_tokens(tokenizer, tmp_path):
    """RoBERTa's 26 positions begin after its padding id: the model reads 24 tokens."""
    sizes = {"max_position_embeddings": 26, "pad_token_id": 1}
    save_model(tmp_path, "roberta", tokenizer, transformers.AutoModelForMaskedLM, **sizes)
    model, loaded = fill_mask.load_masked_lm(tmp_path)
    assert fill_mask.choose_window_length(0, model, loaded) == 24
    assert np.isfinite(fill_mask.compute_mask_score(model, loaded, iter(TEXTS), 0.4, 10_000).loss)


def test_the_limit_is_in_tokens_and_windows_are_no_longer_than_the_tokenizer_cuts(tokenizer):
    stub = Stub(lambda ids: ids, len(tokenizer))
    stub.config = SimpleNamespace(max_position_embeddings=131_072)
    short = copy.deepcopy(tokenizer)
    short.model_max_length = 12
    fill_mask.compute_mask_score(stub, short, iter(TEXTS), 0.5, 100)
    assert sum(map(len, stub.asked)) == 100 and max(map(len, stub.asked)) == 12


def test_guesses_are_those_of_transformers_pipeline(directories, tokenizer):
    model, _ = fill_mask.load_masked_lm(directories / "encoder")
    asked = fill_mask.choose_masked_sentences(tokenizer, iter(TEXTS), 4)
    fill = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, device=model.device)
    for riddle, best in zip(
        asked, fill_mask.predict_masked_words(model, tokenizer, asked), strict=True
    ):
        expected = fill(riddle.before + tokenizer.mask_token + riddle.after, top_k=3)
        assert [word for word, _ in best] == [
            one["token_str"].strip() or repr(one["token_str"]) for one in expected
        ]
        assert [share for _, share in best] == pytest.approx(
            [one["score"] for one in expected], rel=1e-5
        )


def test_a_decoder_that_reads_both_ways_fills_masks(directories):
    model, _ = fill_mask.load_masked_lm(directories / "decoder")
    tokens = torch.arange(2, 14)[None]
    moved = (
        model(tokens).logits - model(tokens.clone().index_fill_(1, torch.tensor([11]), 99)).logits
    )[0, 0]
    assert moved.abs().max() > 1e-4, "the first position sees the last token"


def test_riddles_hide_one_token_that_means_something(tokenizer):
    asked = fill_mask.choose_masked_sentences(tokenizer, iter(TEXTS), 8)
    assert asked == fill_mask.choose_masked_sentences(tokenizer, iter(TEXTS), 8) and len(asked) == 8
    for riddle in asked:
        assert any(riddle.before + riddle.word + riddle.after in text for text in TEXTS)
        assert len(tokenizer.encode(" " + riddle.word)) == 1 and riddle.word not in ("with", "into")
    assert len({riddle.word for riddle in asked}) > 2


@pytest.mark.parametrize(
    "text", ["def f(x): return x", "Too short to say.", ":: Note that x = 3.", ""]
)
def test_text_that_is_no_plain_sentence_makes_no_riddle(tokenizer, text):
    assert fill_mask.choose_masked_sentences(tokenizer, iter([text]), 8) == []


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_command_shows_and_counts(kind, directories, text, capsys):
    command = [
        "--model",
        str(directories / kind),
        "--input",
        text,
        "--tokens",
        "100",
        "--sentences",
        "3",
    ]
    fill_mask.main(command)
    first = capsys.readouterr()
    fill_mask.main(command)
    assert first.out == capsys.readouterr().out and not first.err
    assert first.out.count("_____") == 3 and "hidden tokens guessed" in first.out
    assert "the 3 sentences with the surest guesses of 24;" in first.out


def test_the_surest_guesses_come_first_next_to_the_accuracy_of_all(capsys):
    """Those that are right are marked."""
    shares = [0.2, 0.9, 0.1, 0.5]
    riddles = [fill_mask.MaskedSentence(f"Number {number} is ", "cat", ".") for number in range(4)]
    guesses = [
        [("cat" if number in (0, 2) else "dog", share), ("bird", 0.05)]
        for number, share in enumerate(shares)
    ]
    fill_mask.print_surest(riddles, guesses, 3)
    output = capsys.readouterr().out
    assert re.findall(r"Number (\d)", output) == ["1", "3", "0"]
    assert re.findall(r"✓ (\w+)", output) == ["cat"]
    assert output.endswith(
        "the 3 sentences with the surest guesses of 4; the first guess is right in 50.0 % of all "
        "4\n"
    )


def test_models_that_fill_no_mask_are_refused(directories, tokenizer, text, tmp_path, refusal):
    save_model(tmp_path / "headless", "eurobert", tokenizer)
    causal = shutil.copytree(directories / "decoder", tmp_path / "causal")
    values = json.loads((causal / "config.json").read_text())
    del values["is_causal"]
    write_file(causal / "config.json", values)
    for directory, words in (
        ("causal", "Qwen3ForCausalLM reads causally; expected a masked language model"),
        ("headless", "no weights `lm_head.weight`"),
    ):
        assert words in refusal(fill_mask.main, ["--model", tmp_path / directory, "--input", text])
