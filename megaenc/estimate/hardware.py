"""Rates of machines from a table of data sheets; `megaenc.estimate.microbench` measures them instead."""

from dataclasses import dataclass

from megaenc.errors import InputError, closest_match

GIB = 2**30

# Assumptions about megaenc on an accelerator, used without --calibrate.
# A layer forward and backward on the host: about 31 kernel launches (counted in docs/kernels.md) and the Python around them. From
# 32 ms of a step of the tiny preset on an H200 and a layer's share of it, 6 % (docs/estimate.md, "Launches").
LAUNCH_SECONDS = 2e-3
START_SECONDS = 2e-3  # a micro-batch's data, head and bookkeeping on the host
INSIDE_LATENCY, BETWEEN_LATENCY = 5e-6, 15e-6  # of one message of a collective
BASE_BYTES = 2 * GIB  # context of the device, its libraries and the buffers of the collectives
USABLE_MEMORY = 1 - 0.06  # of the device memory; the allocator loses the rest to fragmentation
_MEMORY_EFFICIENCY = 0.8  # fraction of the memory bandwidth that elementwise kernels reach
_LINK_EFFICIENCY = 0.75  # fraction of the link bandwidth that collectives reach


@dataclass(frozen=True)
class Link:
    """Connection of a group's ranks: bandwidth in bytes/s per rank and direction, latency in seconds per message."""

    bandwidth: float
    latency: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes over `ranks`.

        A ring sends 2 (n - 1) / n of the bytes in 2 (n - 1) messages per rank. For many ranks, trees need messages that grow with
        log2 n (Thakur, Rabenseifner & Gropp 2005), assumed to be 5 per doubling.
        """
        return 2 * self.gather(size, ranks)

    def gather(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `size` total bytes, of which each rank sends (n - 1) / n."""
        return 0.0 if ranks == 1 else (ranks - 1) / ranks * size / self.bandwidth + count_messages(ranks) * self.latency

    def send(self, size: float) -> float:
        """Return the seconds of one message of `size` bytes between two ranks."""
        return size / self.bandwidth + self.latency


def count_messages(ranks: int) -> int:
    """Return the consecutive messages of an all-gather: a ring's ranks - 1, or a tree's 5 per doubling if fewer."""
    return min(ranks - 1, 5 * (ranks - 1).bit_length())


def intra_node_link(gb_s: float) -> Link:
    """Return the Link between devices of a node, with 75 % of `gb_s`, the data sheet's GB/s per device and direction."""
    return Link(_LINK_EFFICIENCY * (gb_s * 1e9), INSIDE_LATENCY)


def inter_node_link(gb_s: float) -> Link:
    """Return the Link between nodes, with 75 % of `gb_s`, the data sheet's GB/s per device and direction."""
    return Link(_LINK_EFFICIENCY * (gb_s * 1e9), BETWEEN_LATENCY)


@dataclass(frozen=True)
class Rates:
    """Speeds of megaenc on one device in FLOP/s or bytes/s by kind of operation, with fixed times, links and memory."""

    peak: float
    """dense peak FLOP/s, the denominator of utilization"""
    gemm: float
    """matrix products of the layers and the output layer"""
    attention: float
    causal_attention: float
    elementwise: float
    """all other operations of a layer: norms, rotary embeddings, SwiGLU, copies, gradient accumulation"""
    loss: float
    """cross-entropy and embedding"""
    optimizer: float
    layer_floor: float
    """minimum seconds of a layer"""
    start: float
    """fixed seconds of a micro-batch"""
    inside: Link
    between: Link
    """link between nodes, per device"""
    devices: int
    """devices of a node"""
    memory: float
    """usable bytes of a rank"""
    base: float
    """bytes of a rank before the model is built"""
    host: bool
    """whether the device is a CPU, on which communication never overlaps computation"""
    source: str
    pieces: float = 0.0
    """bytes lost to fragmentation, independent of activations"""
    pieces_of_kept: float = 0.0
    """bytes lost to fragmentation per byte of activations"""
    saves_probabilities: bool = False
    """whether attention is by onednn, which saves probabilities for backward"""


