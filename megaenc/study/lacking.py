"""What has no score yet, and why: so that no model is missing from a report without a word."""

from collections import defaultdict

from megaenc.study.evidence import Evidence
from megaenc.study.score import Grid
from megaenc.study.setups import dataset_label


def without_score(evidence: Evidence) -> str:
    """A few sentences that name every model and data set without a score; "" where none lacks one."""
    there = {(one.model, one.dataset) for one in evidence.scores}
    grids: dict[str, dict[str, Grid]] = defaultdict(dict)
    for one in evidence.grids:
        grids[one.model][one.dataset] = one
    planned = [name for _, name in evidence.scope.datasets]
    begun, never = [], []
    for model in dict.fromkeys([*evidence.scope.names, *grids]):
        of_model = grids.get(model, {})
        if not of_model:
            never.append(model)
            continue
        parts = [_of_grid(one) for dataset, one in of_model.items() if (model, dataset) not in there]
        known = {dataset.partition(" after ")[0] for dataset in of_model}
        parts += [f"{dataset}: no run" for dataset in planned if dataset not in known]
        if parts:
            begun.append(f"{model} ({'; '.join(parts)})")
    said = []
    if begun:
        said.append(f"Without a score, which takes a learning rate with every seed finished: {', '.join(begun)}.")
    if never:
        said.append(f"Without any run: {', '.join(never)}.")
    return " ".join(said)


def _of_grid(one: Grid) -> str:
    failed = f", {one.failed} failed" if one.failed else ""
    return f"{one.family} {dataset_label(one.family, one.dataset)}: {len(one.ended)} of {one.planned} runs ended{failed}"
