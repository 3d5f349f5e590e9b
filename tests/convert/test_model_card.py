"""The card of an export says where predictions stand, by the last objective."""

import dataclasses
import json
import os
import re
from pathlib import Path

import hf_models
import pytest
import runs
import torch

from megaenc.convert.model_card import ExportProvenance, build_model_card, read_last_metrics
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.finetune import fill_mask
from megaenc.objectives import Attention, Schedule
from megaenc.tables import inline_code
from megaenc.training.command import main as pretrain
from megaenc.training.run_dir import METRICS_FILE, VALIDATION_FILE
from megaenc.training.run_init import Ancestor, RunInit

MNTP = [
    "--objective-schedule",
    "mntp",
    "--lr-warmup-iters",
    "0",
    "--lr-wsd-decay-iters",
    "0",
    "--no-bf16",
]
VOCABULARY = Vocabulary(size=64, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="f" * 64)


def provenance(schedule, step=100):
    return ExportProvenance(
        schedule, Schedule.build(schedule, 100, VOCABULARY), step, 100, tokens=step * 2048
    )


MOVED = "**Predictions are moved by 1 position.**"
IN_PLACE = "the output at position i is for token i"


@pytest.mark.parametrize(
    ("schedule", "step", "attention", "objective", "words"),
    [
        ("mlm", 100, "bidirectional", "mlm", IN_PLACE),
        ("clm:0.25,mlm:0.75", 25, "bidirectional", "clm", "It was trained under causal attention"),
        (
            "clm:0.5,mntp(mask=0.2):0.5",
            100,
            "bidirectional",
            "mntp",
            "| `mntp(mask=0.2)` | bidirectional | token i + 1 |",
        ),
        ("clm:0.5,mntp:0.5", 100, "bidirectional", "mntp", "step 100, after 204,800 tokens"),
        (
            "clm:0.5,mntp:0.5",
            0,
            "bidirectional",
            "clm",
            "It is first trained under causal attention",
        ),
        (
            "10x(mlm:9,clm:1)",
            100,
            "bidirectional",
            "mlm",
            IN_PLACE,
        ),  # a twentieth of the run: four steps of MLM, and one of CLM
        ("prefix_lm", 100, "causal", "prefix_lm", "It was trained under prefix attention"),
        (
            "mlm(mask=0.4->0.2):1.0",
            50,
            "bidirectional",
            "mlm",
            f"`mlm(mask={0.4 - 0.2 * 49 / 99})`",
        ),
        ("mix(clm:0.6,mlm:0.3,mntp:0.1):1.0", 100, "bidirectional", "mlm", IN_PLACE),
        ("mix(clm:0.4,mlm:0.6):1.0", 100, "causal", "clm", "token i + 1"),
    ],
)
def test_an_export_is_read_by_the_last_objective_of_its_attention(
    schedule, step, attention, objective, words
):
    export = provenance(schedule, step)
    found = export.select_objective(Attention(attention))
    assert (found.name, found.shift) == (objective, 0 if objective == "mlm" else 1)
    text = build_model_card("x", export, Attention(attention))
    assert words in text and f"prediction_shift: {found.shift}" in text
    assert (MOVED in text) == (found.shift == 1 and attention == "bidirectional")
    assert ("It was trained under" in text) == words.startswith("It was")


def test_the_runs_it_comes_from_are_named_without_their_places():
    before = (Ancestor("/home/me/clm", 10, "clm", 20480), Ancestor("b", 30, "mlm", 61440))
    start = RunInit("branch", "/home/me/a", 40, before=before)
    text = build_model_card(
        "hf", dataclasses.replace(provenance("mlm"), start=start), Attention.BIDIRECTIONAL
    )
    assert (
        "trained in other runs: `clm` to step 10 (`clm`, 20,480 tokens), "
        "then `b` to step 30 (`mlm`, 61,440 tokens)." in text
    )
    assert "It is a branch of the run `a` at step 40" in text and "/home" not in text


def test_of_a_model_that_came_in_nothing_is_said_to_be_trained(small_corpus):
    hf = hf_models.write(hf_models.build("qwen3", vocab_size=410), "qwen3", small_corpus.tokenizer)
    hf_models.from_hf(hf, "core")
    hf_models.to_hf("core", "hf")
    text = Path("hf/README.md").read_text()
    assert "A text encoder as it came in: nothing was trained since." in text
    assert "with `Qwen3ForCausalLM` of transformers 5.3 or later, which reads both" in text
    assert "Its weights are those of `qwen3`, a Hugging Face model of type qwen3. Attention" in text
    assert (
        "| made for | under attention |" in text
        and "It came in reading under causal attention" in text
    )
    for words in (
        "pretrained",
        "was trained under",
        "last trained",
        "first weights",
        " step",
        "added",
    ):
        assert words not in text


