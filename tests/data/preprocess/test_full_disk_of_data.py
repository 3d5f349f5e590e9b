"""Tokenizers and corpora on a full disk: one line, exit code 2, no files left."""

import subprocess

import pytest

from megaenc.cli import main


@pytest.mark.parametrize("options", ["size=64k,nr_inodes=3", "size=8k,nr_inodes=100"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, small_corpus, refusal, options):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("file systems cannot be mounted here")
    text = ["--input", small_corpus.text]
    output = disk / "new" / "directory" / "name"
    preprocess = [
        "preprocess",
        *text,
        "--tokenizer",
        small_corpus.tokenizer,
        "--workers",
        "1",
        "--output-prefix",
        output,
    ]
    try:
        for words in (
            ["tokenizer", *text, "--vocab-size", "400", "--output", output],
            preprocess,
            [*preprocess, "--partitions", "3"],
        ):
            assert "No space left on device" in refusal(main, words)
            assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
