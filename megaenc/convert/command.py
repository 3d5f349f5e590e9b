"""The command `megaenc convert`, also run by tools/convert_checkpoint.py."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megaenc import flags
from megaenc.console import print_rank_0, silence_libraries
from megaenc.convert.hub_upload import CERTIFICATE
from megaenc.errors import InputError, closest_match, handle_command_errors
from megaenc.flags import NonNegativeFloat, NonNegativeInt, PositiveFraction
from megaenc.output_paths import report_stale_files
from megaenc.processes import exit_on_sigterm

USAGE = """usage: {prog} DIRECTION [options]

directions:
  to-hf    convert a run's checkpoint, saved in any layout, to a Hugging Face directory
  from-hf  convert a Hugging Face directory to a run directory, from which runs in any layout start
  \
(--init-from)
  merge    average checkpoints of one or several runs to such a run directory

{prog} to-hf --help shows the options."""


@dataclasses.dataclass(frozen=True)
class ToHFConfig:
    """Flags of `megaenc convert to-hf`, each a field; `architecture` is --as.

    `load`, a run directory, and `output`, a new directory, must not stay empty, which `main` and
    `api.export` check. `ckpt_step`, an int, is the step of the checkpoint, None for the newest;
    `all` exports every checkpoint, and is refused together with `ckpt_step`. `architecture` is the
    family to write, None to choose it. `dtype` ("run", "bf16" or "fp32"), `max_shard_size` (text
    such as 5GB), `sentence_transformers`, `encoder_only` and `license` are options of `Exporter`.
    `push`, ORG/NAME, uploads to the Hub, unless it is empty.
    """

    load: str = ""
    """run directory (the --save of a pretraining run)"""
    output: str = ""
    """directory to write; must not exist, unless --push is given and it holds the same export"""
    architecture: Annotated[
        Literal[
            *(
                "eurobert",
                "gemma3_text",
                "llama",
                "mistral",
                "modernbert",
                "modernbert-decoder",
                "neobert",
                "qwen2",
                "qwen3",
            ),
            "source",
        ]
        | None,
        tyro.conf.arg(name="as"),
    ] = None
    """family to write: a decoder's name exports the same weights with causal attention, as for
    generation; source: the family of the original model, bidirectional. EuroBERT unless given, or
    source, or another encoder, if EuroBERT does not support the model"""
    ckpt_step: NonNegativeInt | None = None
    """step of the checkpoint; the newest unless given, 0 for the initial weights"""
    all: bool = False
    """export every checkpoint, and step 0, to directories in --output with names such as
    610m-clm-10k-mlm40-42k"""
    push: str = ""
    """repository of the Hugging Face Hub to upload to, as ORG/NAME: the export to its revision
    main, with --all each checkpoint to step1000 and so on and the last one also to main; a missing
    repository is created and is private"""
    dtype: Literal["run", "bf16", "fp32"] = "run"
    """dtype of the weights; run: the run's"""
    max_shard_size: str = "5GB"
    """maximum size of a weight file, in KB, MB or GB"""
    sentence_transformers: bool = False
    """also write the files of sentence-transformers: an embedding is the mean of the tokens' hidden
    states, in float32 unless model_kwargs says otherwise"""
    encoder_only: bool = False
    """leave out the output layer, as after an objective that predicts classes of its own instead of
    tokens"""
    license: str = "unknown"
    """license of the weights for the model card, as an identifier of the Hub (apache-2.0)"""


@dataclasses.dataclass(frozen=True)
class FromHFConfig:
    """Flags of `megaenc convert from-hf`, each a field.

    `input`, a Hugging Face directory, and `output`, a new run directory, must not stay empty, which
    only `main` checks. `add_mask_token` adds a mask token to a tokenizer that has none,
    `tie_word_embeddings` is for a model that was saved without output layer, and `dtype` is that of
    the weights to write: "source", "bf16" or "fp32".
    """

    input: str = ""
    """Hugging Face directory of an EuroBERT, ModernBERT, Ettin, NeoBERT, Llama, Mistral, Qwen2,
    Qwen3 or Gemma 3 text model: config.json, safetensors and tokenizer"""
    output: str = ""
    """run directory to write, with the weights as the checkpoint of step 0; must not exist"""
    add_mask_token: bool = False
    """add a mask token to a tokenizer with neither a mask token nor reserved tokens; its row is the
    mean of the others"""
    tie_word_embeddings: bool = False
    """use the embedding as the output layer of a model that was saved without one"""
    dtype: Literal["source", "bf16", "fp32"] = "source"
    """dtype of the weights; source: bf16 if all source weights are, else fp32"""


@dataclasses.dataclass(frozen=True)
class MergeConfig:
    """Flags of `megaenc convert merge`, each a field.

    `load`, a tuple of checkpoints such as "runs/a@1000,1200", and `output`, a new run directory,
    must not stay empty, which only `main` checks. `method` is "linear", "slerp" or "ties".
    `weights` is a tuple of a number per checkpoint for "linear", and for "slerp" of only one, from
    0 (the first checkpoint) to 1; () is for equal weights. `base`, a checkpoint, and `density`, a
    fraction (required, although None by default), are for "ties". `dtype` is that of the merged
    weights: "source", "bf16" or "fp32".
    """

    load: tuple[str, ...] = ()
    """checkpoints: run directories with steps, as in runs/a@1000,1200 runs/b@1200; the newest
    checkpoint of a run without steps"""
    output: str = ""
    """run directory to write, with the weights as the checkpoint of step 0; must not exist"""
    method: Literal["linear", "slerp", "ties"] = "linear"
    """linear: weighted average; slerp: spherical interpolation of two checkpoints, for each tensor;
    ties: average of the largest changes since --base that agree in sign (arXiv 2306.01708)"""
    weights: tuple[NonNegativeFloat, ...] = ()
    """linear: one for each checkpoint, divided by their sum (default: equal); slerp: one number
    from 0, the first checkpoint, to 1, the second (default: 0.5)"""
    base: str = ""
    """ties: checkpoint from which all others were trained, as in runs/a@1000"""
    density: PositiveFraction | None = None
    """ties: share of each checkpoint's changes, the largest ones, that are merged; the paper's
    default is 0.2"""
    dtype: Literal["source", "bf16", "fp32"] = "source"
    """dtype of the merged weights, which are computed in float64; source: bf16 if all runs have it,
    else fp32"""


