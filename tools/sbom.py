"""List the installed packages with their licences, and write an SBOM.

    .venv/bin/python tools/sbom.py --output sbom.json

The table on standard output is Markdown, from the packages' metadata. The SBOM (software bill of
materials) is CycloneDX JSON. cyclonedx-bom writes it, which pip installs in an environment of its
own, so that the one that is described stays as it is.
"""

import argparse
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

WRITER = "cyclonedx-bom==7.5.0"
_MAX_NAME = 60  # characters of a licence's name; some packages have its text there


def main() -> None:
    """Print the table, and write the SBOM if --output is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file to write; by default no SBOM")
    output = parser.parse_args().output
    print(format_licences(metadata.distributions()))
    if output:
        try:
            write_sbom(output)
        except subprocess.CalledProcessError as error:
            command = " ".join(map(str, error.cmd))
            sys.exit(f"error: {command}: ended with exit code {error.returncode}")


def format_licences(packages: Iterable[metadata.Distribution]) -> str:
    """Return a Markdown table of packages with version and licence, by name.

    Of packages of the same name only the first one, which Python imports, has a row.
    """
    by_name: dict[str, metadata.Distribution] = {}
    for package in packages:
        by_name.setdefault(package.name.lower(), package)
    lines = ["| package | version | licence |", "|---|---|---|"]
    for _, package in sorted(by_name.items()):
        licence = find_licence(package.metadata)
        lines.append(f"| {package.name} | {package.version} | {licence} |")
    return "\n".join(lines)


def find_licence(fields: metadata.PackageMetadata) -> str:
    """Return the licence that a package's metadata state.

    It is the SPDX expression, else the name of the licence, else the classifiers, else the first
    line of the licence's text; `not stated` without any.
    """
    stated = (fields.get("License") or "").strip()
    title = stated.partition("\n")[0]
    name = stated if title == stated and len(stated) <= _MAX_NAME else ""
    classifiers = [
        classifier.rpartition(" :: ")[2]
        for classifier in fields.get_all("Classifier", [])
        if classifier.startswith("License ::")
    ]
    expression = fields.get("License-Expression")
    return expression or name or "; ".join(classifiers) or title[:_MAX_NAME] or "not stated"


def write_sbom(output: Path) -> None:
    """Write the SBOM of this Python's environment.

    Raises:
        CalledProcessError: pip cannot install the writer, or the writer fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        programs = Path(directory, "bin")
        # pip of this environment installs it: Debian's Python has none for new ones.
        venv.create(directory, with_pip=False)
        install = ["--python", programs / "python", "install", "--quiet", WRITER]
        subprocess.run([sys.executable, "-P", "-m", "pip", *install], check=True)
        options = ["--output-reproducible", "--output-format", "JSON", "--output-file", output]
        subprocess.run(
            [programs / "cyclonedx-py", "environment", *options, sys.executable], check=True
        )


if __name__ == "__main__":
    main()
