"""Small corpora and short runs: alone or under torchrun, always with a time limit."""

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from megaenc.counter_rng import uniforms

ROOT = Path(__file__).resolve().parents[1]
PRETRAIN = ROOT / "examples" / "pretrain_encoder.py"
WORKERS = Path(__file__).parent / "workers"

# Set by conftest.py: True while a test marked `multiprocess` runs, and where there is no pytest.
ranks_allowed = True

# A model for 2 stages x 2 ranks, two phases, warm-up, decay, weight decay and effective clipping.
SHORT_RUN = [
    "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "160",
    "--num-attention-heads", "4",
    "--num-query-groups", "2", "--seq-length", "64", "--micro-batch-size", "2",
    "--global-batch-size", "8",
    "--train-iters", "20", "--objective-schedule", "clm:0.5,mlm:0.5", "--lr", "3e-3",
    "--lr-warmup-iters", "4",
    "--lr-wsd-decay-iters", "5", "--clip-grad", "0.5", "--eval-iters", "1", "--eval-interval", "10",
]  # fmt: skip

# One update, smaller than any rounding: no weight changes.
STANDSTILL = [
    "--objective-schedule", "mlm", "--train-iters", "1", "--lr", "1e-30", "--eval-interval", "0",
    "--micro-batch-size", "1", "--global-batch-size", "1", "--seq-length", "64",
]  # fmt: skip


