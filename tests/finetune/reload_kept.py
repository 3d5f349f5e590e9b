"""Scores of kept models by transformers or sentence-transformers only.

The input is [[DIRECTORY, FAMILY, DATA], ...] as JSON.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, ndcg_score
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

SENTENCES = ["stan plark mill", "dove brack", "plark plark dove stan"]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def score_sc(directory, data):
    """Accuracy, in batches of four padded texts."""
    classify = pipeline("text-classification", str(directory), batch_size=4, truncation=True)
    rows = read(data / "test.jsonl")
    found = classify([row["text"] for row in rows])
    right = [one["label"] == row["label"] for one, row in zip(found, rows, strict=True)]
    return np.mean(right), classify(SENTENCES)


def score_regression(directory, data):
    """Mean of both correlations of the numbers, by the pipeline's defaults."""
    predict = pipeline("text-classification", str(directory), batch_size=4, truncation=True)
    assert predict.model.config.problem_type == "regression"
    rows = read(data / "test.jsonl")
    gold = [row["label"] for row in rows]
    found = [one["score"] for one in predict([row["text"] for row in rows])]
    return np.mean([pearsonr(gold, found)[0], spearmanr(gold, found)[0]]), predict(SENTENCES)


def score_multi_label(directory, data):
    """Micro F1 of the labels above the threshold of finetuning.json."""
    classify = pipeline("text-classification", str(directory), top_k=None, truncation=True)
    assert classify.model.config.problem_type == "multi_label_classification"
    threshold = json.loads((directory / "finetuning.json").read_text())["threshold"]
    rows = read(data / "test.jsonl")
    gold = []
    found = []
    for row, scores in zip(rows, classify([row["text"] for row in rows]), strict=True):
        for score in scores:
            gold.append(score["label"] in row["labels"])
            found.append(score["score"] >= threshold)
    return f1_score(gold, found), classify(SENTENCES)


def score_reranking(directory, data):
    """NDCG@10 by the evaluator of sentence-transformers."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import evaluation

    model = CrossEncoder(str(directory))
    samples = {}
    for row in read(data / "test.jsonl"):
        documents = samples.setdefault(row["query"], {"positive": {}, "negative": {}})
        documents["positive"][row["document"]] = 1
        documents["negative"] |= dict.fromkeys(row["negatives"])
    evaluate = evaluation.CrossEncoderRerankingEvaluator(
        [
            {
                "query": query,
                "positive": [*documents["positive"]],
                "negative": [*(documents["negative"].keys() - documents["positive"].keys())],
            }
            for query, documents in samples.items()
        ]
    )
    scores = evaluate(model)
    card = (directory / "README.md").read_text()
    assert f"| test | mrr@10 | {100 * scores['mrr@10']:.2f} |" in card
    answers = model.predict([("stan mill", text) for text in SENTENCES])
    return scores["ndcg@10"], answers.tolist()


def score_tc(directory, data):
    """Return the mean over sentences of the macro F1 of tags.

    A word's tag is the vote of its tokens.
    """
    model = AutoModelForTokenClassification.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    scores = []
    for row in read(data / "test.jsonl"):
        words = row["tokens"]
        inputs = tokenizer(
            " ".join(words), truncation=True, return_tensors="pt", return_offsets_mapping=True
        )
        offsets = inputs.pop("offset_mapping")[0].tolist()
        special = inputs["input_ids"][0] == tokenizer.eos_token_id
        ends = np.cumsum([len(word) + 1 for word in words]) - 1
        votes = [Counter() for _ in words]
        for label, (start, end), is_special in zip(
            model(**inputs).logits[0].argmax(-1), offsets, special, strict=True
        ):
            if not is_special and end:
                votes[int(np.searchsorted(ends, start, side="right"))][int(label)] += 1
        tags = [model.config.id2label[vote.most_common(1)[0][0]] if vote else "O" for vote in votes]
        scores.append(f1_score(row["tags"], tags, average="macro"))
    return np.mean(scores), pipeline("token-classification", str(directory))(SENTENCES)


def score_qa(directory, data):
    """Mean F1 of the positions inside the answer."""
    model = AutoModelForTokenClassification.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    scores = []
    for paragraph in json.loads((data / "test.json").read_text())["data"][0]["paragraphs"]:
        for qa in paragraph["qas"]:
            prefix = f"Question: {qa['question']}\nContext: "
            [answer] = qa["answers"]
            texts = (prefix, paragraph["context"])
            inputs = tokenizer(
                *texts, truncation="only_second", return_tensors="pt", return_offsets_mapping=True
            )
            start = answer["answer_start"]
            end = answer["answer_start"] + len(answer["text"])
            places = zip(
                inputs.sequence_ids(0), inputs.pop("offset_mapping")[0].tolist(), strict=True
            )
            gold = {
                at
                for at, (part, (left, right)) in enumerate(places)
                if part == 1 and left < end and right > start
            }
            inside = {int(at) for at in torch.nonzero(model(**inputs).logits[0].argmax(-1))} or {0}
            scores.append(2 * len(gold & inside) / (len(gold) + len(inside)))
    questions = [["Question: which?\nContext: ", sentence] for sentence in SENTENCES]
    tag = pipeline("token-classification", str(directory), ignore_labels=[])
    return np.mean(scores), tag(questions, is_split_into_words=True, delimiter="")


def score_ir(directory, data):
    """Mean NDCG@10 of the one relevant document of each query."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory))
    documents = {row["_id"]: row["text"] for row in read(data / "corpus.jsonl")}
    queries = {row["_id"]: row["text"] for row in read(data / "queries.jsonl")}
    judged = {}
    for split in ("dev", "test"):
        lines = (data / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
        judged[split] = dict(line.split("\t")[:2] for line in lines)
    relevant = judged["test"]
    # Only judged documents are searched
    names = sorted({*judged["dev"].values(), *relevant.values()}, reverse=True)
    embedded = model.encode([documents[name] for name in names], prompt_name="document")
    similar = model.similarity(
        model.encode([queries[query] for query in relevant], prompt_name="query"), embedded
    )
    there = [[name == document for name in names] for document in relevant.values()]
    return ndcg_score(there, similar.numpy(), k=10), model.encode(
        SENTENCES, prompt_name="query"
    ).shape


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for directory, family, data in json.loads(sys.argv[1]):
        with torch.inference_mode():
            score, answers = globals()[f"score_{family}"](Path(directory), Path(data))
        found[directory] = f"{100 * score:.2f}", answers
    assert not any(name.startswith("megaenc") for name in sys.modules)
    print(json.dumps(found, default=float))
