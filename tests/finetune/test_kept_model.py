"""Fine-tuned models that are kept: the same scores in a fresh process that has only transformers."""

import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import runs
import test_train
import tokenizer_shapes
import torch
from safetensors.torch import load_file, save_file
from sklearn.metrics import f1_score
from tokenizers import Tokenizer
from tokenizers import models as models_of_tokens
from transformers import (
    BertConfig,
    BertForMaskedLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    pipeline,
)

from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_special_tokens
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.finetune.command import run_main
from megaenc.finetune.grid.command import grid_main
from megaenc.finetune.kept_model import needs_spaced_words
from megaenc.finetune.model import load
from megaenc.finetune.model.task_class import NativeHead
from megaenc.finetune.predict import predict_main

SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=400)
TOKENS = dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=0)
MODELS = {
    "eurobert": (EuroBertForMaskedLM, EuroBertConfig, dict(num_key_value_heads=2, mask_token_id=1)),
    "modernbert": (
        ModernBertForMaskedLM,
        ModernBertConfig,
        dict(classifier_pooling="mean", sep_token_id=None),
    ),
    "bert": (BertForMaskedLM, BertConfig, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=2)),
}
CASES = {
    f"{name}-{head}-{family}-{precision}": (name, head, family, precision)
    for name, head, families, precision in [
        ("eurobert", "linear", "sc tc qa ir", "fp32"),
        ("eurobert", "linear", "sc tc qa ir", "bf16"),
        ("eurobert", "native", "sc tc", "fp32"),
        ("modernbert", "native", "sc tc qa", "fp32"),
        ("modernbert", "native", "sc", "bf16"),
        ("modernbert", "linear", "ir", "fp32"),
        ("bert", "linear", "tc", "fp32"),
        ("bert", "native", "sc qa", "fp32"),
        ("llama", "native", "sc", "fp32"),
        ("llama", "linear", "tc ir", "fp32"),
    ]
    for family in families.split()
}
LEARNING = ["--max-steps", 40, "--epochs", 20, "--batch-size", 8, "--learning-rate", "5e-3"]
data = test_train.data


@pytest.fixture(scope="module")
def models(small_corpus, tmp_path_factory):
    """A folder with a model of two layers with random weights of each class in MODELS."""
    root = tmp_path_factory.mktemp("models")
    for name, (kind, config, others) in MODELS.items():
        torch.manual_seed(0)
        kind(config(**SHAPE, **TOKENS, **others)).save_pretrained(root / name)
        load_tokenizer(small_corpus.tokenizer).save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def labelled(data):
    """The data sets, with names for the two classes."""
    for path in (data / "sc").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        test_train.write(path, (row | {"label": ("bad", "good")[row["label"]]} for row in rows))
    return data


def train(model, dataset, output, *flags):
    run_main([str(flag) for flag in ("--model", model, "--dataset", dataset, "--output", output, *LEARNING, *flags)])
    [path] = Path(output).rglob("results.json")
    return path


