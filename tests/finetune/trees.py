"""Trees of results as the study has published them, and as runs write them."""

import json
from pathlib import Path

from megaenc.finetune.config import format_learning_rate


def published(
    root: Path, model: str, place: str, rate: float, seed: int, validation, test, run: str = ""
) -> Path:
    """Write a published result; scores are a number or a list by example.

    `place` is FAMILY/DATASET.
    """
    path = root / model / place / f"{run}lr{format_learning_rate(rate)}_sd{seed}" / "results.json"
    path.parent.mkdir(parents=True)
    splits = {}
    for name, scores in (("validation", validation), ("test", test)):
        listed = scores if isinstance(scores, list) else [0.0, 1.0, 0.6309297535714573]
        splits[name] = {
            "score": sum(scores) / len(scores) if isinstance(scores, list) else scores,
            "scores_i": listed,
        }
    path.write_text(json.dumps(splits, indent=4))
    return path


def cell(
    root: Path, model: str, place: str, by_rate: dict[float, list[float]], run: str = ""
) -> None:
    """Write runs with equal scores on validation and test, by rate in order of seeds.

    None leaves a run out.
    """
    for rate, scores in by_rate.items():
        for seed, score in enumerate(scores):
            if score is not None:
                published(root, model, place, rate, seed, score, score, run)
