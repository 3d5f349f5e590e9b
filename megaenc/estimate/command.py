"""Estimate memory, time and device hours of a pretraining run before it starts.

A layout is suggested too:

megaenc estimate --config configs/pretrain/encoder-610m.yaml --gpu mi250x --gpus 192

Takes all flags of `megaenc pretrain`; the data need not exist. Time is FLOPs over the share of the
peak that has been measured on such a device, or --mfu: a run of 20 steps logs its own as
model_flops_utilization.
"""

import glob
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from megaenc import flags
from megaenc.atomic_io import atomic_write
from megaenc.console import build_rich_console, format_duration, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.estimate.devices import Utilization, get_device
from megaenc.estimate.layout_case import LayoutCase
from megaenc.estimate.length_model import LengthModel, build_length_model, read_vocab_size
from megaenc.estimate.report import EstimateReport
from megaenc.estimate.total import Workload, estimate_layout, find_simplest_layout
from megaenc.estimate.work import build_phases, build_schedule
from megaenc.flags import Bounds, PositiveFloat, PositiveFraction, PositiveInt
from megaenc.objectives import pseudo_perplexity_shifts
from megaenc.output_paths import check_output_file, create_parent_dir
from megaenc.training.config import PretrainConfig, merge_defaults

# Vocabulary sizes without a corpus or --vocab-size: of the small preset's benchmarks, the demo
# tokenizer, ModernBERT, NeoBERT, Gemma 3, and Llama 3 for the study's sizes.
_DEFAULT_VOCAB_SIZES = {
    "small": 32_768,
    "tiny": 8_192,
    "modernbert-base": 50_368,
    "modernbert-large": 50_368,
}
_DEFAULT_VOCAB_SIZES |= dict.fromkeys(
    ("gemma3-270m", "gemma3-1b", "embeddinggemma-300m"), 262_144
) | {"neobert-base": 30_522}
_STUDY_VOCAB_SIZE = 128_256
_STUDY_MODELS = ("210m", "610m", "1b")
_STUDY_RECIPE = {
    "objective_schedule": "mlm(mask=0.4):1.0",
    "packing": "random-length",
    "seq_length": 2048,
    "micro_batch_size": 6,
    "global_batch_size": 1152,
    "train_iters": 42_000,
    "eval_interval": 1000,
}
"""Flags of configs/pretrain/encoder-*.yaml that change an estimate."""
_CORPUS_SUFFIXES = (".bin", ".idx", ".json")


