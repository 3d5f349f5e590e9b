"""Check an objective before a run: contract, leaks, determinism, statistics of a million tokens, and speed.

megaenc objective check 'mlm(mask=0.3)'
megaenc objective check my_package.my_module:MyObjective --options share=0.5

Packs are made up, so that neither a corpus nor a tokenizer is needed. Exit code 2 if a check fails.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Annotated, NamedTuple

import numpy as np
from rich import box
from rich.table import Table
from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.console import build_rich_console
from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, handle_command_errors
from megaenc.objectives.base import Attention, Objective, Targets
from megaenc.objectives.registry import check_class
from megaenc.objectives.validate import check_targets
from megaenc.processes import python_command, python_environment

_VOCABULARY = Vocabulary(size=1000, eos_id=0, mask_id=1, special_ids=(0, 1, 2), fingerprint="made up")
_LENGTH, _PACKS, _CONTRACT_PACKS = 2048, 512, 64  # a million tokens; packs of the slower checks
_MOST_VISIBLE = 0.5  # share of the targets; BERT keeps a tenth, a plain mistake shows all of them


@dataclass(frozen=True)
class CheckConfig:
    """Flags of `megaenc objective check`: the objective and its options."""

    objective: Annotated[str, Positional, arg(metavar="OBJECTIVE")]
    """name of an objective, with options as in a schedule (`mlm(mask=0.3)`), or MODULE:CLASS, also of the current directory"""
    options: tuple[str, ...] = ()
    """options of a MODULE:CLASS, such as share=0.5 length=4"""


class CheckResult(NamedTuple):
    """Result of a check: its name, whether it passed (None: only a figure), and the figure or complaint."""

    name: str
    passed: bool | None
    text: str


def load_objective(text: str, options: Sequence[str] = ()) -> Objective:
    """Return the objective `text`, NAME, NAME(OPTIONS) or MODULE:CLASS with `options`; InputError if it cannot be built."""
    words = dict(word.partition("=")[::2] for word in options)
    if "(" in text or ":" not in text:
        from megaenc.objectives.inspect import parse_objective

        if options:
            raise InputError(
                f"--options {' '.join(options)}: found with {text}, expected them in it: {text}({','.join(options)})"
            )
        return parse_objective(text, _VOCABULARY)
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        objective = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a foreign module may raise anything
        raise InputError(f"{text}: {type(error).__name__}: {error}; expected MODULE:CLASS of an objective") from None
    finally:
        sys.path.pop(0)
    check_class(objective, text)
    return objective.from_texts(_VOCABULARY, words)


def make_packs(count: int, length: int = _LENGTH) -> Iterable[Pack]:
    """Yield `count` packs of `length` tokens: documents of 1 to 300 tokens that end in EOS, every eighth pack with odd ones."""
    for sample in range(count):
        rng = np.random.default_rng(sample)
        tokens = rng.integers(3, _VOCABULARY.size, size=length)
        longest = 2 if sample % 8 == 7 else 300
        ends = np.cumsum(rng.integers(1, longest + 1, size=length))
        edges = np.array([0, *ends[ends < length], length], dtype=np.int32)
        tokens[edges[1:] - 1] = _VOCABULARY.eos_id
        if sample % 8 == 6:
            tokens[: length // 2] = 2  # only special tokens
        yield Pack(sample, sample % 3, tokens, edges)


def visible_targets(objective: Objective, pack: Pack, targets: Targets) -> np.ndarray:
    """Return bool[N], whether the model reads each label at its own place, from where it is predicted."""
    places = targets.predict_at + objective.shift
    if objective.attention == Attention.CAUSAL:
        reads = places <= targets.predict_at
    elif objective.attention == Attention.BIDIRECTIONAL:
        reads = np.ones(len(places), dtype=bool)
    else:
        in_prefix = pack.positions < np.repeat(targets.prefixes, np.diff(pack.edges))
        reads = (places <= targets.predict_at) | (in_prefix[places] & in_prefix[targets.predict_at])
    return reads & (targets.inputs[places] == targets.labels)


def compute_digest(objective: Objective, packs: Iterable[Pack]) -> str:
    """Return the SHA-256 of the Targets of `packs`, whatever their order."""
    digests = []
    for pack in packs:
        targets = objective.targets(pack, SampleRandomness(1, pack.sample, pack.epoch))
        arrays = [np.asarray(part).tobytes() for part in targets.parts if part is not None]
        digests.append(hashlib.sha256(b"|".join(arrays)).hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def check_contract(objective: Objective) -> CheckResult:
    """Check the arrays of `Targets` on packs that include documents of one token and only special tokens."""
    try:
        for pack in make_packs(_CONTRACT_PACKS):
            check_targets(objective, pack, seed=1)
    except InputError as error:
        return CheckResult("contract", False, str(error))
    return CheckResult("contract", True, f"{_CONTRACT_PACKS} packs, with documents of one token and without text")


def check_determinism(objective: Objective, config: CheckConfig) -> CheckResult:
    """Check that targets are equal in another order of packs and in another process, as other ranks compute them."""
    packs = list(make_packs(_CONTRACT_PACKS))
    expected = compute_digest(objective, packs)
    if compute_digest(objective, reversed(packs)) != expected:
        return CheckResult("determinism", False, "targets differ in another order of packs; expected no state between calls")
    code = "import json, sys; from megaenc.objectives import check; check.print_digest(*json.loads(sys.argv[1]))"
    command = python_command("-c", code, json.dumps([config.objective, config.options]))
    environment = python_environment() | {"PYTHONHASHSEED": "4711"}
    other = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if other.returncode or other.stdout.split()[-1:] != [expected]:
        return CheckResult("determinism", False, "targets differ in another process; expected draws only from `randomness`")
    return CheckResult("determinism", True, "equal in another order and in another process")


def print_digest(objective: str, options: Sequence[str]) -> None:
    """Print `compute_digest` of an objective given as text, for the check in another process."""
    print(compute_digest(load_objective(objective, options), make_packs(_CONTRACT_PACKS)))


def measure(objective: Objective) -> list[CheckResult]:
    """Return leaks, statistics and speed over a million tokens."""
    visible, predicted, hidden, weights, seconds, tokens, counts = 0, [], 0, 0.0, 0.0, 0, 0
    for pack in make_packs(_PACKS):
        start = perf_counter()
        targets = objective.targets(pack, SampleRandomness(1, pack.sample, pack.epoch))
        seconds += perf_counter() - start
        tokens += len(pack.tokens)
        visible += int(visible_targets(objective, pack, targets).sum())
        predicted.append(len(targets.labels) / len(pack.tokens))
        hidden += int((targets.inputs != pack.tokens).sum())
        weights += len(targets.labels) if targets.weights is None else float(targets.weights.sum(dtype=np.float64))
        counts += targets.loss_count
    share, total = float(np.mean(predicted)), round(sum(predicted) * _LENGTH)
    error = 1.96 * float(np.std(predicted, ddof=1)) / len(predicted) ** 0.5
    leaked = visible / total if total else 0.0
    leak = f"{100 * leaked:.2f} % of the targets are read at their own place"
    if leaked > _MOST_VISIBLE:
        leak += f"; expected at most {100 * _MOST_VISIBLE:.0f} %: hide them in `inputs`, or use causal attention and shift 1"
    return [
        CheckResult("leaks", leaked <= _MOST_VISIBLE, leak),
        CheckResult("predictions", total > 0, f"{100 * share:.2f} % of {tokens:,} tokens (95 % interval {100 * error:.2f})"),
        CheckResult("changed inputs", None, f"{100 * hidden / tokens:.2f} % of the tokens"),
        CheckResult("weight / divisor", None, f"{weights / counts:.4f}" if counts else "no predictions"),
        CheckResult("speed", None, f"{tokens / seconds:,.0f} tokens/s on one core"),
    ]


def run_checks(config: CheckConfig) -> tuple[Objective, list[CheckResult]]:
    """Return the objective and the results of all checks; only that of the contract if this fails."""
    objective = load_objective(config.objective, config.options)
    contract = check_contract(objective)
    if not contract.passed:
        return objective, [contract]
    return objective, [contract, check_determinism(objective, config), *measure(objective)]


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc objective check`: print a table of the checks; InputError (exit code 2) for the first that failed."""
    config = flags.parse(CheckConfig, argv, prog="megaenc objective check", description=__doc__)
    objective, results = run_checks(config)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("check", "", objective.describe(every=True)):
        table.add_column(name, overflow="fold")
    for result in results:
        table.add_row(result.name, {True: "passed", False: "failed", None: ""}[result.passed], result.text)
    build_rich_console(highlight=False, markup=False, emoji=False).print(table)
    for result in results:
        if result.passed is False:
            raise InputError(f"{config.objective}: {result.name}: {result.text}")
