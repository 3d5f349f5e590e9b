"""Server that runs Python scripts in forks: `fork_server.py SOCKET`.

It imports torch, megatron-core and megaenc once. A fresh interpreter spends seconds of processor
time on these imports, and torchrun as many for each rank, which is most of a short run. The server
only imports and forks. It has one thread and nothing open that a fork cannot inherit, so a script
runs as in its own interpreter with these modules imported. There are two differences: sets of
strings have the same order in all forks, and variables that are read at import are read too early.

A request comes over the socket with the given file descriptor: JSON of `command`, `processes`,
`environment` and `packages` (a directory to import from as well, or null), with the file
descriptors of standard output and error. The answers are a process id and, when that process has
ended, its exit code.
"""

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from megaenc.console import silence_libraries

silence_libraries()  # as a command does, before the first import of torch

from torch.distributed import TCPStore  # noqa: E402

from megaenc.backend import prepare_megatron  # noqa: E402
from megaenc.dist_env import die_with_parent  # noqa: E402

# Of what a run imports when it comes to that: what takes time.
IMPORTED = (
    "megaenc.training.command",
    "megaenc.training.planning",
    "megaenc.training.trainer",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)
TO_STOP = 30  # seconds that torchrun gives the other ranks, when one has failed


def import_all() -> None:
    """Import the slow modules once for all forks."""
    prepare_megatron()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # or each fork would go through it at its end


def serve(requests: socket.socket) -> str | None:
    """Fork for each request in turn; return the script in a fork, None at the end."""
    while True:
        message, streams, *_ = socket.recv_fds(requests, 1 << 20, 2)
        if not message:
            return None
        assert len(os.listdir("/proc/self/task")) == 1, (
            "a thread was started: it would be missing in a fork"
        )
        server = os.getpid()
        if child := os.fork():
            for stream in streams:
                os.close(stream)
            requests.send(str(child).encode())
            requests.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
            continue
        requests.close()
        return prepare(json.loads(message), streams, server)


def prepare(request: dict, streams: list[int], server: int) -> str:
    """Set up session, output, environment and arguments of a fork; return its script."""
    die_with_parent(server)
    os.setsid()
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    if request["packages"]:
        sys.path.append(request["packages"])
    if request["processes"] > 1:
        launch(request["processes"])
    return sys.argv[0]


def launch(count: int) -> None:
    """Fork `count` ranks as torchrun does, and return in each rank.

    This process waits for them and exits with torchrun's code.
    """
    launcher = os.getpid()
    logs = Path(tempfile.mkdtemp(prefix="torchelastic_"))
    listening = socket.create_server(("localhost", 0))
    port = listening.getsockname()[1]
    ranks = {}
    for rank in range(count):
        if child := os.fork():
            ranks[child] = rank
            continue
        listening.close()
        die_with_parent(launcher)
        os.setsid()
        directory = logs / "attempt_0" / str(rank)
        directory.mkdir(parents=True)
        here = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "ROLE_RANK": rank,
        }
        here |= {
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_WORLD_SIZE": count,
            "ROLE_NAME": "default",
        }
        here |= {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "TORCHELASTIC_ERROR_FILE": directory / "error.json",
        }
        here |= {"TORCHELASTIC_RUN_ID": logs.name, "TORCHELASTIC_USE_AGENT_STORE": True}
        here |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
        os.environ.update({name: str(value) for name, value in here.items()})
        sys.stdout.reconfigure(write_through=True)  # it starts them with -u
        return
    store = TCPStore(
        "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    failed = watch(ranks)
    shutil.rmtree(logs)
    del store
    os._exit(1 if failed else 0)  # which spares the time of taking apart all that was imported


def watch(ranks: dict[int, int]) -> bool:
    """Wait for all ranks, end the others if one fails, and return whether one failed.

    `ranks` maps process ids to ranks.
    """

    def end(number: int) -> None:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, number)

    failed = False
    signal.signal(signal.SIGALRM, lambda *_: end(signal.SIGKILL))
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = True
            print(
                f"rank {rank} failed (exitcode: {code}), the others are ended",
                file=sys.stderr,
                flush=True,
            )
            end(signal.SIGTERM)
            signal.alarm(TO_STOP)
    return failed


def become(script: str) -> None:
    """Run `script` as `__main__`, as the interpreter does."""
    main = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    import_all()
    script = serve(socket.socket(fileno=int(sys.argv[1])))
    if script:
        become(script)
