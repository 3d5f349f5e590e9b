"""Kept models have the same scores in a fresh process with only transformers."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import reload_kept
import runs
import tokenizer_shapes
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, f1_score
from small_data import read_json, write_file, write_splits
from small_models import save_model
from tokenizers import Tokenizer
from tokenizers import models as models_of_tokens
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, pipeline

from megaenc import flags
from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_special_tokens
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.finetune.command import run_main
from megaenc.finetune.datasets.registry import find_dataset
from megaenc.finetune.grid.command import GridConfig, grid_main, plan_grid
from megaenc.finetune.kept_model import needs_spaced_words
from megaenc.finetune.model import load
from megaenc.finetune.predict import predict_main
from megaenc.finetune.results.files import job_directory
from megaenc.finetune.train import train_and_evaluate

# The activation of a CrossEncoder that is fine-tuned further.
LOGITS = {"activation_fn": "torch.nn.modules.linear.Identity"}
MODELS = {
    "eurobert": (
        AutoModelForMaskedLM,
        {"num_key_value_heads": 2, "mask_token_id": 1, "sentence_transformers": LOGITS},
    ),
    "modernbert": (AutoModelForMaskedLM, {"classifier_pooling": "mean", "sep_token_id": None}),
    "bert": (AutoModelForMaskedLM, {}),
    "llama": (AutoModelForCausalLM, {"num_key_value_heads": 2}),
    "opt": (AutoModelForCausalLM, {"word_embed_proj_dim": 32, "ffn_dim": 64}),
}
# name: model, data set, flags
CASES = {
    "sc": ("eurobert", "sc", []),
    "tc": ("eurobert", "tc", []),
    "qa": ("eurobert", "qa", []),
    "ir": ("eurobert", "ir", []),
    "last token": ("eurobert", "ir", ["--pooling", "lasttoken"]),
    "regression": ("eurobert", "regression", []),
    "native regression": ("modernbert", "regression", ["--head", "native"]),
    "multi_label": ("eurobert", "multi_label", ["--threshold", "auto"]),
    "reranking": ("eurobert", "reranking", []),
    "native reranking": ("modernbert", "reranking", ["--head", "native"]),
    "bf16": ("eurobert", "tc", ["--precision", "bf16"]),
    "native sc": ("modernbert", "sc", ["--head", "native"]),
    "native qa": ("modernbert", "qa", ["--head", "native"]),
    "modernbert": ("modernbert", "ir", []),
    "bert": ("bert", "qa", ["--head", "native"]),
    "llama": ("llama", "tc", []),
    "native llama": ("llama", "sc", ["--head", "native"]),
}
LEARNING = [
    "--max-steps",
    40,
    "--epochs",
    20,
    "--batch-size",
    8,
    "--learning-rate",
    "5e-3",
    "--precision",
    "fp32",
]


@pytest.fixture(scope="module")
def models(small_corpus, tmp_path_factory):
    """The path of a random model of two layers, for each kind in MODELS."""
    root = tmp_path_factory.mktemp("models")
    for kind, (auto, values) in MODELS.items():
        save_model(root / kind, kind, load_tokenizer(small_corpus.tokenizer), auto, **values)
    return root


def train(model, dataset, output, *given):
    run_main(
        [
            str(flag)
            for flag in (
                "--model",
                model,
                "--dataset",
                dataset,
                "--output",
                output,
                *LEARNING,
                *given,
            )
        ]
    )
    [path] = Path(output).rglob("results.json")
    return read_json(path)


def reload(kept):
    """Score kept models, (directory, family, data) each, without this package."""
    triples = json.dumps([[str(part) for part in case] for case in kept])
    command = [
        "env",
        "-u",
        "PYTHONPATH",
        sys.executable,
        "-P",
        Path(__file__).with_name("reload_kept.py"),
        triples,
    ]
    done = runs.run(list(map(str, command)), timeout=400, cwd=Path("/"))
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def kept(models, data, tmp_path_factory):
    """Return the model's directory, the run's result and reloaded answers, by case."""
    root = tmp_path_factory.mktemp("kept")
    found = {}
    for case, (name, family, given) in CASES.items():
        result = train(
            models / name,
            data / family,
            root / case,
            *given,
            "--save-model",
            root / "models" / case,
        )
        found[case] = (root / "models" / case, result)
    answers = reload(
        (directory, CASES[case][1], data / CASES[case][1]) for case, (directory, _) in found.items()
    )
    return {
        case: (directory, result, *answers[str(directory)])
        for case, (directory, result) in found.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_a_reloaded_model_has_the_printed_score(case, kept):
    directory, result, reloaded, answers = kept[case]
    assert f"| test | score | {reloaded} |" in (directory / "README.md").read_text()
    if case != "bf16":
        assert reloaded == f"{100 * result['test']['score']:.2f}"
    assert len(answers) == 3 or answers == [3, 32]


def test_the_models_have_learned_something(kept):
    """Otherwise equal scores would prove little."""
    scores = {float(reloaded) for _, _, reloaded, _ in kept.values()}
    assert len(scores) > 5 and max(scores) > 90


def test_pipelines_answer_with_the_names_of_labels(kept):
    assert {answer["label"] for answer in kept["sc"][3]} <= {"bad", "good"}
    assert {answer["label"] for answer in kept["regression"][3]} == {"score"}
    assert {entity["entity"] for entities in kept["tc"][3] for entity in entities} == {"B-X"}
    assert {one["entity"] for tokens in kept["native qa"][3] for one in tokens} == {
        "OUTSIDE",
        "INSIDE",
    }


def test_keeping_a_model_changes_no_result(kept, models, data, tmp_path):
    assert (
        train(models / "eurobert", data / "tc", tmp_path, "--precision", "bf16") == kept["bf16"][1]
    )


def test_a_finished_run_is_repeated_for_its_model_alone(models, data, tmp_path, refusal, capfd):
    output = tmp_path / "out"
    argv = ["--model", models / "eurobert", "--dataset", data / "sc", "--output", output, *LEARNING]
    before = train(models / "eurobert", data / "sc", output)
    [path] = output.rglob("results.json")
    changed = path.stat().st_mtime_ns
    assert (
        train(models / "eurobert", data / "sc", output) == before
        and path.stat().st_mtime_ns == changed
    )
    # As results of versions that had no such flags.
    new = {
        "head",
        "special_tokens",
        "pooling",
        "eval_interval",
        "best_checkpoint",
        "early_stopping",
    }
    assert not new & before["protocol"].keys()
    assert (before["protocol"]["add_bos"], before["protocol"]["add_eos"]) == (False, True)
    assert "field `protocol.head`: found 'linear', expected 'native'" in refusal(
        run_main, [*argv, "--head", "native"]
    )
    grid = [
        "--model",
        models / "eurobert",
        "--datasets",
        data / "sc",
        "--output",
        output,
        "--keep",
        "best",
    ]
    capfd.readouterr()
    grid_main(
        [
            str(flag)
            for flag in (
                *grid,
                "--learning-rates",
                "5e-3",
                "--seeds",
                1,
                *LEARNING[:6],
                *LEARNING[8:],
            )
        ]
    )
    assert (
        "--keep best: 1 finished run without a model; choose another --output"
        in capfd.readouterr().out
    )
    assert (
        train(models / "eurobert", data / "sc", output, "--save-model", tmp_path / "kept") == before
    )
    assert read_json(tmp_path / "kept" / "finetuning.json")["trained"] == before["trained"]


def test_the_card_names_rate_seed_and_digests(kept):
    directory = kept["ir"][0]
    card = (directory / "README.md").read_text()
    details = read_json(directory / "finetuning.json")
    assert "| learning rate | `5e-03` |" in card and "| seed | `0` |" in card
    assert len(details["fingerprints"]) == 4 and all(
        digest in card for digest in details["fingerprints"].values()
    )


NEW = ["--save-model", "kept"]
UNKEPT = [
    (
        "modernbert",
        "sc",
        NEW,
        "--save-model: ModernBertForSequenceClassification has no linear head .* --head native",
    ),
    (
        "llama",
        "sc",
        NEW,
        "--save-model: LlamaForSequenceClassification has no linear head .* --head native",
    ),
    (
        "eurobert",
        "ir",
        ["--head", "native"],
        "--head native: found ir, and retrieval has no head; expected --head linear",
    ),
    (
        "opt",
        "tc",
        ["--head", "native"],
        "--head native: transformers has no class of opt for TC; expected --head linear",
    ),
    (
        "eurobert",
        "sc",
        [*NEW, "--pooling", "lasttoken"],
        "EuroBertForSequenceClassification has no --pooling lasttoken",
    ),
    (
        "eurobert",
        "sc",
        ["--head", "native", "--pooling", "lasttoken"],
        "--pooling lasttoken: found with --head native",
    ),
    (
        "eurobert",
        "tc",
        ["--pooling", "lasttoken"],
        "--pooling lasttoken: found tc, and TC reads the states",
    ),
    (
        "eurobert",
        "sc",
        ["--threshold", "auto"],
        "--threshold auto: found sc of the task SC, expected multi_label",
    ),
]


@pytest.mark.parametrize(("name", "family", "given", "said"), UNKEPT)
def test_what_cannot_be_kept_is_said_before_training(
    name, family, given, said, models, data, tmp_path, refusal, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    argv = [
        "--model",
        models / name,
        "--dataset",
        data / family,
        "--output",
        "out",
        *LEARNING,
        *given,
    ]
    assert re.search(said, refusal(run_main, [*argv, "--max-steps", 10**6, "--epochs", 1e9]))
    assert not any(tmp_path.iterdir())


def test_a_directory_with_content_is_not_overwritten(models, data, tmp_path, refusal):
    write_file(tmp_path / "kept" / "mine", "text")
    argv = ["--model", models / "eurobert", "--dataset", data / "sc", "--output", tmp_path / "out"]
    said = refusal(run_main, [*argv, "--save-model", tmp_path / "kept"])
    name = tmp_path / "kept"
    advice = "remove it or choose another name"
    assert said == f"error: --save-model {name}: exists already; {advice}"
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "mine"]


def test_a_native_head_is_drawn_from_the_seed_and_new(models):
    _, head = load.load_with_native_head(
        str(models / "modernbert"),
        "bidirectional",
        "SC",
        ("a", "b"),
        padding=0,
        device="cpu",
        dtype=torch.float32,
    )
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        head.reset_parameters()
        states.append(torch.cat([weight.flatten() for weight in head.parameters()]).clone())
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


@pytest.mark.parametrize("keep", ["best", "all"])
def test_a_grid_keeps_models(keep, models, data, tmp_path):
    """A grid keeps the best model so far, which the first is not, or all."""
    argv = [
        "--model",
        models / "eurobert",
        "--datasets",
        data / "tc",
        "--learning-rates",
        "5e-3",
        "1e-5",
        "--seeds",
        2,
    ]
    argv += [
        "--output",
        tmp_path,
        "--keep",
        keep,
        "--max-steps",
        4,
        "--batch-size",
        8,
        "--precision",
        "fp32",
    ]
    settings = flags.parse(
        GridConfig, [str(flag) for flag in argv], prog="grid", description="a grid"
    )
    jobs = plan_grid(settings, find_dataset).pending[::-1]
    for job in jobs:
        assert train_and_evaluate(job)
    results = {path.parent: read_json(path) for path in tmp_path.rglob("results.json")}
    ranks = {
        run: (-one["validation"]["score"], one["learning_rate"], one["seed"])
        for run, one in results.items()
    }
    order = sorted(results, key=ranks.get)
    assert len(order) == 4 and order[0] != job_directory(jobs[0], "tc")
    expected = order if keep == "all" else order[:1]
    assert {path.parents[1] for path in tmp_path.rglob("model/config.json")} == set(expected)
    for run in expected:
        details = read_json(run / "model" / "finetuning.json")
        assert details["trained"] == results[run]["trained"]
        assert details["scores"]["test"]["score"] == results[run]["test"]["score"]


def predict(directory, source, output, *given):
    files = ["--model", directory, "--input", source, "--output", output]
    predict_main([*map(str, files), "--overwrite", *given])
    return read(output)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_predictions_give_the_score_of_the_run(kept, data, tmp_path):
    rows = read(data / "tc" / "test.jsonl")
    found = predict(kept["tc"][0], data / "tc" / "test.jsonl", tmp_path / "found.jsonl")
    scores = [
        f1_score(row["tags"], one["tags"], average="macro")
        for one, row in zip(found, rows, strict=True)
    ]
    assert sum(scores) / len(scores) == pytest.approx(kept["tc"][1]["test"]["score"])
    rows = read(data / "regression" / "test.jsonl")
    found = predict(kept["regression"][0], data / "regression" / "test.jsonl", tmp_path / "found")
    correlation = pearsonr([row["label"] for row in rows], [one["label"] for one in found])
    pearson = kept["regression"][1]["test"]["metrics"]["pearson"]
    assert correlation.statistic == pytest.approx(pearson, abs=1e-5)
    directory, result, _, answers = kept["multi_label"]
    threshold = result["threshold"]
    assert read_json(directory / "finetuning.json")["threshold"] == threshold != 0.5
    assert f'label["score"] >= {threshold}]' in (directory / "README.md").read_text()
    write_file(tmp_path / "rows.jsonl", [{"text": text} for text in reload_kept.SENTENCES])
    found = predict(directory, tmp_path / "rows.jsonl", tmp_path / "found", "--all-scores")
    for one, scores in zip(found, answers, strict=True):
        assert one["scores"] == pytest.approx(
            {score["label"]: score["score"] for score in scores}, abs=1e-5
        )
        above = {score["label"] for score in scores if score["score"] >= threshold}
        assert set(one["labels"]) == above
    rows = [{"query": "stan mill", "document": text} for text in reload_kept.SENTENCES]
    write_file(tmp_path / "rows.csv", rows)
    found = predict(kept["reranking"][0], tmp_path / "rows.csv", tmp_path / "found.jsonl")
    scores = dict(zip(reload_kept.SENTENCES, kept["reranking"][3], strict=True))
    assert [one["rank"] for one in found] == [1, 2, 3]
    assert [one["document"] for one in found] == sorted(scores, key=scores.get, reverse=True)
    for one in found:
        assert one["query"] == "stan mill"
        assert one["score"] == pytest.approx(scores[one["document"]], abs=1e-6)
    found = predict(kept["native qa"][0], data / "qa" / "test.json", tmp_path / "found.jsonl")
    texts = [
        one["context"] for one in read_json(data / "qa" / "test.json")["data"][0]["paragraphs"]
    ]
    right = sum(one["answer"] == text.split()[0] for one, text in zip(found, texts, strict=True))
    assert right / len(texts) == kept["native qa"][1]["test"]["metrics"]["exact_match"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Equal and other pairs of words."""
    rows = []
    for number in range(20):
        first = ("stan", "mill")[number % 2]
        second = ("stan", "mill")[number // 2 % 2]
        rows.append(
            {
                "id": number,
                "text": first,
                "text_pair": second,
                "label": "same" if first == second else "other",
            }
        )
    root = tmp_path_factory.mktemp("pairs")
    write_splits(root, "jsonl", rows)
    return root


def test_pairs_are_joined_as_in_training_whatever_the_format(models, pairs, tmp_path, refusal):
    template = "{text_pair} -- {text}"
    result = train(
        models / "eurobert",
        pairs,
        tmp_path / "out",
        "--pair-template",
        template,
        "--save-model",
        tmp_path / "kept",
    )
    details = read_json(tmp_path / "kept" / "finetuning.json")
    assert details["pair_template"] == template
    rows = read(pairs / "test.jsonl")
    found = predict(tmp_path / "kept", pairs / "test.jsonl", tmp_path / "found.jsonl")
    assert (
        accuracy_score(*([one["label"] for one in some] for some in (rows, found)))
        == result["test"]["score"]
    )
    write_file(
        tmp_path / "joined.jsonl",
        [{"id": row["id"], "text": template.format(**row)} for row in rows],
    )
    assert predict(tmp_path / "kept", tmp_path / "joined.jsonl", tmp_path / "found.jsonl") == found
    write_file(tmp_path / "pairs.parquet", rows)
    assert predict(tmp_path / "kept", tmp_path / "pairs.parquet", tmp_path / "found.jsonl") == found
    del details["pair_template"]  # as of older versions
    write_file(tmp_path / "kept" / "finetuning.json", details)
    said = refusal(
        predict_main, ["--model", tmp_path / "kept", "--input", tmp_path / "pairs.parquet"]
    )
    assert "row 1: field `text_pair`: expected both texts in `text`" in said


@pytest.fixture(scope="module")
def templated(models, tmp_path_factory):
    """Return ModernBERT and EuroBERT whose tokenizer adds a first and a last token."""
    root = tmp_path_factory.mktemp("templated")
    for name in ("modernbert", "eurobert"):
        shutil.copytree(models / name, root / name)
        tokenizer = load_tokenizer(models / name)
        template = SpecialTokens("template", (tokenizer.mask_token_id,), (tokenizer.eos_token_id,))
        set_special_tokens(tokenizer, template).save_pretrained(root / name)
    config = read_json(root / "modernbert" / "config.json")
    write_file(root / "modernbert" / "config.json", config | {"classifier_pooling": "cls"})
    return root


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("modernbert", ["--head", "native"]),
        ("eurobert", ["--pooling", "cls"]),
        ("eurobert", ["--add-eos"]),
    ],
    ids=["native head that reads the first token", "first token", "only an end"],
)
def test_pairs_have_the_tokenizers_own_special_tokens(
    model, given, templated, pairs, tmp_path, refusal
):
    """`predict`, a pipeline and CrossEncoder give the run's score.

    A classifier of the first token reads the template's.
    """
    from sentence_transformers import CrossEncoder

    kept = tmp_path / "kept"
    result = train(templated / model, pairs, tmp_path / "out", *given, "--save-model", kept)
    rows = read(pairs / "test.jsonl")
    found = [one["label"] for one in predict(kept, pairs / "test.jsonl", tmp_path / "found.jsonl")]
    tokenizer = AutoTokenizer.from_pretrained(kept)
    begin = tokenizer.mask_token_id
    end = tokenizer.eos_token_id
    first = tokenizer("stan", add_special_tokens=False)["input_ids"]
    second = tokenizer("mill", add_special_tokens=False)["input_ids"]
    is_ended = "--add-eos" in given
    assert tokenizer("stan", "mill")["input_ids"] == [
        *([] if is_ended else [begin]),
        *first,
        end,
        *second,
        end,
    ]
    classify = pipeline("text-classification", str(kept))
    assert [
        classify({name: row[name] for name in ("text", "text_pair")})["label"] for row in rows
    ] == found
    encoder = CrossEncoder(str(kept))
    scores = encoder.predict([(row["text"], row["text_pair"]) for row in rows])
    assert [encoder.config.id2label[int(score.argmax())] for score in scores] == found
    assert accuracy_score([row["label"] for row in rows], found) == result["test"]["score"]
    if is_ended:
        argv = [
            "--model",
            templated / model,
            "--dataset",
            pairs,
            "--output",
            tmp_path / "out",
            *LEARNING,
        ]
        said = (
            "field `protocol.special_tokens`: found '', expected 'template'; use --no-add-bos "
            "--add-eos, choose another"
        )
        assert said in refusal(run_main, argv)


