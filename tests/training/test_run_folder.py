"""What a full disk makes of the rows of a run folder."""

import errno
import json
import os

import pytest

from megaenc.errors import LocalInputError
from megaenc.training.run_folder import METRICS, RunFolder


def test_a_disk_that_is_full_when_rows_are_cut_is_told_to_the_other_ranks(tmp_path, monkeypatch):
    """Rank 0 alone notices: an error that all ranks are taken to have would leave them waiting for it."""
    folder = object.__new__(RunFolder)
    folder.path = tmp_path
    (tmp_path / METRICS).write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megaenc.files.os.fsync", full)
    with pytest.raises(LocalInputError, match="cannot be written to: No space left on device"):
        folder.cut(2)
    monkeypatch.undo()
    folder.cut(2)
    assert [json.loads(row)["step"] for row in (tmp_path / METRICS).read_text().splitlines()] == [1, 2]
