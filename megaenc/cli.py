"""`megaenc COMMAND ...`: one door to every command; each is imported only when it is called."""

import difflib
import importlib
import sys
from collections.abc import Sequence

import megaenc
from megaenc.errors import InputError, one_line_errors

# name: (module:function, what it does)
COMMANDS = {
    "demo": ("megaenc.data.demo:main", "make a corpus of English from what is installed here, without any download"),
    "tokenizer": ("megaenc.data.tokenizer_command:main", "train a byte-level BPE tokenizer on text"),
    "preprocess": ("megaenc.data.preprocess:main", "tokenise text to the .bin and .idx that training reads"),
    "pretrain": ("megaenc.training.command:main", "pretrain an encoder with CLM, MLM or a schedule of them"),
    "convert": ("megaenc.convert.command:main", "convert checkpoints to and from Hugging Face"),
    "fill-mask": ("megaenc.finetune.fill_mask:main", "let an exported encoder guess hidden words of text"),
    "plot": ("megaenc.study.plot:main", "draw the loss of a run, its phases and its learning rate"),
    "summary": ("megaenc.study.summary:main", "print what a run has learnt, before and after"),
}


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc`. Raises InputError (exit code 2) for a command that there is not."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return
    if arguments[0] in ("-V", "--version"):
        print(f"megaenc {megaenc.__version__}")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `megaenc {near[0]}`?" if near else f"expected one of {', '.join(COMMANDS)}"
        raise InputError(f"megaenc {name}: no such command; {hint}")
    module, function = COMMANDS[name][0].split(":")
    getattr(importlib.import_module(module), function)(rest)


def usage() -> str:
    """The text of `megaenc --help`: the commands in the order of the work, and where to begin."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {help_text}" for name, (_, help_text) in COMMANDS.items())
    return f"""usage: megaenc COMMAND [flags]

{megaenc.__doc__.strip()}

commands:
{commands}

`megaenc COMMAND --help` explains the flags. From text to training data:
  megaenc tokenizer --input corpus.jsonl --vocab-size 8192 --output tokenizer
  megaenc preprocess --input corpus.jsonl --output-prefix out/corpus --tokenizer tokenizer --append-eod"""
