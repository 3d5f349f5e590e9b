"""The command `megaenc`, which imports and runs its subcommands on demand."""

import contextlib
import importlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import megaenc
from megaenc.errors import InputError, closest_match, handle_command_errors

# Name, of one or two words: (module:function, description).
COMMANDS = {
    "demo": (
        "megaenc.data.demo:main",
        "make an English corpus from the documentation of installed packages, without a download",
    ),
    "tokenizer": (
        "megaenc.data.tokenizer.train_command:main",
        "train a byte-level BPE tokenizer on text",
    ),
    "preprocess": (
        "megaenc.data.preprocess.command:main",
        "tokenize text to the .bin and .idx files that training reads",
    ),
    "data inspect": (
        "megaenc.objectives.inspection.inspect:main",
        "print statistics of a corpus, and one pack as an objective sees it",
    ),
    "objective check": (
        "megaenc.objectives.check.command:main",
        "check an objective: contract, leaks, statistics, speed, layouts",
    ),
    "objective collocations": (
        "megaenc.objectives.units.collocations:main",
        "find the token n-grams of a corpus that mlm(unit=FILE) hides as a whole",
    ),
    "data verify": (
        "megaenc.data.indexed.verify:main",
        "check that the files of a corpus are complete, down to the last token",
    ),
    "pretrain": (
        "megaenc.training.command:main",
        "pretrain an encoder with CLM, MLM or a schedule of them",
    ),
    "estimate": (
        "megaenc.estimate.command:main",
        "estimate the memory, time and GPU hours of a run, and propose a layout",
    ),
    "convert": ("megaenc.convert.command:main", "convert checkpoints to and from Hugging Face"),
    "finetune run": (
        "megaenc.finetune.command:run_main",
        "fine-tune a model on one data set, with one learning rate and one seed",
    ),
    "finetune grid": (
        "megaenc.finetune.grid.command:grid_main",
        "fine-tune models on data sets with every learning rate and seed",
    ),
    "finetune summary": (
        "megaenc.finetune.results.summary:summary_main",
        "print means and confidence intervals of a grid, and the effect of the learning rate",
    ),
    "finetune predict": (
        "megaenc.finetune.predict:predict_main",
        "predict labels, tags or answers with a fine-tuned model",
    ),
    "finetune demo": (
        "megaenc.finetune.datasets.demo:main",
        "make four small data sets from installed packages",
    ),
    "embed eval": (
        "megaenc.embed.command:eval_main",
        "evaluate models without fine-tuning on retrieval, similarity and classification",
    ),
    "embed pairs": (
        "megaenc.embed.text_pairs:pairs_main",
        "make training pairs from running text, without labels",
    ),
    "embed mine": (
        "megaenc.embed.hard_negatives:mine_main",
        "add to training pairs the documents that a model confuses",
    ),
    "embed train": (
        "megaenc.embed.train_command:train_main",
        "train an embedding model on pairs of queries and documents, for sentence-transformers",
    ),
    "fill-mask": (
        "megaenc.finetune.fill_mask:main",
        "predict masked words of a text with an exported encoder",
    ),
    "study plan": (
        "megaenc.study.plan.command:main",
        "print the runs of a study, the prefixes they share and their cost",
    ),
    "study run": (
        "megaenc.study.run.command:main",
        "train, export and fine-tune all models of a study, locally or on a cluster",
    ),
    "study status": (
        "megaenc.study.run.status:main",
        "print the progress of a study, its failed stages and the reasons",
    ),
    "study report": (
        "megaenc.study.report.command:main",
        "write tables, figures and verdicts of a study, in files and as one page",
    ),
    "plot": (
        "megaenc.viz.plot:main",
        "plot the loss of a run, or the validation losses of several runs",
    ),
    "summary": (
        "megaenc.viz.run_summary:main",
        "print a run's validation metrics before and after training",
    ),
    "doctor": (
        "megaenc.doctor.command:main",
        "check the hardware and software that training depends on, and report problems",
    ),
}

