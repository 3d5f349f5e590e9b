"""List of the doctor's checks, which needs none of the modules that they import."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from megaenc.model.kernels import FusedKernels

REQUIRED_PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers", "numpy")
OPTIONAL_PACKAGES = (
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "transformer-engine",
    "apex",
    "amdsmi",
)
ATTENTION_BACKENDS = ("flash", "varlen", "cudnn", "onednn", "sdpa")
Subject = Literal[
    "versions", "machine", "accelerators", "network", "variables", "numbers", "attention",
                  "kernels", "ranks",
    "collectives", "disk",
]  # fmt: skip
SUBJECTS: tuple[Subject, ...] = get_args(Subject)
"""Subjects in the order of the report."""
TIMEOUT_FACTORS = {"versions": 2, "attention": 3, "kernels": 3, "ranks": 2, "collectives": 2}
"""Time limit of each check of a subject in multiples of --timeout; 1 for other subjects."""
ADVICE = {
    "accelerators": (
        "the driver does not answer: look at `dmesg` for Xid or amdgpu errors; a restart of the "
        "machine may help"
    ),
    "attention": (
        "runs would fail too, also with --attention-backend auto: choose another backend; "
        "reinstall torch if it is sdpa"
    ),
    "kernels": "run with --no-fused-kernels, or without --fp8-format if it is float8 products",
    "ranks": (
        "a rank is late or unreachable: set GLOO_SOCKET_IFNAME to the nodes' network, check "
        "firewalls"
    ),
}
"""Advice by subject for a check that fails."""


@dataclass(frozen=True)
class Check:
    """Entry of `CHECKS`: one check called `name`, which runs in a child process.

    `subject` is its section of the report. `function`, "module:name", is called with a
    `CheckContext` and `arguments`, and returns a list of `Finding`. `scope` tells who calls it:
    each rank, one rank of each node, or all ranks together. The check fails if the function hangs,
    raises an exception or ends its process. Then the checks whose `requires` is its name ("": none)
    are left out; if all ranks ran it together, those that require the check "meeting" are, as its
    process group is lost.
    """

    subject: Subject
    name: str
    """Name in the progress line, and of the finding if the check fails."""
    function: str
    scope: Literal["rank", "node", "ranks"] = "rank"
    """Ranks that run it: each rank, one rank of each node, or all ranks together."""
    arguments: tuple[str, ...] = ()
    requires: str = ""
    """Name of a check after whose failure this one is left out."""


CHECKS = (
    # First: the driver would report the memory that this command's own ranks use later as another
    # process's.
    Check("accelerators", "driver", "megaenc.doctor.accelerators:check_driver", "node"),
    # Cross-rank checks next, before slow checks set the ranks apart.
    Check("ranks", "meeting", "megaenc.doctor.cross_rank:join_ranks", "ranks"),
    Check(
        "disk",
        "shared by ranks",
        "megaenc.doctor.cross_rank:check_shared_directory",
        "ranks",
        requires="meeting",
    ),
    Check(
        "collectives",
        "collectives",
        "megaenc.doctor.collectives:check_collectives",
        "ranks",
        requires="meeting",
    ),
    Check("versions", "versions", "megaenc.doctor.versions:check_versions"),
    *(
        Check("versions", name, "megaenc.doctor.versions:check_package", arguments=(name,))
        for name in (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES)
    ),
    Check("versions", "CUDA, ROCm, NCCL", "megaenc.doctor.versions:check_libraries"),
    Check("machine", "processors", "megaenc.doctor.machine:check_processors", "node"),
    Check("machine", "memory", "megaenc.doctor.machine:check_memory", "node"),
    Check("machine", "/dev/shm", "megaenc.doctor.machine:check_dev_shm", "node"),
    Check("machine", "limits", "megaenc.doctor.machine:check_resource_limits"),
    Check("accelerators", "seen by torch", "megaenc.doctor.accelerators:check_torch_devices"),
    Check("network", "network cards", "megaenc.doctor.network:check_network_cards", "node"),
    Check("network", "interfaces", "megaenc.doctor.network:check_interfaces", "node"),
    Check("variables", "variables", "megaenc.doctor.env_vars:check_env_vars"),
    Check("numbers", "matrix products", "megaenc.doctor.numerics:check_matmul"),
    Check("attention", "attention backends", "megaenc.doctor.numerics:prepare_attention"),
    *(
        Check(
            "attention",
            name,
            "megaenc.doctor.numerics:check_attention_backend",
            arguments=(name,),
            requires="attention backends",
        )
        for name in ATTENTION_BACKENDS
    ),
    Check("kernels", "fused kernels", "megaenc.doctor.numerics:prepare_fused_kernels"),
    *(
        Check(
            "kernels",
            kernel.name,
            "megaenc.doctor.numerics:check_fused_kernel",
            arguments=(kernel.name,),
            requires="fused kernels",
        )
        for kernel in fields(FusedKernels)
    ),
    Check("kernels", "float8 products", "megaenc.doctor.numerics:check_fp8_products"),
    Check("disk", "space", "megaenc.doctor.disk:check_disk_space", "node"),
    Check("disk", "temporary files", "megaenc.doctor.disk:check_temp_space", "node"),
    Check("disk", "promises of the file system", "megaenc.doctor.disk:check_file_system", "node"),
)
"""All checks, in the order in which they run."""
