"""The GPU benchmark's comparison of kernels: all of them at the same work, or not compared."""

import dataclasses

from megaenc.backend.parallel_config import KernelConfig
from megaenc.bench.gpu.command import Benchmark, GpuBenchConfig
from megaenc.bench.gpu.table import format_table
from megaenc.bench.gpu.variants import format_kernels

TORCH = "attention_backend=sdpa fused_kernels=false"


class Card:
    """A device on which kernels fit so many packs each, `most` the others, and train a million tokens a second and pack."""

    def __init__(self, most: int, **packs: int):
        self.most, self.packs = most, packs

    def fits(self, setup) -> int:
        kernels = format_kernels(setup.kernels)
        return next((packs for name, packs in self.packs.items() if name in kernels), self.most)

    def run(self, job, seconds, seconds_left):
        given = job["arguments"]
        if job["kind"] == "speed.find_common_packs":
            assert format_kernels(given["setup"].kernels).endswith(TORCH) and given["objective"] == "mlm(mask=0.4)"
            yield ["compare", "packs"], self.fits(given["setup"])
        else:
            row = speed_row(min(given["packs"], self.fits(given["setup"])), given["setup"].kernels)
            yield (["compare", "rows", given["name"]], row)


def speed_row(packs: int, kernels: dict) -> dict:
    """What a measurement of so many packs tells."""
    row = {"tokens_per_second": 1e6 * packs, "packs": packs, "micro_batches": 4, "peak_memory": 2.0**30, "loss": 9.0}
    return row | {"finite": True, "kernels": dataclasses.asdict(KernelConfig()) | kernels}


def compared(tmp_path, card: Card, **settings) -> Benchmark:
    config = GpuBenchConfig(output=str(tmp_path / "gpu.json"), seconds=500, phases=("compare",), **settings)
    benchmark = Benchmark(config, tmp_path, card, card)
    benchmark.results["device"] = {"bf16": True, "lacking": {}}
    # A card that fused kernels filled with twenty packs.
    benchmark.results["speed"] = {"610m": {"mlm(mask=0.4)": speed_row(20, {}) | {"attention_backend": "varlen"}}}
    benchmark.run_compare()
    return benchmark


def test_all_kernels_are_compared_with_the_packs_that_the_largest_of_them_takes(tmp_path):
    part = compared(tmp_path, Card(20, sdpa=6, fused_kernels=6)).results["compare"]
    assert part["base"] == "defaults" and {"attention_backend=sdpa", "fused_kernels=false"} < set(part["rows"])
    assert {part["rows"][name]["packs"] for name in part["ratios"]} == {6}
    assert part["ratios"].keys() == part["rows"].keys() and set(part["ratios"].values()) == {1.0}


def test_kernels_that_take_less_than_all_others_are_not_compared(tmp_path):
    part = compared(tmp_path, Card(20, sdpa=6, e4m3=4)).results["compare"]
    assert part["rows"]["fp8_format=e4m3"]["packs"] == 4
    assert part["rows"].keys() - part["ratios"].keys() == {"fp8_format=e4m3"}
    assert {part["rows"][name]["packs"] for name in part["ratios"]} == {6}
    table = (tmp_path / "gpu.md").read_text()
    assert "| kernels | tokens/s | relative to defaults | packs |" in table
    assert "| fp8_format=e4m3 | 4,000,000 | not like for like, 4 packs | 4 |" in table
    assert "| attention_backend=sdpa | 6,000,000 | 1.00 | 6 |" in table


def test_what_the_base_cannot_take_no_other_is_given(tmp_path):
    card = Card(20, sdpa=6, hybrid=3)
    part = compared(tmp_path, card, kernels=("fp8_format=hybrid",), compare=("fp8_format=none",)).results["compare"]
    assert {name: row["packs"] for name, row in part["rows"].items()} == {"fp8_format=hybrid": 3, "fp8_format=none": 3}
    assert part["ratios"] == {"fp8_format=hybrid": 1.0, "fp8_format=none": 1.0}


def test_without_its_base_nothing_is_compared(tmp_path):
    results = compared(tmp_path, Card(20)).results
    del results["compare"]["rows"]["defaults"]
    results["compare"]["ratios"] = {}
    results["settings"]["small"] = False
    assert "| 20,000,000 | not compared, defaults not measured | 20 |" in format_table(results)


def test_every_field_of_the_kernels_is_compared(tmp_path):
    part = compared(tmp_path, Card(20)).results["compare"]
    fields = {name.split("=")[0] for name in part["rows"]}
    assert fields == {"defaults", *(field.name for field in dataclasses.fields(KernelConfig))}
