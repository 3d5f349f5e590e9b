"""Plans of runs for tests, and more corpora."""

from pathlib import Path

import runs

from megaenc.data.preprocess import command as preprocess
from megaenc.training.config import parse_config
from megaenc.training.plan import Plan
from megaenc.training.planning import build_plan


def plan_of(*flags) -> Plan:
    """Return the plan of a run with these flags."""
    return build_plan(parse_config([str(flag) for flag in flags], "test"))


def make_corpus(prefix: Path, tokenizer: Path, documents: int, seed: int = 0) -> str:
    """Write a corpus of made-up documents, each with its end; return its prefix."""
    text = runs.write_text(prefix.with_suffix(".jsonl"), documents=documents, seed=seed)
    flags = [
        "--input",
        str(text),
        "--output-prefix",
        str(prefix),
        "--tokenizer",
        str(tokenizer),
        "--append-eod",
    ]
    preprocess.main(flags)
    return f"{prefix}_text_document"
