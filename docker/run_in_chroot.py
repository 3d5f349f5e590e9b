#!/usr/bin/env python3
"""Build and run a Dockerfile of this folder where no Docker engine can be: in a root directory, by chroot. Needs root.

    debootstrap --variant=minbase bookworm /tmp/debian     # what debian:bookworm-slim is made of
    python docker/run_in_chroot.py build docker/Dockerfile.cpu --base /tmp/debian --root /tmp/image
    python docker/run_in_chroot.py run --root /tmp/image -- megaenc --version

The base stands in for every image that FROM names and is not changed: each stage works in a copy of it, or of the stage that it
names. The stages that the last one (or --target) needs are carried out, one after the other. There are no layers: a build that
failed starts again. What is known of the language of Dockerfiles is in dockerfile_language.py, beside this file.

What this machine alone needs for reaching its package indexes (pip's configuration, certificates, proxies) is lent by --bind and
--env.
"""

import argparse
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dockerfile_language import FROM_STAGE, Refusal, assignments, copies, expand, sent_files, stages, wanted

# Everything is mounted in a namespace of its own, which takes the mounts along when the command ends. /dev/shm has the 64 MB
# that Docker gives without --ipc or --shm-size.
_ENTER = """
set -e
root=$1 user=$2; shift 2
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=64m tmpfs "$root/dev/shm"
while [ "$1" != -- ]; do mount -o bind,ro "$1" "$root$2"; shift 2; done
shift
exec chroot --userspec="$user" --groups= "$root" /usr/bin/env -i "$@"
"""
# Docker lends a container these files of the host.
_HOST_FILES = ("/etc/resolv.conf", "/etc/hosts")


@dataclass
class Image:
    """What a Dockerfile says of a container, besides its files."""

    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
    folder: str = "/"
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    health: list[str] = field(default_factory=list)


def ids(root: Path, user: str) -> str:
    """uid:gid of a user by name or number; a number that the root's passwd does not know has group 0, as in Docker."""
    if re.fullmatch(r"\d+:\d+", user):
        return user
    passwd = root / "etc/passwd"
    for name, _, uid, gid, *_ in (line.split(":") for line in (passwd.read_text() if passwd.exists() else "").splitlines()):
        if user in (name, uid):
            return f"{uid}:{gid}"
    if user.isdigit():
        return f"{user}:0"
    raise Refusal(f"{passwd} has no user {user}")


def mount_points(root: Path, binds: Sequence[tuple[str, str]]) -> list[Path]:
    """Make in the root what the files are bound over; returns what was not there, in the order of making."""
    made = []
    for here, inside in binds:
        point = root / inside.lstrip("/")
        missing = [folder for folder in reversed(point.parents) if not folder.exists()]
        for folder in missing:
            folder.mkdir()
        if not point.exists():
            missing.append(point)
            point.mkdir() if Path(here).is_dir() else point.touch()
        made += missing
    return made


def take_away(made: Sequence[Path]) -> None:
    """Remove what `mount_points` has made, but for folders that the command has put something into."""
    for path in reversed(made):
        if not path.is_dir():
            path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()


def run_inside(root: Path, image: Image, env: Mapping[str, str], command: Sequence[str], lent: Sequence[tuple[str, str]]) -> int:
    """Run `command` with `env` and nothing of this process's environment, as the image's user in its folder; its exit status.

    `lent` are paths as (here, in the root), mounted read-only.
    """
    user = ids(root, image.user)
    env = {"HOME": "/root", **env} if user.startswith("0:") else env
    binds = [(path, path) for path in _HOST_FILES] + list(lent)
    inside = [
        *(f"{name}={value}" for name, value in env.items()),
        "/bin/sh",
        "-c",
        'cd "$0" && exec "$@"',
        image.folder,
        *command,
    ]
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, "sh", str(root), user]
    made = mount_points(root, binds)
    try:
        return subprocess.run([*enter, *(path for bind in binds for path in bind), "--", *inside], check=False).returncode
    finally:
        take_away(made)


def build(
    dockerfile: Path,
    context: Path,
    base: Path,
    root: Path,
    asked: Mapping[str, str],
    target: str | None = None,
    lent_files: Sequence[tuple[str, str]] = (),
    lent_env: Mapping[str, str] = types.MappingProxyType({}),
) -> Image:
    """Carry out the Dockerfile; `root` gets the files of its last stage. `asked` are build arguments. Raises Refusal.

    The other stages are folders beside `root`, gone when all went well.
    """
    found, arguments = stages(dockerfile, asked)
    used = set(arguments)
    build_stages = wanted(found, target, dockerfile)
    roots = {stage.name: root.with_name(f"{root.name}.{stage.name}") for stage in build_stages[:-1]} | {
        build_stages[-1].name: root
    }
    if there := [path for path in roots.values() if path.exists()]:
        raise Refusal(f"{there[0]} exists; remove it or name another --root")
    images: dict[str, Image] = {}
    for stage in build_stages:
        below = roots.get(stage.base.lower(), base)
        print(f"{dockerfile}: {stage.name}, from {stage.base}" + (f", for which {base} stands in" if below == base else ""))
        subprocess.run(["cp", "--archive", "--reflink=auto", str(below), str(roots[stage.name])], check=True)
        image = copy.deepcopy(images.get(stage.base.lower(), Image()))
        images[stage.name] = image
        used |= _carry_out(stage, image, dockerfile, context, roots, {**arguments}, asked, lent_files, lent_env)
    if unused := sorted(set(asked) - used):
        raise Refusal(f"--build-arg {unused[0]}: {dockerfile} has no such argument")
    for path in list(roots.values())[:-1]:
        shutil.rmtree(path)
    return image


