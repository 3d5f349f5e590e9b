"""Import of megatron-core: version check, and patches that this machine needs."""

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata

from megaenc.backend.device import detect_backend
from megaenc.errors import InputError

# The patches replace internal names, so that each version is reviewed before it is listed here.
KNOWN_VERSIONS = ("0.16.1",)


def check_megatron_version(version: str | None = None) -> str:
    """Return a megatron-core version if it is one of KNOWN_VERSIONS.

    Args:
        version: Text such as 0.16.1; None for that of the installed megatron-core.

    Raises:
        InputError: The version is unknown, or megatron-core is not installed.
    """
    if version is None:
        try:
            version = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            raise InputError(
                f"megatron-core is not installed, expected {' or '.join(KNOWN_VERSIONS)}: "
                f"pip install megatron-core=={KNOWN_VERSIONS[-1]}"
            ) from None
    if version not in KNOWN_VERSIONS:
        known = " or ".join(KNOWN_VERSIONS)
        raise InputError(
            f"megatron-core {version} is installed, expected {known}: pip install "
            f"megatron-core=={KNOWN_VERSIONS[-1]}"
        )
    return version


@contextlib.contextmanager
def _hide_modules(*modules: str) -> Iterator[None]:
    """Make imports of `modules` fail in the block.

    Modules that are already loaded stay.
    """
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def _skip_compiling() -> Iterator[None]:
    """Make `torch.compile` return the function that it is given, in the block."""
    import torch

    compile_function = torch.compile
    torch.compile = lambda function: function
    try:
        yield
    finally:
        torch.compile = compile_function


@functools.cache
def import_megatron() -> None:
    """Import megatron.core without the packages that it does not need here.

    Version and patches are left to `prepare_megatron`. W&B and TensorBoard, left out, take a second
    to import. Triton, left out on a CPU, prints errors in processes that fail; it is imported if
    TRITON_INTERPRET=1 enables its interpreter. All three can be imported later. Functions that
    megatron-core decorates with torch.compile are not compiled: no model here calls one, and
    torch's compiler takes a second to import.
    """
    import torch

    unused = ["wandb", "torch.utils.tensorboard"]
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        unused.append("triton")
    with _hide_modules(*unused), _skip_compiling(), warnings.catch_warnings():
        # megatron-core warns that Transformer Engine and apex are missing; neither is needed.
        warnings.simplefilter("ignore")
        import megatron.core
        import megatron.core.timers  # noqa: F401


@functools.cache
def prepare_megatron() -> None:
    """Check megatron-core's version, import it and patch it for this machine.

    Call it before any import of megatron.core. It needs no process group. Further calls do nothing.

    Raises:
        InputError: megatron-core is missing or of an unknown version, or there are more processes
            than accelerators.
    """
    check_megatron_version()
    import_megatron()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        from megaenc.backend import cpu_patches, main_grad, optimizer_patches

        if detect_backend().is_cpu:
            cpu_patches.install()
        optimizer_patches.install()
        main_grad.install()
