"""The card of an export says where predictions stand, by the objective that was trained last."""

import dataclasses
import json
import os
import re
from types import SimpleNamespace

import hf_models
import pytest
import runs
import torch

from megaenc import markdown
from megaenc.convert.command import main
from megaenc.convert.model_card import ExportProvenance, build_model_card, read_last_metrics
from megaenc.convert.to_hf import to_hf
from megaenc.data.preprocess import command as preprocess
from megaenc.data.tokenizer import train_command
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.finetune import fill_mask
from megaenc.objectives import Attention, Schedule
from megaenc.training.run_dir import METRICS_FILE, VALIDATION_FILE
from megaenc.training.run_init import Ancestor, RunInit

VOCABULARY = Vocabulary(size=64, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="f" * 64)


def provenance(schedule, step=100):
    return ExportProvenance(schedule, Schedule.build(schedule, 100, VOCABULARY), step, 100, tokens=step * 2048)


@pytest.mark.parametrize(
    ("schedule", "step", "attention", "objective", "shift"),
    [
        ("mlm", 100, "bidirectional", "mlm", 0),
        ("clm:0.25,mlm:0.75", 100, "bidirectional", "mlm", 0),
        ("clm:0.25,mlm:0.75", 25, "causal", "clm", 1),
        ("clm:0.25,mlm:0.75", 25, "bidirectional", "clm", 1),
        ("clm:0.5,mntp:0.5", 100, "bidirectional", "mntp", 1),
        ("clm:0.5,mntp:0.5", 0, "bidirectional", "clm", 1),
        ("prefix_lm", 100, "causal", "prefix_lm", 1),
        ("mix(clm:0.6,mlm:0.3,mntp:0.1):1.0", 100, "bidirectional", "mlm", 0),
        ("mix(clm:0.6,mlm:0.1,mntp:0.3):1.0", 100, "bidirectional", "mntp", 1),
        ("mix(clm:0.4,mlm:0.6):1.0", 100, "causal", "clm", 1),
    ],
)
def test_an_export_is_read_by_the_last_objective_of_its_attention(schedule, step, attention, objective, shift):
    found = provenance(schedule, step).select_objective(Attention(attention))
    assert (found.name, found.shift) == (objective, shift)
    assert f"prediction_shift: {shift}" in build_model_card("x", provenance(schedule, step), Attention(attention))


def test_an_alternation_is_judged_by_more_than_its_last_phase():
    found = provenance("10x(mlm:9,clm:1)")  # a twentieth of the run, five steps: four of MLM and the last one of CLM
    assert [objective.name for objective in found.last_objectives] == ["mlm", "clm"]
    assert found.select_objective(Attention.BIDIRECTIONAL).name == "mlm"


def test_inside_a_ramp_the_card_names_what_was_trained_last():
    text = build_model_card("x", provenance("mlm(mask=0.4->0.2):1.0", step=50), Attention.BIDIRECTIONAL)
    assert f"`mlm(mask={0.4 - 0.2 * 49 / 99})`" in text


def test_a_moved_prediction_is_said_in_plain_words():
    text = build_model_card("hf", provenance("clm:0.25,mntp(mask=0.2):0.75"), Attention.BIDIRECTIONAL)
    assert "| `mntp(mask=0.2)` | bidirectional | token i + 1 |" in text
    assert "**Predictions are moved by 1 position.**" in text and "read the logits at position i - 1" in text
    assert "step 100, after 204,800 tokens" in text
    plain = build_model_card("hf", provenance("mlm"), Attention.BIDIRECTIONAL)
    assert "moved" not in plain and "the output at position i is for token i" in plain


def test_the_runs_it_comes_from_are_named_without_their_places():
    start = RunInit(
        "branch", "/home/me/a", 40, before=(Ancestor("/home/me/clm", 10, "clm", 20480), Ancestor("b", 30, "mlm", 61440))
    )
    text = build_model_card("hf", dataclasses.replace(provenance("mlm"), start=start), Attention.BIDIRECTIONAL)
    assert "trained in other runs: `clm` to step 10 (`clm`, 20,480 tokens), then `b` to step 30 (`mlm`, 61,440 tokens)." in text
    assert "It is a branch of the run `a` at step 40" in text and "/home" not in text
    plain = build_model_card("hf", provenance("mlm"), Attention.BIDIRECTIONAL)
    assert "branch" not in plain and "other runs" not in plain