def _carry_out(stage, image, dockerfile, context, roots, outer, asked, lent_files, lent_env) -> set[str]:
    """The lines of a stage, which change its root and `image`; returns the arguments that it knows. Refusals name the line."""
    root, arguments = roots[stage.name], {}
    for line, name, rest in stage.lines:
        started = time.monotonic()
        print(f"{dockerfile}:{line}: {name} {rest}", flush=True)
        known = {**arguments, **image.env}
        try:
            match name:
                case "ARG":
                    key, given, value = rest.partition("=")
                    arguments[key] = asked.get(key, expand(value, known) if given else outer.get(key, ""))
                case "ENV":
                    image.env |= assignments(rest, known)
                case "LABEL":
                    image.labels |= assignments(rest, known)
                case "RUN":
                    if rest.startswith(("[", "-", "<")):
                        raise Refusal("only RUN with a command for the shell is known")
                    status = run_inside(root, image, {**lent_env, **known}, ["/bin/sh", "-c", rest], lent_files)
                    if status:
                        raise Refusal(f"RUN ended with status {status}")
                case "COPY":
                    _copy(expand(rest, known), image, context, root, roots)
                case "WORKDIR":
                    image.folder = os.path.join(image.folder, expand(rest, known))
                    (root / image.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
                case "USER":
                    image.user = expand(rest, known)
                case "ENTRYPOINT" | "CMD":
                    if not rest.startswith("["):
                        raise Refusal(f"only {name} as a list is known")
                    setattr(image, "entrypoint" if name == "ENTRYPOINT" else "command", json.loads(rest))
                case "HEALTHCHECK":
                    _, mark, command = rest.partition("CMD ")
                    if not mark or not command.startswith("["):
                        raise Refusal("only HEALTHCHECK ... CMD as a list is known")
                    image.health = json.loads(command)
                case _:
                    raise Refusal(f"{name} is not known here")
        except Refusal as refusal:
            raise Refusal(f"{dockerfile}:{line}: {refusal}") from None
        if name == "RUN":
            print(f"    {time.monotonic() - started:.0f} s", flush=True)
    return set(arguments)


def _copy(rest: str, image: Image, context: Path, root: Path, roots: Mapping[str, Path]) -> None:
    """COPY SOURCE ... DESTINATION from the context, or COPY --from=STAGE SOURCE DESTINATION from a stage. Raises Refusal."""
    if found := FROM_STAGE.match(rest):
        stage, (*sources, destination) = found[1].lower(), rest[found.end() :].split()
        if stage not in roots or len(sources) != 1:
            raise Refusal("only COPY --from=STAGE SOURCE DESTINATION is known")
        source, target = roots[stage] / sources[0].lstrip("/"), root / os.path.join(image.folder, destination).lstrip("/")
        if not source.exists():
            raise Refusal(f"COPY --from={found[1]}: {sources[0]} is not there")
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "--archive", "--no-target-directory", "--reflink=auto", str(source), str(target)], check=True)
        return
    *sources, destination = rest.split()
    if not sources or rest.startswith(("-", "[")):
        raise Refusal("only COPY [--from=STAGE] SOURCE ... DESTINATION is known")
    for source, target in copies(sources, destination, sent_files(context)):
        path = root / os.path.join(image.folder, target).lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(context / source, path)


def pairs(given: Sequence[str], separator: str, flag: str) -> list[tuple[str, str]]:
    """Each A{separator}B as (A, B)."""
    for text in given:
        if separator not in text:
            raise Refusal(f"{flag} {text}: expected A{separator}B")
    return [(key, value) for key, _, value in (text.partition(separator) for text in given)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    builds = verbs.add_parser("build", help="carry out a Dockerfile in a root")
    builds.add_argument("dockerfile", type=Path)
    builds.add_argument("--context", type=Path, default=Path(), help="what COPY copies from (default: here)")
    builds.add_argument("--base", type=Path, required=True, help="the root directory that stands in for what FROM names")
    builds.add_argument("--target", help="the stage to build, instead of the last")
    builds.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    runs = verbs.add_parser("run", help="run a command in a root that was built")
    runs.add_argument("--user", help="instead of the image's, as docker run -u")
    runs.add_argument("command", nargs="*", help="instead of the image's CMD")
    for verb in (builds, runs):
        verb.add_argument("--root", type=Path, required=True, help="the root directory; ROOT.json beside it says how to run it")
        verb.add_argument("--bind", action="append", default=[], metavar="HERE:INSIDE", help="lend a file or folder, read-only")
        verb.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="lend a variable; it is not kept")
    asked = parser.parse_args()
    try:
        if os.geteuid() != 0:
            raise Refusal("mount and chroot need root")
        root = asked.root.resolve()
        lent_files, lent_env = pairs(asked.bind, ":", "--bind"), dict(pairs(asked.env, "=", "--env"))
        state = root.with_name(root.name + ".json")
        base = asked.base.resolve() if asked.verb == "build" else root
        if not (base / "bin/sh").exists():
            raise Refusal(f"{base} is no root directory with a shell: debootstrap --variant=minbase bookworm {base}")
        if asked.verb == "build":
            arguments = dict(pairs(asked.build_arg, "=", "--build-arg"))
            image = build(asked.dockerfile, asked.context, base, root, arguments, asked.target, lent_files, lent_env)
            state.write_text(json.dumps(asdict(image), indent=1) + "\n")
            size = subprocess.run(["du", "-sm", str(root)], capture_output=True, text=True, check=True).stdout.split()[0]
            print(f"{root}: {size} MB")
            return 0
        if not state.exists():
            raise Refusal(f"{state} is missing: build first")
        image = Image(**json.loads(state.read_text()))
        image.user = asked.user or image.user
        return run_inside(root, image, {**image.env, **lent_env}, image.entrypoint + (asked.command or image.command), lent_files)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
