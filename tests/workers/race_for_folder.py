"""Processes that open one run folder at the same time, as rank 0 of a run does: `race_for_folder.py PROCESSES RACES FLAGS...`.

Each of RACES races has a folder of its own below --save. A line of JSON a race: what each process got, None or its complaint. One
that gets the folder keeps it until all have tried.
"""

import json
import multiprocessing
import sys
from pathlib import Path

from megaenc.errors import InputError
from megaenc.training.config import parse_config
from megaenc.training.plan import Plan
from megaenc.training.planning import build_plan
from megaenc.training.run_dir import RunDir


def enter(folder: Path, plan: Plan, together, answers) -> None:
    """One process of a race."""
    together.wait(60)
    try:
        RunDir(folder, plan)
        answers.put(None)
    except InputError as error:
        answers.put(str(error))
    together.wait(60)


def main(processes: int, races: int, flags: list[str]) -> None:
    """Fork them with the plan ready: only the folder is left to do."""
    plan = build_plan(parse_config(flags, "race_for_folder.py"))
    root, forked = Path(plan.settings.output.save), multiprocessing.get_context("fork")
    for race in range(races):
        folder = root / str(race // 2)  # a new one, then one that is a run's already
        together, answers = forked.Barrier(processes), forked.Queue()
        entering = [forked.Process(target=enter, args=(folder, plan, together, answers)) for _ in range(processes)]
        for process in entering:
            process.start()
        print(json.dumps([answers.get(timeout=60) for _ in entering]), flush=True)
        for process in entering:
            process.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