def reload(kept):
    """Score kept models, (folder, family, data) each, in a process that cannot import this package."""
    triples = json.dumps([[str(part) for part in case] for case in kept])
    command = ["env", "-u", "PYTHONPATH", sys.executable, "-P", Path(__file__).with_name("reload_kept.py"), triples]
    done = runs.run(list(map(str, command)), timeout=400, cwd=Path("/"))
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def trained(models, labelled, tmp_path_factory):
    """By case: the folder of the model, the test score of the run and, from a fresh process, the reloaded model's answers."""
    root = tmp_path_factory.mktemp("kept")
    found = {}
    for case, (name, head, family, precision) in CASES.items():
        flags = ("--head", head, "--precision", precision, "--save-model", root / "models" / case)
        path = train(models / name, labelled / family, root / case, *flags)
        found[case] = root / "models" / case, json.loads(path.read_text())["test"]["score"]
    answers = reload((folder, CASES[case][2], labelled / CASES[case][2]) for case, (folder, _) in found.items())
    return {case: (folder, score, *answers[str(folder)]) for case, (folder, score) in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_reloaded_model_has_the_printed_score(case, trained):
    folder, score, reloaded, answers = trained[case]
    assert f"| test | score | {reloaded} |" in (folder / "README.md").read_text()
    if CASES[case][3] == "fp32":
        assert reloaded == f"{100 * score:.2f}"
    assert len(answers) == 3 or answers == [3, SHAPE["hidden_size"]]


def test_the_models_have_learned_something(trained):
    """Otherwise equal scores would prove little."""
    scores = {float(reloaded) for _, _, reloaded, _ in trained.values()}
    assert len(scores) > 8 and max(scores) > 90


def test_pipelines_answer_with_the_names_of_labels(trained):
    assert {answer["label"] for answer in trained["eurobert-linear-sc-fp32"][3]} <= {"bad", "good"}
    assert {entity["entity"] for entities in trained["eurobert-linear-tc-fp32"][3] for entity in entities} == {"B-X"}
    assert {one["entity"] for tokens in trained["modernbert-native-qa-fp32"][3] for one in tokens} == {"OUTSIDE", "INSIDE"}


def test_keeping_a_model_changes_no_result(trained, models, labelled, tmp_path):
    path = train(models / "eurobert", labelled / "tc", tmp_path, "--precision", "bf16")
    kept = trained["eurobert-linear-tc-bf16"][0]
    [other] = (kept.parents[1] / "eurobert-linear-tc-bf16").rglob("results.json")
    assert path.read_bytes() == other.read_bytes()


def test_a_finished_run_is_repeated_for_its_model(models, labelled, tmp_path):
    before = train(models / "eurobert", labelled / "sc", tmp_path / "out").read_bytes()
    assert train(models / "eurobert", labelled / "sc", tmp_path / "out", "--save-model", tmp_path / "kept").read_bytes() == before
    assert json.loads((tmp_path / "kept" / "finetuning.json").read_text())["trained"] == json.loads(before)["trained"]


def test_the_card_names_rate_seed_and_digests(trained):
    folder = trained["eurobert-linear-ir-fp32"][0]
    card, details = (folder / "README.md").read_text(), json.loads((folder / "finetuning.json").read_text())
    assert "| learning rate | `5e-03` |" in card and "| seed | `0` |" in card
    assert len(details["fingerprints"]) == 4 and all(digest in card for digest in details["fingerprints"].values())


@pytest.mark.parametrize(
    ("name", "family", "flags", "said"),
    [
        ("modernbert", "sc", [], "--save-model: ModernBertForSequenceClassification has no linear head .* --head native"),
        ("bert", "sc", [], "--save-model: BertForSequenceClassification has .* a linear head lacks .* --head native"),
        ("llama", "sc", [], "--save-model: LlamaForSequenceClassification has no linear head .* --head native"),
        ("eurobert", "ir", ["--head", "native"], "--head native: found ir, and retrieval has no head; expected --head linear"),
    ],
)
def test_what_cannot_be_kept_is_said_before_training(name, family, flags, said, models, labelled, tmp_path, refusal):
    argv = ["--model", models / name, "--dataset", labelled / family, "--output", tmp_path / "out", *LEARNING, *flags]
    (tmp_path / "out").mkdir()
    assert re.search(
        said, refusal(run_main, [*argv, "--save-model", tmp_path / "new" / "kept", "--max-steps", 10**6, "--epochs", 1e9])
    )
    assert not any(path.is_file() for path in tmp_path.rglob("*")) and not (tmp_path / "new").exists()


def test_a_head_that_transformers_lacks_is_said_before_training(small_corpus, labelled, tmp_path, refusal):
    shape = dict(hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=400)
    OPTForCausalLM(OPTConfig(**shape, **TOKENS)).save_pretrained(tmp_path / "opt")
    load_tokenizer(small_corpus.tokenizer).save_pretrained(tmp_path / "opt")
    argv = ["--model", tmp_path / "opt", "--dataset", labelled / "tc", "--output", tmp_path / "out", "--head", "native"]
    said = refusal(run_main, argv)
    assert said == "error: --head native: transformers has no class of opt for TC; expected --head linear"
    assert not (tmp_path / "out").exists()


def test_a_folder_with_content_is_not_overwritten(models, labelled, tmp_path, refusal):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").write_text("text")
    argv = ["--model", models / "eurobert", "--dataset", labelled / "sc", "--output", tmp_path / "out"]
    said = refusal(run_main, [*argv, "--save-model", tmp_path / "kept"])
    assert said == f"error: --save-model {tmp_path / 'kept'}: exists already; remove it or choose another name"
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "mine"]


