"""megatron-core made ready: its version checked, its adapters put in where this machine needs them."""

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata

from megaenc.backend.device import detect_backend
from megaenc.errors import InputError

# The adapters stand in for names inside the wheel, so each version is read before it is listed here.
KNOWN_VERSIONS = ("0.16.1",)


def check_megatron_version(found: str | None = None) -> str:
    """Return the installed version of megatron-core; InputError if the adapters were not written for it."""
    if found is None:
        try:
            found = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            raise InputError(f"megatron-core is not installed, expected {' or '.join(KNOWN_VERSIONS)}") from None
    if found not in KNOWN_VERSIONS:
        known = " or ".join(KNOWN_VERSIONS)
        raise InputError(f"megatron-core {found} is installed, expected {known}: pip install megatron-core=={KNOWN_VERSIONS[-1]}")
    return found


@contextlib.contextmanager
def _hide_modules(*modules: str) -> Iterator[None]:
    """Importing one of `modules` fails inside, unless somebody has done so before."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@functools.cache
def import_megatron() -> None:
    """Import megatron.core without W&B and TensorBoard, which take a second, and without an accelerator without triton.

    Triton is imported if its interpreter is asked for. Unused, it would complain in processes that end with an error.
    """
    import torch

    unused = ["wandb", "torch.utils.tensorboard"]
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        unused.append("triton")
    with _hide_modules(*unused), warnings.catch_warnings():
        # megatron-core says at import that Transformer Engine and apex are missing; neither is needed here.
        warnings.simplefilter("ignore")
        import megatron.core
        import megatron.core.timers  # noqa: F401


@functools.cache
def prepare_megatron() -> None:
    """Import megatron-core quietly and install the adapters. Call it before anything of megatron.core is used; again is free."""
    check_megatron_version()
    import_megatron()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        from megaenc.backend import cpu_patches, optimizer_patches

        if detect_backend().is_cpu:
            cpu_patches.install()
        optimizer_patches.install()
