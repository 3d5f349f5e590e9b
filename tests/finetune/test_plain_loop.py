"""Runs of regression and multi-label have losses and scores of a plain loop."""

import copy
import json

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score
from torch import nn
from transformers import AutoTokenizer, get_linear_schedule_with_warmup

from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.datasets.registry import find_dataset
from megaenc.finetune.grid.jobs import build_jobs
from megaenc.finetune.model.task_class import build_hf_model
from megaenc.finetune.train import FinetuneRun, iterate_batches

STEPS = 20
LABELS = ["dove", "mill", "stan"]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def get_targets(rows):
    """Numbers, or rows of 0 and 1, for transformers' own loss."""
    if "label" in rows[0]:
        return torch.tensor([row["label"] for row in rows])
    return torch.tensor([[float(label in row["labels"]) for label in LABELS] for row in rows])


def score(rows, logits):
    if "label" in rows[0]:
        pair = (get_targets(rows).numpy(), logits[:, 0].numpy())
        return np.mean([pearsonr(*pair)[0], spearmanr(*pair)[0]])
    return f1_score(get_targets(rows).numpy(), logits.numpy() > 0, average="micro")


@pytest.mark.parametrize("family", ["regression", "multi_label"])
def test_losses_and_scores_are_those_of_a_plain_loop(family, model, data, tmp_path):
    protocol = FinetuneConfig(
        max_steps=STEPS, epochs=9, batch_size=8, weight_decay=0, precision="fp32", head="native"
    )
    jobs = ([str(model)], [str(data / family)], [3e-3], [0], str(tmp_path), protocol)
    [job] = build_jobs(*jobs, DatasetConfig(), find_dataset)
    told = []
    run = FinetuneRun(job, told.append)
    task = run.task
    # A copy, as the result shares its weights with the run.
    plain = copy.deepcopy(
        build_hf_model(run.model.backbone, run.model.head, family, task.label_names, None)
    )
    # The token that pads also ends texts, and has a gradient there.
    plain.get_input_embeddings().padding_idx = None
    run.train()
    losses = [at.fields["loss"] for at in told if at.stage == "training"]
    result = run.evaluate(run.held_out[0])

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(rows):
        texts = [[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id] for row in rows]
        padded = tokenizer.pad({"input_ids": texts}, return_tensors="pt", padding_side="right")
        return {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}

    adam = torch.optim.AdamW(
        plain.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0
    )
    schedule = get_linear_schedule_with_warmup(adam, STEPS // 10, STEPS)
    train = read(data / family / "train.jsonl")
    plain.train()
    for batch, loss in zip(iterate_batches(0, len(train), 8, STEPS), losses, strict=True):
        rows = [train[index] for index in batch]
        expected = plain(**encode(rows), labels=get_targets(rows)).loss
        assert loss == pytest.approx(expected.item(), abs=1e-4)
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        schedule.step()
        adam.zero_grad()
    plain.eval()
    for split, name in (("validation", "valid"), ("test", "test")):
        rows = read(data / family / f"{name}.jsonl")
        with torch.no_grad():
            expected = score(rows, plain(**encode(rows)).logits)
        assert f"{100 * result.scores[split].score:.2f}" == f"{100 * expected:.2f}"
