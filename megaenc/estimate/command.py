"""What a pretraining run takes, before it starts: memory, time, hours, what is sent, and a layout that suits.

megaenc estimate --config configs/pretrain/encoder-610m.yaml --gpu mi250x --gpus 192
megaenc estimate --model small --seq-length 1024 --calibrate --gpus 2 --tensor-model-parallel-size 2

All flags of `megaenc pretrain` count; no data needs to be there.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megaenc import flags
from megaenc.atomic_io import atomic_write
from megaenc.console import silence_libraries, build_rich_console
from megaenc.errors import InputError, handle_command_errors
from megaenc.estimate.hardware import GIB, USABLE, Rates, between, inside, machine
from megaenc.estimate.layout_case import HypotheticalLayout, LayoutCase, phases
from megaenc.estimate.length_model import LengthModel, documents, vocabulary
from megaenc.estimate.report import EstimateReport
from megaenc.estimate.total import Workload, best_layout, estimate
from megaenc.output_paths import check_output_file, create_parent_dir
from megaenc.training.config import PretrainConfig, has_bf16, merge_defaults

# Vocabularies of the presets where neither a corpus nor --vocab-size says: that of the small preset's measurements, the demo
# tokenizer's, and for the study's sizes Llama 3's.
_USUAL = {"small": 32_768, "tiny": 8_192}
_STUDY = 128_256


@dataclass(frozen=True)
class EstimateConfig:
    """One estimate."""

    gpu: str = ""
    """device: a100, a100-40gb, h100, h100-pcie, h200, gh200, b200, l40s, mi210, mi250, mi250x (a die each), mi300a, mi300x,
    mi325x, mi355x"""
    gpus: int = 1
    """devices of the run, all alike: processes of torchrun; a die of an MI250X is one"""
    calibrate: bool = False
    """measure this machine for a minute, as many processes at once as the run has here, instead of the table"""
    mfu: float | None = None
    """take this share of the peak as reached (0.4 is 40 %) and work hours out from it alone"""
    price_per_hour: float | None = None
    """of one device, in any currency: adds what the run costs"""
    document_tokens: tuple[int, ...] = ()
    """lengths of documents, equally likely: 500, or 50 300 2000; from --data-path unless given"""
    devices_per_node: int | None = None
    """of the node, where the table has another"""
    memory_gib: float | None = None
    """of a device, where the table has another"""
    intra_node_bandwidth: float | None = None
    """GB/s from a device to others of its node, where the table has another"""
    inter_node_bandwidth: float | None = None
    """GB/s from a node to others, each device's share, where the table has another"""
    suggest: bool = True
    """look for a layout that fits and is faster"""
    explain: bool = False
    """state every term with its formula and numbers"""
    output: str = ""
    """JSON file for all of it, every term included"""
    pretrain: PretrainConfig = field(default_factory=lambda: PretrainConfig(bf16=True))


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc estimate`."""
    silence_libraries()
    settings = read(sys.argv[1:] if argv is None else argv, "megaenc estimate")
    if settings.output:
        check_output_file(Path(settings.output), "--output")
    report = make_report(settings)
    console = build_rich_console(width=None if sys.stdout.isatty() else 130, highlight=False, markup=False)
    report.show(console, explain=settings.explain)
    if settings.output:
        create_parent_dir(Path(settings.output), "--output")
        atomic_write(Path(settings.output), json.dumps(report.as_json(), indent=2) + "\n")


def read(argv: Sequence[str], prog: str) -> EstimateConfig:
    """Return the settings that `argv` gives over its `--config` over the preset of its `--model`. Raises InputError."""
    # Accelerators of the table have bf16; of this machine only itself can tell, with torch.
    base = EstimateConfig(pretrain=PretrainConfig(bf16="--calibrate" not in argv or has_bf16()))
    default = replace(base, pretrain=merge_defaults(argv, prog, base.pretrain))
    settings = flags.parse(EstimateConfig, argv, prog=prog, description=__doc__, default=default)
    layout = HypotheticalLayout(**flags.flatten(settings.pretrain.layout))
    settings = replace(settings, pretrain=replace(settings.pretrain, layout=layout))
    _check(settings)
    settings.pretrain.check(settings.gpus)
    return settings


def _check(settings: EstimateConfig) -> None:
    whole = ("gpus", "devices_per_node")
    for name in (*whole, "memory_gib", "intra_node_bandwidth", "inter_node_bandwidth", "price_per_hour"):
        if (value := getattr(settings, name)) is not None and not 0 < value < float("inf"):
            expected = "1 or more" if name in whole else "a number above 0"
            raise InputError(f"--{name.replace('_', '-')}: found {value}, expected {expected}")
    if settings.mfu is not None and not 0 < settings.mfu <= 1:
        raise InputError(f"--mfu: found {settings.mfu}, expected a share of the peak, above 0 and at most 1 (0.4 is 40 %)")
    if settings.calibrate and settings.mfu is not None:
        raise InputError(f"--mfu {settings.mfu}: found beside --calibrate, which measures; expected one of them")
    if not settings.gpu and not settings.calibrate:
        raise InputError("--gpu: missing, expected a device such as h100 or mi250x, or --calibrate to measure this machine")
    if not settings.calibrate and not settings.pretrain.bf16:
        raise InputError("--no-bf16: the table's speeds are those of bf16; --calibrate measures float32 on this machine")


def make_report(settings: EstimateConfig) -> EstimateReport:
    """Return everything that there is to say of a run. Raises InputError."""
    run = settings.pretrain
    vocab_size, said = vocabulary_size(settings)
    docs = documents(run.data, settings.document_tokens)
    case, demand = LayoutCase.of(run, vocab_size, settings.gpus), demand_of(settings, vocab_size, docs)
    rates = _rates(settings, case, demand, docs)
    own, search = estimate(case, demand, rates), settings.suggest and settings.mfu is None
    better = best_layout(case, demand, rates) if search else None
    return EstimateReport(run.model_name, said, docs, rates, own, better, search, settings.price_per_hour, settings.mfu)


def vocabulary_size(settings: EstimateConfig) -> tuple[int, str]:
    """Return the rows of the embedding, and where the number is from."""
    run = settings.pretrain
    if run.shape.vocab_size:
        return run.shape.vocab_size, f"vocabulary of {run.shape.vocab_size:,}"
    if (found := vocabulary(run.data)) is not None:
        return found, f"vocabulary of {found:,}, the corpus's"
    usual = _USUAL.get(run.model.lower(), _STUDY)
    return usual, f"vocabulary of {usual:,} (assumed; --vocab-size says another)"


def demand_of(settings: EstimateConfig, vocab_size: int, docs: LengthModel) -> Workload:
    """Return what the run computes: its phases, and its validations under the usual two objectives and its own."""
    run = settings.pretrain
    found = phases(run, vocab_size, docs)
    steps = sum(phase.last - phase.first + 1 for phase in found)
    objectives = {"clm", "mlm"} | {work.objective for phase in found for work, _ in phase.parts}
    times = steps // run.eval_every if run.eval_every else 0
    return Workload(tuple(found), times, len(objectives) * run.output.eval_iters, settings.mfu)


def _rates(settings: EstimateConfig, case: LayoutCase, demand: Workload, docs: LengthModel) -> Rates:
    known = machine(settings.gpu) if settings.gpu else None
    if known:
        given = {
            "devices": settings.devices_per_node,
            "memory": settings.memory_gib and USABLE * (settings.memory_gib * GIB),
            "inside": settings.intra_node_bandwidth and inside(settings.intra_node_bandwidth),
            "between": settings.inter_node_bandwidth and between(settings.inter_node_bandwidth),
        }
        known = replace(known, **{name: value for name, value in given.items() if value})
    if not settings.calibrate:
        return known
    from megaenc.estimate.microbench import calibrate  # imports torch

    rates = calibrate(settings.pretrain, case, demand, docs, known)
    return replace(rates, memory=settings.memory_gib * GIB) if settings.memory_gib else rates
