"""Looks at all that training depends on here: versions, processors, accelerators, networks, variables, numbers, disks, clocks.

Each thing is ok, a note (worth knowing) or a problem (it stops or spoils a run), with what to do next; the problems stand again
at the end. Nothing is changed, and what hangs is left after --timeout. Several processes also try what is between them, and what
each has found is compared. Exit code 0 without problems, 1 with, 2 for wrong flags. Its output is what a bug report needs.

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
from megaenc.atomic_io import atomic_write, stopped_by_sigterm
from megaenc.console import ProgressLine, print_rank_0, quiet
from megaenc.dist_env import local_rank, rank, world_size
from megaenc.doctor import report
from megaenc.doctor.cross_rank import format_ranks
from megaenc.doctor.report import RankFindings, from_json, to_json, together
from megaenc.doctor.result import Finding, Probe, ProbeContext, problem
from megaenc.doctor.runner import ProbeRunner, ProbeTimeout
from megaenc.errors import InputError, one_line_errors
from megaenc.output_paths import check_output_file, make_parent
from megaenc.torchelastic import die_with_launcher, exit_without_restart, leave_if_told

_MEETING = Probe("ranks", "meeting", "megaenc.doctor.cross_rank:join_ranks", "ranks", patience=2)

PROBES = (
    # Before the ranks of this very command are on the devices, where the driver would count their memory as somebody else's.
    Probe("accelerators", "driver", "megaenc.doctor.accelerators:driver", "node"),
    # Then what all ranks do together, while they are level with each other.
    _MEETING,
    Probe("ranks", "clocks", "megaenc.doctor.cross_rank:clocks", "ranks"),
    Probe("disk", "shared by ranks", "megaenc.doctor.cross_rank:shared_folder", "ranks"),
    Probe("machine", "shared arrays", "megaenc.doctor.cross_rank:shared_arrays", "ranks"),
    Probe("collectives", "collectives", "megaenc.doctor.collectives:collectives", "ranks", patience=2),
    Probe("versions", "versions", "megaenc.doctor.versions:versions"),
    Probe("machine", "processors", "megaenc.doctor.machine:processors", "node"),
    Probe("machine", "memory", "megaenc.doctor.machine:memory", "node"),
    Probe("machine", "/dev/shm", "megaenc.doctor.machine:shared_memory", "node"),
    Probe("machine", "limits", "megaenc.doctor.machine:limits"),
    Probe("accelerators", "seen by torch", "megaenc.doctor.accelerators:seen_by_torch"),
    Probe("network", "network cards", "megaenc.doctor.network:cards", "node"),
    Probe("network", "interfaces", "megaenc.doctor.network:interfaces", "node"),
    Probe("variables", "variables", "megaenc.doctor.env_vars:variables"),
    Probe("numbers", "matrix products", "megaenc.doctor.numerics:products"),
    Probe("attention", "attention backends", "megaenc.doctor.numerics:backends", patience=2),
    Probe("kernels", "fused kernels", "megaenc.doctor.numerics:kernels"),
    Probe("kernels", "float8 products", "megaenc.doctor.numerics:float8_products", patience=3, advice="leave --fp8-format out"),
    Probe("disk", "space", "megaenc.doctor.disk:space", "node"),
    Probe("disk", "temporary files", "megaenc.doctor.disk:temporary", "node"),
    Probe("disk", "promises of the file system", "megaenc.doctor.disk:promises", "node"),
)
"""What is looked at; another thing is another line."""

SUBJECTS = (
    "versions", "machine", "accelerators", "network", "variables", "numbers", "attention", "kernels", "ranks",
    "collectives", "disk",
)  # fmt: skip
"""In the order of the report."""

_OTHERS = 10  # times --timeout that rank 0 waits for what other ranks have found, some of which may hang three times


@dataclass(frozen=True)
class DoctorConfig:
    """What the doctor is told."""

    save: str = "."
    """folder that runs are to be saved in: its disk is tried with a file of at most 512 MiB, which is removed again"""
    json: str = ""
    """JSON file for all that was found, by every rank"""
    only: tuple[str, ...] = ()
    """subjects to look at, all unless given: versions, machine, accelerators, network, variables, numbers, attention, kernels,
    ranks, collectives, disk"""
    timeout: float = 60.0
    """seconds after which something that does not answer is left, and named; what compiles has three times as long"""


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc doctor`."""
    environment = dict(os.environ)
    die_with_launcher()
    leave_if_told()
    quiet()
    settings = flags.parse(DoctorConfig, argv, prog="megaenc doctor", description=__doc__)
    unknown = [name for name in settings.only if name not in SUBJECTS]
    if unknown:
        raise InputError(f"--only {unknown[0]}: expected some of {', '.join(SUBJECTS)}")
    if not settings.timeout > 0:
        raise InputError(f"--timeout {settings.timeout:g}: expected seconds above 0")
    if settings.json and not rank():
        check_output_file(Path(settings.json), "--json")
    findings: list[Finding] = []
    try:
        with stopped_by_sigterm(), ProbeRunner(ProbeContext(settings.save, settings.timeout, environment)) as prober:
            looked = _of_all(prober, look(prober, settings.only or SUBJECTS, findings), settings)
    except (SystemExit, KeyboardInterrupt):  # as torchrun does to all when a rank dies
        advice = "by hand, or because another rank has died: see what was printed of it"
        print_rank_0(report.text([*findings, _between("stopped", "before all was looked at", advice)], SUBJECTS))
        raise
    if not looked:
        return
    found = together(looked)
    print_rank_0(report.text(found, SUBJECTS))
    if settings.json:
        command = shlex.join(sys.argv[1:] if argv is None else argv)
        about = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "ranks_asked": world_size(), "command": command}
        make_parent(Path(settings.json), "--json")
        try:  # after the report: a disk that is full or broken is among what is looked for
            atomic_write(Path(settings.json), report.as_json(looked, found, about))
        except OSError as error:
            raise InputError(f"--json {settings.json}: cannot be written: {error.strerror}") from None
    if any(finding.level == "problem" for finding in found):
        exit_without_restart(1)
        sys.exit(1)


