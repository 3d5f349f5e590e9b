"""Mutated manifests of configs/study, given to every command that reads a manifest.

Each one must be accepted, or refused in one line. A failure is repeated with its number: `--start NUMBER --count 1`.

python tests/study/manifest_fuzzer.py --count 5000 --seed 20261
"""

import argparse
import contextlib
import copy
import datetime
import io
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml
from manifests import STUDY

from megaenc.console import escape_unprintable, silence_libraries
from megaenc.finetune.grid.command import GridConfig
from megaenc.flags import flatten
from megaenc.study.manifest.expand import ManifestEntry
from megaenc.study.manifest.schema import CorpusEntry, HardwareEntry, ReportedEntry, read_manifest
from megaenc.study.manifest.scope import build_scope
from megaenc.study.plan import command as plan
from megaenc.study.plan.dag import build_graph
from megaenc.study.run import command as run
from megaenc.study.run import stage_log, status
from megaenc.study.run.embed_stage import EmbedEntry
from megaenc.study.run.finetune_stage import FinetuneStage
from megaenc.training.config import PretrainConfig

CPU_SECONDS, MEMORY = 20, 4 << 30
"""Limits of a manifest in all commands: a shipped one takes 0.1 seconds, and 2 with its picture."""
PICTURES = 5  # of so many manifests one is drawn if it is valid, which takes as long as thirty plans

TEXTS = [
    "", " ", "\n", "a\nb", "\t", "\0", "a\0b", "\x1b[31m", "\u202e", "\ud800", "\ufeff", "\x85", "x" * 300, "é" * 100,
    "x" * 10_000, "x" * 10_001, "/", ".", "..", "../../up", "/abs/olute", "a/b", "~", "-", "--flag", "名前", "mlm", "<b>&$x^{\\|",
    "%s {0} %d", "*", "null", "true", "1", "1e-4", "1e400", "nan", "inf", "1_000", "٣", "0x10", "x" * 100 + "=x", "=", "a=",
    "..=x",
]  # fmt: skip
NUMBERS = [
    True, False, -1, -0.0, 0, 0.0, 0.5, 1, 1.5, 2, 3, 7, 5e-324, 1e-20, 1e20, 1.7e308, 10**9, 10**15, 10**15 + 1, 2**31, 2**53,
    2**63, 10**20, 10**400, -(10**15), -(10**400), float("inf"), -float("inf"), float("nan"),
]  # fmt: skip
LISTS = [[], [[]], [{}], [None], [1, 1], [0], [[1]], ["nan"], ["a", "b"], [0.5, "a", 0.5, "b"], [*range(2000)]]
DATES = [datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)]
OTHERS = [*DATES, None, {}, {1: {2: 3}}, {None: None}, {"": ""}, {"a": 1}, {"x"}, b"\xff"]
YAML_PARTS = [
    b"\0", b"\t", b"\r", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"&a ", b"*a", b"<<: *a\n", b"&a [*a]", b"!!binary ",
    b"!!set ", b"!!python/none ", b"!!float ", b"!!int x", b"!!str ", b"!!timestamp ", b"2026-13-45", b"2026-01-01", b"12:30:45",
    b"? ", b"- ", b": ", b"{", b"}", b"[", b"]", b"#", b"|\n", b">\n", b"---\n", b"...\n", b"%YAML 9.9\n", b"'", b'"', b"\\",
    b"\n", b" ", b"=", b"~", b"0o17", b"1e400", b".inf", b".nan", b"[" * 2000, b"{a: " * 500, b"9" * 5000,
]  # fmt: skip
SCHEDULE_PARTS = [
    "clm", "mlm", "mlm(mask=0.4)", "mlm(mask=0.5->0.2)", "mntp(mask=0.4)", "prefix_lm", "mix(clm:1,mlm:3)", "5x(",
    "50000x(clm:1,", "(", ")", ":", ",", ":0.5", ":0.5,", ":1.0", ":100", ":1e5", "->", "=", "mask=0", "span=3", "0", "1", ".",
    "-", " ", "é",
]  # fmt: skip
DEFAULTS = {
    "pretrain": flatten(PretrainConfig(bf16=True)),
    "sizes": flatten(PretrainConfig(bf16=True)),
    "models": flatten(ManifestEntry()),
    "models.pretrain": flatten(PretrainConfig(bf16=True)),
    "corpus": flatten(CorpusEntry()),
    "finetune": flatten(GridConfig()),
    "embed": flatten(EmbedEntry()),
    "hardware": flatten(HardwareEntry()),
    "reported": flatten(ReportedEntry()),
}
"""Known keys of each section, or of a part of it, and their defaults."""
KNOWN_KEYS = [(section, key, default) for section, keys in DEFAULTS.items() for key, default in keys.items()]