def test_a_native_head_is_drawn_from_the_seed_and_new(models):
    torch.manual_seed(1)
    _, head = load.load_with_native_head(
        str(models / "modernbert"), "bidirectional", "SC", ("a", "b"), padding=0, device="cpu", dtype=torch.float32
    )
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        head.reset_parameters()
        states.append(torch.cat([weight.flatten() for weight in head.parameters()]).clone())
    assert isinstance(head, NativeHead) and torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_results_from_before_the_flag_are_finished_linear_runs(models, labelled, tmp_path, refusal):
    path = train(models / "eurobert", labelled / "sc", tmp_path)
    assert "head" not in json.loads(path.read_text())["protocol"]
    changed = path.stat().st_mtime_ns
    assert train(models / "eurobert", labelled / "sc", tmp_path).stat().st_mtime_ns == changed
    argv = ["--model", models / "eurobert", "--dataset", labelled / "sc", "--output", tmp_path, *LEARNING]
    assert "field `protocol.head`: found 'linear', expected 'native'" in refusal(run_main, [*argv, "--head", "native"])


@pytest.mark.parametrize("keep", ["best", "all"])
def test_a_grid_names_finished_runs_without_a_model(keep, models, labelled, tmp_path, capsys):
    train(models / "eurobert", labelled / "sc", tmp_path)
    flags = ["--model", models / "eurobert", "--datasets", labelled / "sc", "--learning-rates", "5e-3", "--seeds", 1]
    grid_main([str(flag) for flag in (*flags, *LEARNING[:-2], "--output", tmp_path, "--keep", keep)])
    assert f"--keep {keep}: 1 finished run without a model; choose another --output" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["best", "all"])
def test_a_grid_keeps_models(keep, models, labelled, tmp_path):
    flags = ["--model", models / "eurobert", "--datasets", labelled / "tc", labelled / "ir", "--learning-rates", "1e-3", "5e-3"]
    flags += ["--seeds", 2, "--output", tmp_path, *LEARNING[:-2], "--precision", "fp32", "--keep", keep]
    runs.run([sys.executable, "-m", "megaenc", "finetune", "grid", *map(str, flags)], timeout=400)
    for family, dataset in (("TC", "tc"), ("IR", "ir")):
        folder = tmp_path / "eurobert" / family / dataset
        results = {path.parent: json.loads(path.read_text()) for path in folder.glob("*/results.json")}
        assert len(results) == 4
        ranks = {run: (-one["validation"]["score"], one["learning_rate"], one["seed"]) for run, one in results.items()}
        order = sorted(results, key=ranks.get)
        kept = [run for run in results if (run / "model" / "config.json").exists()]
        assert set(kept) == set(order if keep == "all" else order[:1])
        scores = reload([(run / "model", family.lower(), labelled / dataset) for run in kept])
        assert all(scores[str(run / "model")][0] == f"{100 * results[run]['test']['score']:.2f}" for run in kept)


def predict(folder, source, output):
    predict_main(["--model", str(folder), "--input", str(source), "--output", str(output), "--overwrite"])
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_predictions_give_the_score_of_the_run(trained, labelled, tmp_path):
    for case in ("eurobert-linear-sc-fp32", "modernbert-native-sc-fp32"):
        folder, score, *_ = trained[case]
        rows = [json.loads(line) for line in (labelled / "sc" / "test.jsonl").read_text().splitlines()]
        found = predict(folder, labelled / "sc" / "test.jsonl", tmp_path / "sc.jsonl")
        assert [one["id"] for one in found] == [row["id"] for row in rows]
        assert sum(one["label"] == row["label"] for one, row in zip(found, rows, strict=True)) / len(rows) == score
    folder, score, *_ = trained["eurobert-linear-tc-fp32"]
    rows = [json.loads(line) for line in (labelled / "tc" / "test.jsonl").read_text().splitlines()]
    found = predict(folder, labelled / "tc" / "test.jsonl", tmp_path / "tc.jsonl")
    scores = [f1_score(row["tags"], one["tags"], average="macro") for one, row in zip(found, rows, strict=True)]
    assert sum(scores) / len(scores) == pytest.approx(score)
    folder, *_ = trained["modernbert-native-qa-fp32"]
    [path] = (folder.parents[1] / folder.name).rglob("results.json")
    found = predict(folder, labelled / "qa" / "test.json", tmp_path / "qa.jsonl")
    texts = [one["context"] for one in json.loads((labelled / "qa" / "test.json").read_text())["data"][0]["paragraphs"]]
    exact = sum(one["answer"] == text.split()[0] for one, text in zip(found, texts, strict=True)) / len(texts)
    assert exact == json.loads(path.read_text())["test"]["metrics"]["exact_match"]


