"""Facts about the machine: processor cores, accelerators, and limits."""

import contextlib
import os
import platform
import re
import resource
import subprocess
from functools import cache
from pathlib import Path

from megaenc.errors import InputError
from megaenc.processes import python_command, python_environment, with_pdeathsig

_MAX_PROCESSES = 64
_MAX_PER_CORE = 8
_OTHER_FILES = 256  # of libraries, logs and devices


def usable_core_count() -> int:
    """Return the number of logical processors in this process's affinity mask.

    CPU quotas of a container do not count, see `doctor.machine.cpu_quota`.
    """
    return len(os.sched_getaffinity(0))


def allow_open_files(count: int, purpose: str) -> None:
    """Let this process open `count` files more.

    The process's soft limit always becomes its hard limit, as later needs of the run are not all
    known.

    Args:
        count: Files beyond those that are open and those of libraries.
        purpose: What opens them, for the error.

    Raises:
        InputError: The hard limit is too low.
    """
    needed = len(os.listdir("/proc/self/fd")) + count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"ulimit -Hn: found a limit of {hard:,} open files, "
            f"expected {needed:,} or more for {purpose}"
        )
    if soft != hard:
        # A kernel's own maximum may be lower than the limit that it states.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_processor_name(root: Path = Path("/")) -> str:
    """Return the processor's model name, as in `root`/proc/cpuinfo.

    If that has none, the name or architecture in Python's `platform`, which may be empty.
    """
    with contextlib.suppress(OSError):
        text = (root / "proc/cpuinfo").read_text(errors="replace")
        if name := re.search(r"^model name\s*:\s*(.*?)\s*$", text, re.MULTILINE):
            return name[1]
    return platform.processor() or platform.machine()


def check_process_count(flag: str, count: int) -> None:
    """Raise InputError, naming `flag`, for more processes or threads than is sensible.

    These are more than 64 that are also more than 8 per usable core.
    """
    cores = usable_core_count()
    limit = max(_MAX_PROCESSES, _MAX_PER_CORE * cores)
    if count > limit:
        raise InputError(
            f"{flag}: found {count:,}, expected at most {limit:,} with {cores:,} usable cores; "
            "give a smaller number"
        )


@cache
def accelerator_names() -> list[str]:
    """Return the names of the accelerators that torch may use, by torch's index.

    Accelerators that CUDA_VISIBLE_DEVICES hides are left out. The list is empty without a device
    file. The first call starts Python to list them, so that this process does not import torch;
    later calls return the same list, which must not be changed.

    Raises:
        InputError: torch failed to list them.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not any(
        Path("/dev", name).exists() for name in ("kfd", "dxg")
    ):
        return []
    code = (
        "import torch; [print(torch.cuda.get_device_name(index)) for index in "
        "range(torch.cuda.device_count())]"
    )
    result = subprocess.run(
        with_pdeathsig(python_command("-c", code)),
        env=python_environment(),
        capture_output=True,
        text=True,
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["torch printed no error"]
        raise InputError(
            f"the accelerators could not be counted: {lines[-1]}; `megaenc doctor` checks them"
        )
    return result.stdout.splitlines()


def select_visible_devices(count: int) -> tuple[str, list[str]]:
    """Return the variable of visible devices and its first `count` entries.

    It is HIP_VISIBLE_DEVICES if that is set and not empty, else CUDA_VISIBLE_DEVICES; if this is
    unset or empty, the entries are "0", "1", ... There are fewer entries if the variable has fewer.
    That devices exist is not checked. The environment is not changed.
    """
    variable = (
        "HIP_VISIBLE_DEVICES" if os.environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    )
    chosen = os.environ.get(variable, "")
    devices = chosen.split(",") if chosen else [str(index) for index in range(count)]
    return variable, devices[:count]
