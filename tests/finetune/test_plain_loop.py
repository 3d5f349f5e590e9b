"""Runs have losses and scores of a plain loop, in the families with own losses."""

import copy
import json

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, ndcg_score
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


def read(task, path):
    """Return the rows of a file, in reranking one for each pair."""
    if task.family == "reranking":
        split = {"valid": "validation"}.get(path.stem, path.stem)
        return [
            {
                "text": example.query,
                "text_pair": document,
                "label": float(document in example.positives),
            }
            for example in task.dataset.load_split(split)
            for document in example.documents
        ]
    return [json.loads(line) for line in path.read_text().splitlines()]


def get_targets(rows):
    """Numbers, or rows of 0 and 1, for transformers' own loss."""
    if "label" in rows[0]:
        return torch.tensor([row["label"] for row in rows])
    return torch.tensor([[float(label in row["labels"]) for label in LABELS] for row in rows])


def compute_loss(model, inputs, rows):
    if "text_pair" in rows[0]:
        logits = model(**inputs).logits[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, get_targets(rows))
    return model(**inputs, labels=get_targets(rows)).loss


def score(rows, logits):
    if "text_pair" in rows[0]:
        by_query = {}
        for row, logit in zip(rows, logits[:, 0].tolist(), strict=True):
            by_query.setdefault(row["text"], []).append((row["label"], logit))
        rankings = [zip(*pairs, strict=True) for pairs in by_query.values()]
        return np.mean([ndcg_score([labels], [scores], k=10) for labels, scores in rankings])
    if "label" in rows[0]:
        pair = (get_targets(rows).numpy(), logits[:, 0].numpy())
        return np.mean([pearsonr(*pair)[0], spearmanr(*pair)[0]])
    return f1_score(get_targets(rows).numpy(), logits.numpy() > 0, average="micro")


@pytest.mark.parametrize("family", ["regression", "multi_label", "reranking"])
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
        texts = []
        for row in rows:
            text = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
            if "text_pair" in row:
                text += [*tokenizer(row["text_pair"])["input_ids"], tokenizer.eos_token_id]
            texts.append(text)
        padded = tokenizer.pad({"input_ids": texts}, return_tensors="pt", padding_side="right")
        return {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}

    adam = torch.optim.AdamW(
        plain.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0
    )
    schedule = get_linear_schedule_with_warmup(adam, STEPS // 10, STEPS)
    train = read(task, data / family / "train.jsonl")
    plain.train()
    for batch, loss in zip(iterate_batches(0, len(train), 8, STEPS), losses, strict=True):
        rows = [train[index] for index in batch]
        expected = compute_loss(plain, encode(rows), rows)
        assert loss == pytest.approx(expected.item(), abs=1e-4)
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        schedule.step()
        adam.zero_grad()
    plain.eval()
    for split, name in (("validation", "valid"), ("test", "test")):
        rows = read(task, data / family / f"{name}.jsonl")
        with torch.no_grad():
            expected = score(rows, plain(**encode(rows)).logits)
        assert f"{100 * result.scores[split].score:.2f}" == f"{100 * expected:.2f}"
