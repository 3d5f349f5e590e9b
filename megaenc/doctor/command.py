"""Check everything training depends on: versions, processors, accelerators, networks, variables, numerics, disks.

Each finding is ok, a note (worth knowing) or a problem (it stops or spoils a run), with advice; problems are repeated at the
end. Nothing is changed, and a check that hangs is skipped after --timeout. Under torchrun the ranks also check their
connections and compare their findings. Exit code: 0 without problems, 1 with problems, 2 for wrong flags. Attach the output to
bug reports.

megaenc doctor --save runs
megaenc doctor --only versions attention --json doctor.json
torchrun --nproc-per-node 8 -m megaenc doctor --save runs
"""

import os
import shlex
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megaenc import flags
from megaenc.atomic_io import atomic_write, exit_on_sigterm
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.dist_env import get_local_rank, get_rank, get_world_size
from megaenc.doctor import report
from megaenc.doctor.cross_rank import format_ranks
from megaenc.doctor.report import RankFindings, merge_findings, parse_findings, serialize_findings
from megaenc.doctor.result import Finding, Probe, ProbeContext, problem
from megaenc.doctor.runner import ProbeFailure, ProbeRunner
from megaenc.errors import InputError, handle_command_errors
from megaenc.output_paths import check_output_file, create_parent_dir
from megaenc.torchelastic import die_with_launcher, exit_if_restart_forbidden, exit_without_restart

_JOIN_PROBE = Probe("ranks", "meeting", "megaenc.doctor.cross_rank:join_ranks", "ranks", timeout_factor=2)

PROBES = (
    # First: the driver would report the memory that this command's own ranks use later as another process's.
    Probe("accelerators", "driver", "megaenc.doctor.accelerators:check_driver", "node"),
    # Cross-rank probes next, before slow probes set the ranks apart.
    _JOIN_PROBE,
    Probe("disk", "shared by ranks", "megaenc.doctor.cross_rank:check_shared_folder", "ranks"),
    Probe("collectives", "collectives", "megaenc.doctor.collectives:check_collectives", "ranks", timeout_factor=2),
    Probe("versions", "versions", "megaenc.doctor.versions:check_versions"),
    Probe("machine", "processors", "megaenc.doctor.machine:check_processors", "node"),
    Probe("machine", "memory", "megaenc.doctor.machine:check_memory", "node"),
    Probe("machine", "/dev/shm", "megaenc.doctor.machine:check_dev_shm", "node"),
    Probe("machine", "limits", "megaenc.doctor.machine:check_resource_limits"),
    Probe("accelerators", "seen by torch", "megaenc.doctor.accelerators:check_torch_devices"),
    Probe("network", "network cards", "megaenc.doctor.network:check_network_cards", "node"),
    Probe("network", "interfaces", "megaenc.doctor.network:check_interfaces", "node"),
    Probe("variables", "variables", "megaenc.doctor.env_vars:check_env_vars"),
    Probe("numbers", "matrix products", "megaenc.doctor.numerics:check_matmul"),
    Probe("attention", "attention backends", "megaenc.doctor.numerics:attention_probes", timeout_factor=2),
    Probe("kernels", "fused kernels", "megaenc.doctor.numerics:kernel_probes"),
    Probe(
        "kernels",
        "float8 products",
        "megaenc.doctor.numerics:check_fp8_products",
        timeout_factor=3,
        advice="leave --fp8-format out",
    ),
    Probe("disk", "space", "megaenc.doctor.disk:check_disk_space", "node"),
    Probe("disk", "temporary files", "megaenc.doctor.disk:check_temp_space", "node"),
    Probe("disk", "promises of the file system", "megaenc.doctor.disk:check_file_system", "node"),
)
"""All probes, in the order in which they run."""

SUBJECTS = (
    "versions", "machine", "accelerators", "network", "variables", "numbers", "attention", "kernels", "ranks",
    "collectives", "disk",
)  # fmt: skip
"""Subjects in the order of the report."""

_GATHER_TIMEOUTS = 10  # multiples of --timeout that rank 0 waits for other ranks, in which probes may hang three times


