"""The first lines of a run say by what it is computed."""

from dataclasses import replace

import pytest
import runs
import torch


@pytest.mark.parametrize(
    ("machine", "used", "text"),
    [
        ("cuda", {"norm": True, "rotary": False, "loss": True}, "attention by flash; fused kernels: norm, loss)"),
        ("rocm", {"norm": False, "rotary": False}, "attention by flash; fused kernels: none)"),
        ("cpu", {"norm": False, "rotary": False}, "attention by flash)"),  # where there are none
    ],
)
def test_fused_kernels_are_named_where_there_is_an_accelerator(machine, used, text, small_corpus, one_process, monkeypatch):
    from megaenc.training.config import parse_config
    from megaenc.training.dry_run import format_run_header
    from megaenc.training.planning import build_plan

    plan = build_plan(parse_config([*small_corpus.flags, *runs.SHORT_RUN], "test"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: machine)
    backend = replace(one_process, name=machine)
    first = format_run_header(plan, backend, {"attention": "flash", "fused": used}, resumed=0).splitlines()[0]
    assert text in first
