"""`make test-docs`: run every command that the README, docs and examples show.

A document is one script: its bash blocks, in their order, in one shell that ends at the first
command that fails, at the root of a copy of this repository. docs/commands.yaml lists the document
that comes before, the blocks that are not run and the words that are replaced; `--list` prints
that. Commands have one thread each and ask no Hub; packages that they install go into the copy.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from docs.documents import ROOT, Block, blocks, documents, read

TABLE = ROOT / "docs" / "commands.yaml"
REASONS = {
    "accelerator": "needs a GPU",
    "cluster": "needs several machines or Slurm",
    "program": "needs another program's installation, or makes one",
}
LIMIT = 3600  # seconds of one document
SHELL = """set -eo pipefail
PS4='+ $SECONDS s, line $LINENO: '
set -x
source .commands
"""


@dataclass(frozen=True)
class Exceptions:
    """The exceptions of one document in docs/commands.yaml.

    after: a document whose directory is used. before: bash that is run first.
    not_run: (words in the block, reason, why). instead: (words, replacement, why).
    """

    after: str = ""
    before: str = ""
    not_run: tuple[tuple[str, str, str], ...] = ()
    instead: tuple[tuple[str, str, str], ...] = ()


def table() -> dict[str, Exceptions]:
    """Read the exceptions by document; KeyError for a reason not in REASONS."""
    found = {}
    for name, said in (yaml.safe_load(TABLE.read_text(encoding="utf-8")) or {}).items():
        not_run = tuple(
            (entry["block"], REASONS[entry["needs"]], entry["why"])
            for entry in said.pop("not run", [])
        )
        instead = tuple(
            (entry["of"], entry["put"], entry["why"]) for entry in said.pop("instead", [])
        )
        found[name] = Exceptions(**said, not_run=not_run, instead=instead)
    return found


def commands(name: str) -> list[Block]:
    """Return the bash blocks of a document."""
    return [block for block in blocks(read(name)) if block.language == "bash"]


def left_out(block: Block, exceptions: Exceptions) -> tuple[str, str, str] | None:
    """Return the exception that keeps a block from being run."""
    text = "\n".join(block.lines)
    return next((entry for entry in exceptions.not_run if entry[0] in text), None)


def script(name: str, exceptions: Exceptions) -> str:
    """Return the document as a script with the document's line numbers."""
    lines = [""] * len(read(name))
    for block in commands(name):
        if left_out(block, exceptions) is None:
            lines[block.line : block.line + len(block.lines)] = block.lines
    text = "\n".join(lines)
    for words, put, _ in exceptions.instead:
        text = text.replace(words, put)
    return text + "\n"


def copy_repository(directory: Path) -> None:
    """Copy the files that git tracks, and new ones that it does not ignore."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listing.split("\0"):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).unlink(missing_ok=True)
            shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)


@dataclass
class Runner:
    """A runner of documents, each in a directory of its own in `work`.

    A document that passed has the file `.passed` there.
    """

    work: Path
    said: dict[str, Exceptions]
    failed: list[str] = field(default_factory=list)

    def directory(self, name: str) -> Path:
        """Return the directory of a document."""
        return self.work / name.replace("/", "__")

    def run(self, name: str) -> bool:
        """Run a document and those before it; return whether all passed.

        Documents that passed or failed are not run again.
        """
        if (
            name not in self.failed
            and not (self.directory(name) / ".passed").exists()
            and not self._passes(name)
        ):
            self.failed.append(name)
        return name not in self.failed

    def _passes(self, name: str) -> bool:
        exceptions = self.said.get(name, Exceptions())
        if exceptions.after and not self.run(exceptions.after):
            print(f"{name}: not run, as it comes after {exceptions.after}", flush=True)
            return False
        directory = self.directory(name)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        if exceptions.after:
            shutil.copytree(
                self.directory(exceptions.after), directory, symlinks=True, dirs_exist_ok=True
            )
            (directory / ".passed").unlink()
        copy_repository(directory)
        begun = time.monotonic()
        for where, text in (
            (f"{TABLE.name}, before {name}", exceptions.before),
            (name, script(name, exceptions)),
        ):
            wrong, output = _shell(text, directory)
            if wrong:
                print(f"{where}: {wrong}, after", flush=True)
                print("".join(f"    {line}\n" for line in output.splitlines()[-40:]), flush=True)
                return False
        shown = commands(name)
        count = sum(left_out(block, exceptions) is None for block in shown)
        print(
            f"{name}: {count} of {len(shown)} blocks, {time.monotonic() - begun:.0f} s", flush=True
        )
        (directory / ".passed").touch()
        return True


def _shell(text: str, directory: Path) -> tuple[str, str]:
    """Run bash in `directory`; return the failure, `line 12: exit code 2`, and output."""
    (directory / ".commands").write_text(text)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{directory}{os.pathsep}{directory / 'site'}",
        "PIP_TARGET": str(directory / "site"),  # what a document installs
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }
    words = ["timeout", "--foreground", str(LIMIT), "bash", "-c", SHELL]
    with open(directory.with_suffix(".log"), "w+", errors="replace") as log:
        ended = subprocess.run(
            words, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        log.seek(0)
        output = log.read()
    if not ended.returncode:
        return "", output
    begun = re.findall(r"^\++ \d+ s, (line \d+): ", output, re.MULTILINE)
    return f"{begun[-1] if begun else 'no command'}: exit code {ended.returncode}", output


def listed(names: list[str], said: dict[str, Exceptions]) -> str:
    """Return the exceptions as lines, document by document."""
    lines = []
    for name in names:
        exceptions = said.get(name, Exceptions())
        after = f", after {exceptions.after}" if exceptions.after else ""
        lines.append(f"{name}: {len(commands(name))} blocks{after}")
        lines += [f"  before: {line}" for line in exceptions.before.splitlines()]
        for block in commands(name):
            if missing := left_out(block, exceptions):
                _, reason, why = missing
                lines.append(f"  line {block.line + 1} not run: {reason} ({why})")
        lines += [
            f"  {put!r} instead of {words!r}: {why}" for words, put, why in exceptions.instead
        ]
    return "\n".join(lines)


def main() -> None:
    """Run the documents; exit with 1 if a command failed."""
    known = [name for name in documents() if commands(name)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", nargs="*", help="documents to run; all unless given")
    parser.add_argument(
        "--list", action="store_true", help="say what is not run or replaced, and run nothing"
    )
    parser.add_argument(
        "--keep",
        metavar="DIRECTORY",
        help="work here, keep it, and do not run again what has passed here",
    )
    options = parser.parse_args()
    said = table()
    names = options.documents or known
    if unknown := set(names) - set(known):
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(known)}")
    if options.list:
        print(listed(names, said))
        return
    with tempfile.TemporaryDirectory(prefix="megaenc-docs-") as temporary:
        runner = Runner(Path(options.keep or temporary).resolve(), said)
        for name in names:
            runner.run(name)
            if not options.keep and all(exceptions.after != name for exceptions in said.values()):
                shutil.rmtree(runner.directory(name), ignore_errors=True)
        if runner.failed:
            sys.exit(f"{len(runner.failed)} documents failed: {', '.join(runner.failed)}")


if __name__ == "__main__":
    main()
