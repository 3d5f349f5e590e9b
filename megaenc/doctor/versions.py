"""Which versions are installed, whether they are those that megaenc is made for, and whether they can be imported at all."""

import importlib
import platform
import re
from importlib import metadata
from pathlib import Path

import megaenc
from megaenc.doctor.findings import Asked, Finding, Probe, note, ok, problem

_REQUIRED = ("torch", "megatron-core", "transformers", "tokenizers", "numpy")
_OPTIONAL = ("triton", "flash-attn", "flash-attn-3", "transformer-engine", "apex", "amdsmi")
_MODULES = {
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "transformer-engine": "transformer_engine.pytorch",
}
"""What is imported of a package, where it is not called the same."""
_OF_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")


def versions(asked: Asked) -> list[Finding | Probe]:
    """Of megaenc, Python and each package that matters; then a probe to import each of those."""
    found: list[Finding | Probe] = [
        ok("megaenc", f"{megaenc.__version__} in {Path(megaenc.__file__).parent}", alike="problem"),
        ok("python", f"{platform.python_version()} on {platform.system()} {platform.release()}", alike="note"),
    ]
    found += [Probe("versions", name, f"{__name__}:required", arguments=(name,), patience=2) for name in _REQUIRED]
    there = [name for name in _OPTIONAL if _version(name)]
    found += [Probe("versions", name, f"{__name__}:optional", arguments=(name,), patience=2) for name in there]
    found.append(ok("not installed", f"{', '.join(name for name in _OPTIONAL if name not in there)}; megaenc does without"))
    found += lacking()
    return [*found, Probe("versions", "CUDA, ROCm, NCCL", f"{__name__}:libraries", patience=2)]


def required(asked: Asked, name: str) -> list[Finding]:
    """A package that nothing goes without."""
    found = _version(name)
    if not found:
        return [problem(name, "not installed", f"pip install {name}, or ./install.sh for all", alike="problem")]
    try:
        _import(name)
    except Exception as error:  # a half-installed package raises whatever it likes
        said = f"{found}, and cannot be imported: {_short(error)}"
        return [problem(name, said, f"install {name} anew: ./install.sh", alike="problem")]
    return _known(name, found) or [ok(name, found, alike="problem")]


def _known(name: str, found: str) -> list[Finding]:
    """A finding where the adapters were not written for this version of megatron-core."""
    if name == "megatron-core":
        from megaenc.backend.megatron import KNOWN_VERSIONS

        if found not in KNOWN_VERSIONS:
            known = " or ".join(KNOWN_VERSIONS)
            advice = f"pip install megatron-core=={KNOWN_VERSIONS[-1]}"
            return [problem(name, f"{found}; expected {known}", advice, alike="problem")]
    return []


def optional(asked: Asked, name: str) -> list[Finding]:
    """A package that is installed, though megaenc does without: it may be for another torch."""
    found = _version(name)
    try:
        _import(name)
    except Exception as error:
        advice = f"pip uninstall {name}, or install the one that is made for this torch"
        return [note(name, f"{found}, and cannot be imported: {_short(error)}", advice, alike="note")]
    return (_unlike_torch_s() if name == "triton" else []) or [ok(name, found, alike="note")]


def _unlike_torch_s() -> list[Finding]:
    """A finding where the triton that is installed is not the one that this torch asks for."""
    from packaging.requirements import Requirement

    there = {called: version for called in _OF_TRITON if (version := _installed(called))}
    text = " and ".join(f"{called} {version}" for called, version in there.items())
    wanted = [Requirement(line) for line in metadata.requires("torch") or () if re.match(r"[\w-]+", line)[0] in _OF_TRITON]
    wanted = [each for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})]
    if len(there) > 1:
        keep = f"{wanted[0].name}{wanted[0].specifier}" if wanted else "the one for this torch"
        advice = f"one is written over the other: pip uninstall {' '.join(there)}, then install {keep}"
        return [note("triton", text, advice, alike="note")]
    for each in wanted:
        if not each.specifier.contains(there.get(each.name, "0"), prereleases=True):
            advice = f"pip install '{each.name}{each.specifier}'"
            return [note("triton", f"{text}; this torch asks for {each.name}{each.specifier}", advice, alike="note")]
    return []


def _import(name: str) -> None:
    if name == "megatron-core":  # without what it would load besides, for seconds
        from megaenc.backend.megatron import import_megatron

        import_megatron()
    else:
        importlib.import_module(_MODULES.get(name, name))


def _version(name: str) -> str:
    """Of the package, by whichever of its names it is installed; empty where it is not."""
    return next(filter(None, map(_installed, _OF_TRITON if name == "triton" else (name,))), "")


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def lacking() -> list[Finding]:
    """What megaenc's own list of packages asks for and is not there, or in another version."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in metadata.requires("megaenc") or ()]
    except metadata.PackageNotFoundError:
        return [
            note(
                "packages",
                "megaenc itself is not installed: it runs from its folder",
                "./install.sh installs it and all it needs",
            )
        ]
    wrong = []
    for each in wanted:
        if each.marker and not each.marker.evaluate({"extra": ""}):
            continue
        try:
            there = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{each.name} is missing")
            continue
        if not each.specifier.contains(there, prereleases=True):
            wrong.append(f"{each.name} {there}, expected {each.specifier}")
    if wrong:
        return [problem("packages", "; ".join(wrong), "./install.sh, or pip install with the versions named")]
    return [ok("packages", f"all {len(wanted)} that megaenc names are there, in versions that it takes")]


def libraries(asked: Asked) -> list[Finding]:
    """What torch was built for, and the libraries that it brings."""
    import torch

    if torch.version.hip:
        built = f"ROCm {torch.version.hip}"
    else:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "processors alone"
    found = [ok("torch is built for", built, alike="problem")]
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found.append(ok("RCCL" if torch.version.hip else "NCCL", nccl, alike="problem"))
        if not torch.version.hip and torch.backends.cudnn.is_available():
            found.append(ok("cuDNN", str(torch.backends.cudnn.version()), alike="note"))
    return found
