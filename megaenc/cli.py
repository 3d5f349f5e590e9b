"""`megaenc COMMAND ...`: one door to every command; each is imported only when it is called."""

import importlib
import sys
from collections.abc import Sequence

import megaenc
from megaenc.errors import InputError, closest_match, handle_command_errors

# name, of one word or two: (module:function, what it does)
COMMANDS = {
    "demo": ("megaenc.data.demo:main", "make a corpus of English from what is installed here, without any download"),
    "tokenizer": ("megaenc.data.tokenizer.train_command:main", "train a byte-level BPE tokenizer on text"),
    "preprocess": ("megaenc.data.preprocess.command:main", "tokenise text to the .bin and .idx that training reads"),
    "data inspect": ("megaenc.objectives.inspect:main", "show a corpus in figures, and one pack as an objective sees it"),
    "data verify": ("megaenc.data.indexed.verify:main", "check that the files of a corpus are whole, down to the last token"),
    "pretrain": ("megaenc.training.command:main", "pretrain an encoder with CLM, MLM or a schedule of them"),
    "estimate": ("megaenc.estimate.command:main", "say what a run takes before it starts: memory, time, hours, a layout"),
    "convert": ("megaenc.convert.command:main", "convert checkpoints to and from Hugging Face"),
    "finetune run": ("megaenc.finetune.command:run_main", "fine-tune a model on one data set, with one rate and one seed"),
    "finetune grid": ("megaenc.finetune.grid.command:grid_main", "fine-tune models on data sets with every rate and seed"),
    "finetune summary": (
        "megaenc.finetune.results.summary:summary_main",
        "print means and intervals of a grid, and how the rates matter",
    ),
    "finetune demo": ("megaenc.finetune.datasets.demo:main", "make four small data sets from what is installed here"),
    "bench pretrain": ("megaenc.bench.pretrain:main", "compare the speed of training with transformers' on the same work"),
    "bench data": ("megaenc.bench.data:main", "measure tokenising beside gigatoken alone and Hugging Face's ways"),
    "bench loader": ("megaenc.bench.loader:main", "measure how fast a run gets its packs, and what ordering the documents costs"),
    "fill-mask": ("megaenc.finetune.fill_mask:main", "let an exported encoder guess hidden words of text"),
    "study plan": ("megaenc.study.plan.command:main", "say which runs a study takes, what they share and cost"),
    "study run": ("megaenc.study.run.command:main", "train, export and fine-tune all of a study, here or on a cluster"),
    "study status": ("megaenc.study.run.status:main", "show how far a study is, what failed and why"),
    "study report": ("megaenc.study.report.command:main", "tables, figures and verdicts of a study, in files and as one page"),
    "plot": ("megaenc.viz.plot:main", "draw the loss of a run, or the held-out losses of several over each other"),
    "summary": ("megaenc.viz.run_summary:main", "print what a run has learnt, before and after"),
    "doctor": ("megaenc.doctor.command:main", "look at all that training depends on here, and say what will bite"),
}


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc`. Raises InputError (exit code 2) for a command that there is not."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(format_usage())
        return
    if arguments[0] in ("-V", "--version"):
        print(f"megaenc {megaenc.__version__}")
        return
    if arguments[0] in _groups() and (len(arguments) == 1 or arguments[1] in ("-h", "--help", "help")):
        print(format_usage(arguments[0]))
        return
    name, rest = _command(arguments)
    module, function = COMMANDS[name][0].split(":")
    getattr(importlib.import_module(module), function)(rest)


def _command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command that the first word or two name, and the words after it."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, arguments[words:]
    first, both = arguments[0], " ".join(arguments[:2])
    pairs = [name for name in COMMANDS if " " in name]
    if first in _groups():
        given, known = both, [name for name in pairs if name.startswith(f"{first} ")]
        word = closest_match(arguments[1], [name.split()[1] for name in known])
        near = word and f"{first} {word}"
    elif near := closest_match(both, pairs, cutoff=0.8):
        given, known = both, pairs
    else:
        given, known = first, list(COMMANDS)
        near = closest_match(first, [*known, *_groups()])
    hint = f"did you mean `megaenc {near}`?" if near else f"expected one of {', '.join(known)}"
    raise InputError(f"megaenc {given}: no such command; {hint}")


def _groups() -> set[str]:
    """The first words of the commands of two words."""
    return {name.split()[0] for name in COMMANDS if " " in name}


def format_usage(group: str = "") -> str:
    """The text of `megaenc --help`: the commands in the order of the work, and where to begin; or of `megaenc GROUP --help`."""
    shown = {name: text for name, (_, text) in COMMANDS.items() if not group or name.startswith(f"{group} ")}
    width = max(map(len, shown))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in shown.items())
    if group:
        return f"usage: megaenc {group} COMMAND [flags]\n\n{commands}\n\n`megaenc {group} COMMAND --help` explains the flags."
    return f"""usage: megaenc COMMAND [flags]

{megaenc.__doc__.strip()}

commands:
{commands}

`megaenc COMMAND --help` explains the flags. From text to training data:
  megaenc tokenizer --input corpus.jsonl --vocab-size 8192 --output tokenizer
  megaenc preprocess --input corpus.jsonl --output-prefix out/corpus --tokenizer tokenizer --append-eod"""
