"""Run directories without a run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

CLM = "clm"
MLM = "mlm(mask=0.3)"


def write_run(
    directory: Path,
    train_iters: int = 40,
    made: int | None = None,
    phases: Sequence[tuple[str, int]] = (),
    begun: int = 0,
    start: Mapping | None = None,
    every: int = 1,
) -> Path:
    """Write a run directory with a row each `every` steps up to `made`.

    There is a validation each ten rows, and the loss falls from 9 by 0.1 a row. Without `phases`,
    objectives with their last steps, a quarter is CLM and the rest MLM. CLM predicts 1000 tokens a
    step and others 300; a step is 10**15 FLOPs. The run begins after `begun` steps, and `start` is
    the record of its start.
    """
    made = train_iters if made is None else made
    phases = phases or [(CLM, train_iters // 4), (MLM, train_iters)]
    rows = []
    validations = [] if begun else [_validation(0, phases, every)]
    for step in range(begun + every, made + 1, every):
        phase = _phase_of(step, phases)
        row = {
            "step": step,
            "objective": phases[phase][0],
            "phase": phase,
            "loss": 9 - 0.1 * step / every,
            "accuracy": step / every / 100,
            "learning_rate": 5e-4,
            "grad_norm": 1.0,
            "tokens_per_second": 500.0,
            "step_seconds": 2.0,
        }
        rows.append(row | _progress(step, phases))
        if step % (10 * every) == 0 or step == train_iters:
            validations.append(_validation(step, phases, every))
    directory.mkdir(parents=True)
    write_rows(directory / "metrics.jsonl", rows)
    write_rows(directory / "validation.jsonl", validations)
    schedule = ",".join(f"{objective}:{last}" for objective, last in phases)
    identity = {
        "train_iters": train_iters,
        "objective_schedule": schedule,
        "lr": 5e-4,
        "seq_length": 125,
        "global_batch_size": 8,
    }
    facts = {"megaenc": "0.1.0", "parameters": 7_340_000, "identity": identity}
    if start is not None:
        facts["start"] = {**start, "at": begun or start["at"], **_progress(begun, phases)}
    (directory / "run.json").write_text(json.dumps(facts))
    return directory


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _phase_of(step: int, phases: Sequence[tuple[str, int]]) -> int:
    return sum(step > last for _, last in phases[:-1])


def _progress(step: int, phases: Sequence[tuple[str, int]]) -> dict:
    causal = min(step, phases[0][1]) if phases[0][0] == CLM else 0
    return {
        "tokens": 1000 * step,
        "predicted_tokens": 1000 * causal + 300 * (step - causal),
        "flops": 10**15 * step,
    }


def _validation(step: int, phases: Sequence[tuple[str, int]], every: int) -> dict:
    rows = step / every
    objectives = {
        CLM: {"loss": 9 - 0.05 * rows, "accuracy": 0.01 * rows, "most_frequent": 0.08},
        MLM: {"loss": 9 - 0.09 * rows, "accuracy": 0.008 * rows, "most_frequent": 0.05},
    }
    return {"step": step, **_progress(step, phases), "objectives": objectives}