def _from_data_sheet(name, tflops, gib, tb_s, devices, inside_gb_s, between_gb_s, gemm, attention) -> Rates:
    """Return the rates expected from a data sheet, with matrix products and attention at given fractions of the peak.

    The fractions are typical of library kernels on matrices with thousands of rows, attention forward and backward;
    docs/estimate.md compares them with an H200.
    """
    peak, elementwise = tflops * 1e12, _MEMORY_EFFICIENCY * (tb_s * 1e12)
    return Rates(
        peak=peak,
        gemm=gemm * peak,
        attention=attention * peak,
        causal_attention=attention * peak,
        elementwise=elementwise,
        loss=elementwise,
        optimizer=elementwise,
        layer_floor=LAUNCH_SECONDS,
        start=START_SECONDS,
        inside=intra_node_link(inside_gb_s),
        between=inter_node_link(between_gb_s),
        devices=devices,
        memory=USABLE_MEMORY * (gib * GIB),
        base=BASE_BYTES,
        host=False,
        source=f"{name}: data sheet, assumed shares of it",
    )


# Peak, memory and bandwidths: the makers' data sheets; peaks as in megaenc.backend.device (dense, not sparse). Inside a node:
# NVLink 3/4/5 have 600/900/1,800 GB/s both ways; an MI300X sends 64 GB/s to each of 7 others; an MI250X die has 200 GB/s to its
# twin and 50 to 100 to others, and a node of 8 dies (LUMI, Frontier, Adastra) has four 25 GB/s links to the network.
# Between nodes: one link of 200 (A100) or 400 Gb/s a device, the usual layout of such nodes; give others with
# --inter-node-bandwidth. The two shares of the peak are assumptions from published speeds: matrix products 0.6 to 0.75;
# attention: FlashAttention-2 (Dao 2023, arXiv 2307.08691) about half of an A100's peak, a quarter of an H100's.
TABLE = {
    "a100": _from_data_sheet("NVIDIA A100 SXM 80 GB", 312, 80, 2.04, 8, 300, 25, 0.75, 0.45),
    "a100-40gb": _from_data_sheet("NVIDIA A100 SXM 40 GB", 312, 40, 1.555, 8, 300, 25, 0.75, 0.45),
    "h100": _from_data_sheet("NVIDIA H100 SXM", 989, 80, 3.35, 8, 450, 50, 0.62, 0.25),
    "h100-pcie": _from_data_sheet("NVIDIA H100 PCIe", 756, 80, 2.0, 8, 50, 25, 0.55, 0.25),
    "h200": _from_data_sheet("NVIDIA H200 SXM", 989, 141, 4.8, 8, 450, 50, 0.65, 0.25),
    "gh200": _from_data_sheet("NVIDIA GH200", 989, 96, 4.0, 4, 150, 25, 0.62, 0.25),
    "b200": _from_data_sheet("NVIDIA B200", 2250, 180, 7.7, 8, 900, 50, 0.6, 0.15),
    "l40s": _from_data_sheet("NVIDIA L40S", 362, 48, 0.864, 8, 25, 12.5, 0.6, 0.3),
    "mi210": _from_data_sheet("AMD MI210", 181, 64, 1.6, 4, 100, 12.5, 0.5, 0.2),
    "mi250": _from_data_sheet("AMD MI250, one die", 181, 64, 1.6, 8, 100, 12.5, 0.5, 0.2),
    "mi250x": _from_data_sheet("AMD MI250X, one die", 191.5, 64, 1.6, 8, 100, 12.5, 0.5, 0.2),
    "mi300a": _from_data_sheet("AMD MI300A", 980, 128, 5.3, 4, 128, 25, 0.45, 0.2),
    "mi300x": _from_data_sheet("AMD MI300X", 1307, 192, 5.3, 8, 448, 50, 0.45, 0.2),
    "mi325x": _from_data_sheet("AMD MI325X", 1307, 256, 6.0, 8, 448, 50, 0.45, 0.2),
    "mi355x": _from_data_sheet("AMD MI355X", 2500, 288, 8.0, 8, 537, 50, 0.45, 0.2),
}


def get_machine(name: str) -> Rates:
    """Return the Rates of a device in the table by name (such as h100, in any case); raise InputError if it is unknown."""
    rates = TABLE.get(name.lower())
    if rates is None:
        suggestion = closest_match(name.lower(), TABLE)
        hint = f"did you mean {suggestion}?" if suggestion else f"expected one of {', '.join(TABLE)}"
        raise InputError(f"--gpu: unknown machine {name!r}, {hint}")
    return rates
