"""`megaenc convert` and tools/convert_checkpoint.py."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megaenc import flags
from megaenc.atomic_io import exit_on_sigterm
from megaenc.console import print_rank_0, silence_libraries
from megaenc.data.preprocess.outputs import report_stale_files
from megaenc.errors import InputError, closest_match, handle_command_errors

USAGE = """usage: {prog} DIRECTION [options]

directions:
  to-hf    a run's checkpoint, saved in any layout, to a Hugging Face folder
  from-hf  a Hugging Face folder to a run folder, for runs in any layout to start from (--init-from)

{prog} to-hf --help shows the options."""


@dataclasses.dataclass(frozen=True)
class ToHFConfig:
    """Options of to-hf."""

    load: str = ""
    """run folder (the --save of a pretraining run)"""
    output: str = ""
    """folder to write; must not exist"""
    architecture: Annotated[
        Literal["eurobert", "llama", "mistral", "qwen2", "qwen3", "source"] | None, tyro.conf.arg(name="as")
    ] = None
    """family to write; unless given EuroBERT, or where that cannot say what the model is, source: the family that it came in as,
    bidirectional. A decoder's name: the same weights read causally, as for generation"""
    ckpt_step: int | None = None
    """step of the checkpoint; the newest unless given, 0 for the initial weights"""
    all: bool = False
    """write every kept checkpoint, and step 0, to folders in --output, under the study's names: 610m-clm-10k-mlm40-42k"""
    dtype: Literal["run", "bf16", "fp32"] = "run"
    """dtype of the weights written; run: that of the run"""
    max_shard_size: str = "5GB"
    """size of a file of weights, in KB, MB or GB"""
    sentence_transformers: bool = False
    """write for sentence-transformers: without the output layer, a text is the mean of its tokens' states"""
    license: str = "unknown"
    """licence of the weights, as the Hub calls it (apache-2.0), for the card"""


@dataclasses.dataclass(frozen=True)
class FromHFConfig:
    """Options of from-hf."""

    input: str = ""
    """Hugging Face folder of an EuroBERT, Llama, Mistral, Qwen2 or Qwen3 model: config.json, safetensors, tokenizer"""
    output: str = ""
    """run folder to write, which holds the weights as step 0; must not exist"""
    add_mask_token: bool = False
    """add a mask token to a tokenizer that has none, not even a reserved token; its row is the mean of the others"""
    tie_word_embeddings: bool = False
    """take the embedding for the output layer of a model that was saved without one"""
    dtype: Literal["source", "bf16", "fp32"] = "source"
    """dtype of the weights written; source: bf16 where all of them are, else fp32"""


@handle_command_errors
def main(argv: Sequence[str] | None = None, prog: str = "megaenc convert") -> None:
    """Convert in the direction that the first word names."""
    silence_libraries()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE.format(prog=prog))
        return
    if words[0] not in _DIRECTIONS:
        near = closest_match(words[0], _DIRECTIONS)
        known = " or ".join(_DIRECTIONS)
        raise InputError(
            f"{prog}: unknown direction {words[0]!r}, expected {known}" + (f"; did you mean {near}?" if near else "")
        )
    kind, description, convert = _DIRECTIONS[words[0]]
    prog = f"{prog} {words[0]}"
    options = flags.parse(kind, words[1:], prog=prog, description=description)
    for name in (dataclasses.fields(kind)[0].name, "output"):
        if not getattr(options, name):
            raise InputError(f"--{name}: missing (see {prog} --help)")
    report_stale_files(Path(os.path.realpath(options.output)))
    with exit_on_sigterm():
        convert(options)


def _to_hf(options: ToHFConfig) -> None:
    from megaenc.convert.to_hf import to_hf, to_hf_all

    load, output = Path(options.load), Path(options.output)
    how = {name: value for name, value in vars(options).items() if name not in ("load", "output", "ckpt_step", "all")}
    if not options.all:
        step = to_hf(load, output, step=options.ckpt_step, **how)
        print_rank_0(f"{options.output}: step {step} of {options.load} {_describe_proof(output)}")
        return
    if options.ckpt_step is not None:
        raise InputError(f"--ckpt-step {options.ckpt_step}: found --all too, expected one of them")
    for name in to_hf_all(load, output, **how):
        print_rank_0(f"{output / name}: {_describe_proof(output / name)}")


def _describe_proof(folder: Path) -> str:
    """As which family an export was written, and how far its numbers are from the run's."""
    from megaenc.convert.to_hf import CERTIFICATE

    proof = json.loads((folder / CERTIFICATE).read_text(encoding="utf-8"))
    largest = max(number for kernel in proof["largest_difference"].values() for number in kernel.values())
    return f"as {proof['class']}, {proof['attention']}; {proof['compared']} differ by at most {largest:.1e}"


def _from_hf(options: FromHFConfig) -> None:
    from megaenc.convert.from_hf import from_hf

    how = {"add_mask_token": options.add_mask_token, "tie": options.tie_word_embeddings, "dtype": options.dtype}
    source, mask = from_hf(Path(options.input), Path(options.output), **how)
    print_rank_0(
        f"{options.output}: the {source.family.model_type} model of {options.input}, {mask.describe()}\n"
        f"  a run begins with it: --config {Path(options.output) / 'config.yaml'} --init-from {options.output}"
    )


_DIRECTIONS = {
    "to-hf": (ToHFConfig, "Write a run's checkpoint and tokenizer as a Hugging Face folder.", _to_hf),
    "from-hf": (
        FromHFConfig,
        "Write a Hugging Face model and its tokenizer as a run folder that other runs start from.",
        _from_hf,
    ),
}
