"""Model cards of fine-tuned models."""

from collections.abc import Mapping
from typing import Any

from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.examples import TOKENIZER_PAIRS, TaskFamily
from megaenc.tables import escape_markdown, format_facts

_PIPELINES = {
    TaskFamily.SC: "text-classification",
    TaskFamily.TC: "token-classification",
    TaskFamily.QA: "token-classification",
    TaskFamily.IR: "sentence-similarity",
    TaskFamily.REGRESSION: "text-classification",
    TaskFamily.MULTI_LABEL: "text-classification",
    TaskFamily.RERANKING: "text-ranking",
}
_USAGE = {
    TaskFamily.SC: """from transformers import pipeline

classify = pipeline("text-classification", "DIRECTORY")
classify(["a text"], truncation=True)
classify([PAIR], truncation=True)  # two texts""",
    TaskFamily.TC: """from collections import Counter

from transformers import AutoModelForTokenClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
model = AutoModelForTokenClassification.from_pretrained("DIRECTORY")
words = ["The", "words", "of", "a", "sentence"]
inputs = tokenizer(WORDS, is_split_into_words=True, truncation=True, return_tensors="pt")
votes = [Counter() for word in words]
for word, label in zip(inputs.word_ids(), model(**inputs).logits[0].argmax(-1).tolist()):
    if word is not None:
        votes[word][model.config.id2label[label]] += 1
tags = [vote.most_common(1)[0][0] if vote else "O" for vote in votes]""",
    TaskFamily.QA: """from transformers import pipeline

tag = pipeline("token-classification", "DIRECTORY", aggregation_strategy="simple", ignore_labels=["OUTSIDE"])
tag(["Question: who?\\nContext: ", "a text"], is_split_into_words=True, delimiter="")  # its halves are tokenized apart""",
    TaskFamily.IR: """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("DIRECTORY")
queries, documents = model.encode(["a query"], prompt_name="query"), model.encode(["a text"], prompt_name="document")
model.similarity(queries, documents)""",
    TaskFamily.RERANKING: """from sentence_transformers import CrossEncoder

model = CrossEncoder("DIRECTORY")
model.predict([("a query", "a document")])  # from 0 to 1
model.rank("a query", ["a document", "another"])""",
}
# The pipeline reads `problem_type` of config.json, so that a score is the number itself.
_USAGE[TaskFamily.REGRESSION] = _USAGE[TaskFamily.SC].replace("classify", "predict")
_USAGE[TaskFamily.MULTI_LABEL] = """from transformers import pipeline

classify = pipeline("text-classification", "DIRECTORY", top_k=None)
scores = classify(["a text"], truncation=True)[0]
labels = [label["label"] for label in scores if label["score"] >= THRESHOLD]
classify([PAIR], truncation=True)  # two texts"""

_SPACED_WORDS = '[words[0], *(f" {word}" for word in words[1:])]'


def build_finetuned_card(
    name: str,
    details: Mapping[str, Any],
    architecture: str,
    version: str = "",
    *,
    needs_spaces: bool = False,
) -> str:
    """Return the text of README.md, a model card, for a fine-tuned model.

    Args:
        name: Title of the card.
        details: Content of the model's finetuning.json.
        architecture: Name of the transformers class that loads the model.
        version: Lowest version of transformers that gives the same numbers; empty if unknown.
        needs_spaces: Result of `needs_spaced_words` for TC, else False.
    """
    family = TaskFamily(details["family"])
    library = "transformers"
    if family in (TaskFamily.IR, TaskFamily.RERANKING):
        library = "sentence-transformers"
    rows = "\n".join(
        f"| {split} | {metric} | {100 * value:.2f} |"
        for split, values in details["scores"].items()
        for metric, value in values.items()
    )
    facts = {
        "base model": details["model"],
        "data set": details["dataset"],
        "trained on": details["train_on"],
        **(
            {"fraction for validation, and for test": details["validation_fraction"]}
            if "validation_fraction" in details
            else {}
        ),
        "learning rate": format_learning_rate(details["learning_rate"]),
        "seed": details["seed"],
        "steps": f"{details['steps']:,}"
        + (f", weights of step {details['best_step']:,}" if "best_step" in details else ""),
        "head": "none" if family == TaskFamily.IR else details["protocol"]["head"],
        "attention": details["protocol"]["attention"],
        "trained in": f"{details['protocol']['precision']}; kept and scored in fp32",
        **{
            f"SHA-256 of {role.replace('_', ' ')}": digest
            for role, digest in details["fingerprints"].items()
        },
    }
    template = details.get("pair_template", TOKENIZER_PAIRS)
    pair = repr(template.format(text="a text", text_pair="another"))
    if template == TOKENIZER_PAIRS:
        pair = '{"text": "a text", "text_pair": "another"}'
    usage = (
        _USAGE[family]
        .replace("THRESHOLD", f"{details.get('threshold')}")
        .replace("WORDS", _SPACED_WORDS if needs_spaces else "words")
        .replace("PAIR", pair)  # last, as it may have any word
    )
    return f"""---
library_name: {library}
pipeline_tag: {_PIPELINES[family]}
license: unknown
tags: [megaenc]
---

# {escape_markdown(name)}

{escape_markdown(details["model"])} fine-tuned on {escape_markdown(details["train_on"])}. It loads with
`{architecture}` of transformers{f" {version} or later" if version else ""}.

```python
{usage}
```

## Scores

| split | metric | percent |
|---|---|---|
{rows}

## Training

{format_facts(facts)}

`finetuning.json` has the whole protocol.
"""
