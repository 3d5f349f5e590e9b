"""Compare fine-tuning runs per hour of `megaenc finetune grid` and the Trainer.

    python benchmarks/finetuning.py --model hf/a --dataset path/to/sc/sst2 --output finetuning.json

transformers' Trainer has the study's settings: it pads batches of 4 texts, accumulates 8 gradients
and runs once at a time with all threads. Times include startup, imports and evaluation of all runs;
the order alternates between rounds. Text classification with local directories of model and data.
The Trainer needs `pip install accelerate`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class FinetuneBenchConfig:
    """Flags of the fine-tuning benchmark."""

    model: str
    """Hugging Face directory of an encoder with its tokenizer"""
    dataset: str
    """directory of a text classification data set with train, valid and test as JSON lines"""
    output: str = "finetuning.json"
    """JSON file for the results"""
    max_steps: int = 100
    """steps of each run, of 32 texts each"""
    learning_rate: float = 2e-4
    """peak learning rate of each run"""
    seeds: int = 3
    """runs of each contender per round"""
    rounds: int = 1
    """rounds, in each of which both contenders do all runs"""
    precision: str = "fp32"
    """fp32, or bf16 for float32 weights computed in bfloat16"""


def train_with_trainer(settings: dict[str, Any], seed: int) -> dict[str, float]:
    """Fine-tune once with transformers' Trainer and return the accuracy on each split."""
    import numpy as np
    import torch
    from datasets import load_dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    torch.set_num_threads(os.cpu_count() or 1)
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    directory = Path(settings["dataset"])
    files = {
        split: str(next(directory.glob(f"{split}.jsonl*"))) for split in ("train", "valid", "test")
    }
    data = load_dataset("json", data_files=files)

    def tokenise(batch):
        return tokenizer(
            [text + tokenizer.eos_token for text in batch["text"]],
            add_special_tokens=False,
            truncation=True,
        )

    labels = len(set(data["train"]["label"]))
    data = data.map(
        tokenise,
        batched=True,
        remove_columns=[name for name in data["train"].column_names if name != "label"],
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        settings["model"], num_labels=labels, classifier_pooling="mean"
    )
    with tempfile.TemporaryDirectory() as work:
        arguments = TrainingArguments(
            output_dir=work,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=8,
            per_device_eval_batch_size=4,
            max_steps=settings["max_steps"],
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="linear",
            warmup_steps=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_epsilon=1e-5,
            weight_decay=0.1,
            max_grad_norm=1.0,
            bf16=settings["precision"] == "bf16",
            use_cpu=not torch.cuda.is_available(),
            seed=seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        collator = DataCollatorWithPadding(tokenizer)
        trainer = Trainer(
            model=model, args=arguments, train_dataset=data["train"], data_collator=collator
        )
        trainer.train()
        scores = {}
        for split in ("valid", "test"):
            predicted = trainer.predict(data[split])
            scores[split] = float(
                (np.argmax(predicted.predictions, axis=-1) == predicted.label_ids).mean()
            )
    return scores


def run_trainer(settings: FinetuneBenchConfig, work: Path) -> tuple[float, list[float]]:
    """Run the Trainer once per seed; return total seconds and test accuracies."""
    program = (
        f"import sys, json; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import finetuning; "
    )
    program += (
        "print(json.dumps(finetuning.train_with_trainer(json.loads(sys.argv[1]), "
        "int(sys.argv[2]))))"
    )
    began = time.monotonic()
    scores = []
    environment = os.environ | {
        "HF_DATASETS_CACHE": str(work / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    for seed in range(settings.seeds):
        command = [sys.executable, "-P", "-c", program, json.dumps(asdict(settings)), str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"the Trainer's script ended with {done.returncode}:\n{done.stderr[-2000:]}"
            )
        scores.append(json.loads(done.stdout.splitlines()[-1])["test"])
    return time.monotonic() - began, scores


def run_grid(settings: FinetuneBenchConfig, work: Path) -> tuple[float, list[float]]:
    """Run all seeds as one grid; return total seconds and test accuracies."""
    command = [sys.executable, "-P", "-m", "megaenc", "finetune", "grid", "--output", str(work)]
    command += ["--model", settings.model, "--datasets", settings.dataset]
    command += ["--learning-rates", str(settings.learning_rate), "--seeds", str(settings.seeds)]
    command += [
        "--max-steps",
        str(settings.max_steps),
        "--epochs",
        "1000",
        "--precision",
        settings.precision,
    ]
    start = time.monotonic()
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    seconds = time.monotonic() - start
    if done.returncode:
        raise SystemExit(
            f"the grid ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
        )
    files = sorted(work.glob("*/SC/*/*/results.json"))
    return seconds, [json.loads(file.read_text())["test"]["score"] for file in files]


def measure_all(settings: FinetuneBenchConfig, work: Path) -> dict[str, Any]:
    """Return runs per hour, their ratios by round, and accuracies of both contenders.

    Accuracies have confidence intervals over seeds.
    """
    sides = {"trainer": run_trainer, "grid": run_grid}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    scores: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(settings.rounds):
        for name in list(sides)[:: 1 if round_ % 2 == 0 else -1]:
            directory = work / f"{name}{round_}"
            directory.mkdir()
            elapsed, scores[name] = sides[name](settings, directory)
            seconds[name].append(elapsed)
            print(
                f"{name}: {settings.seeds} runs in {elapsed:.0f} s, accuracy "
                f"{mean(scores[name]):.4f}",
                flush=True,
            )
    ratios = [slow / fast for slow, fast in zip(seconds["trainer"], seconds["grid"], strict=True)]
    hourly = {name: settings.seeds * 3600 / median(values) for name, values in seconds.items()}
    spread = {
        name: 1.96 * stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        for name, values in scores.items()
    }
    return {
        **asdict(settings),
        "cores": os.cpu_count(),
        "runs_per_hour": hourly,
        "ratio": median(ratios),
        "ratios": ratios,
        "accuracy": {name: mean(values) for name, values in scores.items()},
        "interval": spread,
        "accuracies": scores,
    }


def main() -> None:
    """Parse flags, run the benchmark, write and print its results."""
    import common

    from megaenc import flags
    from megaenc.console import silence_libraries

    silence_libraries()
    settings = flags.parse(FinetuneBenchConfig, None, prog="finetuning.py", description=__doc__)
    with tempfile.TemporaryDirectory() as work:
        results = measure_all(settings, Path(work))
    common.write_report(settings.output, results)
    hourly = results["runs_per_hour"]
    print(
        f"runs per hour: {hourly['grid']:.0f} in the grid, {hourly['trainer']:.0f} by the Trainer: "
        f"{results['ratio']:.1f} times"
    )


if __name__ == "__main__":
    main()
