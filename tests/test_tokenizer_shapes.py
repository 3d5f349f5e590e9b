"""Every command that takes a tokenizer, with tokenizers of ten released families: what training saw is what clients give."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import tokenizer_shapes
import torch

from megaenc.data.indexed.corpus import Corpus
from megaenc.errors import InputError

# Around one text and around a pair, as the tokens themselves; `A` and `B` are the texts.
TEMPLATES = {
    "bert": ("[CLS] A [SEP]", "[CLS] A [SEP] B [SEP]"),
    "modernbert": ("[CLS] A [SEP]", "[CLS] A [SEP] B [SEP]"),
    "roberta": ("<s> A </s>", "<s> A </s> </s> B </s>"),
    "xlm-r": ("<s> A </s>", "<s> A </s> </s> B </s>"),
    "llama2": ("<s> A", "<s> A <s> B"),
    "llama3": ("<|begin_of_text|> A", "<|begin_of_text|> A <|begin_of_text|> B"),
    "gemma": ("<bos> A", "<bos> A <bos> B"),
    "qwen": ("A <|endoftext|>", "A <|endoftext|> B <|endoftext|>"),  # it adds nothing itself
    "t5": ("A </s>", "A </s> B </s>"),
    "deberta": ("[CLS] A [SEP]", "[CLS] A [SEP] B [SEP]"),
}
MODEL = ["--num-layers", 1, "--hidden-size", 32, "--ffn-hidden-size", 48, "--num-attention-heads", 2, "--num-query-groups", 2]
RUN = [*MODEL, "--seq-length", 64, "--micro-batch-size", 2, "--global-batch-size", 4, "--train-iters", 10, "--split", "90,10,0"]
RUN += ["--objective-schedule", "mlm(mask=0.3)", "--lr", "1e-3", "--lr-warmup-iters", 2, "--eval-interval", 0]
FINETUNE = ["--learning-rate", "1e-3", "--max-steps", 3, "--batch-size", 4, "--max-length", 24, "--precision", "fp32"]


def command(main, *words) -> None:
    """Call the `main` of a command."""
    main([str(word) for word in words])


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=tokenizer_shapes.SHAPES)
def made(request, shared_folder) -> SimpleNamespace:
    """A corpus with the tokenizer's template, a run of ten steps on it, and its export."""
    from megaenc.convert.command import main as convert
    from megaenc.data.preprocess.command import main as preprocess

    name = request.param

    def make(folder: Path) -> None:
        tokenizer = tokenizer_shapes.save(tokenizer_shapes.with_mask(tokenizer_shapes.SHAPES[name]()), folder / "tokenizer")
        text = runs.write_text(folder / "text.jsonl", 40)
        command(preprocess, "--input", text, "--output-prefix", folder / "corpus", "--tokenizer", tokenizer,
                "--special-tokens", "template", "--workers", 1)  # fmt: skip
        data = ["--data-path", folder / "corpus_text_document", "--tokenizer", tokenizer]
        runs.script(runs.PRETRAIN, [str(word) for word in (*data, *RUN, "--save", folder / "run")])
        command(convert, "to-hf", "--load", folder / "run", "--output", folder / "hf")

    folder = shared_folder(f"shape-{name}", make)
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    return SimpleNamespace(
        name=name,
        texts=texts,
        tokenizer=folder / "tokenizer",
        corpus=str(folder / "corpus_text_document"),
        run=folder / "run",
        hf=folder / "hf",
    )


@pytest.fixture
def labelled(tmp_path, made) -> Path:
    """Twelve texts of two classes, a third of them empty."""
    rows = [{"text": "" if number % 3 == 2 else made.texts[number], "label": number % 2} for number in range(12)]
    for split in ("train", "valid", "test"):
        write_lines(tmp_path / "labelled" / f"{split}.jsonl", rows)
    return tmp_path / "labelled"


@pytest.fixture
def pairs(tmp_path, made) -> Path:
    rows = [{"text": made.texts[n], "text_pair": made.texts[(n + n % 2) % 12], "label": n % 2} for n in range(12)]
    for split in ("train", "valid", "test"):
        write_lines(tmp_path / "pairs" / f"{split}.jsonl", rows)
    return tmp_path / "pairs"


