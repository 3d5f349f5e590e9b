"""Check an objective before a run: contract, leaks, statistics, speed, layouts.

megaenc objective check 'mlm(mask=0.3)'
megaenc objective check my_package.my_module:MyObjective --options share=0.5

Packs are made up, so that neither a corpus nor a tokenizer is needed. Statistics are of a million
tokens. --train also trains a tiny model in one process and in four. Exit code 2 if a check fails.
"""

import hashlib
import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from rich import box
from rich.table import Table
from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.console import build_rich_console
from megaenc.data.packing.packed_dataset import Pack
from megaenc.errors import InputError, handle_command_errors
from megaenc.objectives.base import Objective
from megaenc.objectives.check.load import load_objective
from megaenc.objectives.check.measure import CheckResult, compute_targets, make_packs, measure
from megaenc.objectives.validate import check_targets
from megaenc.processes import python_command, python_environment

_CONTRACT_PACKS = 64


@dataclass(frozen=True)
class CheckConfig:
    """Flags of `megaenc objective check`, each a field.

    `objective`, the positional argument, is a name, perhaps with options as in a schedule, or
    MODULE:CLASS with its `options`, a tuple of texts such as share=0.5. `train` also trains a tiny
    model.
    """

    objective: Annotated[str, Positional, arg(metavar="OBJECTIVE")]
    """name of an objective, with options as in a schedule (`mlm(mask=0.3)`), or MODULE:CLASS, also
    of the current directory"""
    options: tuple[str, ...] = ()
    """options of a MODULE:CLASS, such as share=0.5 length=4"""
    train: bool = False
    """also train a tiny model some steps on the CPU, in 1 process and in 4 (tensor 2 x pipeline 2),
    and stop and resume it"""


def compute_digest(objective: Objective, packs: Iterable[Pack]) -> str:
    """Return the SHA-256, as hexadecimal text, of the Targets of packs.

    It is the same in every order of the packs.

    Raises:
        InputError: The objective raises an error.
    """
    digests = []
    for pack in packs:
        arrays = [
            np.asarray(part).tobytes()
            for part in compute_targets(objective, pack).parts
            if part is not None
        ]
        digests.append(hashlib.sha256(b"|".join(arrays)).hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def check_contract(objective: Objective) -> CheckResult:
    """Return the check `contract`: whether Targets of made-up packs are valid.

    See `check_targets`; its error, and any of the objective, is a failed result. Some of the packs
    have documents of one token, or of only special tokens.
    """
    try:
        for pack in make_packs(_CONTRACT_PACKS):
            check_targets(objective, pack, seed=1)
    except InputError as error:
        return CheckResult("contract", False, str(error))
    return CheckResult(
        "contract", True, f"{_CONTRACT_PACKS} packs, with documents of one token and without text"
    )


def check_determinism(objective: Objective, config: CheckConfig) -> CheckResult:
    """Return the check `determinism`: targets do not depend on pack order or process.

    Ranks compute them in other processes, of which one is started here, without a time limit.

    Args:
        config: Objective and options as given to the command, for the other process.

    Raises:
        InputError: The objective raises an error here; in the other process it fails the check.
    """
    packs = list(make_packs(_CONTRACT_PACKS))
    expected = compute_digest(objective, packs)
    if compute_digest(objective, reversed(packs)) != expected:
        return CheckResult(
            "determinism",
            False,
            "targets differ in another order of packs; expected no state between calls",
        )
    code = (
        "import json, sys; from megaenc.objectives.check import command; "
        "command.print_digest(*json.loads(sys.argv[1]))"
    )
    command = python_command("-c", code, json.dumps([config.objective, config.options]))
    environment = python_environment() | {"PYTHONHASHSEED": "4711"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode or process.stdout.split()[-1:] != [expected]:
        return CheckResult(
            "determinism",
            False,
            "targets differ in another process; expected draws only from `randomness`",
        )
    return CheckResult("determinism", True, "equal in another order and in another process")


def print_digest(objective: str, options: Sequence[str]) -> None:
    """Print `compute_digest` of an objective and the packs of `check_determinism`.

    That check calls it in another process. Arguments are those of `load_objective`, errors also
    those of `compute_digest`.
    """
    print(compute_digest(load_objective(objective, options), make_packs(_CONTRACT_PACKS)))


def run_checks(config: CheckConfig) -> tuple[Objective, list[CheckResult]]:
    """Return the objective and the results of all checks.

    They are in the order of computation. A failed contract leaves out all other checks, and any
    failed check the one of training, which `config.train` asks for. A failed check raises nothing.

    Raises:
        InputError: The objective cannot be built, or raises an error while it is measured.
    """
    from megaenc.objectives.check.layouts import check_micro_batches, check_training

    objective = load_objective(config.objective, config.options)
    results = [check_contract(objective)]
    if results[-1].passed:
        results += [
            check_determinism(objective, config),
            *measure(objective),
            check_micro_batches(objective),
        ]
    if config.train and all(result.passed is not False for result in results):
        results += check_training(config.objective, config.options)
    return objective, results


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc objective check`: print a table of the checks.

    A failed check or wrong input exits with 2, a failed check after the table.

    Args:
        argv: Words after the command; None: sys.argv[1:].
    """
    config = flags.parse(CheckConfig, argv, prog="megaenc objective check", description=__doc__)
    objective, results = run_checks(config)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("check", "", objective.describe(every=True)):
        table.add_column(name, overflow="fold")
    for result in results:
        table.add_row(
            result.name, {True: "passed", False: "failed", None: ""}[result.passed], result.text
        )
    build_rich_console(highlight=False, markup=False, emoji=False).print(table)
    for result in results:
        if result.passed is False:
            raise InputError(f"{config.objective}: {result.name}: {result.text}")