def look(prober: ProbeRunner, subjects: Sequence[str], findings: list[Finding]) -> RankFindings:
    """Carry out this rank's probes of `subjects`, and what they ask for right after them; add to `findings` what is found."""
    waiting = deque(each for each in PROBES if each.subject in subjects and (each.where != "node" or local_rank() == 0))
    of_all = [each for each in waiting if each.where == "ranks"]
    if of_all and _MEETING not in of_all and world_size() > 1:
        waiting.insert(waiting.index(of_all[0]), _MEETING)
    looked_at = frozenset((each.subject, each.where) for each in waiting)
    met, done = True, 0
    with ProgressLine("looking", len(waiting), closing=False) as progress:
        while waiting:
            probe = waiting.popleft()
            if probe.where == "ranks" and not met:
                continue
            progress.update(done, description=f"looking at {probe.subject}: {probe.name}")
            found, ended = prober.findings(probe)
            met &= ended or probe.where != "ranks"
            findings += [replace(each, subject=probe.subject, where=probe.where) for each in found if isinstance(each, Finding)]
            more = [each for each in found if isinstance(each, Probe)]
            waiting.extendleft(reversed(more))
            progress.total, done = progress.total + len(more), done + 1
    return RankFindings(rank(), socket.gethostname(), tuple(findings), looked_at)


def _of_all(prober: ProbeRunner, mine: RankFindings, settings: DoctorConfig) -> list[RankFindings]:
    """Return on rank 0 what all ranks have found, with those missing named; elsewhere nothing."""
    if world_size() == 1:
        return [mine]
    patience = _OTHERS * settings.timeout
    try:
        found, told = prober.call(
            "megaenc.doctor.cross_rank:exchange", to_json(mine), patience, seconds=patience + settings.timeout
        )
        why = "" if told else found[0].found
    except ProbeTimeout as error:
        why = str(error)
    if why:
        alone = _between("comparing", why, "nothing is known of the other ranks: see what they have printed")
        mine = replace(mine, findings=(*mine.findings, alone))
        if rank():  # and no more, or torchrun would end rank 0, which will miss this one
            print(f"rank {rank()} on {mine.host}\n{report.text(mine.findings, SUBJECTS)}", flush=True)
    if why or rank():
        return [] if rank() else [mine]
    looked, wrong = {}, []
    for each, content in found.items():
        try:
            looked[each] = from_json(content, each) if each else mine
        except ValueError as error:
            advice = "something else writes to torchrun's port: keep it within the job's own network"
            wrong.append(_between(f"malformed, rank {each}", f"its findings: {error}", advice))
    missing = [each for each in range(world_size()) if each not in found]
    if missing:
        advice = "look at what was printed by those ranks and their nodes; --timeout gives slow ones longer"
        wrong.append(_between("missing", f"nothing came from rank {format_ranks(missing)} in {patience:g} s", advice))
    looked[0] = replace(mine, findings=(*mine.findings, *wrong))
    return [looked[each] for each in sorted(looked)]


def _between(what: str, found: str, advice: str) -> Finding:
    return replace(problem(what, found, advice), subject="ranks")