@pytest.mark.parametrize("name", tokenizer_shapes.SHAPES)
def test_the_words_of_the_card_are_the_tokens_of_the_sentence(name, tmp_path):
    tokenizer = load_tokenizer(
        tokenizer_shapes.save(tokenizer_shapes.SHAPES[name](), tmp_path / name)
    )
    assert needs_spaced_words(tokenizer) == (
        name in ("modernbert", "roberta", "llama3", "gemma", "qwen")
    )


def test_standard_output_has_only_predictions(kept, data, tmp_path, capsys):
    source = data / "sc" / "test.jsonl"
    predict_main(["--model", str(kept["sc"][0]), "--input", str(source)])
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["id"] for row in found] == [row["id"] for row in read(source)]
    assert {tuple(row) for row in found} == {("id", "label", "score")}
    assert printed.err == "predicting  100 %\n"
    write_file(tmp_path / "longer.jsonl", [{"text": "word " * count} for count in (1, 2, 5000)])
    predict_main(["--model", str(kept["sc"][0]), "--input", str(tmp_path / "longer.jsonl")])
    assert re.search(
        r"^1 of 3 texts are longer than \d+ tokens and are cut\n", capsys.readouterr().err
    )


def test_scores_of_all_labels(kept, data, tmp_path, refusal):
    """Those of transformers' pipeline."""
    directory = kept["native sc"][0]
    source = data / "sc" / "test.jsonl"
    predict_main(
        [
            "--model",
            str(directory),
            "--input",
            str(source),
            "--output",
            str(tmp_path / "found.jsonl"),
            "--all-scores",
        ]
    )
    expected = pipeline("text-classification", str(directory), top_k=None)(
        [row["text"] for row in read(source)]
    )
    for row, scores in zip(read(tmp_path / "found.jsonl"), expected, strict=True):
        assert row["scores"] == pytest.approx(
            {one["label"]: one["score"] for one in scores}, abs=2e-6
        )
        assert list(row["scores"]) == ["bad", "good"]
        assert row["score"] == row["scores"][row["label"]] == max(row["scores"].values())
    argv = ["--model", kept["tc"][0], "--input", data / "tc" / "test.jsonl", "--all-scores"]
    assert "--all-scores: found a model of TC, expected one of SC" in refusal(predict_main, argv)


