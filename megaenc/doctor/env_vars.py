"""The variables that torch, the networks and the accelerators listen to, each with a word where its value is known to bite."""

import re

from megaenc.doctor.result import Finding, ProbeContext, note, ok, problem

_PREFIXES = (
    "AMD_", "CUBLAS_", "CUDA_", "FI_", "GLOO_", "GPU_", "HIP_", "HSA_", "KMP_", "MIOPEN_", "MKL_", "NCCL_", "NVIDIA_", "NVTE_",
    "OMP_", "PYTORCH_", "RCCL_", "ROCBLAS_", "ROCR_", "TORCH_", "TRITON_", "UCX_",
)  # fmt: skip
_OF_A_RANK = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Which may well differ between ranks."""
_SECRET = re.compile(
    r"(?<!_P)KEY|TOKEN|SECRET|(?<!BY)PASS|PWD|AUTH|CRED|SESSION|COOKIE|BEARER|SIGNATURE|(^|_)(SAS|DSN|PIN)(_|$)",
    re.I,
)
"""In the name of a variable that is not shown. The partition keys of a network (NCCL_IB_PKEY) are no secret, nor is a BYPASS."""
_SECRET_PARTS = (
    (re.compile(r"(?<=://)\S*@"), "***@"),  # https://user:password@host
    (re.compile(r"(?i)\b(bearer|basic)\s+\S+"), r"\1 ***"),
    (re.compile(r"(?i)(key|token|secret|pass\w*|pwd|auth\w*|sig|signature)=[^\s&;,]+"), r"\1=***"),
)
"""In values that are shown, and what stands for each."""
_LONGEST = 120


BITES = (
    ("NVTE_FLASH_ATTN NVTE_FUSED_ATTN NVTE_UNFUSED_ATTN", "not 1",
     "of no effect: it is for Transformer Engine's attention, which no run takes; --attention-backend chooses instead"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "not 1",
     "megatron-core's overlap of communication and computing counts on 1, which megaenc sets where it is not set: take it out"),
    ("CUDA_LAUNCH_BLOCKING HIP_LAUNCH_BLOCKING AMD_SERIALIZE_KERNEL AMD_SERIALIZE_COPY", "on",
     "each kernel is waited for: for finding a fault only, take it out"),
    ("NCCL_P2P_DISABLE", "on",
     "accelerators of a node speak through the host's memory, several times slower: take it out unless they hang without"),
    ("NCCL_SHM_DISABLE", "on", "what cannot go from card to card goes over the network: enlarge /dev/shm instead"),
    ("NCCL_IB_DISABLE", "on", "nodes speak over TCP even where there is InfiniBand or RoCE: take it out there"),
    ("NCCL_NET", "SOCKET", "nodes speak over TCP whatever faster network there is: take it out"),
    ("NCCL_NET_GDR_LEVEL", "0 LOC", "the network cards do not reach the accelerators' memory: take it out"),
    ("NCCL_ALGO NCCL_PROTO", "any", "one way for all sizes costs speed: it is for runs that repeat bit by bit, else take it out"),
    ("NCCL_DEBUG", "INFO TRACE", "thousands of lines on a large run: NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE for a file"),
    ("NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT", "any", "torch reads it as TORCH_NCCL_... now: rename it or take it out"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "off",
     "a lost rank leaves the others waiting until megaenc's own watch ends them: take it out"),
    ("TORCH_NCCL_BLOCKING_WAIT", "on", "the host waits for each collective: take it out"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "every collective is compared over all ranks first: slow, take it out"),
    ("HSA_OVERRIDE_GFX_VERSION", "any", "kernels of another architecture are run: wrong numbers may come of it"),
    ("HSA_ENABLE_SDMA", "off", "copies take compute units: take it out unless copies were found to be wrong"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NO_HIP_MEMORY_CACHING", "on", "each tensor is allocated anew: slow, take it out"),
    ("NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "on", "float32 products are rounded to 10 bits: take it out"),
    ("TRITON_INTERPRET", "on", "kernels run on the host, thousands of times slower: for tests only, take it out"),
)  # fmt: skip
"""(Names, which of their values bite, what to do): notes, but for the last, which is a problem."""


def _bites(value: str, values: str) -> bool:
    """Return whether `value` is one of `values`: on, off, any, not 1, or the words themselves."""
    word, on = value.strip().upper(), value.strip().lower() not in ("", "0", "false", "off", "no")
    return {"on": on, "off": not on, "any": True, "not 1": value != "1"}.get(values, word in values.split())


def variables(asked: ProbeContext) -> list[Finding]:
    """Show those that are set, in order of the alphabet."""
    found = [
        _variable(name, value)
        for name, value in sorted(asked.environment.items())
        if name.startswith(_PREFIXES) and not _SECRET.search(name)
    ]
    both = [asked.environment.get(f"{name}_VISIBLE_DEVICES") for name in ("HIP", "ROCR")]
    if None not in both:
        advice = "the first counts among those that the second leaves: set one of them"
        found.append(note("HIP_ and ROCR_VISIBLE_DEVICES", " of ".join(both), advice))
    return found or [ok("variables", "none of NCCL, RCCL, CUDA, HIP, HSA, TORCH, OMP and their like is set")]


def _variable(name: str, value: str) -> Finding:
    for pattern, instead in _SECRET_PARTS:
        value = pattern.sub(instead, value)
    text = value if len(value) <= _LONGEST else value[: _LONGEST - 3] + "..."
    advice = next((advice for names, values, advice in BITES if name in names.split() and _bites(value, values)), "")
    judge = problem if advice and name == "TRITON_INTERPRET" else note
    return judge(name, text or "(empty)" * (not advice), advice, "ok" if name in _OF_A_RANK else "note")
