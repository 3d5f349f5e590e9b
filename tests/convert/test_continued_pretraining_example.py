"""The example of continued pretraining, from import to export, without network."""

import importlib.util
import sys
from pathlib import Path

import hf_models
import pytest
import runs
import torch

from megaenc import cli
from megaenc.training.command import main as pretrain

EXAMPLE = runs.ROOT / "examples" / "continued_pretraining" / "continue_pretraining.py"
SHORT = [
    "--train-iters",
    "30",
    "--seq-length",
    "64",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--lr",
    "3e-3",
]


def run_example(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example and its commands in this process, to save interpreter starts."""
    spec = importlib.util.spec_from_file_location("continue_pretraining", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)

    def run(words: list[object], text: str) -> None:
        first, *others = map(str, words)
        cli.main(others[1:]) if first == "-m" else pretrain(others)

    monkeypatch.setattr(example, "run_command", run)
    example.main(flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "head"), [("llama", "AutoModelForMaskedLM"), ("qwen3", "AutoModelForCausalLM")]
)
def test_a_decoder_becomes_an_encoder(family, head, small_corpus, monkeypatch):
    """The Llama that the example makes, and a Qwen3 whose tokenizer has no mask token."""
    import sentence_transformers
    import transformers

    flags = ["--input", str(small_corpus.text), "--output", "out", *SHORT]
    if family == "qwen3":
        source = hf_models.write(hf_models.build("qwen3"), "source", small_corpus.tokenizer)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            text = (
                (source / name)
                .read_text()
                .replace("<|mask|>", "<|fim_pad|>")
                .replace('"mask_token"', '"fim_pad_token"')
            )
            (source / name).write_text(text)
        flags += ["--model", str(source), "--add-mask-token"]
    run_example(flags, monkeypatch)

    out = Path("out")
    rows = runs.metrics(out / "run")
    assert {row["objective"] for row in rows} == {"mlm"} and rows[-1]["loss"] < rows[0][
        "loss"
    ] - 0.5
    model = getattr(transformers, head).from_pretrained(out / "hf")
    words = transformers.AutoTokenizer.from_pretrained(out / "hf")(
        "stan plark <|mask|> stan", return_tensors="pt"
    )
    with torch.no_grad():
        states = model(**words, output_hidden_states=True).hidden_states[-1]
    assert (out / "sentences" / "modules.json").exists()
    embedder = sentence_transformers.SentenceTransformer(str(out / "sentences"), device="cpu")
    vector = embedder.encode("stan plark <|mask|> stan", convert_to_tensor=True)
    torch.testing.assert_close(vector, states[0].mean(dim=0), rtol=0, atol=1e-5)
    card = (out / "hf" / "README.md").read_text()
    assert (
        f"Its first weights are those of `source`, a Hugging Face model of type {family}." in card
    )