@dataclass(frozen=True)
class EstimateConfig:
    """Flags of `megaenc estimate`, which include those of `megaenc pretrain`.

    Each field is a flag, and so are those of `pretrain`, a PretrainConfig, of which `output.gpu`
    (--gpu) is the type of the `gpus` devices. None as `mfu` (model FLOPs utilization, a fraction),
    `devices_per_node` or `memory_gib` stands for the type's own; `price_per_hour` is that of a
    device in any currency, None to print no cost. `document_tokens` is a tuple of lengths of
    documents, () for those of the data. `suggest` searches for a layout; `output` is a JSON file,
    "" for none.
    """

    gpus: PositiveInt = 1
    """number of identical devices, one torchrun process each; a die of an MI250X counts as one"""
    mfu: PositiveFraction | None = None
    """model FLOPs utilization (0.4 is 40 % of the peak), instead of the table's"""
    price_per_hour: PositiveFloat | None = None
    """price of one device hour in any currency: adds the cost of the run"""
    document_tokens: tuple[Annotated[int, Bounds(low=1, high=1 << 40)], ...] = ()
    """document lengths in tokens, equally likely: 500, or 50 300 2000 (default: those of
    --data-path)"""
    devices_per_node: PositiveInt | None = None
    """devices of a node, instead of the table's"""
    memory_gib: PositiveFloat | None = None
    """memory of a device in GiB, instead of the table's"""
    suggest: bool = True
    """search for a layout that fits, or is simpler and faster"""
    output: str = ""
    """JSON file to write with the estimate"""
    pretrain: PretrainConfig = field(default_factory=lambda: PretrainConfig(bf16=True))
    """the run, by the flags of `megaenc pretrain`"""


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Print the estimate of a run and a suggested layout, and write them to --output.

    A run with several `phases` is printed phase by phase, with a sum. The file is JSON; an existing
    one is replaced. Wrong input exits with 2.

    Args:
        argv: The flags; None: those of this process.
    """
    silence_libraries()
    config = parse_estimate_config(sys.argv[1:] if argv is None else argv, "megaenc estimate")
    phases = _split_phases(config)
    if config.output:
        words = {word for phase in phases for word in phase.pretrain.data.data_path}
        corpora = [
            path
            for word in words
            for suffix in _CORPUS_SUFFIXES
            for path in (word + suffix, *glob.glob(word + suffix))
        ]
        inputs = [config.pretrain.config, *corpora]
        check_output_file(Path(config.output), "--output", inputs=inputs)
    reports = [build_report(phase) for phase in phases]
    console = build_rich_console(
        width=None if sys.stdout.isatty() else 130, highlight=False, markup=False
    )
    for phase, report in zip(phases, reports, strict=True):
        if len(phases) > 1:
            console.print(
                f"{phase.pretrain.phase_iters:,} steps of {phase.pretrain.objective_schedule}:",
                style="bold",
            )
        report.print(console)
    values = reports[0].to_dict()
    if len(phases) > 1:
        seconds = sum(report.estimate.seconds for report in reports)
        hours = sum(report.estimate.hours for report in reports)
        console.print(
            f"all phases: {format_duration(seconds)}, "
            f"{hours:,.{0 if hours >= 10 else 2}f} device hours",
            style="bold",
        )
        values = {
            "phases": [report.to_dict() for report in reports],
            "seconds": seconds,
            "device_hours": hours,
        }
    if config.output:
        create_parent_dir(Path(config.output), "--output")
        atomic_write(Path(config.output), json.dumps(values, indent=2) + "\n")


def _split_phases(config: EstimateConfig) -> list[EstimateConfig]:
    """Return the config of each of a run's `phases` as a run of its own.

    Steps before --branch-at are left out.
    """
    pretrain = config.pretrain
    done = pretrain.start.branch_at or 0
    if not pretrain.phases:
        return [config]
    output = replace(pretrain.output, eval_interval=pretrain.eval_every)
    parts = []
    for phase in pretrain.phase_configs:
        if phase.last_step > done:
            start = replace(pretrain.start, branch_at=max(0, done + 1 - phase.first_step) or None)
            parts.append(
                replace(config, pretrain=replace(phase.settings, start=start, output=output))
            )
    return parts


def parse_estimate_config(argv: Sequence[str], prog: str) -> EstimateConfig:
    """Return the checked config of the command line.

    Flags take precedence over the `--config` file, and this over the preset of `--model`. The
    study's models (210m, 610m, 1b) have its recipe as defaults unless --config is given. --help
    prints and exits.

    Args:
        argv: The flags, without the program's name.
        prog: Command in the text of --help.

    Raises:
        InputError: A flag is wrong, or --gpu is missing.
    """
    pretrain = PretrainConfig(bf16=True)  # all devices of the table have it
    model = flags.find_flag_value(argv, "--model") or ""
    if model.lower() in _STUDY_MODELS and not flags.find_flag_value(argv, "--config"):
        pretrain = flags.replace_fields(pretrain, _STUDY_RECIPE, source="the study's recipe")
    default = EstimateConfig(pretrain=merge_defaults(argv, prog, pretrain))
    config = flags.parse(EstimateConfig, argv, prog=prog, description=__doc__, default=default)
    if config.pretrain.micro_batch_size == "auto":
        raise InputError(
            "--micro-batch-size: found auto, expected a number of packs; "
            "the last lines of an estimate suggest one"
        )
    if not config.pretrain.output.gpu:
        raise InputError("--gpu: missing, expected a device such as h100 or mi250x")
    if config.mfu is None and not config.pretrain.bf16:
        raise InputError(
            "--no-bf16: the table's speeds are for bf16; give --mfu, "
            "the share of the bf16 peak that float32 reaches"
        )
    config.pretrain.check(config.gpus)
    return config


def build_report(config: EstimateConfig) -> EstimateReport:
    """Return a run's EstimateReport, with the simplest layout unless --no-suggest.

    No layout is suggested if none fits. Corpora of --data-path are read if they exist, else
    document lengths are assumed as in `build_length_model`. The `phases` of the config are not
    regarded: `main` makes a config of each.

    Raises:
        InputError: Corpora, schedule or device are unusable.
    """
    pretrain = config.pretrain
    vocab_size, vocab_text = resolve_vocab_size(config)
    docs = build_length_model(pretrain.data, config.document_tokens, pretrain.shape.window_size)
    case = LayoutCase.from_config(pretrain, vocab_size, config.gpus)
    workload = build_workload(config, vocab_size, docs)
    device = get_device(pretrain.output.gpu)
    device = replace(
        device,
        gib=config.memory_gib or device.gib,
        per_node=config.devices_per_node or device.per_node,
    )
    utilization = device.utilization(case.shape.parameter_count(vocab_size))
    if config.mfu is not None:
        utilization = Utilization(0.0, config.mfu, "given")
    simplest = find_simplest_layout(case, workload, device) if config.suggest else None
    return EstimateReport(
        model=pretrain.model_name,
        vocabulary=vocab_text,
        documents=docs,
        device=device,
        utilization=utilization,
        estimate=estimate_layout(case, workload, device, utilization.share),
        suggestion=simplest and estimate_layout(simplest, workload, device, utilization.share),
        is_searched=config.suggest,
        price=config.price_per_hour,
    )


def resolve_vocab_size(config: EstimateConfig) -> tuple[int, str]:
    """Return (vocabulary size without padding, text such as `vocabulary of 8,192`).

    The size is --vocab-size, else the largest of the corpora's, else the default of --model. The
    text has the source, unless it is --vocab-size.

    Raises:
        InputError: The metadata of a corpus are invalid.
    """
    pretrain = config.pretrain
    if pretrain.shape.vocab_size:
        return pretrain.shape.vocab_size, f"vocabulary of {pretrain.shape.vocab_size:,}"
    if (vocab_size := read_vocab_size(pretrain.data)) is not None:
        return vocab_size, f"vocabulary of {vocab_size:,}, the corpus's"
    default = _DEFAULT_VOCAB_SIZES.get(pretrain.model.lower(), _STUDY_VOCAB_SIZE)
    return default, f"vocabulary of {default:,} (assumed; set --vocab-size)"


def build_workload(config: EstimateConfig, vocab_size: int, docs: LengthModel) -> Workload:
    """Return the Workload of a run: phases of its schedule, and validations.

    The batches of a validation are summed over its objectives and the sets of --valid-data-path.
    Each pass of a pseudo-perplexity counts as an objective. The `phases` of the config are not
    regarded.

    Args:
        vocab_size: Vocabulary without padding.
        docs: Document lengths of the training data.

    Raises:
        InputError: The schedule is wrong.
    """
    pretrain = config.pretrain
    phases = build_phases(pretrain, vocab_size, docs)
    steps = sum(phase.last - phase.first + 1 for phase in phases)
    objectives = {"clm", "mlm"} | {work.objective for phase in phases for work, _ in phase.parts}
    objectives = set(pretrain.output.valid_objective) or objectives
    measures = pseudo_perplexity_shifts(
        build_schedule(pretrain, vocab_size).final_objectives().values()
    )
    forwards = len(objectives) + len(measures) * pretrain.output.eval_pseudo_perplexity_passes
    forwards *= len(pretrain.output.valid_data_path) or 1
    validations = steps // pretrain.eval_every if pretrain.eval_every else 0
    return Workload(tuple(phases), validations, forwards * pretrain.output.eval_iters)