HARMED = {
    "missing": (lambda tensors: tensors.pop("classifier.weight"), "no tensor `classifier.weight`"),
    "NaN": (
        lambda tensors: tensors["classifier.weight"][0].fill_(torch.nan),
        "/model.safetensors: tensor `classifier.weight`: found nan, expected finite weights",
    ),
    "huge": (
        lambda tensors: [tensor.fill_(3e38) for tensor in tensors.values()],
        "computes scores that are NaN or infinite",
    ),
    "integers": (
        lambda tensors: tensors.update(
            {"classifier.bias": tensors["classifier.bias"].to(torch.uint8)}
        ),
        "tensor `classifier.bias`: found dtype U8, expected one of F32, BF16, F16",
    ),
    "foreign": (
        lambda tensors: tensors.update({"decoder.weight": torch.ones(1)}),
        "found a tensor `decoder.weight`, which a EuroBertForSequenceClassification does not have",
    ),
}


@pytest.fixture
def copied(kept, tmp_path):
    """A copy of the kept classifier."""
    return shutil.copytree(kept["sc"][0], tmp_path / "kept")


@pytest.mark.parametrize(("change", "words"), HARMED.values(), ids=HARMED)
def test_weights_that_give_no_scores_are_refused(change, words, copied, data, tmp_path, refusal):
    tensors = load_file(copied / "model.safetensors")
    change(tensors)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    argv = [
        "--model",
        copied,
        "--input",
        data / "sc" / "test.jsonl",
        "--output",
        tmp_path / "found.jsonl",
    ]
    said = refusal(predict_main, argv)
    assert str(copied) in said and words in said and not (tmp_path / "found.jsonl").exists()


