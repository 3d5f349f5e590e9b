"""Every command that takes a tokenizer, with tokenizers of ten released families."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import tokenizer_shapes
from small_data import write_file

from megaenc.data.indexed.corpus import Corpus

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
MODEL = [
    "--num-layers",
    1,
    "--hidden-size",
    32,
    "--ffn-hidden-size",
    48,
    "--num-attention-heads",
    2,
    "--num-query-groups",
    2,
]
RUN = [
    *MODEL,
    "--seq-length",
    64,
    "--micro-batch-size",
    2,
    "--global-batch-size",
    4,
    "--train-iters",
    10,
    "--split",
    "90,10,0",
]
RUN += [
    "--objective-schedule",
    "mlm(mask=0.3)",
    "--lr",
    "1e-3",
    "--lr-warmup-iters",
    2,
    "--eval-interval",
    0,
]


# One of each way: tokens around a text, one before it, none, one after it.
FEW = pytest.mark.parametrize("made", ["bert", "llama2", "qwen", "t5"], indirect=True)


def command(main, *words) -> None:
    main([str(word) for word in words])


@pytest.fixture(scope="module", params=tokenizer_shapes.SHAPES)
def made(request, shared_directory) -> SimpleNamespace:
    """Make a corpus with the tokenizer's template, a run of ten steps and its export."""
    from megaenc.convert.command import main as convert
    from megaenc.data.preprocess.command import main as preprocess

    name = request.param

    def make(directory: Path) -> None:
        tokenizer = tokenizer_shapes.save(
            tokenizer_shapes.with_mask(tokenizer_shapes.SHAPES[name]()), directory / "tokenizer"
        )
        text = runs.write_text(directory / "text.jsonl", 40)
        files = ["--input", text, "--output-prefix", directory / "corpus", "--tokenizer", tokenizer]
        command(preprocess, *files, "--special-tokens", "template", "--workers", 1)
        data = ["--data-path", directory / "corpus_text_document", "--tokenizer", tokenizer]
        runs.script(
            runs.PRETRAIN, [str(word) for word in (*data, *RUN, "--save", directory / "run")]
        )
        command(convert, "to-hf", "--load", directory / "run", "--output", directory / "hf")

    directory = shared_directory(f"shape-{name}", make)
    texts = [
        json.loads(line)["text"] for line in (directory / "text.jsonl").read_text().splitlines()
    ]
    return SimpleNamespace(
        name=name,
        texts=texts,
        text=directory / "text.jsonl",
        tokenizer=directory / "tokenizer",
        corpus=str(directory / "corpus_text_document"),
        hf=directory / "hf",
    )


def load(directory: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def surround(tokenizer, template: str, *texts: str) -> list[int]:
    """Return the ids of texts in a template."""
    ids = dict(
        zip(
            "AB",
            (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts),
            strict=False,
        )
    )
    parts = [
        ids[word] if word in ids else [tokenizer.convert_tokens_to_ids(word)]
        for word in template.split()
    ]
    return [token for part in parts for token in part]


@pytest.mark.slow
def test_a_document_of_the_corpus_is_a_text_in_the_export(made):
    from transformers import AutoModel, AutoModelForMaskedLM, pipeline

    single, pair = TEMPLATES[made.name]
    tokenizer = load(made.hf)
    corpus = Corpus.open(made.corpus)
    assert len(corpus) == len(made.texts)
    for number, text in enumerate(made.texts):
        document = corpus.tokens(number, 0, int(corpus.document_lengths[number])).tolist()
        assert tokenizer(text)["input_ids"] == document == surround(tokenizer, single, text)
    assert tokenizer(*made.texts[:2])["input_ids"] == surround(tokenizer, pair, *made.texts[:2])
    # An empty text harms no client.
    assert len(tokenizer("")["input_ids"]) == len(single.split()) - 1 > 0
    model = AutoModelForMaskedLM.from_pretrained(made.hf)
    inputs = tokenizer(
        [*made.texts[:2], ""], padding=True, truncation=True, max_length=24, return_tensors="pt"
    )
    model(**inputs).logits.square().mean().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    features = pipeline(
        "feature-extraction", model=AutoModel.from_pretrained(made.hf), tokenizer=tokenizer
    )
    assert np.isfinite(np.array(features("")[0])).all()


@pytest.mark.slow
@FEW
def test_the_other_commands_take_the_tokenizer(made, tmp_path):
    from megaenc.convert.command import main as convert
    from megaenc.data.indexed.verify import main as verify
    from megaenc.embed.train_command import train_main
    from megaenc.finetune.fill_mask import main as fill_mask
    from megaenc.objectives.inspection.inspect import main as inspect
    from megaenc.objectives.units.collocations import main as collocations

    data = ["--data-path", made.corpus, "--tokenizer", made.tokenizer]
    command(verify, made.corpus, *data[2:])
    command(inspect, made.corpus, *data[2:], "--seq-length", 64)
    command(collocations, *data, "--output", tmp_path / "pmi.npz", "--min-count", 3)
    command(convert, "from-hf", "--input", made.hf, "--output", tmp_path / "core")
    command(fill_mask, "--model", made.hf, "--input", made.text, "--sentences", 0, "--tokens", 2000)
    pairs = [{"query": text[:20], "document": text} for text in made.texts[:8]]
    write_file(tmp_path / "pairs.jsonl", pairs)
    settings = ["--batch-size", 4, "--max-steps", 2, "--max-length", 24, "--precision", "fp32"]
    command(
        train_main,
        "--model",
        made.hf,
        "--data",
        tmp_path / "pairs.jsonl",
        "--output",
        tmp_path / "embedder",
        *settings,
    )
    embedder = load(tmp_path / "embedder")
    assert embedder("stan plark")["input_ids"] == surround(
        embedder, TEMPLATES[made.name][0], "stan plark"
    )
    # A teacher's tokenizer may add other special tokens than the run's.
    taught = [
        *data,
        *RUN,
        "--objective-schedule",
        f"distill(teacher={made.hf})",
        "--train-iters",
        2,
        "--lr-warmup-iters",
        1,
    ]
    # The corpus is that of the imported model too, whose tokenizer differs at most in its template.
    core = tmp_path / "core"
    imported = [
        "--config",
        core / "config.yaml",
        "--init-from",
        core,
        *data[:2],
        *runs.STANDSTILL,
        "--split",
        "90,10,0",
    ]
    for flags in (taught, imported):
        runs.script(runs.PRETRAIN, [str(word) for word in flags])
