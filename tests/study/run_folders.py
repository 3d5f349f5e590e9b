"""Run folders without a run."""

import json
from pathlib import Path


def write_run(folder: Path, train_iters: int = 40, made: int | None = None) -> Path:
    """`made` steps of a quarter CLM, then MLM: the loss falls from 9 by 0.1 a step; a validation each ten steps.

    CLM predicts 1000 tokens a step and MLM 300; a step is 10**15 FLOPs.
    """
    made = train_iters if made is None else made
    rows, validations = [], [_validation(0, train_iters)]
    for step in range(1, made + 1):
        phase = int(step > train_iters // 4)
        rows.append(
            {
                "step": step,
                "objective": ("clm", "mlm(mask=0.3)")[phase],
                "phase": phase,
                "loss": 9 - 0.1 * step,
                "accuracy": step / 100,
                "learning_rate": 5e-4,
                "grad_norm": 1.0,
                **_progress(step, train_iters),
                "tokens_per_second": 500.0,
                "step_seconds": 2.0,
            }
        )
        if step % 10 == 0:
            validations.append(_validation(step, train_iters))
    folder.mkdir(parents=True)
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "validation.jsonl", validations)
    (folder / "run.json").write_text(json.dumps({"parameters": 7_340_000, "identity": {"train_iters": train_iters}}))
    return folder


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _progress(step: int, train_iters: int) -> dict:
    causal = min(step, train_iters // 4)
    return {"tokens": 1000 * step, "predicted_tokens": 1000 * causal + 300 * (step - causal), "flops": 10**15 * step}


def _validation(step: int, train_iters: int) -> dict:
    objectives = {
        "clm": {"loss": 9 - 0.05 * step, "accuracy": 0.01 * step, "most_frequent": 0.08},
        "mlm(mask=0.3)": {"loss": 9 - 0.09 * step, "accuracy": 0.008 * step, "most_frequent": 0.05},
    }
    return {"step": step, **_progress(step, train_iters), "objectives": objectives}
