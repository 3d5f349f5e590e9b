"""Plant faults in megaenc and record which tests find each: a matrix that says which tests could go. For hours, by hand.

    pip install "coverage>=7.10"
    PYTHONPATH=tests python -m faults.planted reach OUT
    PYTHONPATH=tests python -m faults.planted plant OUT --faults 300 --seed 1
    PYTHONPATH=tests python -m faults.planted show OUT

`reach` runs each file of tests once and keeps the lines that it and its processes run. `plant` changes one place at a time in a
copy of the repository, and runs the files that reach it, the fastest first. Both go on where they were stopped. Faults without an
effect are for the reader to leave out.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TURNED = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
TURNED |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
COVERAGE_SETTINGS = "[run]\nsource = megaenc\nparallel = true\npatch = subprocess\nconcurrency = thread,multiprocessing\n"


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
    """Yield each place of a file that can be changed: comparisons, numbers, returned values and conditions."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def describe(node: ast.expr, kind: str, changed: str) -> Fault:
        first, last = (
            starts[row - 1] + column for row, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        return Fault(module, node.lineno, kind, text[first:last].decode(), changed, first)

    tree = ast.parse(text)
    # Python 3.11 does not know where the parts of an f-string are.
    in_text = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
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
            yield describe(node.test, kind, "True" if kind == "rank check" else f"(not ({ast.unparse(node.test)}))")


def run_tests(
    folder: Path, file: str, timeout: float, launcher: tuple[str, ...] = (), **variables: str
) -> tuple[list[str], float]:
    """Run a file of tests until one fails; return the tests that failed, or the file if it ended in another way, and seconds."""
    command = [sys.executable, *launcher, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", file]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"} | variables
    start = time.monotonic()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output = process.communicate()[0] + f"\nFAILED {file} took more than {timeout:.0f} s"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if process.returncode not in (0, 5) and not failed:
        failed = [file]
    return failed, time.monotonic() - start


def record_reach(out: Path, patterns: list[str]) -> None:
    """Write OUT/reach/FILE.json for each file of tests that git knows by `patterns`: seconds, and lines by module."""
    import coverage

    settings = out / "coveragerc"
    settings.write_text(COVERAGE_SETTINGS, encoding="utf-8")
    files = subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True).split()
    for number, file in enumerate(files, 1):
        target = out / "reach" / f"{file.replace('/', '.')}.json"
        if target.exists():
            continue
        shutil.rmtree(out / "data", ignore_errors=True)
        (out / "data").mkdir(parents=True)
        data_file = str(out / "data" / "coverage")
        launcher = ("-m", "coverage", "run", f"--rcfile={settings}")
        failed, seconds = run_tests(ROOT, file, 3600, launcher, COVERAGE_FILE=data_file, COVERAGE_PROCESS_START=str(settings))
        measured = coverage.Coverage(data_file=data_file, config_file=str(settings))
        measured.combine([str(out / "data")])
        data = measured.get_data()
        lines = {str(Path(path).relative_to(ROOT)): sorted(data.lines(path)) for path in data.measured_files()}
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps({"file": file, "seconds": seconds, "failed": failed, "lines": lines}), encoding="utf-8")
        print(f"{number} of {len(files)}: {file}, {seconds:.0f} s, {sum(map(len, lines.values())):,} lines", flush=True)


def draw_faults(reach: list[dict], count: int, seed: int) -> list[Fault]:
    """Return `count` faults in lines that tests reach, as many of each package as can be."""
    reached = defaultdict(set)
    for row in reach:
        for module, lines in row["lines"].items():
            reached[module] |= set(lines)
    by_package = defaultdict(list)
    for module in sorted(reached):
        for fault in list_faults(ROOT / module, module):
            if fault.line in reached[module]:
                by_package[module.split("/")[1]].append(fault)
    source = random.Random(seed)
    for faults in by_package.values():
        source.shuffle(faults)
    drawn = []
    while len(drawn) < count and any(by_package.values()):
        drawn += [faults.pop() for faults in by_package.values() if faults]
    return drawn[:count]


def plant_faults(out: Path, count: int, seed: int, budget: float) -> None:
    """Append a row for each fault to OUT/report.jsonl: the tests that found it, and the files of tests that did not."""
    reach = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / "reach").glob("*.json"))]
    report = out / "report.jsonl"
    rows = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()] if report.exists() else []
    known = {(row["module"], row["start"], row["kind"]) for row in rows}
    copy = out / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    for number, fault in enumerate(draw_faults(reach, count, seed), 1):
        if (fault.module, fault.start, fault.kind) in known:
            continue
        path = copy / fault.module
        whole = path.read_bytes()
        end = fault.start + len(fault.before.encode())
        path.write_bytes(whole[: fault.start] + fault.after.encode() + whole[end:])
        reaching = [row for row in reach if fault.line in row["lines"].get(fault.module, ())]
        found, missed, spent = [], [], 0.0
        for row in sorted(reaching, key=lambda row: row["seconds"]):
            if spent > budget:
                break
            failed, seconds = run_tests(copy, row["file"], 3 * row["seconds"] + 60)
            spent += seconds
            found += failed
            if not failed:
                missed.append(row["file"])
        path.write_bytes(whole)
        with open(report, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(fault) | {"found": found, "missed": missed, "seconds": round(spent)}) + "\n")
        print(f"{number} of {count}: {fault.module}:{fault.line} {fault.kind}: {len(found)} found it", flush=True)


def show_report(out: Path) -> None:
    """Print how many faults of each package were found, those that were not, and how many each file of tests found."""
    rows = [json.loads(line) for line in (out / "report.jsonl").read_text(encoding="utf-8").splitlines()]
    of_package, of_file = defaultdict(list), Counter()
    for row in rows:
        of_package[row["module"].split("/")[1]].append(bool(row["found"]))
        of_file.update({test.split("::")[0] for test in row["found"]})
    for package, found in sorted(of_package.items()):
        print(f"{package}: {sum(found)} of {len(found)}")
    for row in rows:
        if not row["found"]:
            print(f"not found: {row['module']}:{row['line']} {row['kind']}: {row['before']} -> {row['after']}")
    tried = of_file.keys() | {file for row in rows for file in row["missed"]}
    for file in sorted(tried, key=lambda file: (of_file[file], file)):
        print(f"{of_file[file]:4} {file}")


def main() -> None:
    """Run the step that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("reach", "plant", "show"))
    parser.add_argument("out", type=Path, help="folder for what is found")
    parser.add_argument("--faults", type=int, default=300, help="number of faults")
    parser.add_argument("--seed", type=int, default=1, help="seed that they are drawn by")
    parser.add_argument("--budget", type=float, default=120, help="seconds after which no further file is begun for a fault")
    parser.add_argument("--files", nargs="+", default=["tests/**/test_*.py", "tests/test_*.py"], help="tests")
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.step == "reach":
        record_reach(given.out, given.files)
    elif given.step == "plant":
        plant_faults(given.out, given.faults, given.seed, given.budget)
    else:
        show_report(given.out)


if __name__ == "__main__":
    main()