def test_a_tokenizer_of_another_model_is_refused(copied, data, refusal):
    values = read_json(copied / "tokenizer.json")
    words = values["model"]["vocab"]
    argv = ["--model", copied, "--input", data / "sc" / "test.jsonl"]
    values["model"]["vocab"] = {
        word: number + 1000 * (number > 1) for word, number in words.items()
    }
    write_file(copied / "tokenizer.json", values)
    assert re.search(
        r"kept: found the token id \d+, expected 0 to 399, those of the model",
        refusal(predict_main, argv),
    )
    Tokenizer(models_of_tokens.WordLevel({"a": 0}, unk_token="[UNK]")).save(
        str(copied / "tokenizer.json")
    )
    said = (
        f"{copied}: its tokenizer fails: WordLevel error: Missing [UNK] token from the vocabulary; "
        "expected"
    )
    assert said in refusal(predict_main, argv)


def test_questions_need_no_answers(kept, tmp_path):
    asked = {"question": "which?", "id": "q"}
    write_file(
        tmp_path / "asked.json",
        {"data": [{"paragraphs": [{"context": "stan mill", "qas": [asked]}]}]},
    )
    write_file(tmp_path / "asked.jsonl", [asked | {"context": "stan mill"}])
    directory = kept["native qa"][0]
    first = predict(directory, tmp_path / "asked.json", tmp_path / "found.jsonl")
    second = predict(directory, tmp_path / "asked.jsonl", tmp_path / "found.jsonl")
    assert first == second and first[0]["id"] == "q"