MOVED = {
    "bench pretrain": "python benchmarks/pretrain.py",
    "bench data": "python benchmarks/preprocess.py",
    "bench loader": "python benchmarks/loader.py",
}
"""Former commands, and the scripts of a clone that do the same."""


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand named by the first words of `argv`, or print help or version.

    Help and version go to standard output, and the call returns; a subcommand's `--help` exits with
    0. Wrong input, such as an unknown command, exits with 2 (`handle_command_errors` has other
    codes).

    Args:
        argv: The words after `megaenc`; None: those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(format_usage())
        return
    if arguments[0] in ("-V", "--version"):
        print(format_versions())
        return
    if arguments[0] in _command_groups() and (
        len(arguments) == 1 or arguments[1] in ("-h", "--help", "help")
    ):
        print(format_usage(arguments[0]))
        return
    name, rest = _find_command(arguments)
    module, function = COMMANDS[name][0].split(":")
    getattr(importlib.import_module(module), function)(rest)


def format_versions() -> str:
    """Return the versions of megaenc, Python and the main libraries, one a line."""
    versions = {
        "megaenc": megaenc.__version__,
        "commit": read_commit(Path(megaenc.__file__).parent),
        "Python": platform.python_version(),
    }
    for name in ("torch", "megatron-core", "transformers"):
        versions[name] = "not installed"
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return "\n".join(f"{name} {version}" for name, version in versions.items())


def read_commit(package: Path) -> str:
    """Return the commit that the directory of a package is from, or "unknown".

    Builds record it in the file COMMIT (`setup.py`). In a clone it is the last commit, with
    `-dirty` after it if files have changed since.
    """
    if (package / "COMMIT").exists():
        return (package / "COMMIT").read_text(encoding="utf-8").strip()
    if (package.parent / ".git").exists():
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        with contextlib.suppress(OSError):  # no git
            described = subprocess.run(command, cwd=package, capture_output=True, text=True)
            if described.returncode == 0:
                return described.stdout.strip()
    return "unknown"


def _find_command(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the command named by the first one or two words, and the remaining words.

    Raises:
        InputError: There is no such command.
    """
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, arguments[words:]
    first = arguments[0]
    both = " ".join(arguments[:2])
    if both in MOVED:
        raise InputError(
            f"megaenc {both}: is now a script of the repository; use `{MOVED[both]}` in a clone"
        )
    pairs = [name for name in COMMANDS if " " in name]
    if first in _command_groups():
        command = both
        known = [name for name in pairs if name.startswith(f"{first} ")]
        word = closest_match(arguments[1], [name.split()[1] for name in known])
        near = word and f"{first} {word}"
    elif near := closest_match(both, pairs, cutoff=0.8):
        command = both
        known = pairs
    else:
        command = first
        known = list(COMMANDS)
        near = closest_match(first, [*known, *_command_groups()])
    hint = f"did you mean `megaenc {near}`?" if near else f"expected one of {', '.join(known)}"
    raise InputError(f"megaenc {command}: no such command; {hint}")


def _command_groups() -> set[str]:
    """Return the first words of the two-word commands."""
    return {name.split()[0] for name in COMMANDS if " " in name}


def format_usage(group: str = "") -> str:
    """Return the help text of `megaenc`, or of `megaenc GROUP` with only its commands.

    Args:
        group: First word of existing two-word commands, such as `finetune`; empty for all commands.
    """
    descriptions = {
        name: text
        for name, (_, text) in COMMANDS.items()
        if not group or name.startswith(f"{group} ")
    }
    width = max(map(len, descriptions))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in descriptions.items())
    if group:
        return (
            f"usage: megaenc {group} COMMAND [flags]\n\n{commands}\n\n`megaenc {group} COMMAND "
            "--help` explains the flags."
        )
    from megaenc.flags import format_config_names  # here, as its libraries take half a second

    return f"""usage: megaenc COMMAND [flags]

{megaenc.__doc__.strip()}

commands:
{commands}

packaged files, for --config NAME and `megaenc study plan NAME`, such as recipes/modernbert:
{format_config_names()}

`megaenc COMMAND --help` explains the flags. From text to training data:
  megaenc tokenizer --input corpus.jsonl --vocab-size 8192 --output tokenizer
  megaenc preprocess --input corpus.jsonl --output-prefix out/corpus --tokenizer tokenizer \
--append-eod"""
