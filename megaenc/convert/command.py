"""`megaenc convert` and tools/convert_checkpoint.py."""

import dataclasses
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megaenc import flags
from megaenc.console import quiet, say
from megaenc.errors import InputError, one_line_errors

USAGE = """usage: {prog} DIRECTION [options]

directions:
  to-hf    a run's checkpoint, saved in any layout, to a Hugging Face folder

{prog} to-hf --help shows the options."""


@dataclasses.dataclass(frozen=True)
class ToHF:
    """Options of to-hf."""

    load: str = ""
    """run folder (the --save of a pretraining run)"""
    output: str = ""
    """folder to write; must not exist"""
    architecture: Annotated[Literal["eurobert", "llama"], tyro.conf.arg(name="as")] = "eurobert"
    """eurobert: bidirectional, EuroBertForMaskedLM; llama: the same weights read causally, LlamaForCausalLM"""
    ckpt_step: int | None = None
    """step of the checkpoint; the newest unless given"""


@one_line_errors
def main(argv: Sequence[str] | None = None, prog: str = "megaenc convert") -> None:
    """Convert in the direction that the first word names."""
    quiet()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE.format(prog=prog))
        return
    if words[0] != "to-hf":
        near = difflib.get_close_matches(words[0], ["to-hf"], n=1)
        raise InputError(f"{prog}: unknown direction {words[0]!r}, expected to-hf" + ("; did you mean to-hf?" if near else ""))
    options = flags.parse(
        ToHF,
        words[1:],
        prog=f"{prog} to-hf",
        description="Write a run's checkpoint and tokenizer as a Hugging Face folder.",
    )
    for name in ("load", "output"):
        if not getattr(options, name):
            raise InputError(f"--{name}: missing (see {prog} to-hf --help)")
    from megaenc.convert.to_hf import to_hf

    step = to_hf(Path(options.load), Path(options.output), architecture=options.architecture, step=options.ckpt_step)
    say(f"{options.output}: step {step} of {options.load} as {options.architecture}")
