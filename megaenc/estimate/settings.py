"""What `megaenc estimate` can be told: the flags of `megaenc pretrain`, a machine, and how much to say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megaenc import flags
from megaenc.backend.layout import Layout
from megaenc.errors import InputError
from megaenc.training.settings import PretrainSettings, has_bf16, over_defaults

DESCRIPTION = """What a pretraining run takes, before it starts: memory, time, hours, what is sent, and a layout that suits.

megaenc estimate --config configs/pretrain/encoder-610m.yaml --gpu mi250x --gpus 192
megaenc estimate --model small --seq-length 1024 --calibrate --gpus 2 --tensor-model-parallel-size 2

All flags of `megaenc pretrain` count; no data needs to be there."""


@dataclass(frozen=True)
class EstimateSettings:
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
    pretrain: PretrainSettings = field(default_factory=lambda: PretrainSettings(bf16=True))


@dataclass(frozen=True)
class PaperLayout(Layout):
    """A layout for a machine that need not be this one; nothing of megatron-core or torch is imported to read it."""

    def split(self, num_layers: int) -> tuple[int, ...]:
        text, stages = self.pipeline_model_parallel_layout, self.pipeline_model_parallel_size
        if not text or stages == 1 or self.num_layers_per_virtual_pipeline_stage:
            return super().split(num_layers)
        return read_split(text, num_layers, stages)

    def _check_overlap(self) -> None:
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise InputError("--overlap-param-gather: needs --use-distributed-optimizer and --overlap-grad-reduce")


def read_split(text: str, num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each part that Megatron's notation says, Et*6|t*7|t*7|t*6L. InputError if it is none of this model."""
    flag = f"--pipeline-model-parallel-layout {text}"
    spread = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        spread = re.sub(repeated, lambda found: found[1] * int(found[2]), spread)
    parts = spread.split("|")
    if "".join(parts) != f"E{'t' * num_layers}L":
        raise InputError(f"{flag}: expected E, t for each of the {num_layers} layers, then L, with | between parts")
    if len(parts) % stages or not all(parts):
        raise InputError(f"{flag}: found {len(parts)} parts, expected {stages} or a multiple of it, none of them empty")
    return tuple(part.count("t") for part in parts)


def write_split(split: Sequence[int]) -> str:
    """Return the same in Megatron's notation."""
    return f"E{'|'.join(f't*{layers}' if layers > 1 else 't' * layers for layers in split)}L"


def read(argv: Sequence[str], prog: str) -> EstimateSettings:
    """Return the settings that `argv` gives over its `--config` over the preset of its `--model`. Raises InputError."""
    # Accelerators of the table have bf16; of this machine only itself can tell, with torch.
    base = EstimateSettings(pretrain=PretrainSettings(bf16="--calibrate" not in argv or has_bf16()))
    default = replace(base, pretrain=over_defaults(argv, prog, base.pretrain))
    settings = flags.parse(EstimateSettings, argv, prog=prog, description=DESCRIPTION, default=default)
    layout = PaperLayout(**flags.flatten(settings.pretrain.layout))
    settings = replace(settings, pretrain=replace(settings.pretrain, layout=layout))
    _check(settings)
    settings.pretrain.check(settings.gpus)
    return settings


def _check(settings: EstimateSettings) -> None:
    for name in ("gpus", "devices_per_node"):
        if (value := getattr(settings, name)) is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')}: found {value}, expected 1 or more")
    for name in ("memory_gib", "intra_node_bandwidth", "inter_node_bandwidth", "price_per_hour"):
        if (value := getattr(settings, name)) is not None and not 0 < value < float("inf"):
            raise InputError(f"--{name.replace('_', '-')}: found {value}, expected a number above 0")
    if settings.mfu is not None and not 0 < settings.mfu <= 1:
        raise InputError(f"--mfu: found {settings.mfu}, expected a share of the peak, above 0 and at most 1 (0.4 is 40 %)")
    if settings.calibrate and settings.mfu is not None:
        raise InputError(f"--mfu {settings.mfu}: found beside --calibrate, which measures; expected one of them")
    if not settings.gpu and not settings.calibrate:
        raise InputError("--gpu: missing, expected a device such as h100 or mi250x, or --calibrate to measure this machine")
    if not settings.calibrate and not settings.pretrain.bf16:
        raise InputError("--no-bf16: the table's speeds are those of bf16; --calibrate measures float32 on this machine")