def load(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def surround(tokenizer, template: str, *texts: str) -> list[int]:
    """The ids of texts in a template."""
    ids = dict(zip("AB", (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts), strict=False))
    parts = [ids[word] if word in ids else [tokenizer.convert_tokens_to_ids(word)] for word in template.split()]
    return [token for part in parts for token in part]


def assert_trains(model, tokenizer, texts: list[str]) -> None:
    """A step of AdamW on padded texts, one of them empty, leaves all weights finite."""
    inputs = tokenizer([*texts, ""], padding=True, truncation=True, max_length=24, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    output = model(**inputs)
    (output.logits if "logits" in output else output.last_hidden_state).float().square().mean().backward()
    optimizer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.slow
def test_a_document_of_the_corpus_is_a_text_in_the_export(made):
    single, pair = TEMPLATES[made.name]
    tokenizer, corpus = load(made.hf), Corpus.open(made.corpus)
    assert len(corpus) == len(made.texts)
    for number, text in enumerate(made.texts):
        document = corpus.tokens(number, 0, int(corpus.document_lengths[number])).tolist()
        assert tokenizer(text)["input_ids"] == document == surround(tokenizer, single, text)
    assert tokenizer(*made.texts[:2])["input_ids"] == surround(tokenizer, pair, *made.texts[:2])
    assert len(tokenizer("")["input_ids"]) == len(single.split()) - 1 > 0


@pytest.mark.slow
def test_an_empty_text_harms_no_client(made):
    from transformers import AutoModel, AutoModelForMaskedLM, pipeline

    tokenizer = load(made.hf)
    assert_trains(AutoModelForMaskedLM.from_pretrained(made.hf), tokenizer, made.texts[:2])
    features = pipeline("feature-extraction", model=AutoModel.from_pretrained(made.hf), tokenizer=tokenizer)
    assert np.isfinite(np.array(features("")[0])).all()


@pytest.mark.slow
def test_the_other_commands_take_the_tokenizer(made, tmp_path, capsys):
    from megaenc.convert.command import main as convert
    from megaenc.data.indexed.verify import main as verify
    from megaenc.finetune.fill_mask import main as fill_mask
    from megaenc.objectives.inspection.inspect import main as inspect
    from megaenc.objectives.units.collocations import main as collocations

    command(verify, made.corpus, "--tokenizer", made.tokenizer)
    command(inspect, made.corpus, "--tokenizer", made.tokenizer, "--seq-length", 64)
    command(collocations, "--data-path", made.corpus, "--tokenizer", made.tokenizer, "--output", tmp_path / "pmi.npz",
            "--min-count", 3)  # fmt: skip
    command(convert, "from-hf", "--input", made.hf, "--output", tmp_path / "core")
    command(fill_mask, "--model", made.hf, "--input", made.run.parent / "text.jsonl", "--sentences", 0, "--tokens", 2000)
    assert "in windows of at most 64 tokens" in capsys.readouterr().out
    # A teacher's tokenizer may add other special tokens than the run's.
    teacher = ["--objective-schedule", f"distill(teacher={made.hf})", "--train-iters", 2, "--lr-warmup-iters", 1]
    data = ["--data-path", made.corpus, "--tokenizer", made.tokenizer, *RUN, *teacher]
    runs.script(runs.PRETRAIN, [str(word) for word in data])
    # The corpus is that of the imported model too, whose tokenizer differs at most in its template.
    imported = ["--config", tmp_path / "core" / "config.yaml", "--init-from", tmp_path / "core", "--data-path", made.corpus]
    again = [
        *imported,
        "--seq-length",
        64,
        "--train-iters",
        1,
        "--micro-batch-size",
        2,
        "--global-batch-size",
        4,
        "--lr-warmup-iters",
        0,
    ]
    runs.script(runs.PRETRAIN, [str(word) for word in (*again, "--split", "90,10,0", "--eval-interval", 0)])


@pytest.mark.slow
def test_a_kept_classifier_gives_clients_what_predict_gives(made, labelled, pairs, tmp_path):
    from transformers import AutoModelForSequenceClassification, pipeline

    from megaenc.finetune.command import run_main
    from megaenc.finetune.predict import predict_main

    single, pair = TEMPLATES[made.name]
    for data in (labelled, pairs):
        kept = tmp_path / f"kept-{data.name}"
        command(run_main, "--model", made.hf, "--dataset", data, "--output", tmp_path / "out", *FINETUNE, "--save-model", kept)
        output = tmp_path / f"found-{data.name}.jsonl"
        command(predict_main, "--model", kept, "--input", data / "test.jsonl", "--output", output)
        found = [json.loads(line) for line in output.read_text().splitlines()]
        rows = [json.loads(line) for line in (data / "test.jsonl").read_text().splitlines()]
        classify = pipeline("text-classification", str(kept))
        texts = [{name: row[name] for name in ("text", "text_pair") if name in row} for row in rows]
        answers = [classify([text], truncation=True)[0] for text in texts]
        assert [answer["label"] for answer in answers] == [one["label"] for one in found]
        scores = [answer["score"] for answer in answers]
        np.testing.assert_allclose(scores, [one["score"] for one in found], atol=2e-5)
        tokenizer = load(kept)
        assert tokenizer("stan plark")["input_ids"] == surround(tokenizer, single, "stan plark")
        assert tokenizer("stan", "plark")["input_ids"] == surround(tokenizer, pair, "stan", "plark")
        cut = tokenizer(made.texts[0] * 9, truncation=True)["input_ids"]
        assert (len(cut) == 24 and tokenizer.decode(cut[-1:]) == tokenizer.decode(tokenizer("stan")["input_ids"][-1:])) or (
            single.endswith("A")
        )
        assert_trains(AutoModelForSequenceClassification.from_pretrained(kept), tokenizer, made.texts[:3])


@pytest.mark.slow
def test_an_embedder_trains_with_the_same_tokens(made, tmp_path):
    from sentence_transformers import SentenceTransformer

    from megaenc.embed.command import eval_main
    from megaenc.embed.train_command import train_main

    rows = [{"query": made.texts[n][:20], "document": made.texts[n]} for n in range(8)]
    data = write_lines(tmp_path / "pairs.jsonl", rows)
    settings = ["--batch-size", 4, "--max-steps", 2, "--max-length", 24, "--precision", "fp32"]
    command(train_main, "--model", made.hf, "--data", data, "--output", tmp_path / "embedder", *settings)
    model = SentenceTransformer(str(tmp_path / "embedder"))
    assert np.isfinite(model.encode(["", "stan plark"])).all()
    tokenizer = load(tmp_path / "embedder")
    assert tokenizer("stan plark")["input_ids"] == surround(tokenizer, TEMPLATES[made.name][0], "stan plark")
    beir = tmp_path / "beir"
    write_lines(beir / "corpus.jsonl", [{"_id": f"d{n}", "title": "", "text": text} for n, text in enumerate(made.texts[:6])])
    write_lines(beir / "queries.jsonl", [{"_id": f"q{n}", "text": made.texts[n][:15]} for n in range(3)])
    (beir / "qrels").mkdir()
    judged = "".join(f"q{n}\td{n}\t1\n" for n in range(3))
    (beir / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    command(eval_main, "--model", tmp_path / "embedder", made.hf, "--data", beir, "--output", tmp_path / "scores.json",
            "--precision", "fp32")  # fmt: skip
    assert (tmp_path / "scores.json").exists()


@pytest.mark.slow
def test_corpora_of_different_modes_are_refused_in_one_line(made, tmp_path):
    from megaenc.data.preprocess.command import main as preprocess
    from megaenc.training.config import parse_config
    from megaenc.training.planning import build_plan

    command(preprocess, "--input", made.run.parent / "text.jsonl", "--output-prefix", tmp_path / "plain",
            "--tokenizer", made.tokenizer, "--workers", 1)  # fmt: skip
    data = ["--data-path", made.corpus, tmp_path / "plain_text_document", "--tokenizer", made.tokenizer]
    with pytest.raises(InputError, match="expected one mode for all corpora of a run") as error:
        build_plan(parse_config([str(word) for word in (*data, *RUN)], "test"))
    assert "--special-tokens none" in str(error.value) and "\n" not in str(error.value)
