"""Checks of environment variables of torch, networks and accelerators."""

import re

from megaenc.doctor.result import CheckContext, Finding, note, ok, problem

_PREFIXES = (
    "AMD_", "CUBLAS_", "CUDA_", "FI_", "GLOO_", "GPU_", "HIP_", "HSA_", "KMP_", "MIOPEN_", "MKL_",
             "NCCL_", "NVIDIA_", "NVTE_",
    "OMP_", "PYTORCH_", "RCCL_", "ROCBLAS_", "ROCR_", "TORCH_", "TRITON_", "UCX_",
)  # fmt: skip
_PER_RANK = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
)
"""Variables that may differ between ranks."""
_SECRET_NAME = re.compile(
    r"(?<!_P)KEY|TOKEN|SECRET|(?<!BY)PASS|PWD|AUTH|CRED|SESSION|COOKIE|BEARER|SIGNATURE|(^|_)(SAS|DSN|PIN)(_|$)",
    re.I,
)
"""Pattern of variable names never shown. Network partition keys (NCCL_IB_PKEY) and BYPASS are not
secret."""
_SECRET_PARTS = (
    (re.compile(r"(?<=://)\S*@"), "***@"),  # https://user:password@host
    (re.compile(r"(?i)\b(bearer|basic)\s+\S+"), r"\1 ***"),
    (re.compile(r"(?i)(key|token|secret|pass\w*|pwd|auth\w*|sig|signature)=[^\s&;,]+"), r"\1=***"),
)
"""Patterns masked in shown values, with their replacements."""
_MAX_LENGTH = 120


PITFALLS = (
    ("NVTE_FLASH_ATTN NVTE_FUSED_ATTN NVTE_UNFUSED_ATTN", "not 1",
     "no effect: it is for Transformer Engine's attention, which no run uses; use "
     "--attention-backend instead"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "not 1",
     "megatron-core's overlap of communication and computation needs 1, which megaenc sets if it "
     "is unset: unset it"),
    ("CUDA_LAUNCH_BLOCKING HIP_LAUNCH_BLOCKING AMD_SERIALIZE_KERNEL AMD_SERIALIZE_COPY", "on",
     "the host waits for each kernel: for debugging only, unset it"),
    ("NCCL_P2P_DISABLE", "on",
     "accelerators of a node communicate through host memory, several times slower: unset it "
     "unless they hang without it"),
    ("NCCL_SHM_DISABLE", "on",
     "traffic without a direct link goes over the network: enlarge /dev/shm instead"),
    ("NCCL_IB_DISABLE", "on", "nodes use TCP even with InfiniBand or RoCE: unset it there"),
    ("NCCL_NET", "SOCKET", "nodes use TCP instead of a faster network: unset it"),
    ("NCCL_NET_GDR_LEVEL", "0 LOC",
     "network cards do not access the accelerators' memory directly: unset it"),
    ("NCCL_ALGO NCCL_PROTO", "any",
     "one algorithm for all sizes is slower: unset it unless runs must be bit-identical"),
    ("NCCL_DEBUG", "INFO TRACE",
     "thousands of lines on a large run: NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE for a file"),
    ("NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT", "any",
     "torch now reads TORCH_NCCL_...: rename or unset it"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "off",
     "after a rank is lost, the others wait until megaenc's watchdog ends them: unset it"),
    ("TORCH_NCCL_BLOCKING_WAIT", "on", "the host waits for each collective: unset it"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL",
     "every collective is first checked across ranks: slow, unset it"),
    ("HSA_OVERRIDE_GFX_VERSION", "any",
     "kernels of another architecture run and may compute wrong results"),
    ("HSA_ENABLE_SDMA", "off",
     "copies use compute units: unset it unless copies are known to be wrong without it"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NO_HIP_MEMORY_CACHING", "on",
     "each tensor is newly allocated: slow, unset it"),
    ("NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "on",
     "float32 products are rounded to 10 bits: unset it"),
    ("TRITON_INTERPRET", "on",
     "kernels run on the host, thousands of times slower: for tests only, unset it"),
)  # fmt: skip
"""(Variable names, harmful values, advice): notes, except for the last, which is a problem."""


def _is_pitfall(value: str, values: str) -> bool:
    """Return whether `value` matches the harmful `values`.

    They are "on", "off", "any", "not 1", or a list of words.
    """
    word = value.strip().upper()
    on = value.strip().lower() not in ("", "0", "false", "off", "no")
    return {"on": on, "off": not on, "any": True, "not 1": value != "1"}.get(
        values, word in values.split()
    )


def check_env_vars(context: CheckContext) -> list[Finding]:
    """Return a finding per torch, network or device variable in `context.environment`.

    It is a note if the value is harmful by `PITFALLS`, a problem if TRITON_INTERPRET is on, else
    ok; HIP_ and ROCR_VISIBLE_DEVICES together are a further note. Names begin with one of
    `_PREFIXES`; those of secrets are left out, and secrets in values are masked. If there is no
    such variable, there is one ok finding.
    """
    findings = [
        _check_variable(name, value)
        for name, value in sorted(context.environment.items())
        if name.startswith(_PREFIXES) and not _SECRET_NAME.search(name)
    ]
    both = [context.environment.get(f"{name}_VISIBLE_DEVICES") for name in ("HIP", "ROCR")]
    if None not in both:
        advice = "the first selects among the devices that the second leaves: set only one of them"
        findings.append(note("HIP_ and ROCR_VISIBLE_DEVICES", " of ".join(both), advice))
    return findings or [
        ok("variables", "none of NCCL, RCCL, CUDA, HIP, HSA, TORCH, OMP and their like is set")
    ]


def _check_variable(name: str, value: str) -> Finding:
    """Return a finding with the masked value of a variable, and advice if harmful.

    Long values are shortened.
    """
    for pattern, replacement in _SECRET_PARTS:
        value = pattern.sub(replacement, value)
    text = value if len(value) <= _MAX_LENGTH else value[: _MAX_LENGTH - 3] + "..."
    advice = next(
        (
            advice
            for names, values, advice in PITFALLS
            if name in names.split() and _is_pitfall(value, values)
        ),
        "",
    )
    judge = problem if advice and name == "TRITON_INTERPRET" else note
    return judge(
        name, text or "(empty)" * (not advice), advice, "ok" if name in _PER_RANK else "note"
    )
