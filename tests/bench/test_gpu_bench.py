"""The GPU benchmark: all of it in miniature on the host, its budget, and what its verdicts rest on."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from bare_machine import bare_python

from megaenc.backend.parallel_config import KernelConfig
from megaenc.bench.gpu import command, presets, variants
from megaenc.bench.gpu.__main__ import NEEDED
from megaenc.bench.gpu.command import Benchmark, GpuBenchConfig
from megaenc.bench.gpu.table import format_table
from megaenc.bench.gpu.worker import JobFailed
from megaenc.bench.gpu.worker_pool import WorkerPool
from megaenc.model.config import PRESETS

DOOR = runs.ROOT / "benchmarks" / "gpu.sh"


def through_the_door(flags: list[str], seconds: float = 420, python: str | Path = sys.executable) -> subprocess.CompletedProcess:
    environment = runs.surroundings() | {"PYTHON": str(python), "PYTHONPATH": ""}
    words = [str(DOOR), *map(str, flags)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=seconds, cwd="/")


@pytest.fixture(scope="module")
def full_run(tmp_path_factory) -> SimpleNamespace:
    """All phases in miniature, as anyone without an accelerator would start them, with what the help names and no more."""
    folder = tmp_path_factory.mktemp("gpu")
    output, python = folder / "gpu.json", bare_python(folder / "venv", "transformers", "safetensors")
    done = through_the_door(
        ["--device", "cpu", "--small", "--output", output, "--compare", "attention_backend=sdpa"], python=python
    )
    log = output.with_suffix(".log")
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    results = json.loads(output.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    return SimpleNamespace(found=results, table=output.with_suffix(".md").read_text(), said=done.stdout)


@pytest.mark.slow
def test_every_phase_is_done_in_miniature(full_run):
    ended = {name: phase["ended"] for name, phase in full_run.found["phases"].items()}
    assert set(ended.values()) == {"done"}, ended
    assert all(any(name.startswith(phase) for name in ended) for phase in command.PHASES)
    assert full_run.table.strip() in full_run.said
    for section in (
        "Correctness",
        "Parity",
        "Speed",
        "Breakdown of a step",
        "Host synchronizations",
        "Comparison with transformers",
        "Comparison of kernels",
    ):
        assert f"## {section}" in full_run.table
    assert "these speeds are meaningless" in full_run.table


@pytest.mark.slow
def test_both_masks_and_both_heads_are_right_in_both_kinds_of_number(full_run):
    rows = full_run.found["correctness"]["rows"]
    cases = {(row["head_dim"], row["attention"], row["numbers"]) for row in rows}
    assert cases == {(h, a, n) for h in (64, 96) for a in ("causal", "bidirectional") for n in ("float32", "bfloat16")}
    assert all(row["passed"] and not row["not_compared"] for row in rows), rows
    losses = {row["attention"]: row["reference_loss"] for row in rows if row["head_dim"] == 64}
    assert losses["causal"] != losses["bidirectional"]
    for row in rows:  # the same program on the same machine: float32 differs by nothing, bfloat16 by its rounding
        assert (row["gradient_error"] < 1e-6) == (row["numbers"] == "float32")


@pytest.mark.slow
def test_the_short_run_is_the_hosts(full_run):
    parity = full_run.found["parity"]
    assert [len(parity[f"{where} {kind}"]) for where in ("host", "device") for kind in ("float32", "bfloat16")] == [6] * 4
    assert parity["device float32"] == parity["host float32"] != parity["host bfloat16"]
    assert [(row["numbers"], row["beside"], row["passed"]) for row in parity["rows"]] == [
        ("float32", "host float32", True),
        ("bfloat16", "host bfloat16", True),
    ]


@pytest.mark.slow
def test_speed_is_of_what_was_read(full_run):
    models = full_run.found["speed"]
    assert set(models) == {"miniature"}
    small = presets.SMALL
    for objective, row in models["miniature"].items():
        assert row["updates"] >= 3 and row["finite"] and row["packs"] == small.packs
        tokens = row["packs"] * row["micro_batches"] * small.speed["miniature"].seq_length
        assert row["tokens_per_second"] * row["seconds_per_update"] == pytest.approx(tokens)
        assert row["mfu"] == pytest.approx(row["flops_per_second"] / row["peak_flops"])
        assert row["kernels"]["attention_backend"] and "miniature: " in full_run.table
        assert 0 < row["attention_flops_per_update"] < row["flops_per_update"]
        share = {"clm": (0.9, 1.0), "mlm(mask=0.4)": (0.35, 0.45)}[objective]
        assert share[0] < row["predicted_share"] < share[1]


@pytest.mark.slow
def test_the_step_is_all_accounted_for(full_run):
    for each in full_run.found["breakdown"]["miniature"].values():
        assert sum(each["shares"].values()) == pytest.approx(1)
        for group in ("matrix products", "attention forward", "attention backward", "loss", "optimizer"):
            assert each["seconds"][group] > 0, each["seconds"]
        assert each["by_time_too"] and each["matrix_flops_per_second"] > 0
        assert each["next"]
    assert full_run.found["synchronisations"]["miniature"] == {"left out": "there is no accelerator"}


@pytest.mark.slow
def test_the_peer_does_the_same_work(full_run):
    peer = full_run.found["peer"]
    assert peer["same_loss"] and len(peer["rows"]) == 3
    assert {row["batch"] for row in peer["rows"].values()} == {8}
    padded = peer["rows"]["transformers, padded"]["tokens_per_second"]
    ours = full_run.found["speed"]["miniature"]["mlm(mask=0.4)"]["tokens_per_second"]
    assert peer["ratios"]["megaenc, card filled / transformers, padded"] == pytest.approx(ours / padded)


@pytest.mark.slow
def test_kernels_are_compared_on_the_same_work(full_run):
    part = full_run.found["compare"]
    assert part["rows"].keys() == part["ratios"].keys() == {"defaults", "attention_backend=sdpa"}
    assert {row["packs"] for row in part["rows"].values()} == {part["packs"]} == {1}
    rates = [row["tokens_per_second"] for row in part["rows"].values()]
    assert list(part["ratios"].values()) == pytest.approx([1.0, rates[1] / rates[0]])
    losses = [row["loss"] for row in part["rows"].values()]  # of as many steps as there was time for
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


class Told:
    """A crew whose jobs find what they are told to."""

    def __init__(self, *answers, failure: str = ""):
        self.answers, self.failure, self.seconds = answers, failure, []

    def run(self, job, seconds, seconds_left):
        self.seconds.append(seconds_left)
        yield from self.answers
        if self.failure:
            raise JobFailed(self.failure)


def benchmark(tmp_path, seconds: float) -> Benchmark:
    return Benchmark(GpuBenchConfig(output=str(tmp_path / "gpu.json"), small=True, seconds=seconds), tmp_path, Told(), Told())


def test_what_there_is_no_time_for_is_left_out(tmp_path):
    short, crew = benchmark(tmp_path, 30), Told()
    assert not short.run_phase("speed, 1b", crew, "", 40, 90) and not crew.seconds
    assert short.run_phase("parity", crew, "", 20, 90)
    assert 29 < crew.seconds[0] <= 30, "no phase has more time than there is left"
    written = json.loads((tmp_path / "gpu.json").read_text())["phases"]
    assert re.fullmatch(r"left out: (29|30) s left, 40 needed", written["speed, 1b"]["ended"])
    assert "| speed, 1b | 0 | left out" in (tmp_path / "gpu.md").read_text()


def test_a_failed_phase_keeps_what_it_had_found(tmp_path):
    broken = benchmark(tmp_path, 100)
    crew = Told((["correctness", "half"], 0.5), (["nothing"], float("nan")), failure="its time was over")
    assert not broken.run_phase("correctness", crew, "", 10, 90)
    written = json.loads((tmp_path / "gpu.json").read_text(), parse_constant=pytest.fail)
    assert written["correctness"] == {"half": 0.5} and written["nothing"] is None
    assert written["phases"]["correctness"]["ended"] == "cut short: its time was over"


def test_a_job_that_takes_too_long_is_killed(tmp_path):
    with WorkerPool({}, fresh=True, log=tmp_path / "log") as crew:
        worker = crew._ready
        with pytest.raises(JobFailed, match="its time was over"):
            list(crew.run({"kind": "worker.describe_device", "name": "machine"}, seconds=60, seconds_left=0.2))
        assert worker.process.returncode == -signal.SIGKILL
        assert crew._ready is not worker, "the next job has a process of its own"


def test_a_failed_job_leaves_its_process_to_others(tmp_path):
    with WorkerPool(command.HOST_ENVIRONMENT, fresh=False, log=tmp_path / "log") as crew:
        worker = crew._ready
        with pytest.raises(JobFailed, match="TypeError: run_losses"):
            list(crew.run({"kind": "correctness.run_losses", "name": "parity"}, seconds=60, seconds_left=240))
        results = dict(
            (path[0], value)
            for path, value in crew.run({"kind": "worker.describe_device", "name": "a"}, seconds=60, seconds_left=240)
        )
        assert results["device"]["backend"] == "cpu" and results["machine"]["cores"] >= 1 and results["said"] == []
        assert crew._ready is worker


def test_what_its_user_says_of_memory_is_left_alone(monkeypatch):
    for name in command.DEVICE_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert command.defaults_unless_set(command.DEVICE_ENVIRONMENT) == dict.fromkeys(
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert command.defaults_unless_set(command.DEVICE_ENVIRONMENT) == {}


@pytest.mark.slow
def test_which_kernels_are_fused_is_in_the_table(full_run):
    results = json.loads(json.dumps(full_run.found))
    for row in results["speed"]["miniature"].values():
        row["fused"] = {"norm": True, "rotary": True, "loss": False}
    assert "; fused: norm, rotary, by torch: loss" in format_table(results)


@pytest.mark.slow
def test_a_missed_target_says_what_to_try(full_run):
    results = json.loads(json.dumps(full_run.found))
    results["targets"]["mfu"] = {"miniature": 1e9}
    assert "**missed by" in format_table(results) and "Suggestion: " in format_table(results)
    results["targets"]["mfu"] = {"miniature": 0.0}
    assert "| hit |" in format_table(results) and "Suggestion" not in format_table(results)


@pytest.mark.slow
def test_a_table_can_be_made_of_whatever_there_is(full_run):
    keys = [name for name in full_run.found if name not in ("settings", "phases", "kernels", "targets")]
    for missing in keys:
        if missing == "speed":  # of which the breakdown is told
            continue
        assert format_table({name: value for name, value in full_run.found.items() if name != missing})


def test_kernels_are_read_by_their_fields():
    assert variants.parse_kernels(["attention_backend=sdpa"], "--kernels") == {"attention_backend": "sdpa"}
    assert variants.format_kernels({"a": None, "b": False}) == "a=none b=false"
    changed = variants.list_variants({})
    assert {"attention_backend": "sdpa"} in changed and {"attention_backend": KernelConfig().attention_backend} not in changed
    for one in [*changed, variants.reference_kernels()]:
        KernelConfig(**one)


def test_what_cannot_be_had_or_is_measured_already_is_not_compared():
    missing = {"attention_backend=flash": "flash-attn is not installed", "transformer_impl=transformer_engine": "not installed"}
    computed = dataclasses.asdict(KernelConfig()) | {"attention_backend": "varlen"}
    tried, left_out = variants.candidate_variants({}, computed, missing)
    titles = [variants.format_kernels(each) for each in tried]
    first = ["fused_kernels=false", "fp8_format=hybrid", "fp8_format=e4m3"]
    assert titles == [*first, *(f"attention_backend={name}" for name in ("cudnn", "onednn", "sdpa"))]
    assert left_out == missing | {"attention_backend=varlen": "measured already"}
    tried, _ = variants.candidate_variants({"fp8_format": "hybrid"}, None, {})
    assert tried[:3] == [{"fp8_format": "hybrid", "fused_kernels": False}, {"fp8_format": "e4m3"}, {"fp8_format": None}]
    assert len(tried) == len(variants.list_variants({}))


def test_what_fills_the_card_is_what_gpus_are_given():
    speed = presets.FULL.speed
    assert {name: setup.shape for name, setup in speed.items()} == {name: PRESETS[name] for name in ("1b", "610m", "210m")}
    assert presets.FULL.packs == 0 and all((each.seq_length, each.vocab_size) == (2048, 128256) for each in speed.values())
    assert {setup.shape.head_dim for setup in presets.FULL.correctness.values()} == {64, 96}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--kernels", "speed=high"], "--kernels speed=high: expected FIELD=VALUE with FIELD one of attention_backend"),
        (["--compare", "attention_backend=magic"], "--compare attention_backend=magic: expected one of auto, "),
        (["--models", "7b"], "--models 7b: expected some of 1b, 610m, 210m"),
        (["--seconds", "0"], "--seconds 0.0: expected more than 0"),
        (["--output", "/proc/none/gpu.json"], "--output /proc/none/gpu.json: "),
    ],
)
def test_wrong_settings_are_one_line(flags, complaint, refusal):
    assert complaint in refusal(command.main, flags)


def test_nothing_is_imported_that_the_help_does_not_name(tmp_path):
    flags = ["--device", "cpu", "--small", "--output", tmp_path / "gpu.json", "--phases", "speed", "peer"]
    done = through_the_door(flags, python=bare_python(tmp_path / "venv"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^speed, miniature: mlm\(mask=0.4\) [\d.]+ % of the peak", done.stdout, re.MULTILINE), done.stdout
    assert "peer: transformers or safetensors is not installed" in done.stdout


def test_help_says_what_must_be_installed():
    done = through_the_door(["--help"])
    assert (
        done.returncode == 0
        and all(f" {package.split()[0]}" in done.stdout for package in NEEDED.values())
        and "C compiler" in done.stdout
        and "--kernels" in done.stdout
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_the_way_to_try_is_told(tmp_path):
    done = through_the_door(["--output", tmp_path / "gpu.json"])
    assert done.returncode == 2 and "--device cpu --small" in done.stderr and "Traceback" not in done.stderr
    assert np.size(done.stderr.strip().splitlines()) == 1
