"""The example's whole road: a decoder comes in, learns to fill masks, goes out and loads, without a network."""

import importlib.util
import json
import sys

import hf_models
import pytest
import runs
import torch

from megaenc import cli
from megaenc.console import silence_libraries
from megaenc.training.command import main as pretrain

EXAMPLE = runs.ROOT / "examples" / "continued_pretraining" / "continue_pretraining.py"
SHORT = ["--train-iters", "30", "--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "3e-3"]

silence_libraries()


def run_example(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example in this process, its commands too: it would start an interpreter for each."""
    spec = importlib.util.spec_from_file_location("continue_pretraining", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)

    def run(words: list[object], text: str) -> None:
        first, *others = map(str, words)
        cli.main(others[1:]) if first == "-m" else pretrain(others)

    monkeypatch.setattr(example, "run_command", run)
    example.main(flags)


@pytest.fixture(scope="module")
def made(small_corpus, tmp_path_factory):
    """By family: what the example leaves, of the Llama that it makes and of a Qwen3 whose tokenizer has no mask token.

    The second is made as a user makes it, by a command and the commands that it starts.
    """
    folder = tmp_path_factory.mktemp("made")
    source = hf_models.write(hf_models.build("qwen3"), folder / "source", small_corpus.tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (source / name).read_text().replace("<|mask|>", "<|fim_pad|>").replace('"mask_token"', '"fim_pad_token"')
        (source / name).write_text(text)
    for family, flags in (("llama", []), ("qwen3", ["--model", str(source), "--add-mask-token"])):
        flags += ["--input", str(small_corpus.text), "--output", str(folder / family), *SHORT]
        if family == "llama":
            with pytest.MonkeyPatch.context() as monkeypatch:
                run_example(flags, monkeypatch)
        else:
            runs.script(EXAMPLE, flags, timeout=480, environment={"HF_HUB_OFFLINE": "1"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("family", "head"), [("llama", "AutoModelForMaskedLM"), ("qwen3", "AutoModelForCausalLM")])
def test_a_decoder_becomes_an_encoder(family, head, made):
    import transformers

    out = made / family
    rows = runs.metrics(out / "run")
    assert {row["objective"] for row in rows} == {"mlm"} and rows[-1]["loss"] < rows[0]["loss"] - 0.5

    model, report = getattr(transformers, head).from_pretrained(out / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    base, report = transformers.AutoModel.from_pretrained(out / "sentences", output_loading_info=True)
    assert not report["missing_keys"] and report["unexpected_keys"] <= {"lm_head.weight"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "hf")
    words = tokenizer("stan plark <|mask|> stan", return_tensors="pt")
    assert int((words["input_ids"] == tokenizer.mask_token_id).sum()) == 1
    with torch.no_grad():
        states = model(**words, output_hidden_states=True)
        torch.testing.assert_close(base(**words).last_hidden_state, states.hidden_states[-1])
    card = (out / "hf" / "README.md").read_text()
    assert f"Its first weights are those of `source`, a Hugging Face model of type {family}." in card
    assert json.loads((out / "sentences" / "conversion.json").read_text())["attention"] == "bidirectional"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_it_loads_in_sentence_transformers(family, made):
    import sentence_transformers

    model = sentence_transformers.SentenceTransformer(str(made / family / "sentences"), device="cpu")
    assert model.encode(["stan plark", "a stone"]).shape == (2, 64)


def test_bad_input_leaves_no_folder(small_corpus, tmp_path):
    text = ["--input", str(small_corpus.text)]
    for flags, words in (
        (["--input", str(tmp_path / "none.jsonl")], "none.jsonl"),
        ([*text, "--model", str(tmp_path / "none")], "no such folder"),
    ):
        done = runs.script(EXAMPLE, [*flags, "--output", str(tmp_path / "new" / "out")], expect=2)
        assert words in done.stderr.splitlines()[-1] and not list(tmp_path.iterdir())