def test_pairs_are_joined_as_in_training_whatever_the_format(models, tmp_path, refusal):
    texts = [(first, second) for first in ("stan", "mill") for second in ("stan", "mill")] * 5
    labels = ["same" if first == second else "other" for first, second in texts]
    pairs = [{"id": n, "text": text, "text_pair": pair, "label": labels[n]} for n, (text, pair) in enumerate(texts)]
    for split in ("train", "valid", "test"):
        test_train.write(tmp_path / "pairs" / f"{split}.jsonl", pairs)
    template = "{text_pair} -- {text}"
    flags = ("--pair-template", template, "--save-model", tmp_path / "kept", "--precision", "fp32")
    score = json.loads(train(models / "eurobert", tmp_path / "pairs", tmp_path / "out", *flags).read_text())["test"]["score"]
    assert json.loads((tmp_path / "kept" / "finetuning.json").read_text())["pair_template"] == template
    found = predict(tmp_path / "kept", tmp_path / "pairs" / "test.jsonl", tmp_path / "pairs.jsonl")
    assert sum(one["label"] == row["label"] for one, row in zip(found, pairs, strict=True)) / len(pairs) == score
    joined = [{"id": row["id"], "text": template.format(**row)} for row in pairs]
    test_train.write(tmp_path / "joined.jsonl", joined)
    assert predict(tmp_path / "kept", tmp_path / "joined.jsonl", tmp_path / "joined_found.jsonl") == found
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    assert predict(tmp_path / "kept", tmp_path / "pairs.parquet", tmp_path / "parquet.jsonl") == found
    details = json.loads((tmp_path / "kept" / "finetuning.json").read_text())
    argv = ["--model", tmp_path / "kept", "--input", tmp_path / "pairs.parquet"]
    for value, said in (
        ("{text", "field `pair_template`: '{text': expected '}'"),
        (None, "row 1: field `text_pair`: expected both texts in `text`"),
    ):
        changed = {name: part for name, part in (details | {"pair_template": value}).items() if part is not None}
        (tmp_path / "kept" / "finetuning.json").write_text(json.dumps(changed))  # None: as of older versions
        assert said in refusal(predict_main, argv)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Equal and other pairs of words."""
    root = tmp_path_factory.mktemp("pairs")
    texts = [(first, second) for first in ("stan", "mill") for second in ("stan", "mill")] * 5
    labels = ["same" if first == second else "other" for first, second in texts]
    rows = [{"id": n, "text": text, "text_pair": pair, "label": labels[n]} for n, (text, pair) in enumerate(texts)]
    for split in ("train", "valid", "test"):
        test_train.write(root / f"{split}.jsonl", rows)
    return root


@pytest.fixture(scope="module")
def templated(models, tmp_path_factory):
    """The models of ModernBERT and EuroBERT with a tokenizer that puts a first and a last token around a text."""
    root = tmp_path_factory.mktemp("templated")
    for name in ("modernbert", "eurobert"):
        shutil.copytree(models / name, root / name)
        tokenizer = load_tokenizer(models / name)
        template = SpecialTokens("template", (tokenizer.mask_token_id,), (tokenizer.eos_token_id,))
        set_special_tokens(tokenizer, template).save_pretrained(root / name)
    config = json.loads((root / "modernbert" / "config.json").read_text())
    (root / "modernbert" / "config.json").write_text(json.dumps(config | {"classifier_pooling": "cls"}))
    return root


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("modernbert", ["--head", "native"]),
        ("eurobert", ["--pooling", "cls"]),
        ("eurobert", []),
        ("eurobert", ["--add-eos"]),
    ],
    ids=["native head that reads the first token", "first token", "mean", "only an end"],
)
def test_pairs_have_the_tokenizers_own_special_tokens(model, flags, templated, pairs, tmp_path):
    """In `predict`, a pipeline and CrossEncoder: the score of the run; a classifier of the first token reads the template's."""
    from sentence_transformers import CrossEncoder
    from transformers import AutoTokenizer

    kept = tmp_path / "kept"
    path = train(templated / model, pairs, tmp_path / "out", *flags, "--save-model", kept, "--precision", "fp32")
    result = json.loads(path.read_text())
    rows = [json.loads(line) for line in (pairs / "test.jsonl").read_text().splitlines()]
    found = [one["label"] for one in predict(kept, pairs / "test.jsonl", tmp_path / "found.jsonl")]
    tokenizer = AutoTokenizer.from_pretrained(kept)
    ids = tokenizer("stan", "mill")["input_ids"]
    begin, end = tokenizer.mask_token_id, tokenizer.eos_token_id
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("stan", "mill"))
    is_ended = "--add-eos" in flags
    assert ids == [*([] if is_ended else [begin]), *first, end, *second, end]
    classify = pipeline("text-classification", str(kept))
    assert [classify({name: row[name] for name in ("text", "text_pair")})["label"] for row in rows] == found
    encoder = CrossEncoder(str(kept))
    scores = encoder.predict([(row["text"], row["text_pair"]) for row in rows])
    assert [encoder.config.id2label[int(score.argmax())] for score in scores] == found
    right = [label == row["label"] for label, row in zip(found, rows, strict=True)]
    assert sum(right) / len(right) == result["test"]["score"]
    expected = {"add_bos": False, "add_eos": True} if is_ended else {"special_tokens": "template"}
    protocol = {name: result["protocol"][name] for name in ("special_tokens", "add_bos", "add_eos") if name in result["protocol"]}
    assert protocol == expected


