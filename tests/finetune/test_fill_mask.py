"""Guessing hidden words: the counting is right whatever the model, and the riddles are fair."""

import copy
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_special_tokens
from megaenc.data.tokenizer.tokenizer import encode_documents, train_tokenizer
from megaenc.finetune import fill_mask
from megaenc.objectives import MaskedLanguageModeling

SENTENCE = "The small garden behind the house was full of yellow flowers in the early summer."
TEXTS = [
    f"{SENTENCE} {'Nobody came. ' * (number % 7)}The old man walked slowly down to the river with his dog and a {word} book."
    for number, word in enumerate(["heavy", "green", "little", "borrowed"] * 6)
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 2, 400)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A model that knows nothing, as an export is laid out."""
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = EuroBertConfig(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=24, **sizes, **ids)
    torch.manual_seed(0)
    EuroBertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(tokenizer, tmp_path_factory):
    """The same of a Qwen3 that reads both ways."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("decoder")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=24, **sizes, **ids)
    config.is_causal = False
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Stub:
    """A model of windows of 16 tokens that answers with what `answer(input_ids)` says; keeps what it was asked."""

    device = "cpu"
    config = SimpleNamespace(max_position_embeddings=16)

    named_modules = staticmethod(list)

    def __init__(self, answer, vocabulary: int):
        self.answer, self.vocabulary, self.asked = answer, vocabulary, []

    def __call__(self, input_ids, attention_mask):
        self.asked += [row[seen.bool()] for row, seen in zip(input_ids, attention_mask, strict=True)]
        guesses = self.answer(input_ids)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(guesses, self.vocabulary).float())


def test_a_constant_guess_scores_what_the_baseline_says(tokenizer):
    counts = np.zeros(len(tokenizer), dtype=int)
    for token in range(2, len(tokenizer)):
        stub = Stub(lambda ids, token=token: torch.full_like(ids, token), len(tokenizer))
        found = fill_mask.compute_mask_score(stub, tokenizer, iter(TEXTS[:6]), 0.4, 10_000)
        counts[token] = round(found.accuracy * found.token_count)
    assert counts.sum() == found.token_count and counts.max() / counts.sum() == pytest.approx(found.most_frequent_accuracy)


def test_masks_are_those_of_training_and_windows_those_of_the_documents(tokenizer):
    stub = Stub(lambda ids: ids, len(tokenizer))
    found = fill_mask.compute_mask_score(stub, tokenizer, iter(TEXTS), 0.4, 10_000)
    assert found.accuracy == 0  # it sees the mask, never what is under it
    # The first token of a window may be hidden too, but is not asked for.
    hidden = sum(int((row[1:] == tokenizer.mask_token_id).sum()) for row in stub.asked)
    lengths = [len(tokens) + 1 for tokens in encode_documents(tokenizer, TEXTS)]
    assert hidden == found.token_count == pytest.approx(0.4 * sum(lengths) * 15 / 16, rel=0.1)
    assert sorted(map(len, stub.asked)) == sorted(min(16, n - start) for n in lengths for start in range(0, n, 16))
    ends = sum(int((row == tokenizer.eos_token_id).sum()) for row in stub.asked)
    assert ends == len(TEXTS)  # one each, never hidden