def test_reading_under_another_attention_than_trained_is_said():
    assert "It was trained under causal attention" in build_model_card("hf", provenance("clm"), Attention.BIDIRECTIONAL)
    assert "It was trained under" not in build_model_card("hf", provenance("mlm"), Attention.BIDIRECTIONAL)


def test_of_a_model_that_came_in_nothing_is_said_to_be_trained(small_corpus, tmp_path):
    hf = hf_models.write(hf_models.build("qwen3", vocab_size=410), tmp_path / "qwen3", small_corpus.tokenizer)
    main(["from-hf", "--input", str(hf), "--output", str(tmp_path / "core")])
    main(["to-hf", "--load", str(tmp_path / "core"), "--output", str(tmp_path / "out"), "--all"])
    (folder,) = (tmp_path / "out").iterdir()
    text = (folder / "README.md").read_text()
    assert folder.name == "qwen3" and "# qwen3\n\nA text encoder as it came in: nothing was trained since." in text
    assert "pipeline_tag: feature-extraction\n" in text
    assert "with `Qwen3ForCausalLM` of transformers 5.3 or later, which reads both" in text
    assert "Its weights are those of `qwen3`, a Hugging Face model of type qwen3. Attention" in text
    assert "| made for | under attention |" in text and "It came in reading under causal attention" in text
    for words in ("pretrained", "was trained under", "last trained", "first weights", " step", "added"):
        assert words not in text


@pytest.mark.parametrize(
    ("architecture", "attention", "tag", "said"),
    [
        ("EuroBertForMaskedLM", "BIDIRECTIONAL", "fill-mask", "It loads with `EuroBertForMaskedLM` of transformers."),
        ("LlamaForCausalLM", "CAUSAL", "text-generation", "It loads with `LlamaForCausalLM` of transformers."),
        (
            "NeoBERTLMHead",
            "BIDIRECTIONAL",
            "fill-mask",
            "It loads with `AutoModelForMaskedLM` and `trust_remote_code=True`, which runs the code of chandar-lab/NeoBERT "
            "on the Hub, written for transformers 4: under 5 it computes other outputs, without an error.",
        ),
        (
            "Qwen3ForCausalLM",
            "BIDIRECTIONAL",
            "feature-extraction",
            "It loads with `Qwen3ForCausalLM` of transformers, which reads both ways here, and not with `AutoModelForMaskedLM`; "
            "`megaenc fill-mask` fills masks with it.",
        ),
    ],
)
def test_what_loads_an_export_is_said_and_what_it_is_for(architecture, attention, tag, said):
    export = dataclasses.replace(provenance("mntp"), architecture=architecture)
    text = build_model_card("hf", export, Attention[attention])
    assert f"pipeline_tag: {tag}\n" in text and said in text
    assert ("moves the logits by itself" in text) == (attention == "BIDIRECTIONAL")
    assert ('pipeline("fill-mask")' in text) == (tag == "fill-mask")


def test_the_row_of_an_added_mask_token_is_named():
    stage = Ancestor("/home/me/llama", 0, "clm", 0, "llama", 512)
    source = dataclasses.replace(
        provenance("clm", step=0), start=RunInit(before=(stage,)), converted=True, added_token="<|mask|>"
    )
    text = build_model_card("hf", source, Attention.CAUSAL)
    assert "a Hugging Face model of type llama. The row of its mask token, `<|mask|>`, was added: the mean of the others." in text


def test_before_its_first_step_a_run_has_trained_nothing():
    text = build_model_card("hf", provenance("clm", step=0), Attention.BIDIRECTIONAL)
    assert "| trained first | under attention |" in text and "It is first trained under causal attention" in text


