"""The language of Dockerfiles, as far as those of this folder use it, for run_in_chroot.py; anything else is refused."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
FROM_STAGE = re.compile(r"--from=(\S+)\s+")


class Refusal(Exception):
    """One line for the user."""


@dataclass
class Stage:
    """The lines of a Dockerfile from one FROM to the next."""

    name: str
    """what AS calls it, in small letters; its number where nothing does"""
    base: str
    lines: list[tuple[int, str, str]] = field(default_factory=list)

    def needs(self) -> set[str]:
        """The names of what it is built upon and copies from."""
        copied = {found[1].lower() for _, name, rest in self.lines if name == "COPY" and (found := FROM_STAGE.match(rest))}
        return copied | {self.base.lower()}


def instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, instruction, rest) of a Dockerfile; lines that a backslash continues are one, comments are gone."""
    begun, parts = 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun if parts else number
        parts.append(line.strip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            name, _, rest = "".join(parts).strip().partition(" ")
            yield begun, name.upper(), rest.strip()
            parts = []


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}` replaced; an unknown one is empty, as in Docker."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def ignore_rules(context: Path) -> list[tuple[bool, re.Pattern]]:
    """(whether it takes back in, pattern of paths) for each line of the context's .dockerignore."""
    path = context / ".dockerignore"
    lines = path.read_text().splitlines() if path.exists() else []
    rules = []
    for line in (line.strip() for line in lines):
        if line and not line.startswith("#"):
            parts = re.split(r"(\*\*/|\*\*|\*|\?)", line.removeprefix("!").strip("/"))
            known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
            rules.append(
                (line.startswith("!"), re.compile("".join(known.get(part, re.escape(part)) for part in parts) + "(?:/.*)?"))
            )
    return rules


def travels(path: str, rules: Sequence[tuple[bool, re.Pattern]]) -> bool:
    """Whether the file, named relative to the context, is sent to the build: the last line that speaks of it decides."""
    return next((kept for kept, pattern in reversed(rules) if pattern.fullmatch(path)), True)


def sent_files(context: Path) -> list[str]:
    """All files of the context that .dockerignore lets travel, relative to it."""
    rules = ignore_rules(context)
    found = []
    for folder, folders, files in os.walk(context):
        folders[:] = [name for name in folders if name != ".git"]  # a large folder that no image here wants
        paths = (os.path.relpath(os.path.join(folder, name), context) for name in files)
        found += [path for path in paths if travels(path, rules)]
    return sorted(found)


def copies(sources: Sequence[str], destination: str, files: Sequence[str]) -> list[tuple[str, str]]:
    """What `COPY sources destination` copies, as (file of the context, path in the image). Refuses a missing source."""
    result = []
    for source in (os.path.normpath(source) for source in sources):
        into_folder = destination.endswith("/") or len(sources) > 1 or destination in (".", "..")
        if source in files:
            result.append((source, os.path.join(destination, os.path.basename(source)) if into_folder else destination))
            continue
        inside = [path for path in files if source == "." or path.startswith(source + "/")]
        if not inside:
            raise Refusal(f"COPY {source}: no such file among those that .dockerignore lets travel")
        result += [(path, os.path.join(destination, os.path.relpath(path, source))) for path in inside]
    return result


def stages(dockerfile: Path, asked: Mapping[str, str]) -> tuple[list[Stage], dict[str, str]]:
    """The stages of a Dockerfile, and the arguments before the first. Raises Refusal."""
    found: list[Stage] = []
    arguments: dict[str, str] = {}
    for line, name, rest in instructions(dockerfile.read_text()):
        match name:
            case "FROM":
                base, *named = expand(rest, arguments).split()
                if named and (len(named) != 2 or named[0].upper() != "AS"):
                    raise Refusal(f"{dockerfile}:{line}: only FROM IMAGE [AS NAME] is known")
                found.append(Stage(named[1].lower() if named else str(len(found)), base))
            case "ARG" if not found:
                key, _, value = rest.partition("=")
                arguments[key] = asked.get(key, expand(value, arguments))
            case _ if not found:
                raise Refusal(f"{dockerfile}:{line}: {name} before the first FROM")
            case _:
                found[-1].lines.append((line, name, rest))
    if not found:
        raise Refusal(f"{dockerfile}: has no FROM")
    return found, arguments


def wanted(found: Sequence[Stage], target: str | None, dockerfile: Path) -> list[Stage]:
    """The target (else the last stage) and what it needs, in the order of the file. Refuses a target that there is not."""
    names = [stage.name for stage in found]
    if target and target.lower() not in names:
        raise Refusal(f"--target {target}: {dockerfile} has the stages {', '.join(names)}")
    needed = {target.lower() if target else names[-1]}
    for stage in reversed(found):
        needed |= stage.needs() if stage.name in needed else set()
    return [stage for stage in found if stage.name in needed]


def assignments(rest: str, known: Mapping[str, str]) -> dict[str, str]:
    """NAME=VALUE NAME="two words" as a dict."""
    return {key: value for key, _, value in (word.partition("=") for word in shlex.split(expand(rest, known)))}