def test_batches_give_what_windows_alone_give(folder, tokenizer):
    model, _ = fill_mask.load_masked_lm(folder)
    asked = []
    original = model.forward

    def watched(input_ids, attention_mask, **rest):
        out = original(input_ids=input_ids, attention_mask=attention_mask, **rest)
        batch = zip(input_ids, attention_mask.bool(), out.logits, strict=True)
        asked.extend((row[seen].clone(), logits[seen].clone()) for row, seen, logits in batch)
        return out

    model.forward = watched
    fill_mask.compute_mask_score(model, tokenizer, iter(TEXTS), 0.4, 10_000)
    assert len({len(row) for row, _ in asked}) > 3
    for row, logits in asked[::5]:
        with torch.inference_mode():
            alone = original(input_ids=row[None]).logits[0]
        torch.testing.assert_close(alone, logits, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_mean_of_transformers_own(folder, tokenizer, monkeypatch):
    """Each window by itself, with the labels that transformers' masked language models take."""
    model, _ = fill_mask.load_masked_lm(folder)
    windows = []
    targets = MaskedLanguageModeling.targets
    monkeypatch.setattr(MaskedLanguageModeling, "targets", lambda *given: windows.append(targets(*given)) or windows[-1])
    score = fill_mask.compute_mask_score(model, tokenizer, iter(TEXTS), 0.4, 10_000)
    total = 0.0
    for window in windows:
        labels = np.full(len(window.inputs), -100)
        labels[window.predict_at] = window.labels
        labels[0] = -100
        count = int((labels != -100).sum())
        if count:
            inputs, targets_of_window = (torch.from_numpy(array)[None] for array in (window.inputs, labels))
            total += count * float(model(input_ids=inputs, labels=targets_of_window).loss)
    assert score.loss == pytest.approx(total / score.token_count, rel=1e-5)


def test_documents_have_the_special_tokens_of_the_tokenizer(tokenizer):
    template = SpecialTokens("template", (tokenizer.mask_token_id,), (tokenizer.eos_token_id,))
    stub = Stub(lambda ids: ids, len(tokenizer))
    fill_mask.compute_mask_score(stub, set_special_tokens(tokenizer, template), iter(TEXTS[:3]), 0.4, 10_000)
    lengths = [len(tokens) + 2 for tokens in encode_documents(tokenizer, TEXTS[:3])]
    assert sorted(map(len, stub.asked)) == sorted(min(16, n - start) for n in lengths for start in range(0, n, 16))


def test_seq_length_is_that_of_the_windows_and_is_printed(folder, tmp_path, capsys):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    argv = ["--model", str(folder), "--input", str(text), "--sentences", "0"]
    fill_mask.main([*argv, "--seq-length", "12"])
    short = capsys.readouterr().out
    assert "in windows of at most 12 tokens" in short
    fill_mask.main(argv)
    whole = capsys.readouterr().out
    assert "in windows of at most" in whole and whole != short
    with pytest.raises(SystemExit):
        fill_mask.main([*argv, "--seq-length", "100000"])
    assert "--seq-length: found 100000, expected at most the 24 tokens" in capsys.readouterr().err


def test_a_model_whose_positions_begin_later_reads_fewer_tokens(tokenizer, tmp_path):
    """RoBERTa's table of 26 positions begins after its padding id: the model reads 24 tokens."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=26, pad_token_id=1, **sizes)
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, loaded = fill_mask.load_masked_lm(tmp_path)
    assert fill_mask.choose_window_length(0, model, loaded) == 24
    score = fill_mask.compute_mask_score(model, loaded, iter(TEXTS), 0.4, 10_000)
    assert np.isfinite(score.loss)


def test_the_limit_is_in_tokens(tokenizer):
    stub = Stub(lambda ids: ids, len(tokenizer))
    fill_mask.compute_mask_score(stub, tokenizer, iter(TEXTS), 0.5, 100)
    assert sum(map(len, stub.asked)) == 100


def test_windows_are_no_longer_than_the_tokenizer_cuts(tokenizer):
    stub = Stub(lambda ids: ids, len(tokenizer))
    stub.config = SimpleNamespace(max_position_embeddings=131_072)
    short = copy.deepcopy(tokenizer)
    short.model_max_length = 12
    fill_mask.compute_mask_score(stub, short, iter(TEXTS), 0.4, 10_000)
    assert max(map(len, stub.asked)) == 12


def test_guesses_are_those_of_transformers_pipeline(folder, tokenizer):
    from transformers import pipeline

    model, _ = fill_mask.load_masked_lm(folder)
    asked = fill_mask.choose_masked_sentences(tokenizer, iter(TEXTS), 4)
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, device=model.device)
    for riddle, best in zip(asked, fill_mask.predict_masked_words(model, tokenizer, asked), strict=True):
        expected = fill(riddle.before + tokenizer.mask_token + riddle.after, top_k=3)
        assert [word for word, _ in best] == [one["token_str"].strip() or repr(one["token_str"]) for one in expected]
        assert [share for _, share in best] == pytest.approx([one["score"] for one in expected], rel=1e-5)


def test_a_decoder_that_reads_both_ways_fills_masks(decoder, tokenizer, tmp_path, capfd):
    model, _ = fill_mask.load_masked_lm(decoder)
    tokens = torch.arange(2, 14)[None]
    moved = (model(tokens).logits - model(tokens.clone().index_fill_(1, torch.tensor([11]), 99)).logits)[0, 0]
    assert moved.abs().max() > 1e-4, "the first position sees the last token"
    text = tmp_path / "heldout.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    fill_mask.main(["--model", str(decoder), "--input", str(text), "--sentences", "2"])
    said = capfd.readouterr()
    assert said.out.count("_____") == 2 and "hidden tokens guessed" in said.out and not said.err


def test_riddles_hide_one_token_that_means_something(tokenizer):
    asked = fill_mask.choose_masked_sentences(tokenizer, iter(TEXTS), 8)
    assert asked == fill_mask.choose_masked_sentences(tokenizer, iter(TEXTS), 8) and len(asked) == 8
    for riddle in asked:
        assert any(riddle.before + riddle.word + riddle.after in text for text in TEXTS)
        assert len(tokenizer.encode(" " + riddle.word)) == 1 and riddle.word not in ("with", "into")
    assert len({riddle.word for riddle in asked}) > 2


@pytest.mark.parametrize("text", ["def f(x): return x", "Too short to say.", ":: Note that x = 3.", ""])
def test_text_that_is_no_plain_sentence_makes_no_riddle(tokenizer, text):
    assert fill_mask.choose_masked_sentences(tokenizer, iter([text]), 8) == []


def test_the_command_shows_and_counts(folder, tmp_path, capsys):
    text = tmp_path / "heldout.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    command = ["--model", str(folder), "--input", str(text), "--sentences", "2"]
    fill_mask.main(command)
    first = capsys.readouterr()
    fill_mask.main(command)
    assert first.out == capsys.readouterr().out and not first.err
    assert first.out.count("_____") == 2 and "hidden tokens guessed" in first.out


def test_the_right_guess_is_marked():
    from rich.console import Console

    riddle = fill_mask.MaskedSentence("A ", "cat", " sat.")
    console = Console(width=80)
    with console.capture() as output:
        console.print(fill_mask.build_table([riddle], [[("dog", 0.5), ("cat", 0.25)]]))
    assert "✓ cat 25 %" in output.get() and "✓ dog" not in output.get()


def test_the_surest_guesses_come_first_next_to_the_accuracy_of_all(capsys):
    shares = [0.2, 0.9, 0.1, 0.5]
    riddles = [fill_mask.MaskedSentence(f"Number {number} is ", "cat", ".") for number in range(4)]
    guesses = [[("cat" if number in (0, 2) else "dog", share), ("bird", 0.05)] for number, share in enumerate(shares)]
    fill_mask.print_surest(riddles, guesses, 3)
    output = capsys.readouterr().out
    assert re.findall(r"Number (\d)", output) == ["1", "3", "0"]
    assert output.endswith("the 3 sentences with the surest guesses of 4; the first guess is right in 50.0 % of all 4\n")


def test_more_sentences_are_guessed_than_printed(folder, tmp_path, capsys):
    text = tmp_path / "heldout.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["--model", str(folder), "--input", str(text), "--tokens", "100"]
    fill_mask.main([*words, "--sentences", "3"])
    output = capsys.readouterr().out
    assert output.count("_____") == 3 and "the 3 sentences with the surest guesses of 24;" in output
    printed = [int(share) for share in re.findall(r"_____[^\n]*? (\d+) %", output)]
    model, tokenizer = fill_mask.load_masked_lm(folder)
    guesses = fill_mask.predict_masked_words(model, tokenizer, fill_mask.choose_masked_sentences(tokenizer, iter(TEXTS), 24))
    assert printed == [round(100 * share) for share in sorted((best[0][1] for best in guesses), reverse=True)[:3]]
    fill_mask.main([*words, "--sentences", "0"])
    assert "surest" not in capsys.readouterr().out


def test_wrong_input_is_one_line(folder, decoder, tokenizer, tmp_path, capfd, refusal):
    from transformers import EuroBertModel

    text = tmp_path / "heldout.jsonl"
    text.write_text('{"text": "A cat."}\n')
    headless = tmp_path / "headless"
    EuroBertModel.from_pretrained(folder).save_pretrained(headless)
    tokenizer.save_pretrained(headless)
    torn = tmp_path / "torn"
    shutil.copytree(folder, torn)
    (torn / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    causal = shutil.copytree(decoder, tmp_path / "causal")
    values = json.loads((causal / "config.json").read_text())
    (causal / "config.json").write_text(json.dumps({name: value for name, value in values.items() if name != "is_causal"}))
    for arguments, words in [
        (["--model", str(causal), "--input", str(text)], "Qwen3ForCausalLM reads causally; expected a masked language model"),
        (["--model", str(tmp_path / "none"), "--input", str(text)], "no such folder"),
        (["--model", str(folder), "--input", str(tmp_path / "none.jsonl")], "none.jsonl"),
        (["--model", str(headless), "--input", str(text)], "no weights `lm_head.weight`"),
        (["--model", str(torn), "--input", str(text)], "model.safetensors: not a complete safetensors file"),
        (["--model", str(folder), "--input", str(text), "--mask", "0"], "option `mask`"),
        (["--model", str(folder), "--input", str(text), "--tokens", "0"], "--tokens: found 0"),
    ]:
        capfd.readouterr()
        assert words in refusal(fill_mask.main, arguments)
