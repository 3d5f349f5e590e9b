"""A save that fails leaves the checkpoint before it, one line, exit code 2 and nothing half-written; no rank waits for ever."""

import subprocess

import pytest
import runs
from checkpoint_helpers import assert_only_step_4, errors


def test_disk_that_fills_up(small_corpus, small_disk):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(small_disk / "run"), "--save-interval", "4"]
    result = runs.script(runs.PRETRAIN, flags, expect=2)
    [line] = errors(result)
    assert result.stderr == line + "\n"
    assert "cannot be written to: No space left on device; step 8 is not saved, step 4 is: give the same command again" in line
    assert_only_step_4(small_disk / "run")
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert "resuming after step 4" in runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "8"]).stdout
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    [line] = errors(runs.script(runs.PRETRAIN, flags, expect=2))
    assert "Read-only file system" in line


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("where", ["1:shard", "0:metadata"])
def test_full_for_one_rank_ends_both_with_one_line(where, small_corpus, tmp_path):
    """Rank 0 writes the indexes alone, while the other waits for it: it has to be told."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(tmp_path / "run"), "--save-interval", "4"]
    flags += ["--tensor-model-parallel-size", "2"]
    result = runs.script(runs.WORKERS / "full_disk.py", [where, *flags], processes=2, expect=1, timeout=90)
    [line] = errors(result)
    assert "cannot be written to: No space left on device; step 8 is not saved, step 4 is" in line
    assert "Traceback" not in result.stderr.partition("torch/distributed/elastic")[0]  # torchrun's own comes after
    assert_only_step_4(tmp_path / "run")
