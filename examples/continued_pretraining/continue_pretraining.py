r"""Turn a decoder into an encoder: import, continue pretraining with MLM, export.

    python examples/continued_pretraining/continue_pretraining.py --input corpus.jsonl \
        --output out/llama [--model DIRECTORY]

Prints each command before running it. Without --model, uses a small model of --family with random
weights. Downloads nothing.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megaenc import flags
from megaenc.console import print_rank_0, silence_libraries
from megaenc.data.sources.resolve import InputConfig, resolve_inputs
from megaenc.errors import handle_command_errors
from megaenc.output_paths import refuse_existing
from megaenc.processes import python_command, python_environment

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class ContinuedPretrainingConfig:
    """Flags of this example."""

    input: str
    """text in any format that `megaenc preprocess` reads"""
    output: str
    """directory for all outputs; must not exist"""
    model: str = ""
    """Hugging Face directory of the model (default: a small one with random weights)"""
    family: Literal["llama", "qwen3"] = "llama"
    """architecture of the small model without --model"""
    add_mask_token: bool = False
    """add a mask token to the tokenizer if it has neither one nor a reserved token"""
    train_iters: int = 100
    """MLM training steps"""
    seq_length: int = 128
    """tokens of a pack"""
    micro_batch_size: int = 4
    """packs of a micro-batch"""
    global_batch_size: int = 16
    """packs of a step"""
    lr: float = 5e-4
    """peak learning rate"""
    processes: int = 1
    """tensor-parallel processes"""


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run import, preprocessing, pretraining and export in sequence."""
    silence_libraries()
    settings = flags.parse(
        ContinuedPretrainingConfig, argv, prog="continue_pretraining.py", description=__doc__
    )
    out = Path(settings.output)
    refuse_existing(out, "--output")
    # Fails before the output directory is created
    resolve_inputs(InputConfig((settings.input,)), ["text"])
    source = settings.model or str(create_model(settings.family, settings.input, out / "source"))
    mask = ["--add-mask-token"] if settings.add_mask_token else []
    run_megaenc("convert", "from-hf", "--input", source, "--output", out / "core", *mask)
    tokenizer = out / "core" / "tokenizer"
    corpus = [
        "--input",
        settings.input,
        "--output-prefix",
        out / "corpus",
        "--tokenizer",
        tokenizer,
        "--append-eod",
    ]
    run_megaenc("preprocess", *corpus)
    schedule = [
        "--objective-schedule",
        "mlm:1.0",
        "--train-iters",
        settings.train_iters,
        "--lr",
        settings.lr,
    ]
    batch = [
        "--micro-batch-size",
        settings.micro_batch_size,
        "--global-batch-size",
        settings.global_batch_size,
    ]
    run_pretrain(
        settings.processes,
        *(
            "--config",
            out / "core" / "config.yaml",
            "--init-from",
            out / "core",
            "--data-path",
            out / "corpus_text_document",
        ),
        *(*schedule, *batch, "--seq-length", settings.seq_length, "--save", out / "run"),
    )
    run_megaenc("convert", "to-hf", "--load", out / "run", "--output", out / "hf")
    run_megaenc(
        "convert",
        "to-hf",
        "--load",
        out / "run",
        "--output",
        out / "sentences",
        "--sentence-transformers",
    )
    print_rank_0(
        f"{out / 'hf'} loads with transformers, {out / 'sentences'} with sentence-transformers"
    )


def create_model(family: str, text: str, directory: Path) -> Path:
    """Write a tiny decoder with random weights as a Hugging Face directory.

    Its tokenizer is trained on `text`.

    Returns:
        Path of the directory.
    """
    run_megaenc("tokenizer", "--input", text, "--vocab-size", 400, "--output", directory)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    sizes = dict(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **ids, head_dim=16, max_position_embeddings=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def run_megaenc(*words: object) -> None:
    """Run a `megaenc` command."""
    run_command(["-m", "megaenc", *words], f"megaenc {shlex.join(map(str, words))}")


def run_pretrain(processes: int, *words: object) -> None:
    """Run pretraining, under torchrun for several processes."""
    if processes > 1:
        words = (*words, "--tensor-model-parallel-size", processes)
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        if processes > 1
        else []
    )
    script = ROOT / "examples" / "pretrain_encoder.py"
    text = f"torchrun --nproc-per-node {processes}" if processes > 1 else "python"
    run_command(
        [*torchrun, script, *words],
        f"{text} {script.relative_to(ROOT)} {shlex.join(map(str, words))}",
    )


def run_command(words: list[object], text: str) -> None:
    """Print and run a command of this Python; exit with its exit code if it fails."""
    print_rank_0(f"$ {text}")
    code = subprocess.run(python_command(*map(str, words)), env=python_environment()).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
