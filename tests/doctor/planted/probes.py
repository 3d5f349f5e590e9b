"""Probes that misbehave."""

import os
import signal
import sys
import time

from megaenc.doctor.result import Finding, Probe, ProbeAborted, ProbeContext, ok, problem


def hangs(context: ProbeContext) -> list[Finding]:
    """With the interpreter's lock free, as in a driver; the process is killed either way."""
    print("waiting for the device", flush=True)
    time.sleep(600)
    return []


def crashes(context: ProbeContext) -> list[Finding]:
    """As a library does that was built for another machine."""
    print("about to go", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def raises(context: ProbeContext) -> list[Finding]:
    """As a broken package does."""
    raise ImportError("no such symbol", name="flash_attn.ops")


def ends(context: ProbeContext) -> list[Finding]:
    """Without a word."""
    os._exit(3)


def breaks_off(context: ProbeContext) -> list[Finding]:
    """As a meeting does that nobody comes to."""
    raise ProbeAborted(problem("meeting", "nobody came", "wait"))


def process(context: ProbeContext, word: str) -> list[Finding | Probe]:
    """Which process this is, and a probe more."""
    print("words of one that went well", flush=True)
    return [ok("process", f"{os.getpid()} {word}"), Probe("ranks", "more", "probes:raises")]


def finds_a_problem(context: ProbeContext) -> list[Finding]:
    """And leaves its process in doubt."""
    return [problem("something", "wrong", "see to it")]