def test_an_export_of_mntp_guesses_hidden_tokens_where_its_card_says(tmp_path):
    """Trained on mntp over words in a circle: moved by its shift the export guesses well, read in place it does not."""
    circle = [
        "the",
        "old",
        "man",
        "sat",
        "near",
        "a",
        "green",
        "tree",
        "while",
        "seven",
        "small",
        "birds",
        "sang",
        "over",
        "his",
        "head",
    ] * 20
    texts = [" ".join(circle[start : start + 60 + start]) for start in range(150)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = ["--input", str(tmp_path / "text.jsonl")]
    train_command.main([*corpus, "--vocab-size", "400", "--output", str(tmp_path / "tokenizer")])
    tokenizer = ["--tokenizer", str(tmp_path / "tokenizer")]
    preprocess.main([*corpus, "--output-prefix", str(tmp_path / "c"), *tokenizer, "--append-eod"])
    data = ["--data-path", str(tmp_path / "c_text_document"), *tokenizer]
    schedule = ["--objective-schedule", "mntp(mask=0.3)", "--train-iters", "40", "--lr", "1e-2", "--no-bf16"]
    runs.script(runs.PRETRAIN, [*data, *runs.SHORT_RUN, *schedule, "--save", str(tmp_path / "run")])
    to_hf(tmp_path / "run", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["prediction_shift"] == 1
    assert "Predictions are moved by 1 position" in (tmp_path / "hf" / "README.md").read_text()

    model, loaded = fill_mask.load_masked_lm(tmp_path / "hf")
    [move] = model._forward_hooks.values()
    output = SimpleNamespace(logits=torch.arange(6.0).reshape(1, 3, 2) + 1)
    move(model, (), output)
    assert output.logits.tolist() == [[[0, 0], [1, 2], [3, 4]]]
    moved = fill_mask.compute_mask_score(model, loaded, iter(texts), 0.3, 10_000)
    model._forward_hooks.clear()
    in_place = fill_mask.compute_mask_score(model, loaded, iter(texts), 0.3, 10_000)
    assert moved.accuracy > 5 * moved.most_frequent_accuracy
    assert in_place.accuracy < 0.5 * moved.accuracy


def test_what_a_card_says_of_others_is_text_alone():
    evil = "a`\n---\nlicense: mit\n<script>alert(1)</script> [x](http://y) \x1b[2J"
    schedule = "mlm"
    start = RunInit("branch", evil, 40, before=(Ancestor(evil, 10, evil, 20480), Ancestor(evil, 0, evil, 0, family="llama")))
    metrics = {
        "training": {"step": 3, "loss": 1.5},
        f"held out, {markdown.inline_code(evil + '|', cell=True)}": {"step": 3, "loss": "<b>"},
    }
    facts = dict(start=start, data=evil, tokenizer=evil, metrics=metrics, added_token=evil, schedule_text=evil)
    text = build_model_card(evil, dataclasses.replace(provenance(schedule), **facts), Attention.BIDIRECTIONAL)
    assert "\x1b" not in text
    front, _, rest = text.removeprefix("---\n").partition("\n---\n")
    assert front.count("\n") == 3 and "license: unknown" in front and "\n---\n" not in rest and "\nlicense" not in rest
    for line in rest.splitlines():  # what begins in a line ends in it
        outside = re.sub(r"(?<!\\)`[^`]*`", "", line)
        assert not re.search(r"(?<!\\)[`<]|(?<!\\)\[x", outside), line
    rows = [line for line in rest.splitlines() if line.startswith("| 3 |")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [5, 5]


@pytest.mark.parametrize(
    "line", ["[1]", "7", '{"step": "4"}', '{"step": 4, "objectives": [1]}', '{"step": 4, "objectives": {"a": 5}}']
)
def test_metrics_of_another_kind_are_left_out(tmp_path, line):
    for name in (METRICS_FILE, VALIDATION_FILE):
        (tmp_path / name).write_text(line + "\n")
    found = read_last_metrics(tmp_path, 10)
    assert not any("held out" in name for name in found)
    build_model_card("x", dataclasses.replace(provenance("mlm"), metrics=found), Attention.BIDIRECTIONAL)


def test_metrics_that_could_block_are_left_out(tmp_path):
    os.mkfifo(tmp_path / METRICS_FILE)
    assert read_last_metrics(tmp_path, 10) == {}