@handle_command_errors
def main(argv: Sequence[str] | None = None, prog: str = "megaenc convert") -> None:
    """Run `megaenc convert` with a direction (to-hf, from-hf, merge) and its flags.

    A single process runs it. Without arguments it prints the usage and returns. Wrong input exits
    with 2.

    Args:
        argv: Direction and flags; None: those of this process.
        prog: Command that usage and errors name.
    """
    silence_libraries()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE.format(prog=prog))
        return
    if words[0] not in _DIRECTIONS:
        near = closest_match(words[0], _DIRECTIONS)
        *first_directions, last = _DIRECTIONS
        known = f"{', '.join(first_directions)} or {last}"
        raise InputError(
            f"{prog}: unknown direction {words[0]!r}, expected {known}"
            + (f"; did you mean {near}?" if near else "")
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


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """Hugging Face directory of a checkpoint, verified against the run's own model."""

    directory: Path
    step: int
    """Step of the checkpoint."""
    architecture: str
    """Class of transformers that loads it."""
    attention: str
    """Direction of attention: bidirectional or causal."""
    compared: str
    """Outputs that were compared, such as logits."""
    largest_difference: float
    """Largest absolute difference of an output from that of the run's model."""


def export_run(options: ToHFConfig) -> list[ExportedModel]:
    """Export one checkpoint or all of a run, and return them in the order of steps.

    Raises:
        InputError: The run, an option or the output is unusable, or an export differs.
    """
    from megaenc.convert.to_hf import to_hf, to_hf_all

    load = Path(options.load)
    output = Path(options.output)
    export_options = {
        name: value
        for name, value in vars(options).items()
        if name not in ("load", "output", "ckpt_step", "all")
    }
    directories = [output]
    if not options.all:
        to_hf(load, output, step=options.ckpt_step, **export_options)
    elif options.ckpt_step is not None:
        raise InputError(f"--ckpt-step {options.ckpt_step}: found --all too, expected one of them")
    else:
        directories = [output / name for name in to_hf_all(load, output, **export_options)]
    models = []
    for directory in directories:
        proof = json.loads((directory / CERTIFICATE).read_text(encoding="utf-8"))
        largest = max(
            difference
            for kernel in proof["largest_difference"].values()
            for difference in kernel.values()
        )
        models.append(
            ExportedModel(
                directory,
                proof["step"],
                proof["class"],
                proof["attention"],
                proof["compared"],
                largest,
            )
        )
    return models


def _to_hf(options: ToHFConfig) -> None:
    """Export one checkpoint or all of a run, and print how closely they match."""
    for model in export_run(options):
        step = "" if options.all else f"step {model.step} of {options.load} "
        print_rank_0(
            f"{model.directory}: {step}as {model.architecture}, {model.attention}; "
            f"{model.compared} differ by at most {model.largest_difference:.1e}"
        )


def _from_hf(options: FromHFConfig) -> None:
    """Convert a Hugging Face directory, and print the flags that start a run from it."""
    from megaenc.convert.from_hf import from_hf

    source, mask = from_hf(
        Path(options.input),
        Path(options.output),
        add_mask_token=options.add_mask_token,
        tie=options.tie_word_embeddings,
        dtype=options.dtype,
    )
    print_rank_0(
        f"{options.output}: the {source.family.model_type} model of {options.input}, "
        f"{mask.describe()}\n  prepare text for it: megaenc preprocess --tokenizer "
        f"{Path(options.output) / 'tokenizer'} --special-tokens template\n"
        f"{_describe_start(options.output)}"
    )


def _merge(options: MergeConfig) -> None:
    """Merge checkpoints, and print the flags that start a run from the result."""
    from megaenc.convert.merge.checkpoints import merge

    merge_options = {
        name: value for name, value in vars(options).items() if name not in ("load", "output")
    }
    record = merge(options.load, Path(options.output), **merge_options)
    names = ", ".join(checkpoint.describe() for checkpoint in record.checkpoints)
    base = f", base {record.base.label}, density {record.density:g}" if record.base else ""
    print_rank_0(
        f"{options.output}: {record.method} merge of "
        f"{names}{base}\n{_describe_start(options.output)}"
    )


def _describe_start(output: str) -> str:
    return f"  start a run from it: --config {Path(output) / 'config.yaml'} --init-from {output}"


_DIRECTIONS = {
    "to-hf": (
        ToHFConfig,
        "Write a run's checkpoint and tokenizer as a Hugging Face directory.",
        _to_hf,
    ),
    "from-hf": (
        FromHFConfig,
        "Write a Hugging Face model and its tokenizer as a run directory that other runs start "
        "from.",
        _from_hf,
    ),
    "merge": (
        MergeConfig,
        "Merge checkpoints of one or several runs as a run directory that other runs start from.",
        _merge,
    ),
}