ODD_FIELDS = [
    (
        "config.json",
        {"classifier_pooling": "x"},
        "config.json: EuroBertForSequenceClassification fails: cannot access",
    ),
    ("config.json", {"pad_token_id": -1}, "found the token id -1, expected 0 to 399"),
    (
        "config.json",
        {"id2label": None},
        "config.json: field `id2label`: no such field, expected names that differ",
    ),
    (
        "config.json",
        {"id2label": {"0": "bad", "2": "good"}},
        "config.json: field `id2label`: found {'0': 'bad', '2': 'good'}",
    ),
    ("config.json", {"id2label": {"0": "bad", "1": "bad"}}, "config.json: field `id2label`: found"),
    (
        "config.json",
        {"id2label": {"0": "a", "1": "b", "2": "c"}},
        "model.safetensors: tensor `classifier.",
    ),
    (
        "config.json",
        {"architectures": ["EuroBertForMaskedLM"]},
        "expected ['EuroBertForSequenceClassification']",
    ),
    (
        "finetuning.json",
        {"family": ["SC"]},
        "finetuning.json: field `family`: found ['SC'], expected one of SC, TC, QA, IR",
    ),
    ("finetuning.json", {"family": "TC"}, "finetuning.json describes a model of TC"),
    ("finetuning.json", {"protocol": None}, "finetuning.json: field `protocol`: found None"),
    (
        "finetuning.json",
        {"protocol": {"max_lenght": 8}},
        "protocol: unknown field `max_lenght`; did you mean `max_length`?",
    ),
    (
        "finetuning.json",
        {"protocol": {"max_length": "8"}},
        "protocol: field `max_length`: found '8', expected a int",
    ),
    (
        "finetuning.json",
        {"protocol": {"max_length": 1}},
        "field `max_length`: found 1, expected 2 to 64 tokens",
    ),
    (
        "finetuning.json",
        {"protocol": {"max_length": 65}},
        "expected 2 to 64 tokens, those that the model reads",
    ),
    (
        "finetuning.json",
        {"pair_template": 5},
        "finetuning.json: field `pair_template`: found 5, expected text",
    ),
    (
        "finetuning.json",
        {"threshold": 1.5},
        "field `threshold`: found 1.5, expected a number from 0.0 to 1.0",
    ),
    ("finetuning.json", {"pair_template": "{text"}, "field `pair_template`: '{text': expected '}'"),
]


