"""Which versions are installed, whether they are those that megaenc is made for, and whether they can be imported at all."""

import importlib
import platform
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import megaenc
from megaenc.doctor.result import Finding, Probe, ProbeContext, note, ok, problem

_REQUIRED = ("torch", "megatron-core", "transformers", "tokenizers", "numpy")
_OPTIONAL = ("triton", "flash-attn", "flash-attn-3", "transformer-engine", "apex", "amdsmi")
_MODULES = {
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "transformer-engine": "transformer_engine.pytorch",
}
"""What is imported of a package, where it is not called the same."""
_OF_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")


def versions(asked: ProbeContext) -> list[Finding | Probe]:
    """Tell those of megaenc and Python, and ask for a probe to import each package that matters."""
    there = [name for name in _OPTIONAL if _version(name)]
    return [
        ok("megaenc", f"{megaenc.__version__} in {Path(megaenc.__file__).parent}", alike="problem"),
        ok("python", f"{platform.python_version()} on {platform.system()} {platform.release()}", alike="note"),
        *(Probe("versions", name, f"{__name__}:package", arguments=(name,), patience=2) for name in (*_REQUIRED, *there)),
        ok("not installed", f"{', '.join(name for name in _OPTIONAL if name not in there)}; megaenc does without"),
        lacking(),
        Probe("versions", "CUDA, ROCm, NCCL", f"{__name__}:libraries", patience=2),
    ]


def package(asked: ProbeContext, name: str) -> list[Finding]:
    """Tell whether a package is there, can be imported, and is one that megaenc, or torch, is made for."""
    found, needed = _version(name), name in _REQUIRED
    if not found:
        return [problem(name, "not installed", f"pip install {name}, or ./install.sh for all", alike="problem")]
    try:
        _import(name)
    except Exception as error:  # a half-installed package raises whatever it likes
        text = f"{found}, and cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if needed:
            return [problem(name, text, f"install {name} anew: ./install.sh", alike="problem")]
        return [note(name, text, f"pip uninstall {name}, or install the one that is made for this torch", alike="note")]
    if name == "megatron-core":
        from megaenc.backend.megatron import KNOWN_VERSIONS

        if found not in KNOWN_VERSIONS:  # the adapters were not written for it
            advice = f"pip install megatron-core=={KNOWN_VERSIONS[-1]}"
            return [problem(name, f"{found}; expected {' or '.join(KNOWN_VERSIONS)}", advice, alike="problem")]
    return [_triton(found) if name == "triton" else ok(name, found, alike="problem" if needed else "note")]


def _triton(found: str) -> Finding:
    """Judge whether the triton that is installed is the one that this torch asks for."""
    there = {called: version for called in _OF_TRITON if (version := _installed(called))}
    text = " and ".join(f"{called} {version}" for called, version in there.items())
    wanted = {f"{each.name}{each.specifier}": each for each in _requirements("torch") if each.name in _OF_TRITON}
    if len(there) > 1:
        keep = next(iter(wanted), "the one for this torch")
        advice = f"one is written over the other: pip uninstall {' '.join(there)}, then install {keep}"
        return note("triton", text, advice, alike="note")
    for called, each in wanted.items():
        if not each.specifier.contains(there.get(each.name, "0"), prereleases=True):
            return note("triton", f"{text}; this torch asks for {called}", f"pip install '{called}'", alike="note")
    return ok("triton", found, alike="note")


def lacking() -> Finding:
    """Tell what megaenc's own list of packages asks for and is not there, or in another version."""
    try:
        wanted = _requirements("megaenc")
    except metadata.PackageNotFoundError:
        advice = "./install.sh installs it and all it needs"
        return note("packages", "megaenc itself is not installed: it runs from its folder", advice)
    there = {each: _installed(each.name) for each in wanted}
    wrong = [
        f"{each.name} {version}, expected {each.specifier}" if version else f"{each.name} is missing"
        for each, version in there.items()
        if not version or not each.specifier.contains(version, prereleases=True)
    ]
    if wrong:
        return problem("packages", "; ".join(wrong), "./install.sh, or pip install with the versions named")
    return ok("packages", f"all {len(wanted)} that megaenc names are there, in versions that it takes")


def _requirements(distribution: str) -> list[Requirement]:
    """Return what a package asks for here, without its extras. Raises PackageNotFoundError."""
    found = map(Requirement, metadata.requires(distribution) or ())
    return [each for each in found if not each.marker or each.marker.evaluate({"extra": ""})]


def _import(name: str) -> None:
    if name == "megatron-core":  # without what it would load besides, for seconds
        from megaenc.backend.megatron import import_megatron

        import_megatron()
    else:
        importlib.import_module(_MODULES.get(name, name))


def _installed(name: str) -> str:
    """Return the version of a package; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _version(name: str) -> str:
    """Return the same by whichever of its names it is installed."""
    return next(filter(None, map(_installed, _OF_TRITON if name == "triton" else (name,))), "")


def libraries(asked: ProbeContext) -> list[Finding]:
    """Tell what torch was built for, and the libraries that it brings."""
    import torch

    hip, cuda = torch.version.hip, torch.version.cuda
    built = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "processors alone"
    found = [ok("torch is built for", built, alike="problem")]
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found.append(ok("RCCL" if hip else "NCCL", nccl, alike="problem"))
        if not hip and torch.backends.cudnn.is_available():
            found.append(ok("cuDNN", str(torch.backends.cudnn.version()), alike="note"))
    return found