@dataclass(frozen=True)
class DoctorConfig:
    """Flags of `megaenc doctor`: directory to test, JSON file, subjects to check and the time limit of a check."""

    save: str = "."
    """directory for run directories: its disk is tested with a temporary file of at most 512 MiB"""
    json: str = ""
    """JSON file to write with the findings of every rank"""
    only: tuple[str, ...] = ()
    """subjects to check (default: all): versions, machine, accelerators, network, variables, numbers, attention, kernels, ranks,
    collectives, disk"""
    timeout: float = 60.0
    """seconds after which a hanging check is skipped and reported; checks that compile kernels get up to three times as long"""


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `megaenc doctor`: print the findings, and exit with status 1 if one of them is a problem."""
    environment = dict(os.environ)
    die_with_launcher()
    exit_if_restart_forbidden()
    silence_libraries()
    config = flags.parse(DoctorConfig, argv, prog="megaenc doctor", description=__doc__)
    unknown = [name for name in config.only if name not in SUBJECTS]
    if unknown:
        raise InputError(f"--only {unknown[0]}: expected some of {', '.join(SUBJECTS)}")
    if not config.timeout > 0:
        raise InputError(f"--timeout {config.timeout:g}: expected seconds above 0")
    if config.json and not get_rank():
        check_output_file(Path(config.json), "--json")
    findings: list[Finding] = []
    try:
        with exit_on_sigterm(), ProbeRunner(ProbeContext(config.save, config.timeout, environment)) as runner:
            rank_findings = _gather_rank_findings(runner, run_probes(runner, config.only or SUBJECTS, findings), config)
    except (SystemExit, KeyboardInterrupt):  # as torchrun does to all when a rank dies
        advice = "by a signal, or because another rank died: see its output above"
        print_rank_0(report.format_report([*findings, _rank_problem("stopped", "before all checks ran", advice)], SUBJECTS))
        raise
    if not rank_findings:
        return
    merged = merge_findings(rank_findings)
    print_rank_0(report.format_report(merged, SUBJECTS))
    if config.json:
        command = shlex.join(sys.argv[1:] if argv is None else argv)
        metadata = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "ranks_asked": get_world_size(),
            "command": command,
        }
        create_parent_dir(Path(config.json), "--json")
        try:  # after the report, which must survive a full or broken disk
            atomic_write(Path(config.json), report.format_json(rank_findings, merged, metadata))
        except OSError as error:
            raise InputError(f"--json {config.json}: cannot be written: {error.strerror}") from None
    if any(finding.level == "problem" for finding in merged):
        exit_without_restart(1)
        sys.exit(1)


def run_probes(runner: ProbeRunner, subjects: Sequence[str], findings: list[Finding]) -> RankFindings:
    """Run this rank's probes of `subjects` and their follow-up probes; return the findings, also appended to `findings`."""
    queue = deque(each for each in PROBES if each.subject in subjects and (each.scope != "node" or get_local_rank() == 0))
    cross_rank_probes = [each for each in queue if each.scope == "ranks"]
    if cross_rank_probes and _JOIN_PROBE not in cross_rank_probes and get_world_size() > 1:
        queue.insert(queue.index(cross_rank_probes[0]), _JOIN_PROBE)
    probed_scopes = frozenset((each.subject, each.scope) for each in queue)
    is_joined, done_count = True, 0
    with ProgressLine("checking", len(queue), closing=False) as progress:
        while queue:
            probe = queue.popleft()
            if probe.scope == "ranks" and not is_joined:
                continue
            progress.update(done_count, description=f"checking {probe.subject}: {probe.name}")
            results, is_complete = runner.run(probe)
            is_joined &= is_complete or probe.scope != "ranks"
            findings += [replace(each, subject=probe.subject, scope=probe.scope) for each in results if isinstance(each, Finding)]
            follow_ups = [each for each in results if isinstance(each, Probe)]
            queue.extendleft(reversed(follow_ups))
            progress.total, done_count = progress.total + len(follow_ups), done_count + 1
    return RankFindings(get_rank(), socket.gethostname(), tuple(findings), probed_scopes)


def _gather_rank_findings(runner: ProbeRunner, own: RankFindings, config: DoctorConfig) -> list[RankFindings]:
    """Return the findings of all ranks on rank 0, with a problem for each missing rank; an empty list on other ranks."""
    if get_world_size() == 1:
        return [own]
    timeout = _GATHER_TIMEOUTS * config.timeout
    try:
        contents, is_complete = runner.call(
            "megaenc.doctor.cross_rank:gather_findings", serialize_findings(own), timeout, seconds=timeout + config.timeout
        )
        failure = "" if is_complete else contents[0].result
    except ProbeFailure as error:
        failure = str(error)
    if failure:
        unreachable = _rank_problem("comparing", failure, "the findings of other ranks are unknown: see their output")
        own = replace(own, findings=(*own.findings, unreachable))
        if get_rank():  # without an exit code: torchrun would kill rank 0, which reports this rank as missing
            print(f"rank {get_rank()} on {own.host}\n{report.format_report(own.findings, SUBJECTS)}", flush=True)
    if failure or get_rank():
        return [] if get_rank() else [own]
    by_rank, errors = {}, []
    for each, content in contents.items():
        try:
            by_rank[each] = parse_findings(content, each) if each else own
        except ValueError as error:
            advice = "another program writes to torchrun's port: restrict the port to the job's network"
            errors.append(_rank_problem(f"malformed, rank {each}", f"its findings: {error}", advice))
    missing = [each for each in range(get_world_size()) if each not in contents]
    if missing:
        advice = "see the output of those ranks and their nodes; a larger --timeout waits longer for slow ones"
        errors.append(_rank_problem("missing", f"no findings from rank {format_ranks(missing)} within {timeout:g} s", advice))
    by_rank[0] = replace(own, findings=(*own.findings, *errors))
    return [by_rank[each] for each in sorted(by_rank)]


def _rank_problem(name: str, result: str, advice: str) -> Finding:
    """Return a problem of the subject "ranks"."""
    return replace(problem(name, result, advice), subject="ranks")
