"""A decoder becomes an encoder: a Hugging Face model comes in, is trained on MLM, and goes out again.

    python examples/continued_pretraining/continue_pretraining.py --input corpus.jsonl --output out/llama [--model FOLDER]

Runs the commands that one would give by hand, and prints each. Without --model a small one with random weights is made, of the
family that --family names. Nothing is downloaded.
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
class Settings:
    """What to continue, and for how long."""

    input: str
    """text, from all that `megaenc preprocess` reads"""
    output: str
    """folder for everything that is made; must not exist"""
    model: str = ""
    """Hugging Face folder of the model; a small one with random weights unless given"""
    family: Literal["llama", "qwen3"] = "llama"
    """of the model that is made where none is given"""
    add_mask_token: bool = False
    """give its tokenizer a mask token, where it has none nor a reserved one"""
    train_iters: int = 100
    """steps of MLM"""
    seq_length: int = 128
    """tokens of a pack"""
    micro_batch_size: int = 4
    """packs that one process reads at once"""
    global_batch_size: int = 16
    """packs of a step"""
    lr: float = 5e-4
    """peak learning rate"""
    processes: int = 1
    """processes of torchrun, which share each layer"""


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Make each folder from the one before."""
    silence_libraries()
    settings = flags.parse(Settings, argv, prog="continue_pretraining.py", description=__doc__)
    out = Path(settings.output)
    refuse_existing(out, "--output")
    resolve_inputs(InputConfig((settings.input,)), ["text"])  # before there is a folder: the commands look at what they need
    source = settings.model or str(make_model(settings.family, settings.input, out / "source"))
    mask = ["--add-mask-token"] if settings.add_mask_token else []
    megaenc("convert", "from-hf", "--input", source, "--output", out / "core", *mask)
    tokenizer = out / "core" / "tokenizer"
    corpus = ["--input", settings.input, "--output-prefix", out / "corpus", "--tokenizer", tokenizer, "--append-eod"]
    megaenc("preprocess", *corpus)
    schedule = ["--objective-schedule", "mlm:1.0", "--train-iters", settings.train_iters, "--lr", settings.lr]
    batch = ["--micro-batch-size", settings.micro_batch_size, "--global-batch-size", settings.global_batch_size]
    pretrain(
        settings.processes,
        *("--config", out / "core" / "config.yaml", "--init-from", out / "core", "--data-path", out / "corpus_text_document"),
        *(*schedule, *batch, "--seq-length", settings.seq_length, "--save", out / "run"),
    )
    megaenc("convert", "to-hf", "--load", out / "run", "--output", out / "hf")
    megaenc("convert", "to-hf", "--load", out / "run", "--output", out / "sentences", "--sentence-transformers")
    print_rank_0(f"{out / 'hf'} loads with transformers, {out / 'sentences'} with sentence-transformers")


def make_model(family: str, text: str, folder: Path) -> Path:
    """A decoder of next to no size with random weights, and a tokenizer learnt from `text`, as a Hugging Face folder."""
    megaenc("tokenizer", "--input", text, "--vocab-size", 400, "--output", folder)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    ids = dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **ids, head_dim=16, max_position_embeddings=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def megaenc(*words: object) -> None:
    """The command `megaenc`."""
    run(["-m", "megaenc", *words], f"megaenc {shlex.join(map(str, words))}")


def pretrain(processes: int, *words: object) -> None:
    """Pretraining, under torchrun where there are several processes."""
    if processes > 1:
        words = (*words, "--tensor-model-parallel-size", processes)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] if processes > 1 else []
    script = ROOT / "examples" / "pretrain_encoder.py"
    shown = f"torchrun --nproc-per-node {processes}" if processes > 1 else "python"
    run([*torchrun, script, *words], f"{shown} {script.relative_to(ROOT)} {shlex.join(map(str, words))}")


def run(words: list[object], shown: str) -> None:
    """Show and run a command of this Python; an error ends this program with its exit code."""
    print_rank_0(f"$ {shown}")
    code = subprocess.run(python_command(*map(str, words)), env=python_environment()).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