def test_poolings_that_no_class_has_are_refused_before_training(templated, labelled, tmp_path, refusal):
    argv = ["--model", templated / "eurobert", "--output", tmp_path / "out", *LEARNING, "--pooling", "lasttoken"]
    kept = ["--dataset", labelled / "sc", "--save-model", tmp_path / "kept"]
    assert "--save-model: EuroBertForSequenceClassification has no --pooling lasttoken" in refusal(run_main, [*argv, *kept])
    assert "--pooling lasttoken: found with --head native" in refusal(run_main, [*argv, *kept, "--head", "native"])
    assert "--pooling lasttoken: found tc, and TC reads the states" in refusal(run_main, [*argv, "--dataset", labelled / "tc"])


def test_retrieval_is_kept_with_its_pooling(templated, labelled, tmp_path):
    kept = tmp_path / "kept"
    flags = ["--pooling", "lasttoken", "--save-model", kept, "--precision", "fp32", "--max-steps", 3]
    score = json.loads(train(templated / "eurobert", labelled / "ir", tmp_path / "out", *flags).read_text())["test"]["score"]
    assert json.loads((kept / "1_Pooling" / "config.json").read_text())["pooling_mode_lasttoken"]
    assert reload([(kept, "ir", labelled / "ir")])[str(kept)][0] == f"{100 * score:.2f}"


@pytest.mark.parametrize("flags", [["--special-tokens", "eod"], ["--add-eos"], ["--no-add-bos", "--add-eos"], []])
def test_an_eos_alone_gives_the_bytes_of_earlier_versions(flags, models, labelled, tmp_path):
    """Whichever flag asks for it; by default so do tokenizers that add nothing."""
    path = train(models / "eurobert", labelled / "sc", tmp_path, *flags, "--max-steps", 2)
    protocol = json.loads(path.read_text())["protocol"]
    assert (protocol["add_bos"], protocol["add_eos"]) == (False, True)
    assert not {"special_tokens", "pooling"} & protocol.keys()


def test_results_with_other_special_tokens_name_the_flags(templated, labelled, tmp_path, refusal):
    train(templated / "eurobert", labelled / "sc", tmp_path, "--add-eos", "--max-steps", 2)
    argv = ["--model", templated / "eurobert", "--dataset", labelled / "sc", "--output", tmp_path, *LEARNING, "--max-steps", 2]
    line = refusal(run_main, argv)
    assert "field `protocol.special_tokens`: found '', expected 'template'; use --no-add-bos --add-eos, choose another" in line


