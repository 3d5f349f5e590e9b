"""Faults planted in megaenc and the tests that find them, to see which could go.

    PYTHONPATH=tests python -m faults.planted plant OUT --faults 300 --seed 1
    PYTHONPATH=tests python -m faults.planted show OUT

Each fault changes one place in a copy of the repository. Then the tests that reach it are run
(changed.py), those of its package first. It takes hours and resumes where it was stopped. Faults
without an effect are for the reader to leave out.
"""

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from changed import Reach, run_git

ROOT = Path(__file__).resolve().parents[2]
TURNED = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
TURNED |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}


@dataclass(frozen=True)
class Fault:
    """One changed place."""

    module: str
    """Path of the file."""
    line: int
    kind: str
    before: str
    after: str
    start: int
    """Offset of `before` in the file, in bytes."""


def list_faults(path: Path, module: str) -> Iterator[Fault]:
    """Yield each comparison, number, returned value or condition that can be changed."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def describe(node: ast.expr, kind: str, changed: str) -> Fault:
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        return Fault(module, node.lineno, kind, text[first:last].decode(), changed, first)

    tree = ast.parse(text)
    # Python 3.11 does not know where the parts of an f-string are.
    in_text = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in in_text:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
            turned = ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
            yield describe(node, "comparison", f"({ast.unparse(turned)})")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield describe(node, "number", repr(node.value + 1))
        elif isinstance(node, ast.Return) and node.value is not None:
            yield describe(node.value, "return", "None")
        elif isinstance(node, ast.If):
            kind = "rank check" if "rank" in ast.unparse(node.test) else "condition"
            yield describe(
                node.test,
                kind,
                "True" if kind == "rank check" else f"(not ({ast.unparse(node.test)}))",
            )


def run_tests(
    copy: Path, tests: list[str], budget: float, first: bool
) -> tuple[list[str], list[str]]:
    """Run `tests` in turn for `budget` seconds; return the failed and the passed.

    With `first`, the first failure ends it.
    """
    listed = copy.parent / f"{copy.name}.tests"
    listed.write_text("\n".join(tests), encoding="utf-8")
    command = [
        sys.executable,
        "-u",
        "-m",
        "pytest",
        "-v",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *["-x"] * first,
        f"@{listed}",
    ]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        timer = threading.Timer(budget, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        output, _ = process.communicate()
        timer.cancel()
    results = defaultdict(list)
    for test, result in re.findall(
        r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR) ", output, re.MULTILINE
    ):
        results[result].append(test)
    found = results["FAILED"] + results["ERROR"]
    if process.returncode not in (0, 5, -signal.SIGKILL) and not found:
        found = [f"collection: {output.strip().splitlines()[-1][:200]}"]
    return found, results["PASSED"]


def name_package(module: str) -> str:
    """Return the package of a module; modules of megaenc itself are one."""
    parts = Path(module).parts
    return parts[1] if len(parts) > 2 else parts[0]


def draw_faults(count: int, seed: int) -> list[Fault]:
    """Return `count` faults, as many of each package as can be."""
    by_package = defaultdict(list)
    for module in sorted(run_git("ls-files", "megaenc/*.py").split()):
        by_package[name_package(module)] += list_faults(ROOT / module, module)
    source = random.Random(seed)
    for faults in by_package.values():
        source.shuffle(faults)
    drawn = []
    while len(drawn) < count and any(by_package.values()):
        drawn += [faults.pop() for faults in by_package.values() if faults]
    return drawn[:count]


def plant_faults(out: Path, faults: list[Fault], budget: float, first: bool, workers: int) -> None:
    """Append a row for each fault to OUT/report.jsonl, with the tests that found it.

    The tests that did not find it are listed, too.
    """
    report = out / "report.jsonl"
    rows = (
        [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        if report.exists()
        else []
    )
    known = {(row["module"], row["start"], row["kind"]) for row in rows}
    reach = Reach(run_git("ls-files").split())
    copies = []
    for number in range(workers):
        copies.append(out / f"copy{number}")
        if not copies[-1].exists():
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copies[-1])], check=True)
    lock = threading.Lock()

    def plant(fault: Fault) -> None:
        with lock:
            copy = copies.pop()
            subprocess.run(
                ["git", "checkout", "--quiet", "--force", run_git("rev-parse", "HEAD").strip()],
                cwd=copy,
                check=True,
            )
        path = copy / fault.module
        whole = path.read_bytes()
        end = fault.start + len(fault.before.encode())
        path.write_bytes(whole[: fault.start] + fault.after.encode() + whole[end:])
        start = time.monotonic()
        tests = reach.find_tests(reach.find_definitions(fault.module, fault.line, fault.line))
        near = [name_package(fault.module), Path(fault.module).stem]
        tests.sort(key=lambda test: ("test_mistakes" in test, -sum(name in test for name in near)))
        found, passed = run_tests(copy, tests, budget, first) if tests else ([], [])
        path.write_bytes(whole)
        seconds = round(time.monotonic() - start)
        row = asdict(fault) | {
            "reaching": len(tests),
            "found": found,
            "passed": passed,
            "seconds": seconds,
        }
        with lock:
            copies.append(copy)
            with open(report, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{fault.module}:{fault.line} {fault.kind}: {len(found)} found it, {seconds} s",
                flush=True,
            )

    with ThreadPoolExecutor(workers) as pool:
        list(
            pool.map(
                plant,
                [fault for fault in faults if (fault.module, fault.start, fault.kind) not in known],
            )
        )


def show_report(out: Path) -> None:
    """Print the faults found by package and by test file, and those not found."""
    rows = [
        json.loads(line) for line in (out / "report.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    of_package = defaultdict(list)
    of_file = Counter()
    for row in rows:
        of_package[name_package(row["module"])].append(bool(row["found"]))
        of_file.update({test.split("::")[0] for test in row["found"]})
    for package, found in sorted(of_package.items()):
        print(f"{package}: {sum(found)} of {len(found)} found")
    for row in rows:
        if not row["found"]:
            print(
                f"not found: {row['module']}:{row['line']} {row['kind']}: "
                f"{row['before']} -> {row['after']}"
            )
    tried = of_file.keys() | {test.split("::")[0] for row in rows for test in row["passed"]}
    for file in sorted(tried, key=lambda file: (of_file[file], file)):
        print(f"{of_file[file]:4} {file}")


def main() -> None:
    """Run the step that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("plant", "show"))
    parser.add_argument(
        "out", type=Path, help="directory for the report and copies of the repository"
    )
    parser.add_argument("--faults", type=int, default=300, help="number of faults")
    parser.add_argument("--seed", type=int, default=1, help="seed that they are drawn by")
    parser.add_argument(
        "--budget", type=float, default=120, help="seconds that the tests of a fault may take"
    )
    parser.add_argument(
        "--first", action="store_true", help="go on to the next fault when one test has found it"
    )
    parser.add_argument("--workers", type=int, default=2, help="faults that are tried at once")
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.step == "plant":
        plant_faults(
            given.out,
            draw_faults(given.faults, given.seed),
            given.budget,
            given.first,
            given.workers,
        )
    else:
        show_report(given.out)


if __name__ == "__main__":
    main()
