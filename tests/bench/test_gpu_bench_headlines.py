"""What the GPU benchmark prints after each job: what is most wanted first, in figures."""

import math
import re

from megaenc.bench.gpu import command, table
from megaenc.bench.gpu.command import Benchmark, GpuBenchConfig
from megaenc.bench.gpu.presets import HF_TARGET, TARGETS
from megaenc.bench.gpu.verdicts import derive_results, format_headline
from megaenc.bench.gpu.worker import JobFailed

GOALS = {"targets": {"mfu": TARGETS, "peer": HF_TARGET}}


def row(passed: bool, **others) -> dict:
    same = {"numbers": "bfloat16", "attention": "causal", "head_dim": 96, "loss_error": 2e-4, "gradient_error": math.nan}
    return same | {"passed": passed} | others


def speed_row(rate: float, share: float | None = None, **others) -> dict:
    return {"tokens_per_second": rate, "mfu": share, "finite": True, "packs": 6, "kernels": {}} | others


def test_correctness_says_how_many_passed_and_which_did_not():
    results = {"correctness": {"reference": "float32 on the host", "rows": [row(True)] * 7 + [row(False)]}}
    failed = "bfloat16 causal with heads of 96 (loss off by 2.0e-04, gradient by nan)"
    assert format_headline("correctness", results) == f"7 of 8 passed; FAILED: {failed}"
    results["correctness"]["rows"].pop()
    assert format_headline("correctness", results) == "7 of 7 passed"
    assert format_headline("correctness, reference", results) == ""


def test_speed_says_the_share_of_the_peak_and_its_goal():
    speed = {"mlm(mask=0.4)": speed_row(52_000.4, 0.543), "clm": speed_row(47_000, 0.5, finite=False), "left out": {}}
    results = GOALS | {"speed": {"1b": speed, "mine": {"clm": speed_row(9.0)}}}
    assert format_headline("speed, 1b", results) == (
        "mlm(mask=0.4) 54.3 % of the peak (goal 60 %), 52,000 tokens/s; "
        "clm 50.0 % of the peak (goal 60 %), 47,000 tokens/s, NOT FINITE"
    )
    assert format_headline("speed, mine", results) == "clm 9 tokens/s"
    assert format_headline("speed, 610m", results) == ""


def test_parity_peer_and_kernels_say_their_verdicts():
    results = GOALS | {
        "parity": {"host float32": [5.0], "device float32": [5.001], "device bfloat16": [5.1]},
        "peer": {
            "rows": {"transformers, padded": speed_row(100.0), "transformers, by length": speed_row(200.0)},
            "same_loss": False,
        },
        "compare": {
            "base": "defaults",
            "packs": 6,
            "rows": {"defaults": speed_row(800.0), "a=b": speed_row(400.0), "c=d": speed_row(9.0, packs=5)},
        },
    }
    derive_results(results, speed_row(350.0))
    assert format_headline("parity, host", results) == ""
    assert format_headline("parity, device", results) == (
        "float32 passed, largest error 2.0e-04 (allowed 1e-03); bfloat16 FAILED, largest error 2.0e-02 (allowed 1e-02)"
    )
    assert format_headline("peer", results) == (
        "megaenc, card filled / transformers, padded: 3.50 times (goal 3); initial losses DIFFER"
    )
    assert format_headline("compare, packs", results) == "6 in a micro-batch"
    assert format_headline("compare, a=b", results) == "0.50 times defaults, 400 tokens/s"
    assert format_headline("compare, c=d", results) == "not like for like, 5 packs, 9 tokens/s"
    assert format_headline("compare, e=f", results) == ""
    assert format_headline("peer", {"peer": {"left out": "transformers is not installed"}} | GOALS) == (
        "transformers is not installed"
    )


class Answering:
    """A worker whose jobs are all done, by name."""

    def __init__(self):
        self.jobs: list[str] = []

    def run(self, job, seconds, seconds_left):
        self.jobs.append(job["name"])
        if job["name"] == "correctness":
            yield (
                ["correctness", "rows"],
                [
                    row(True, not_compared=[], loss=6.0, reference_loss=6.0, worst_parameter="a")
                    | {"allowed": {"loss": 1e-3, "gradient": 5e-2}}
                ]
                * 8,
            )
        if job["kind"] == "speed.find_common_packs":
            yield ["compare", "packs"], 6


def test_correctness_is_printed_first_and_the_largest_model_next(tmp_path, capsys):
    worker = Answering()
    benchmark = Benchmark(GpuBenchConfig(output=str(tmp_path / "gpu.json")), tmp_path, worker, worker)
    benchmark.results["device"] = {"bf16": True, "host_bf16": True, "lacking": {}}
    benchmark.run_phases()
    assert worker.jobs[:7] == [
        "correctness, reference",
        "correctness",
        *(f"speed, {model}" for model in ("1b", "610m", "210m")),
        "parity, host",
        "parity, device",
    ]
    assert worker.jobs[7:9] == ["peer", "compare, packs"]
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"correctness, reference: done \(\d+ s, \d+ s left\)", lines[0])
    assert re.fullmatch(r"correctness: 8 of 8 passed \(\d+ s, \d+ s left\)", lines[1])


def test_sections_are_in_the_order_of_the_phases():
    names = [name for name in table.SECTIONS if name in command.PHASES]
    assert tuple(names) == command.PHASES == GpuBenchConfig().phases


def test_a_failure_is_printed_with_the_figures_so_far(tmp_path, capsys):
    class Failing:
        def run(self, job, seconds, seconds_left):
            yield ["speed", "1b", "clm"], speed_row(47_000, 0.543)
            raise JobFailed("its time was over")

    benchmark = Benchmark(GpuBenchConfig(output=str(tmp_path / "gpu.json")), tmp_path, Failing(), Failing())
    benchmark.write = lambda: None
    assert not benchmark.run_phase("speed, 1b", benchmark.device, "speed.measure_speed", 40, 90)
    figures = "clm 54.3 % of the peak (goal 60 %), 47,000 tokens/s"
    assert capsys.readouterr().out.startswith(f"speed, 1b: cut short: its time was over; {figures} (")
