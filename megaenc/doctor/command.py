"""Check what training depends on: versions, devices, networks, numerics, disks.

Each finding is ok, a note (worth knowing) or a problem (it stops or spoils a run), with advice;
problems are repeated at the end. Nothing is changed, and a check that hangs is skipped after
--timeout. Under torchrun the ranks also check their connections and compare their findings. Exit
code: 0 without problems, 1 with problems, 2 for wrong flags. Attach the output to bug reports.

megaenc doctor --save runs
megaenc doctor --only versions attention --json doctor.json
torchrun --nproc-per-node 8 -m megaenc doctor --save runs
"""

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megaenc import flags
from megaenc.atomic_io import atomic_write
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.dist_env import (
    die_with_launcher,
    exit_if_restart_forbidden,
    forbid_restart,
    get_local_rank,
    get_rank,
    get_world_size,
)
from megaenc.doctor.checks import ADVICE, CHECKS, SUBJECTS, TIMEOUT_FACTORS, Subject
from megaenc.doctor.cross_rank import format_ranks
from megaenc.doctor.report import (
    RankFindings,
    format_json,
    format_report,
    merge_findings,
    parse_findings,
)
from megaenc.doctor.result import CheckContext, Finding, problem
from megaenc.doctor.runner import CheckRunner
from megaenc.errors import InputError, handle_command_errors
from megaenc.flags import PositiveFloat
from megaenc.output_paths import check_output_file, create_parent_dir
from megaenc.processes import exit_on_sigterm

# Multiples of --timeout that rank 0 waits for other ranks, in which checks may hang three times
_GATHER_TIMEOUTS = 10


@dataclass(frozen=True)
class DoctorConfig:
    """Flags of `megaenc doctor`, each a field.

    `save` is a directory whose disk is tested, `json` a file to write all findings to, "" for none,
    and `only` a tuple of the subjects to check, () for all. `timeout` is in seconds, for each
    check.
    """

    save: str = "."
    """directory for run directories: its disk is tested with a temporary file of at most 512 MiB"""
    json: str = ""
    """JSON file to write with the findings of every rank"""
    only: tuple[Subject, ...] = ()
    """subjects to check (default: all)"""
    timeout: PositiveFloat = 60.0
    """seconds after which a hanging check is skipped and reported; checks that compile kernels get
    up to three times as long"""


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc doctor`: print the findings; exit with 1 if one is a problem.

    Under torchrun every rank calls it; rank 0 prints, writes or replaces the file of --json and
    exits with 1, others return. Wrong flags exit with 2.

    Args:
        argv: The flags; None: those of this process.
    """
    environment = dict(os.environ)
    die_with_launcher()
    exit_if_restart_forbidden()
    silence_libraries()
    config = flags.parse(DoctorConfig, argv, prog="megaenc doctor", description=__doc__)
    if config.json and not get_rank():
        check_output_file(Path(config.json), "--json")
    local_findings = RankFindings(get_rank(), socket.gethostname(), [])
    try:
        with exit_on_sigterm(), CheckRunner(environment) as runner:
            context = CheckContext(config.save, config.timeout, environment)
            run_checks(runner, config.only or SUBJECTS, context, local_findings.findings)
            rank_findings = _gather_findings(runner, local_findings, config)
    except (SystemExit, KeyboardInterrupt):  # as torchrun does to all when a rank dies
        advice = "by a signal, or because another rank died: see its output above"
        local_findings.findings.append(_rank_problem("stopped", "before all checks ran", advice))
        print_rank_0(format_report(local_findings.findings))
        raise
    if get_rank():
        return
    merged = merge_findings(rank_findings)
    print_rank_0(format_report(merged))
    if config.json:
        metadata = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "ranks_asked": get_world_size(),
            "command": shlex.join(sys.argv[1:] if argv is None else argv),
        }
        create_parent_dir(Path(config.json), "--json")
        try:  # after the report, which must survive a full or broken disk
            atomic_write(Path(config.json), format_json(rank_findings, merged, metadata))
        except OSError as error:
            raise InputError(f"--json {config.json}: cannot be written: {error.strerror}") from None
    if any(finding.level == "problem" for finding in merged):
        forbid_restart(1)
        sys.exit(1)


def run_checks(
    runner: CheckRunner, subjects: Sequence[str], context: CheckContext, findings: list[Finding]
) -> None:
    """Run this rank's checks of `subjects` and append their findings to `findings`.

    All ranks call it with the same `subjects`, since some checks are collective. A check that fails
    adds a problem, and those that require it are left out. A progress line is shown.

    Args:
        subjects: Some of `SUBJECTS`; the order does not matter.
    """
    checks = [
        check
        for check in CHECKS
        if check.subject in subjects and (check.scope != "node" or get_local_rank() == 0)
    ]
    failed = set()
    with ProgressLine("checking", len(checks), closing=False) as progress:
        for index, check in enumerate(checks):
            if check.requires in failed:
                continue
            progress.update(index, description=f"checking {check.subject}: {check.name}")
            seconds = TIMEOUT_FACTORS.get(check.subject, 1) * context.timeout
            results, failure = runner.call(
                check.function, context, *check.arguments, seconds=seconds
            )
            if failure:  # a check across ranks takes the process group of the meeting with it
                failed.add("meeting" if check.scope == "ranks" else check.name)
                results = [
                    problem(
                        check.name, failure, ADVICE.get(check.subject, "a run would fail there too")
                    )
                ]
            elif check.scope != "ranks" and any(finding.level == "problem" for finding in results):
                runner.kill()  # the process may be damaged: a half-imported module, a lost device
            findings += [
                replace(finding, subject=check.subject, scope=check.scope) for finding in results
            ]


def _gather_findings(
    runner: CheckRunner, local_findings: RankFindings, config: DoctorConfig
) -> list[RankFindings]:
    """Return the findings of all ranks on rank 0; on other ranks only their own.

    Each missing rank is a problem.
    """
    if get_world_size() == 1:
        return [local_findings]
    timeout = _GATHER_TIMEOUTS * config.timeout
    function = "megaenc.doctor.cross_rank:gather_findings"
    contents, failure = runner.call(
        function, json.dumps(asdict(local_findings)), timeout, seconds=timeout + config.timeout
    )
    if failure:
        local_findings.findings.append(
            _rank_problem(
                "comparing", failure, "the findings of other ranks are unknown: see their output"
            )
        )
        # Without an exit code: torchrun would kill rank 0, which reports this rank as missing
        if get_rank():
            report = format_report(local_findings.findings)
            print(f"rank {get_rank()} on {local_findings.host}\n{report}", flush=True)
    if failure or get_rank():
        return [local_findings]
    gathered = [local_findings]
    for rank in sorted(contents):
        try:
            gathered.append(parse_findings(contents[rank], rank))
        except ValueError as error:
            advice = (
                "another program writes to torchrun's port: restrict the port to the job's network"
            )
            local_findings.findings.append(
                _rank_problem(f"malformed, rank {rank}", f"its findings: {error}", advice)
            )
    missing = [rank for rank in range(1, get_world_size()) if rank not in contents]
    if missing:
        advice = (
            "see the output of those ranks and their nodes; a larger --timeout waits longer for "
            "slow ones"
        )
        result = f"no findings from rank {format_ranks(missing)} within {timeout:g} s"
        local_findings.findings.append(_rank_problem("missing", result, advice))
    return gathered


def _rank_problem(name: str, result: str, advice: str) -> Finding:
    """Return a problem of the subject "ranks"."""
    return Finding(name, result, "problem", advice, subject="ranks")
