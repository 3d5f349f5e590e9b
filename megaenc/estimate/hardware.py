"""Machines as numbers: from the table, or from what was measured here (calibrate)."""

from dataclasses import dataclass

from megaenc.errors import InputError, closest_match

GIB = 2**30

# Assumptions about this program on an accelerator, where --calibrate has not measured them.
LAUNCH_SECONDS = 1e-3  # a layer forward and backward: about 180 kernels, started by Python one by one
START_SECONDS = 2e-3  # a micro-batch's data, head and bookkeeping on the host
INSIDE_LATENCY, BETWEEN_LATENCY = 5e-6, 15e-6  # of one message of a collective
BASE_BYTES = 2 * GIB  # context of the device, its libraries and the buffers of the collectives
USABLE = 1 - 0.06  # of the memory; the rest is lost to the allocator's pieces
_USED = 0.8  # of the memory's bandwidth, which elementwise kernels reach
_WIRE = 0.75  # of the links' bandwidth, which collectives reach


@dataclass(frozen=True)
class Link:
    """What connects ranks of a group: bytes a second that each sends in one direction, and the seconds that one message takes."""

    bandwidth: float
    latency: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return the seconds for `size` bytes on each of `ranks`: each sends 2 (n - 1) / n of them, in 2 (n - 1) messages.

        That is a ring's. Of many ranks trees take over, whose messages grow with log2 n (Thakur, Rabenseifner & Gropp 2005); that
        each doubling of the ranks is worth 5 messages of a ring is an assumption.
        """
        return 2 * self.gather(size, ranks)

    def gather(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-gather or a reduce-scatter: `size` is the whole, each sends (n - 1) / n of it."""
        return 0.0 if ranks == 1 else (ranks - 1) / ranks * size / self.bandwidth + messages(ranks) * self.latency

    def send(self, size: float) -> float:
        """Return the seconds of a message from one rank to another."""
        return size / self.bandwidth + self.latency


def messages(ranks: int) -> int:
    """Return how many messages an all-gather among `ranks` sends one after the other; see `Link.all_reduce`."""
    return min(ranks - 1, 5 * (ranks - 1).bit_length())


def inside(gb_s: float) -> Link:
    """Return what connects a device to the others of its node, of so many GB/s in one direction."""
    return Link(_WIRE * (gb_s * 1e9), INSIDE_LATENCY)


def between(gb_s: float) -> Link:
    """Return what connects a node to others, each device's share of so many GB/s."""
    return Link(_WIRE * (gb_s * 1e9), BETWEEN_LATENCY)


@dataclass(frozen=True)
class Rates:
    """What this program reaches on one device of a machine, by kind of operation; FLOP or bytes a second."""

    peak: float
    """dense FLOP/s that utilization is counted of"""
    gemm: float
    """products of the layers and of the output layer"""
    attention: float
    causal_attention: float
    elementwise: float
    """everything else in a layer: norms, rotary positions, SwiGLU, copies, adding gradients up"""
    loss: float
    """cross-entropy and embedding"""
    optimizer: float
    layer_floor: float
    """seconds below which no layer gets"""
    start: float
    """seconds of a micro-batch besides"""
    inside: Link
    between: Link
    """each device's share of a node's links"""
    devices: int
    """of a node"""
    memory: float
    """bytes that a rank may take"""
    base: float
    """bytes of a rank before it has a model"""
    host: bool
    """whether the device is the processor: then nothing runs beside computation"""
    source: str
    pieces: float = 0.0
    """bytes that the allocator loses to pieces, whatever is kept"""
    pieces_of_kept: float = 0.0
    """and of each byte of activations"""


def _machine(name, tflops, gib, tb_s, devices, inside_gb_s, between_gb_s, gemm, attention) -> Rates:
    """Return what a data sheet makes one expect; `gemm` and `attention`: shares of the peak, the latter forward and backward.

    The shares are what plain kernels of a good library reach on matrices of some thousand rows; nothing of it was measured here.
    """
    peak, elementwise = tflops * 1e12, _USED * (tb_s * 1e12)
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
        inside=inside(inside_gb_s),
        between=between(between_gb_s),
        devices=devices,
        memory=USABLE * (gib * GIB),
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
    "a100": _machine("NVIDIA A100 SXM 80 GB", 312, 80, 2.04, 8, 300, 25, 0.75, 0.45),
    "a100-40gb": _machine("NVIDIA A100 SXM 40 GB", 312, 40, 1.555, 8, 300, 25, 0.75, 0.45),
    "h100": _machine("NVIDIA H100 SXM", 989, 80, 3.35, 8, 450, 50, 0.62, 0.25),
    "h100-pcie": _machine("NVIDIA H100 PCIe", 756, 80, 2.0, 8, 50, 25, 0.55, 0.25),
    "h200": _machine("NVIDIA H200 SXM", 989, 141, 4.8, 8, 450, 50, 0.65, 0.25),
    "gh200": _machine("NVIDIA GH200", 989, 96, 4.0, 4, 150, 25, 0.62, 0.25),
    "b200": _machine("NVIDIA B200", 2250, 180, 7.7, 8, 900, 50, 0.6, 0.15),
    "l40s": _machine("NVIDIA L40S", 362, 48, 0.864, 8, 25, 12.5, 0.6, 0.3),
    "mi210": _machine("AMD MI210", 181, 64, 1.6, 4, 100, 12.5, 0.5, 0.2),
    "mi250": _machine("AMD MI250, one die", 181, 64, 1.6, 8, 100, 12.5, 0.5, 0.2),
    "mi250x": _machine("AMD MI250X, one die", 191.5, 64, 1.6, 8, 100, 12.5, 0.5, 0.2),
    "mi300a": _machine("AMD MI300A", 980, 128, 5.3, 4, 128, 25, 0.45, 0.2),
    "mi300x": _machine("AMD MI300X", 1307, 192, 5.3, 8, 448, 50, 0.45, 0.2),
    "mi325x": _machine("AMD MI325X", 1307, 256, 6.0, 8, 448, 50, 0.45, 0.2),
    "mi355x": _machine("AMD MI355X", 2500, 288, 8.0, 8, 537, 50, 0.45, 0.2),
}


def machine(name: str) -> Rates:
    """Return the machine called `name`, in any case. InputError lists the known ones."""
    found = TABLE.get(name.lower())
    if found is None:
        near = closest_match(name.lower(), TABLE)
        hint = f"did you mean {near}?" if near else f"expected one of {', '.join(TABLE)}"
        raise InputError(f"--gpu: unknown machine {name!r}, {hint}")
    return found