Place = tuple[Any, ...]
"""The keys and indices that lead to a value of a manifest."""


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """The way to each key and to each item of a list, beginning with () to `value` itself."""
    yield at
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*at, key))


def value_at(values: Any, at: Place) -> Any:
    for key in at:
        values = values[key]
    return values


def draw_odd(like: Any, random: Random) -> Any:
    """An odd value, in half of the cases of the type of `like`: those get further than others."""
    kinds = {str: TEXTS, int: NUMBERS, float: NUMBERS, bool: NUMBERS, tuple: LISTS, list: LISTS}
    drawn = random.choice([TEXTS, NUMBERS, LISTS, OTHERS])
    return copy.deepcopy(random.choice(kinds.get(type(like), drawn) if random.random() < 0.5 else drawn))


class Mutations:
    """Changes of the parsed manifest `values` at `place`; each returns a few words."""

    def __init__(self, values: dict, place: Place, random: Random):
        self.values, self.random = values, random
        self.node, self.key = value_at(values, place[:-1]), place[-1]

    def replace(self) -> str:
        self.node[self.key] = odd = draw_odd(self.node[self.key], self.random)
        return f"{odd!r}"

    def change(self) -> str:
        """Change a text, a number or a list a little."""
        value, random = self.node[self.key], self.random
        if isinstance(value, str):
            middle, part = random.randrange(len(value) + 1), random.choice([*TEXTS, *SCHEDULE_PARTS])
            self.node[self.key] = value[:middle] + part + value[middle + random.randrange(3) :]
        elif isinstance(value, int | float) and abs(value) < 1e100:
            self.node[self.key] = random.choice(
                [-value, value + 1, value / 2, value * 2, value * 10**6, value * 1e-6, str(value)]
            )
        elif isinstance(value, list):
            value += [draw_odd(value[0] if value else None, random) for _ in range(random.choice([1, 1, 3, 100]))]
        else:
            return self.replace()
        return f"{self.node[self.key]!r}"

    def wrap(self) -> str:
        value = self.node[self.key]
        self.node[self.key] = self.random.choice([[value], [value, value], {self.key: value}])
        return ""

    def drop(self) -> str:
        del self.node[self.key]
        return ""

    def rename(self) -> str:
        """Rename a key to an odd one or to one that stands elsewhere, or swap two items of a list."""
        if isinstance(self.node, list):
            other = self.random.randrange(len(self.node))
            self.node[self.key], self.node[other] = self.node[other], self.node[self.key]
            return f"with {other}"
        keys = [at[-1] for at in places(self.values) if at] + [*TEXTS, *NUMBERS, *DATES, None]
        name = self.random.choice(keys)
        self.node[name] = self.node.pop(self.key)
        return f"{name!r}"

    def copy(self) -> str:
        """Put a copy of another value here."""
        other = self.random.choice([*places(self.values)][1:])
        self.node[self.key] = copy.deepcopy(value_at(self.values, other))
        return f"of {other}"

    def alias(self) -> str:
        """Put another value here, which is then written as an anchor and an alias, possibly a recursive one."""
        other = self.random.choice([*places(self.values)])
        self.node[self.key] = value_at(self.values, other)
        return f"of {other}"

    def add(self) -> str:
        """Give a section a key that it knows, with an odd value."""
        section, key, default = self.random.choice(KNOWN_KEYS)
        name, _, part = section.partition(".")
        node = self.values.setdefault(name, {})
        node = self._draw_part(node) if name in ("models", "sizes") else node
        node = node.setdefault(part, {}) if part and isinstance(node, dict) else node
        if not isinstance(node, dict):
            return "nowhere"
        node[key] = odd = draw_odd(default, self.random)
        return f"in {section}: {key} = {odd!r}"

    def reschedule(self) -> str:
        """Give a model an odd schedule."""
        entry = self._draw_part(self.values.get("models"))
        if not isinstance(entry, dict):
            return "nothing"
        for key in ("mask", "clm_share", "clm_steps"):
            entry.pop(key, None)
        entry["schedule"] = "".join(self.random.choices(SCHEDULE_PARTS, k=self.random.randint(1, 8)))
        return entry["schedule"]

    def _draw_part(self, node: Any) -> Any:
        """An item of a list or a value of a mapping; None if there is none."""
        parts = [*node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []
        return self.random.choice(parts) if parts else None


WEIGHTS: dict[Callable[[Mutations], str], int] = {
    Mutations.replace: 8,
    Mutations.change: 6,
    Mutations.add: 10,
    Mutations.reschedule: 2,
    Mutations.drop: 2,
    Mutations.rename: 2,
    Mutations.copy: 2,
    Mutations.wrap: 1,
    Mutations.alias: 1,
}


def damage(text: bytes, random: Random) -> tuple[bytes, str]:
    """Insert a part of YAML's syntax into a text, cut it, or repeat or drop a line."""
    lines, middle = text.splitlines(keepends=True), random.randrange(len(text) + 1)
    kind, number = random.randrange(4) if lines else 0, random.randrange(len(lines) or 1)
    if kind == 0:
        part = random.choice(YAML_PARTS)
        return text[:middle] + part + text[middle + random.randrange(2) :], f"insert {part!r} at {middle}"
    if kind == 1:
        return text[:middle], f"cut at {middle}"
    if kind == 2:
        return b"".join([*lines[: number + 1], *lines[number:]]), f"repeat line {number}"
    return b"".join([*lines[:number], *lines[number + 1 :]]), f"drop line {number}"


def mutate(random: Random) -> tuple[bytes, str]:
    """A shipped manifest with one to three mutations as the text of a file, and a description of the mutations."""
    path = random.choice(sorted(STUDY.glob("*.yaml")))
    values, notes = yaml.safe_load(path.read_text()), []
    count = random.choice([1, 1, 1, 1, 2, 3])
    damages = sum(random.random() < 0.1 for _ in range(count))
    for _ in range(count - damages):
        ways = [*places(values)][1:]
        kind, place = random.choices([*WEIGHTS], [*WEIGHTS.values()])[0], random.choice(ways or [("title",)])
        notes.append(f"{kind.__name__} {'.'.join(map(str, place))} {kind(Mutations(values, place, random))}")
        if kind is Mutations.alias:  # of recursive values there is no list of places
            break
    text = yaml.safe_dump(values, allow_unicode=random.random() < 0.5, sort_keys=False).encode(errors="replace")
    for _ in range(damages):
        text, note = damage(text, random)
        notes.append(note)
    return text, f"{path.name}: {'; '.join(note[:120] for note in notes)}"


def call(main: Callable[[list[str]], None], *arguments: object) -> str:
    """Call a command; return its error line, or "" if it succeeds. Raises what else it ends with."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib's, about letters that its font lacks
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as stop:
            code = stop.code
    output, errors = out.getvalue(), err.getvalue()
    for text in (output, errors):
        assert escape_unprintable(text, keep="\n\t") == text, text
    assert (code, errors.count("\n"), errors[-1:]) == (2, 1, "\n") if code else output and not errors, (code, errors)
    return errors.strip()


def read_everywhere(path: Path, draw: bool) -> str:
    """Plan a manifest, list its stages and their states, build its report's scope; return the error line, or ""."""
    if error := call(plan.main, path):
        assert str(path) in error, error
        return error
    manifest = read_manifest(path)
    assert build_scope(manifest).model_keys == manifest.model_keys()
    study, stages = path.with_name("study"), build_graph(manifest).stages
    data = [] if manifest.corpus.is_built_by_study else ["--data-path", "corpus", "--tokenizer", "tokenizer"]
    for stage in stages.values():
        assert re.fullmatch(r"[A-Za-z0-9][\w.-]*", stage.name), stage.name
        for part in [stage, *(stage.split_by_training_set() if isinstance(stage, FinetuneStage) else [])]:
            log = stage_log.log_path(study, part.id)
            assert log.parent.parent in (study, study / "logs") and len(log.name.encode()) <= 255, log
    return (
        call(run.main, path, "--output", study, "--dry-run", *data)
        or call(status.main, path, "--output", study)
        or (call(plan.main, path, "--picture", path.with_name("plan.png")) if draw else "")
    )


class LimitError(BaseException):
    """End of what takes too long. The commands catch exceptions of the system, among them TimeoutError, but not this one."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Raise LimitError or MemoryError inside for what takes more processor time or memory than the limits."""

    def stop(number: int, frame: object) -> None:
        raise LimitError(f"more than {CPU_SECONDS} seconds of processor time")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, memory[1]))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, memory)