@pytest.mark.parametrize(("file", "changes", "words"), ODD_FIELDS)
def test_odd_fields_of_a_kept_model_are_named(file, changes, words, copied, tmp_path, refusal):
    values = read_json(copied / file) | changes
    write_file(copied / file, {name: value for name, value in values.items() if value is not None})
    write_file(tmp_path / "rows.jsonl", [{"text": "stan", "tokens": ["stan"]}])
    message = refusal(predict_main, ["--model", copied, "--input", tmp_path / "rows.jsonl"])
    assert str(copied) in message and words in message


@pytest.mark.parametrize(("row", "said"), [
    ('{"id": 0.5, "text": "stan"}',
     "rows.jsonl:2: key `id`: found 0.5, expected text or an integer"),
    ('{"id": true, "text": "stan"}',
     "rows.jsonl:2: key `id`: found true, expected text or an integer"),
    ('{"words": 1}', "rows.jsonl:2: no key `text`; found `words`"),
])  # fmt: skip
def test_rows_that_cannot_be_predicted_are_named(row, said, kept, tmp_path, refusal):
    write_file(tmp_path / "rows.jsonl", f'{{"text": "stan"}}\n{row}\n')
    argv = [
        "--model",
        kept["sc"][0],
        "--input",
        tmp_path / "rows.jsonl",
        "--output",
        tmp_path / "out" / "found.jsonl",
    ]
    assert said in refusal(predict_main, argv)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("case", "fields"), [
    ("sc", '"text": "stan \\ud800"'),
    ("tc", '"tokens": ["stan", "\\udfff"]'),
    ("native qa", '"question": "\\ud800", "context": "\\udc00"'),
])  # fmt: skip
def test_lone_surrogates_are_written_as_in_the_input(case, fields, kept, tmp_path):
    """UTF-8 has none, but JSON's escapes do."""
    write_file(
        tmp_path / "rows.jsonl", f'{{"id": "\\ud800é", {fields}}}\n{{"id": null, {fields}}}\n'
    )
    found = predict(kept[case][0], tmp_path / "rows.jsonl", tmp_path / "found.jsonl")
    assert [row["id"] for row in found] == ["\ud800é", None]