@pytest.mark.parametrize("name", tokenizer_shapes.SHAPES)
def test_the_words_of_the_card_are_the_tokens_of_the_sentence(name, tmp_path):
    tokenizer = load_tokenizer(tokenizer_shapes.save(tokenizer_shapes.SHAPES[name](), tmp_path / name))
    assert needs_spaced_words(tokenizer) == (name in ("modernbert", "roberta", "llama3", "gemma", "qwen"))


def test_standard_output_has_only_predictions(trained, labelled, tmp_path, capsys):
    source = labelled / "sc" / "test.jsonl"
    predict_main(["--model", str(trained["eurobert-linear-sc-fp32"][0]), "--input", str(source)])
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["id"] for row in found] == [json.loads(line)["id"] for line in source.read_text().splitlines()]
    assert {tuple(row) for row in found} == {("id", "label", "score")}
    assert printed.err == "predicting  100 %\n"
    longer = tmp_path / "longer.jsonl"
    longer.write_text("".join(json.dumps({"text": "word " * count}) + "\n" for count in (1, 2, 5000)))
    predict_main(["--model", str(trained["eurobert-linear-sc-fp32"][0]), "--input", str(longer)])
    assert re.search(r"^1 of 3 texts are longer than \d+ tokens and are cut\n", capsys.readouterr().err)


