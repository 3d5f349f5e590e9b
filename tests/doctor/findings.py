"""Findings of checks, for tests."""

from collections.abc import Iterable

from megaenc.doctor.result import Finding


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Return the findings by their names."""
    return {finding.name: finding for finding in findings}