def write_text(path: Path, documents: int = 300, seed: int = 0) -> Path:
    """Write JSONL of made-up documents of 5 to 150 words with skewed frequencies."""
    words = [
        a + b + c
        for a in ("st", "pl", "gr", "m", "th", "l")
        for b in ("a", "e", "o", "ai")
        for c in ("n", "rk", "th", "m")
    ]
    lines = []
    for number in range(documents):
        length = 5 + int(145 * uniforms(seed, "length", 1, counters=(number,))[0])
        picks = (uniforms(seed, "words", length, counters=(number,)) ** 3 * len(words)).astype(int)
        lines.append(json.dumps({"text": " ".join(words[pick] for pick in picks) + "."}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_corpus(directory: Path) -> None:
    """Write 300 documents, a tokenizer of 400 ids and the corpus `small` of both."""
    from megaenc.data.preprocess import command as preprocess
    from megaenc.data.tokenizer import train_command

    text = str(write_text(directory / "text.jsonl"))
    tokenizer = str(directory / "tokenizer")
    train_command.main(["--input", text, "--vocab-size", "400", "--output", tokenizer])
    preprocess.main(
        [
            "--input",
            text,
            "--output-prefix",
            str(directory / "small"),
            "--tokenizer",
            tokenizer,
            "--append-eod",
        ]
    )


def surroundings(packages: Path | None = None) -> dict[str, str]:
    """Return the environment of a command: one thread, this code, no accelerator.

    `packages` is as in `run`.
    """
    path = os.pathsep.join([str(ROOT), *([str(packages)] if packages else [])])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def run(
    command: list[str],
    *,
    expect: int | None = 0,
    timeout: float = 240,
    cwd: Path | None = None,
    packages: Path | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Run `command` with one thread a process, and check its exit code.

    Everything that it started is killed when time is up. `packages` is a directory of installed
    packages to import from as well; `environment` has further variables.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=surroundings(packages) | (environment or {}),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun's workers die with it
        out, err = process.communicate()
        raise AssertionError(
            f"{command} took more than {timeout} s\n{out[-2000:]}\n{err[-4000:]}"
        ) from None
    return checked(subprocess.CompletedProcess(command, process.returncode, out, err), expect)


def checked(ended: subprocess.CompletedProcess, expect: int | None) -> subprocess.CompletedProcess:
    """Return `ended` if its exit code is expected, else raise AssertionError."""
    if expect is not None and ended.returncode != expect:
        said = f"{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}"
        raise AssertionError(
            f"{ended.args} ended with {ended.returncode}, expected {expect}\n{said}"
        )
    return ended


@functools.cache
def fork_server() -> socket.socket:
    """Return the socket of the fork server of this process, which ends with it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(there.fileno())]
    nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    server = subprocess.Popen(
        command, **nowhere, env=surroundings(), pass_fds=[there.fileno()], start_new_session=True
    )
    there.close()
    atexit.register(lambda: (here.close(), server.wait()))
    return here


def forked(
    command: list[str],
    processes: int,
    *,
    expect: int | None = 0,
    timeout: float = 240,
    packages: Path | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Run a script as `run` does, in `processes` forks of the fork server.

    `command` has the script and its arguments.
    """
    server = fork_server()

    def answer(seconds: float | None) -> int:
        server.settimeout(seconds)
        if not (said := server.recv(64)):
            raise AssertionError(
                "the fork server has ended; the lines above on standard error say why"
            )
        return int(said)

    request = {
        "command": command,
        "processes": processes,
        "environment": surroundings(packages) | (environment or {}),
    }
    request["packages"] = packages and str(packages)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        socket.send_fds(server, [json.dumps(request).encode()], [out.fileno(), err.fileno()])
        process = answer(None)  # at once, but for the first time: it imports
        try:
            code = answer(timeout)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # its ranks die with it
            code = answer(None)
            if not isinstance(error, TimeoutError):
                raise
            raise AssertionError(
                f"{command} took more than {timeout} s\n{_text(out)[-2000:]}\n{_text(err)[-4000:]}"
            ) from None
        return checked(subprocess.CompletedProcess(command, code, _text(out), _text(err)), expect)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def script(
    path: Path, arguments: list[str], *, processes: int = 1, fresh: bool = False, **how
) -> subprocess.CompletedProcess:
    """Run a Python script, under torchrun if there are several processes.

    Unless `fresh`, the fork server (fork_server.py) replaces interpreter and torchrun, which spares
    most of the time of a short run. Use `fresh` for tests of torchrun's output, of an import, or of
    a variable that is read at import.
    """
    assert processes == 1 or ranks_allowed, (
        "a test that starts several ranks is marked: @pytest.mark.multiprocess"
    )
    if not fresh:
        return forked([str(path), *arguments], processes, **how)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        if processes > 1
        else []
    )
    return run([sys.executable, *launcher, str(path), *arguments], **how)


@dataclass(frozen=True)
class Job:
    """Run of the pretraining command, for `in_turn`.

    `copy_of` is a directory that is first copied to `save`. `weights` is a file of torch's with
    whole matrices by their global names that replace new ones (not for tensor parallelism).
    """

    save: Path
    flags: list[str]
    processes: int = 1
    copy_of: Path | None = None
    weights: Path | None = None


def in_turn(jobs: list[Job], directory: Path, timeout: float = 480) -> subprocess.CompletedProcess:
    """Run the jobs one after the other under one torchrun, which spares most starts.

    Their list is written to `directory`.
    """
    file = directory / "jobs.json"
    file.write_text(json.dumps([asdict(job) for job in jobs], default=str), encoding="utf-8")
    return script(
        WORKERS / "in_turn.py",
        [str(file)],
        processes=max(job.processes for job in jobs),
        timeout=timeout,
    )


def metrics(directory: Path) -> list[dict]:
    """Return the logged steps of a run."""
    return _rows(directory / "metrics.jsonl")


# What a row says of the clock and the machine, and not of the run.
_MEASURED = ("_seconds", "_per_second", "_utilization", "_gib", "timers")


def lasting(row: dict) -> dict:
    """Return a row without times and machine figures; equal for bitwise equal runs."""
    return {name: value for name, value in row.items() if not name.endswith(_MEASURED)}


def curve(directory: Path, after: int = 0) -> list[dict]:
    """Return the `lasting` part of the logged steps beyond `after`."""
    return [lasting(row) for row in metrics(directory) if row["step"] > after]


def weights(directory: Path, step: int) -> dict:
    """Return all weights of a checkpoint by name."""
    from whole_models import load_weights

    from megaenc.convert.run_checkpoint import open_run_checkpoint

    return load_weights(open_run_checkpoint(directory), step)[1]


def assert_same_weights(run_directory: Path, reference: Path, step: int) -> None:
    """Assert that the checkpoints of `step` of two runs are bitwise equal."""
    here = weights(run_directory, step)
    there = weights(reference, step)
    assert here.keys() == there.keys()
    assert [
        name
        for name in here
        if here[name].dtype != there[name].dtype or not here[name].equal(there[name])
    ] == []


def validations(directory: Path) -> list[dict]:
    """Return the validations of a run, beginning with that of step 0."""
    return _rows(directory / "validation.jsonl")


def _rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def largest_difference(name: str, run_directory: Path, reference: Path, after: int = 0) -> float:
    """Return the largest difference of `name` beyond `after`, relative to `reference`.

    Both runs must have the same steps.
    """

    def read_values(directory: Path) -> dict:
        return {row["step"]: row[name] for row in metrics(directory) if row["step"] > after}

    here = read_values(run_directory)
    there = read_values(reference)
    assert here.keys() == there.keys() != set()
    return max(abs(here[step] / there[step] - 1) for step in there)


def assert_same_curve(run_directory: Path, reference: Path, tolerance: float = 1e-4) -> None:
    """Assert equal steps, with loss and gradient norm within a relative tolerance."""
    here = metrics(run_directory)
    there = metrics(reference)
    for name in ("step", "objective", "learning_rate", "tokens", "predicted_tokens"):
        assert [row[name] for row in here] == [row[name] for row in there], name
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [row[name] for row in here], [row[name] for row in there], rtol=tolerance, err_msg=name
        )
