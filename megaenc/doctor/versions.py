"""Checks of package versions: installed, supported and importable."""

import importlib
import platform
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import megaenc
from megaenc.doctor.checks import OPTIONAL_PACKAGES, REQUIRED_PACKAGES
from megaenc.doctor.result import CheckContext, Finding, note, ok, problem

_MODULES = {
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute",
    "transformer-engine": "transformer_engine.pytorch",
}
"""Modules to import, for packages whose module has another name."""
_TRITON_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")


def check_versions(context: CheckContext) -> list[Finding]:
    """Return findings on megaenc, Python, missing optional packages and requirements.

    The last one is that of `check_requirements`; the others are ok.
    """
    missing = [name for name in OPTIONAL_PACKAGES if not _package_version(name)]
    return [
        ok(
            "megaenc",
            f"{megaenc.__version__} in {Path(megaenc.__file__).parent}",
            mismatch_level="problem",
        ),
        ok(
            "python",
            f"{platform.python_version()} on {platform.system()} {platform.release()}",
            mismatch_level="note",
        ),
        ok("not installed", f"{', '.join(missing)}; megaenc does without"),
        check_requirements(),
    ]


def check_package(context: CheckContext, name: str) -> list[Finding]:
    """Import a package; return its version, or a finding on the failure.

    A required package that is missing, cannot be imported or (megatron-core) has an unsupported
    version is a problem, an optional one that cannot be imported a note. The list is empty if an
    optional one is missing.

    Args:
        name: One of `REQUIRED_PACKAGES` or `OPTIONAL_PACKAGES`.
    """
    version = _package_version(name)
    is_required = name in REQUIRED_PACKAGES
    if not version:
        advice = f"pip install {name}, or ./install.sh for all"
        return (
            [problem(name, "not installed", advice, mismatch_level="problem")]
            if is_required
            else []
        )
    try:
        if name == "megatron-core":
            from megaenc.backend.megatron import KNOWN_VERSIONS, import_megatron

            import_megatron()  # skips optional imports that take seconds
        else:
            importlib.import_module(_MODULES.get(name, name))
    except Exception as error:  # a half-installed package may raise anything
        text = (
            f"{version}, cannot be imported: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:160]}"
        )
        if is_required:
            return [
                problem(name, text, f"reinstall {name}: ./install.sh", mismatch_level="problem")
            ]
        return [
            note(
                name,
                text,
                f"pip uninstall {name}, or install the version built for this torch",
                mismatch_level="note",
            )
        ]
    # The adapters do not support other versions
    if name == "megatron-core" and version not in KNOWN_VERSIONS:
        advice = f"pip install megatron-core=={KNOWN_VERSIONS[-1]}"
        return [
            problem(
                name,
                f"{version}; expected {' or '.join(KNOWN_VERSIONS)}",
                advice,
                mismatch_level="problem",
            )
        ]
    return [ok(name, version, mismatch_level="problem" if is_required else "note")]


def check_requirements() -> Finding:
    """Check that megaenc's requirements are installed in supported versions.

    The finding is a problem if they are not. It is a note if megaenc itself is not installed and
    runs from its source directory; its requirements are then unknown.
    """
    try:
        texts = metadata.requires("megaenc") or ()
    except metadata.PackageNotFoundError:
        advice = "./install.sh installs it with its dependencies"
        return note(
            "packages", "megaenc is not installed: it runs from its source directory", advice
        )
    requirements = [
        requirement
        for requirement in map(Requirement, texts)
        if not requirement.marker or requirement.marker.evaluate({"extra": ""})
    ]
    errors = []
    for requirement in requirements:
        version = _installed_version(requirement.name)
        if not version:
            errors.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            errors.append(f"{requirement.name} {version}, expected {requirement.specifier}")
    if errors:
        return problem("packages", "; ".join(errors), "./install.sh, or pip install these versions")
    return ok(
        "packages",
        f"all {len(requirements)} of megaenc's requirements are installed in supported versions",
    )


def _installed_version(name: str) -> str:
    """Return a distribution's version, or an empty string if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _package_version(name: str) -> str:
    """Return a package's version under any of its distribution names, or ""."""
    return next(
        filter(None, map(_installed_version, _TRITON_PACKAGES if name == "triton" else (name,))), ""
    )


def check_libraries(context: CheckContext) -> list[Finding]:
    """Return ok findings on torch's build and, with a GPU, its libraries.

    The build is CUDA, ROCm or CPU; the libraries are RCCL, or NCCL and cuDNN.
    """
    import torch

    hip = torch.version.hip
    cuda = torch.version.cuda
    build = "CPU only"
    if hip:
        build = f"ROCm {hip}"
    elif cuda:
        build = f"CUDA {cuda}"
    findings = [ok("torch is built for", build, mismatch_level="problem")]
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        findings.append(ok("RCCL" if hip else "NCCL", nccl, mismatch_level="problem"))
        if not hip and torch.backends.cudnn.is_available():
            findings.append(ok("cuDNN", str(torch.backends.cudnn.version()), mismatch_level="note"))
    return findings
