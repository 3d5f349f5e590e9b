"""Flags of the fine-tuning commands and the files that name them."""

import dataclasses
import subprocess
import sys
from pathlib import Path

from fake_runs import make_model

from megaenc import flags
from megaenc.finetune.command import FinetuneRunConfig
from megaenc.finetune.datasets.registry import DATASETS
from megaenc.finetune.grid.command import GridConfig

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "finetune"


def test_the_studys_file_says_what_the_defaults_are_but_for_its_precision():
    found = flags.read_config_file(GridConfig(), CONFIGS / "paper.yaml")
    assert (
        set(found.datasets) == {name for name in DATASETS if not name.startswith("demo_")}
        and len(found.datasets) == 12
    )
    # Whatever the tokenizer does
    assert (found.protocol.add_bos, found.protocol.add_eos) == (
        False,
        True,
    )
    protocol = dataclasses.replace(found.protocol, precision="", add_bos=None, add_eos=None)
    assert dataclasses.replace(found, datasets=(), protocol=protocol) == GridConfig()
    assert found.protocol.precision == "paper-bf16"


def test_the_command_line_wins_over_the_file():
    argv = ["--config", str(CONFIGS / "demo.yaml"), "--seeds", "1"]
    found = flags.parse_with_config(GridConfig, argv, prog="test", description="")
    assert (found.seeds, found.protocol.max_steps, found.learning_rates) == (1, 200, (2e-4, 5e-4))


def test_the_guide_s_run_is_one_of_its_grid():
    """Both write to `results`: a run of another protocol would stop the grid."""
    run, grid, _ = (
        (ROOT / "docs" / "finetuning.md").read_text().partition("```bash\n")[2].splitlines()[:3]
    )
    one = flags.parse(FinetuneRunConfig, run.split()[3:], prog="test", description="")
    words = [word.replace("configs", str(ROOT / "configs")) for word in grid.split()[3:]]
    all_ = flags.parse_with_config(GridConfig, words, prog="test", description="")
    assert (
        one.protocol == all_.protocol and one.output == all_.output and (one.model,) == all_.model
    )
    assert (
        one.dataset in all_.datasets
        and one.learning_rate in all_.learning_rates
        and one.seed < all_.seeds
    )


def test_wrong_input_does_not_wait_for_torch(tmp_path):
    make_model(tmp_path / "toy")
    program = """
import sys
from megaenc.finetune.grid.command import grid_main
try:
    grid_main(sys.argv[1:])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    flags = [
        "--model",
        str(tmp_path / "toy"),
        "--datasets",
        "sst3",
        "--output",
        str(tmp_path / "out"),
    ]
    done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "False",
    ) and "did you mean `sst2`?" in done.stderr
