"""Whatever stands at a key of a manifest, the plan ends well or in one line, before anything large is made of it."""

import copy
import datetime
import functools
import re

import manifests
import pytest
import yaml

from megaenc.errors import InputError
from megaenc.objectives import registry
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.command import format_plan, main
from megaenc.study.plan.cost import compute_study_cost
from megaenc.study.plan.dag import build_graph

TOY = {"size": "toy", "steps": 100, "mask": 0.4}
FULL = copy.deepcopy(manifests.BASE) | {
    "title": "t",
    "models": [
        TOY
        | {"clm_share": [0, 0.5], "checkpoints": [50], "seed": [1], "peak_rate": [1e-3], "group": "", "pretrain": {"lr": 1e-3}},
        {"size": "toy", "steps": 100, "schedule": "clm:0.5,mlm:0.5", "name": "own", "evaluate": True, "inferred": False},
        {"after": ["own"], "steps": [20], "mask": 0.4},
    ],
    "hardware": {
        "device": "x",
        "devices": 1,
        "tokens_per_second": 1.0,
        "tokens_per_second_of": {"toy": 1.0},
        "finetune_seconds": 5.0,
    },
    "reported": {
        "source": "s",
        "models": {"": 5},
        "steps": {"": 5},
        "gpu_hours": {"": 5, "finetune": 5},
        "fine_tunings": 5,
        "notes": {"": "n", "finetune": "n"},
    },
}
ODD = {
    # every one of these is put at every key
    "null": None,
    "true": True,
    "below zero": -1,
    "zero": 0,
    "1e20": 1e20,
    "a whole 1e20": 10**20,
    "400 digits": 10**400,
    "infinity": float("inf"),
    "NaN": float("nan"),
    "a way up": "../../up",
    "an absolute path": "/abs/olute",
    "300 letters": "x" * 300,
    "two lines": "a\nb",
    "an escape sequence": "\x1b[31m",
    "half a pair": "\ud800",
    "HTML and formulas": "<b>&$x^{\\|",
    "a list of lists": [[1]],
    "a mapping of numbers": {1: {2: 3}},
    "a list of mappings": [{}],
    "a date": datetime.date(2026, 1, 1),
    "bytes": b"\xff",
}


@pytest.fixture(autouse=True)
def quick_registry(monkeypatch):
    """Look for objectives of other packages once: that takes most of a plan's time."""
    monkeypatch.setattr(registry, "entry_points", functools.cache(registry.entry_points))


def places(value, at=()):
    """The way to each key and to each item of a list."""
    yield at
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*at, key))


def planned(path):
    graph = build_graph(read_manifest(path))
    return graph, list(format_plan(graph, compute_study_cost(graph)))


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
def test_an_odd_value_at_any_key_is_one_line_or_a_plan(odd, tmp_path):
    refused = 0
    for at in list(places(FULL))[1:]:
        values = copy.deepcopy(FULL)
        node = values
        for key in at[:-1]:
            node = node[key]
        node[at[-1]] = copy.deepcopy(ODD[odd])
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(values))
        try:
            graph, output_lines = planned(tmp_path / "study.yaml")
        except InputError as error:
            refused += 1
            assert len(str(error)) < 1500 and "study.yaml" in str(error), (at, str(error))
        else:
            assert all(line.isprintable() for line in output_lines), at
            for stage in graph.stages.values():
                assert re.fullmatch(r"[A-Za-z0-9][\w.-]{0,250}", stage.name), (at, stage.name)
    assert refused > 10


LARGE = {
    # entries of models that ask for too much, and a word of the line
    "a million models": (
        [TOY | {"steps": [*range(1000, 1100)], "seed": [*range(100)], "peak_rate": [1e-6 * n for n in range(1, 101)]}],
        "1,000",
    ),
    "many entries": (
        [TOY | {"seed": [*range(1, 400)], "steps": 100 + n} for n in range(3)],
        "entry 3: makes more than 1,000 models",
    ),
    "many checkpoints": ([TOY | {"steps": 10**6, "seed": [*range(3)], "checkpoints": [*range(1, 4000)]}], "checkpoints"),
    "a list without end": ([TOY | {"steps": [*range(1, 10_100)]}], "at most 10,000 values"),
    "a text without end": ([TOY | {"group": "x" * 10_100}], "at most 10,000 printable letters"),
    "1e20 steps": ([TOY | {"steps": 10**20}], "at most 1,000,000,000,000,000"),
    "a name of 300 letters": ([TOY | {"name": "x" * 300}], "expected at most 180 bytes"),
    "a name out of a long schedule": (
        [{"size": "toy", "steps": 1000, "schedule": ",".join(["clm:20", "mlm:20"] * 25)}],
        "180 bytes",
    ),
    "a name that leads away": ([TOY | {"name": "../up"}], "expected letters, digits and . _ -"),
    "a name that is a folder": ([TOY | {"name": ".."}], "expected letters, digits and . _ -"),
    "repetitions": ([{"size": "toy", "steps": 100, "schedule": "1000000000x(clm:1,mlm:1)"}], "phases"),
    "packs without end": ([TOY | {"pretrain": {"packing": "random-length", "seq_length": 10**17}}], "at most"),
    "heads that do not divide": ([TOY | {"pretrain": {"num_attention_heads": 3}}], "--hidden-size"),
    "no heads": ([TOY | {"pretrain": {"num_attention_heads": 0}}], "--num-attention-heads"),
    "no tokens": ([TOY | {"pretrain": {"seq_length": 0}}], "--seq-length"),
    "a step below zero": ([TOY | {"pretrain": {"global_batch_size": -8}}], "--global-batch-size"),
}


@pytest.mark.parametrize("case", LARGE)
def test_too_much_is_one_line_at_once(case, tmp_path, refusal):
    models, words = LARGE[case]
    assert words in refusal(main, [manifests.write(tmp_path, models=models)])


@pytest.mark.parametrize("dataset", ["..=data", "a\nb=data", ".=data", "x" * 200 + "=data", "/"])
def test_names_of_data_sets_stay_in_their_folder(dataset, tmp_path, refusal):
    finetune = {"datasets": ["demo_sc", dataset]}
    assert "finetune: field `datasets`" in refusal(main, [manifests.write(tmp_path, finetune=finetune)])


def test_many_seeds_of_fine_tuning_are_one_line(tmp_path, refusal):
    finetune = {"datasets": ["demo_sc"], "seeds": 10**9}
    assert "field `seeds`: found 1,000,000,000" in refusal(main, [manifests.write(tmp_path, finetune=finetune)])


def test_packs_of_random_length_take_no_loop(tmp_path):
    graph, _ = planned(manifests.write(tmp_path, models=[TOY | {"pretrain": {"packing": "random-length", "seq_length": 10**12}}]))
    assert compute_study_cost(graph).with_sharing.flops > 1e29


def test_a_long_chain_of_branches_is_planned(tmp_path):
    """Each share of CLM is a branch of the next larger one; none is reached by recursion."""
    shares = [number / 1000 for number in range(300)]
    manifest = manifests.write(tmp_path, models=[TOY | {"steps": 100_000, "clm_share": shares}], finetune=None)
    graph, output_lines = planned(manifest)
    assert len(graph.runs) == 300 and len(output_lines) > 300
