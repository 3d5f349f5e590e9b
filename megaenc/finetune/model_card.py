"""Model cards of fine-tuned models."""

from collections.abc import Mapping
from typing import Any

from megaenc import markdown
from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.examples import TaskFamily

_PIPELINES = {
    TaskFamily.SC: "text-classification",
    TaskFamily.TC: "token-classification",
    TaskFamily.QA: "token-classification",
    TaskFamily.IR: "sentence-similarity",
}
_USAGE = {
    TaskFamily.SC: """from transformers import pipeline

pipeline("text-classification", "FOLDER")(["a text"], truncation=True)""",
    TaskFamily.TC: """from transformers import pipeline

pipeline("token-classification", "FOLDER", aggregation_strategy="simple")(["words of a sentence"])""",
    TaskFamily.QA: """from transformers import pipeline

tag = pipeline("token-classification", "FOLDER", aggregation_strategy="simple", ignore_labels=["OUTSIDE"])
tag(["Question: who?\\nContext: ", "a text"], is_split_into_words=True, delimiter="")  # its halves are tokenized apart""",
    TaskFamily.IR: """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")
queries, documents = model.encode(["a query"], prompt_name="query"), model.encode(["a text"], prompt_name="document")
model.similarity(queries, documents)""",
}


def build_finetuned_card(name: str, details: Mapping[str, Any], architecture: str) -> str:
    """Return the text of README.md for a fine-tuned model called `name`; `details`: the content of finetuning.json."""
    family = TaskFamily(details["family"])
    is_retrieval = family == TaskFamily.IR
    rows = "\n".join(
        f"| {split} | {metric} | {100 * value:.2f} |"
        for split, values in details["scores"].items()
        for metric, value in values.items()
    )
    facts = {
        "base model": details["model"],
        "data set": details["dataset"],
        "trained on": details["train_on"],
        "learning rate": format_learning_rate(details["learning_rate"]),
        "seed": details["seed"],
        "steps": f"{details['steps']:,}" + (f", weights of step {details['best_step']:,}" if "best_step" in details else ""),
        "head": "none" if is_retrieval else details["protocol"]["head"],
        "attention": details["protocol"]["attention"],
        "trained in": f"{details['protocol']['precision']}; kept and scored in fp32",
        **{f"SHA-256 of {role.replace('_', ' ')}": digest for role, digest in details["fingerprints"].items()},
    }
    table = "\n".join(f"| {key} | {markdown.inline_code(value, cell=True)} |" for key, value in facts.items())
    return f"""---
library_name: {"sentence-transformers" if is_retrieval else "transformers"}
pipeline_tag: {_PIPELINES[family]}
license: unknown
tags: [megaenc]
---

# {markdown.escape(name)}

{markdown.escape(details["model"])} fine-tuned on {markdown.escape(details["train_on"])}. It loads with
`{architecture}` of transformers.

```python
{_USAGE[family]}
```

## Scores

| split | metric | percent |
|---|---|---|
{rows}

## Training

| | |
|---|---|
{table}

`finetuning.json` has the whole protocol.
"""