def test_scores_of_all_labels(trained, labelled, tmp_path, refusal):
    """Those of transformers' pipeline."""
    folder, source = trained["modernbert-native-sc-fp32"][0], labelled / "sc" / "test.jsonl"
    output = tmp_path / "found.jsonl"
    predict_main(["--model", str(folder), "--input", str(source), "--output", str(output), "--all-scores"])
    found = [json.loads(line) for line in output.read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    expected = pipeline("text-classification", str(folder), top_k=None)(texts)
    for row, scores in zip(found, expected, strict=True):
        assert row["scores"] == pytest.approx({one["label"]: one["score"] for one in scores}, abs=2e-6)
        assert list(row["scores"]) == ["bad", "good"] and row["score"] == row["scores"][row["label"]] == max(
            row["scores"].values()
        )
    argv = ["--model", trained["eurobert-linear-tc-fp32"][0], "--input", labelled / "tc" / "test.jsonl", "--all-scores"]
    assert "--all-scores: found a model of TC, expected one of SC" in refusal(predict_main, argv)


def change_weights(folder, target, change):
    """Copy a kept model and change its tensors by name in place."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("case", ["eurobert-linear-sc-fp32", "llama-linear-tc-fp32", "modernbert-native-qa-fp32"])
def test_models_with_missing_or_nan_weights_are_refused(case, trained, labelled, tmp_path, refusal):
    folder, *_ = trained[case]
    head = "score.weight" if case.startswith("llama") else "classifier.weight"
    [source] = (labelled / CASES[case][2]).glob("test.*")
    output = tmp_path / "found.jsonl"
    argv = ["--input", source, "--output", output]
    missing = change_weights(folder, tmp_path / "missing", lambda tensors: tensors.pop(head))
    assert f"--model {missing}: no tensor `{head}`" in refusal(predict_main, ["--model", missing, *argv])
    spoiled = change_weights(folder, tmp_path / "spoiled", lambda tensors: tensors[head][0].fill_(float("nan")))
    message = refusal(predict_main, ["--model", spoiled, *argv])
    assert f"{spoiled}/model.safetensors: tensor `{head}`: found nan, expected finite weights" in message
    assert not output.exists()


HARMED = {
    "huge": (lambda tensors: [tensor.fill_(3e38) for tensor in tensors.values()], "computes scores that are NaN or infinite"),
    "integers": (
        lambda tensors: tensors.update({"classifier.bias": tensors["classifier.bias"].to(torch.uint8)}),
        "tensor `classifier.bias`: found dtype U8, expected one of F32, BF16, F16",
    ),
    "foreign": (
        lambda tensors: tensors.update({"decoder.weight": torch.ones(1)}),
        "found a tensor `decoder.weight`, which a EuroBertForSequenceClassification does not have",
    ),
}


@pytest.mark.parametrize(("change", "words"), HARMED.values(), ids=HARMED)
def test_weights_that_give_no_scores_are_refused(change, words, trained, labelled, tmp_path, refusal):
    folder = change_weights(trained["eurobert-linear-sc-fp32"][0], tmp_path / "kept", change)
    argv = ["--model", folder, "--input", labelled / "sc" / "test.jsonl", "--output", tmp_path / "found.jsonl"]
    said = refusal(predict_main, [*argv, "--all-scores"])
    assert str(folder) in said and words in said and not (tmp_path / "found.jsonl").exists()


@pytest.mark.parametrize("family", ["sc", "tc"])
def test_a_tokenizer_of_another_model_is_refused(family, trained, labelled, tmp_path, refusal):
    folder = tmp_path / "kept"
    shutil.copytree(trained[f"eurobert-linear-{family}-fp32"][0], folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    words = values["model"]["vocab"]
    argv = ["--model", folder, "--input", labelled / family / "test.jsonl"]
    values["model"]["vocab"] = {word: number + 1000 * (number > 1) for word, number in words.items()}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    assert re.search(r"kept: found the token id \d+, expected 0 to 399, those of the model", refusal(predict_main, argv))
    values["model"]["vocab"] = {word: min(number, 258) for word, number in words.items()}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    said = refusal(predict_main, argv)
    assert re.search(r"tokenizer.json: Token `.+` out of vocabulary .*; expected a Hugging Face fast tokenizer$", said)


def test_questions_of_squads_json_need_no_answers(trained, tmp_path):
    asked = {"question": "which?", "id": "q"}
    (tmp_path / "asked.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "stan mill", "qas": [asked]}]}]}))
    test_train.write(tmp_path / "asked.jsonl", [asked | {"context": "stan mill"}])
    first, second = (
        predict(trained["modernbert-native-qa-fp32"][0], tmp_path / name, tmp_path / "found.jsonl")
        for name in ("asked.json", "asked.jsonl")
    )
    assert first == second and first[0]["id"] == "q"


@pytest.mark.parametrize("family", ["sc", "tc"])
def test_a_tokenizer_that_fails_is_named(family, trained, labelled, tmp_path, refusal):
    folder = tmp_path / "kept"
    shutil.copytree(trained[f"eurobert-linear-{family}-fp32"][0], folder)
    argv = ["--model", folder, "--input", labelled / family / "test.jsonl"]
    Tokenizer(models_of_tokens.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    said = f"{folder}: its tokenizer fails: WordLevel error: Missing [UNK] token from the vocabulary; expected"
    assert said in refusal(predict_main, argv)
    values = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": "x"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    assert f"{folder}: its tokenizer fails: '>' not supported" in refusal(predict_main, argv)


ODD_FIELDS = [
    ("config.json", {"classifier_pooling": "x"}, "config.json: EuroBertForSequenceClassification fails: cannot access"),
    ("config.json", {"pad_token_id": -1}, "found the token id -1, expected 0 to 399"),
    ("config.json", {"id2label": None}, "config.json: field `id2label`: no such field, expected names that differ"),
    ("config.json", {"id2label": {}}, "config.json: field `id2label`: found {}"),
    ("config.json", {"id2label": ["bad", "good"]}, "config.json: field `id2label`: found ['bad', 'good']"),
    ("config.json", {"id2label": {"0": "bad", "2": "good"}}, "config.json: field `id2label`: found {'0': 'bad', '2': 'good'}"),
    ("config.json", {"id2label": {"0": "bad", "x": "good"}}, "config.json: field `id2label`: found"),
    ("config.json", {"id2label": {"0": "bad", "1": "bad"}}, "config.json: field `id2label`: found"),
    ("config.json", {"id2label": {"0": "bad", "1": 7}}, "config.json: field `id2label`: found"),
    ("config.json", {"id2label": {"0": "a", "1": "b", "2": "c"}}, "model.safetensors: tensor `classifier."),
    ("config.json", {"architectures": ["EuroBertForMaskedLM"]}, "expected ['EuroBertForSequenceClassification']"),
    ("config.json", {"architectures": 3}, "config.json: field `architectures`: found 3"),
    ("finetuning.json", {"family": None}, "finetuning.json: field `family`: found None, expected one of SC, TC, QA, IR"),
    ("finetuning.json", {"family": ["SC"]}, "finetuning.json: field `family`: found ['SC']"),
    ("finetuning.json", {"family": "TC"}, "finetuning.json describes a model of TC"),
    ("finetuning.json", {"protocol": None}, "finetuning.json: field `protocol`: found None"),
    ("finetuning.json", {"protocol": [1]}, "finetuning.json: field `protocol`: found [1]"),
    ("finetuning.json", {"protocol": {"max_lenght": 8}}, "protocol: unknown field `max_lenght`; did you mean `max_length`?"),
    ("finetuning.json", {"protocol": {"max_length": "8"}}, "protocol: field `max_length`: found '8', expected a int"),
    ("finetuning.json", {"protocol": {"max_length": float("nan")}}, "protocol: field `max_length`: found nan, expected a int"),
    ("finetuning.json", {"protocol": {"head": ["linear"]}}, "protocol: field `head`: found ['linear']"),
    ("finetuning.json", {"protocol": {"max_length": -1}}, "field `max_length`: found -1, expected 2 to 64 tokens"),
    ("finetuning.json", {"protocol": {"max_length": 1}}, "field `max_length`: found 1, expected 2 to 64 tokens"),
    ("finetuning.json", {"protocol": {"max_length": 10**30}}, "expected 2 to 64 tokens, those that the model reads"),
    ("finetuning.json", {"protocol": {}}, "field `max_length`: found 0, expected 2 to 64 tokens"),
    ("finetuning.json", {"pair_template": 5}, "finetuning.json: field `pair_template`: found 5, expected text"),
    (
        "finetuning.json",
        {"pair_template": "{text} {text_pair:{text}}"},
        "field `pair_template`: '{text} {text_pair:{text}}': found a format",
    ),
]


@pytest.mark.parametrize(("file", "changes", "words"), ODD_FIELDS)
def test_odd_fields_of_a_kept_model_are_named(file, changes, words, trained, tmp_path, refusal):
    folder = tmp_path / "kept"
    shutil.copytree(trained["eurobert-linear-sc-fp32"][0], folder)
    values = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "stan", "tokens": ["stan"]}\n')
    message = refusal(predict_main, ["--model", folder, "--input", rows])
    assert str(folder) in message and words in message


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e400", "0.5", "true", "[1]", '{"a": NaN}'])
def test_ids_that_are_neither_text_nor_an_integer_are_refused(value, trained, tmp_path, refusal):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"id": 1, "text": "stan"}}\n{{"id": {value}, "text": "stan"}}\n')
    message = refusal(predict_main, ["--model", trained["eurobert-linear-sc-fp32"][0], "--input", rows])
    assert "rows.jsonl:2: key `id`: found " in message and message.endswith(", expected text or an integer")


@pytest.mark.parametrize("family", ["sc", "tc", "qa"])
def test_lone_surrogates_are_written_as_in_the_input(family, trained, tmp_path, capsys):
    """UTF-8 has none, but JSON's escapes do."""
    rows = tmp_path / "rows.jsonl"
    context = {
        "sc": '"text": "stan \\ud800"',
        "tc": '"tokens": ["stan", "\\udfff"]',
        "qa": '"question": "\\ud800", "context": "\\udc00"',
    }
    rows.write_text(f'{{"id": "\\ud800é", {context[family]}}}\n{{"id": null, {context[family]}}}\n')
    case = "modernbert-native-qa-fp32" if family == "qa" else f"eurobert-linear-{family}-fp32"
    found = predict(trained[case][0], rows, tmp_path / "found.jsonl")
    assert [row["id"] for row in found] == ["\ud800é", None]
    capsys.readouterr()
    predict_main(["--model", str(trained[case][0]), "--input", str(rows)])
    assert (tmp_path / "found.jsonl").read_text(encoding="utf-8") == capsys.readouterr().out


def test_rows_that_cannot_be_predicted_are_named(trained, tmp_path, refusal):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "stan"}\n{"words": 1}\n')
    output = tmp_path / "out" / "found.jsonl"
    argv = ["--input", rows, "--output", output]
    said = refusal(predict_main, ["--model", trained["eurobert-linear-sc-fp32"][0], *argv])
    assert "rows.jsonl:2: no key `text`; found `words`" in said
    assert "found a retrieval model" in refusal(predict_main, ["--model", trained["eurobert-linear-ir-fp32"][0], *argv])
    assert "no finetuning.json" in refusal(predict_main, ["--model", tmp_path, *argv])
    assert not output.parent.exists()