@dataclass(frozen=True)
class FuzzResult:
    """What became of a mutated manifest."""

    number: int
    mutations: str
    outcome: str
    """valid, refused or failed"""
    message: str
    """error line or traceback; empty if valid"""
    seconds: float
    """processor time"""


def fuzz(numbers: Iterable[int], seed: int, folder: Path) -> Iterator[FuzzResult]:
    """What becomes of mutated manifests, each of which depends on `seed` and its number only."""
    path = folder / "study.yaml"
    for number in numbers:
        text, mutations = mutate(Random(f"{seed} {number}"))
        path.write_bytes(text)
        began = time.process_time()
        try:
            with limits():
                message = read_everywhere(path, draw=number % PICTURES == 0)
            outcome = "refused" if message else "valid"
        except (Exception, LimitError):
            outcome, message = "failed", traceback.format_exc()
        yield FuzzResult(number, mutations, outcome, message, time.process_time() - began)


def main() -> None:
    """The command: print failures and counts, exit with 1 if there is a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="number of manifests")
    parser.add_argument("--start", type=int, default=0, help="number of the first, to repeat one")
    parser.add_argument("--seed", type=int, default=0, help="which mutations")
    parser.add_argument("--verbose", action="store_true", help="print every manifest's mutations and error line")
    arguments = parser.parse_args()
    silence_libraries()
    numbers, outcomes, slowest = range(arguments.start, arguments.start + arguments.count), Counter(), None
    with tempfile.TemporaryDirectory() as folder:
        for result in fuzz(numbers, arguments.seed, Path(folder)):
            outcomes[result.outcome] += 1
            slowest = max(slowest or result, result, key=lambda one: one.seconds)
            if arguments.verbose or result.outcome == "failed":
                print(f"{result.outcome}: {result.number}: {result.mutations}: {result.message}", flush=True)
    print(", ".join(f"{outcomes[outcome]:,} {outcome}" for outcome in ("valid", "refused", "failed")))
    if slowest:
        print(f"slowest: {slowest.seconds:.1f} s of processor time, {slowest.outcome}: {slowest.number}: {slowest.mutations}")
    sys.exit(outcomes["failed"] > 0)


if __name__ == "__main__":
    main()