@pytest.mark.parametrize(
    ("architecture", "attention", "tag", "said"),
    [
        (
            "LlamaForCausalLM",
            "CAUSAL",
            "text-generation",
            "It loads with `LlamaForCausalLM` of transformers.",
        ),
        (
            "NeoBERTLMHead",
            "BIDIRECTIONAL",
            "fill-mask",
            "It loads with `AutoModelForMaskedLM` and `trust_remote_code=True`, "
            "which runs the code of chandar-lab/NeoBERT on the Hub, written for transformers 4: "
            "under 5 it computes other outputs, without an error.",
        ),
        (
            "Qwen3ForCausalLM",
            "BIDIRECTIONAL",
            "feature-extraction",
            "It loads with `Qwen3ForCausalLM` of transformers, which reads both ways here, "
            "and not with `AutoModelForMaskedLM`; `megaenc fill-mask` fills masks with it.",
        ),
    ],
)
def test_what_loads_an_export_is_said_and_what_it_is_for(architecture, attention, tag, said):
    export = dataclasses.replace(provenance("mntp"), architecture=architecture)
    text = build_model_card("hf", export, Attention[attention])
    assert f"pipeline_tag: {tag}\n" in text and said in text
    assert ("moves the logits by itself" in text) == (attention == "BIDIRECTIONAL")
    assert ('pipeline("fill-mask")' in text) == (tag == "fill-mask")


def test_an_export_of_mntp_is_read_where_its_card_says(small_corpus):
    """The fill-mask task moves the outputs of the export by one position."""
    pretrain([*small_corpus.flags, *runs.SHORT_RUN, *runs.STANDSTILL, *MNTP, "--save", "run"])
    directory = hf_models.to_hf("run", "hf")
    assert "read the logits at position i - 1" in (directory / "README.md").read_text()
    moved, _ = fill_mask.load_masked_lm(directory)
    config = json.loads((directory / "config.json").read_text())
    assert config.pop("prediction_shift") == 1
    (directory / "config.json").write_text(json.dumps(config))
    in_place, _ = fill_mask.load_masked_lm(directory)
    tokens = torch.arange(2, 30)[None]
    with torch.no_grad():
        assert torch.equal(moved(tokens).logits[:, 1:], in_place(tokens).logits[:, :-1])


def test_what_a_card_says_of_others_is_text_alone():
    evil = "a`\n---\nlicense: mit\n<script>alert(1)</script> [x](http://y) \x1b[2J"
    start = RunInit(
        "branch",
        evil,
        40,
        before=(Ancestor(evil, 10, evil, 20480), Ancestor(evil, 0, evil, 0, family="llama")),
    )
    metrics = {inline_code(evil + "|", cell=True): {"step": 3, "loss": "<b>"}}
    facts = dict.fromkeys(("data", "tokenizer", "added_token", "schedule_text"), evil)
    export = dataclasses.replace(provenance("mlm"), start=start, metrics=metrics, **facts)
    text = build_model_card(evil, export, Attention.BIDIRECTIONAL)
    assert "\x1b" not in text
    front, _, rest = text.removeprefix("---\n").partition("\n---\n")
    assert (
        front.count("\n") == 3
        and "license: unknown" in front
        and "\n---\n" not in rest
        and "\nlicense" not in rest
    )
    for line in rest.splitlines():  # what begins in a line ends in it
        outside = re.sub(r"(?<!\\)`[^`]*`", "", line)
        assert not re.search(r"(?<!\\)[`<]|(?<!\\)\[x", outside), line
    [row] = [line for line in rest.splitlines() if line.startswith("| 3 |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 5


@pytest.mark.parametrize(
    "line", ["[1]", '{"step": "4"}', '{"step": 4, "objectives": {"a": 5}}', None]
)
def test_metrics_of_another_kind_are_left_out(tmp_path, line):
    for name in (METRICS_FILE, VALIDATION_FILE):
        if line is None:
            os.mkfifo(tmp_path / name)  # which could block
        else:
            (tmp_path / name).write_text(line + "\n")
    found = read_last_metrics(tmp_path, 10)
    assert not any("held out" in name for name in found)
    build_model_card(
        "x", dataclasses.replace(provenance("mlm"), metrics=found), Attention.BIDIRECTIONAL
    )
