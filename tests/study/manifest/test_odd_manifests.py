"""Whatever stands at a key of a manifest, the plan ends well or in one line, before anything large is made of it.

500 mutated manifests are a tenth of this run, which takes 5 minutes of one core after a change of the reader:

python tests/study/manifest_fuzzer.py --count 5000 --seed 20261
"""

import copy
import datetime
import re
from collections import Counter

import manifests
import pytest
import yaml
from manifest_fuzzer import DEFAULTS, fuzz, limits, places, read_everywhere

from megaenc.errors import InputError
from megaenc.study.manifest import expand
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.command import format_plan, main
from megaenc.study.plan.cost import compute_study_cost
from megaenc.study.plan.dag import build_graph
from megaenc.study.run import command as run

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


@pytest.mark.slow
@pytest.mark.parametrize("section", ["pretrain", "models", "corpus", "finetune", "embed", "hardware", "reported"])
def test_an_odd_value_of_any_known_key_is_one_line_or_valid(section, tmp_path):
    refused = 0
    for key in DEFAULTS[section]:
        for value in (-1, 0, 7, 0.5, False, "x" * 300, "1e400", [], [0], ["x" * 300], {}):
            values = {"models": [TOY], "corpus": {"vocab_size": 1024}}
            base = {**manifests.BASE, "embed": manifests.EMBED}
            part = values["models"][0] if section == "models" else values.get(section, base.get(section, {}))
            values |= {section: [part | {key: value}] if section == "models" else part | {key: value}}
            with limits():
                refused += bool(read_everywhere(manifests.write(tmp_path, **values), draw=False))
    assert refused > 3 * len(DEFAULTS[section])


@pytest.mark.slow
def test_mutated_manifests_are_one_line_or_valid(tmp_path):
    results = list(fuzz(range(500), 0, tmp_path))
    failed = [f"{result.number}: {result.mutations}: {result.message}" for result in results if result.outcome == "failed"]
    assert not failed, "\n".join(failed)
    outcomes = Counter(result.outcome for result in results)
    assert outcomes["valid"] > 50 and outcomes["refused"] > 250


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
    "a long size": ([TOY | {"size": "x" * 9000}], "xxx..., expected one of toy"),
    "a long parent": ([TOY, {"after": "x" * 9000, "steps": 20, "mask": 0.4}], "xxx..., expected one of toy-mlm40-100"),
    "a long entry": ([["x" * 9000]], "xxx..., expected keys such as size"),
    "a long preset": ([TOY | {"pretrain": {"model": "x" * 9000}}], "xxx..., expected one of 210m"),
    "infinity as text": ([TOY | {"peak_rate": "1e400"}], "found '1e400', expected a finite number"),
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


def test_phases_of_many_models_are_one_line(tmp_path, refusal, monkeypatch):
    monkeypatch.setitem(expand._LIMITS, "phases", 1000)  # what memory has room for takes seconds
    entry = {"size": "toy", "steps": 400, "schedule": "200x(clm:1,mlm:1)"}
    message = "entry 1: makes more than 1,000 phases together"
    assert message in refusal(main, [manifests.write(tmp_path, models=[entry | {"seed": [1, 2, 3]}])])
    planned(manifests.write(tmp_path, models=[entry | {"seed": [1, 2]}]))


FINETUNE = {
    # keys of `finetune`, and a word of the line
    "NaN as text": ({"learning_rates": [1e-4, "nan"]}, "field `learning_rates`: found 'nan', expected a finite number"),
    "too many results": (
        {"learning_rates": [1e-6 * n for n in range(1, 52)], "seeds": 10_000},
        "found 1,020,000 results per model (datasets x learning_rates x seeds), expected at most 1,000,000",
    ),
    "a long data set": ({"datasets": ["x" * 9000]}, "xxx...; expected one of sst2"),
    "the name of a log": ({"datasets": ["d" * 170 + "=data"]}, "of 170 bytes, expected at most 77 with the model nnn"),
}


@pytest.mark.parametrize("case", FINETUNE)
def test_impossible_fine_tuning_is_one_line(case, tmp_path, refusal):
    keys, words = FINETUNE[case]
    entry = TOY | {"name": "n" * 170, "checkpoints": [50]}
    assert words in refusal(main, [manifests.write(tmp_path, models=[entry], finetune=manifests.BASE["finetune"] | keys)])


def test_speeds_are_finite(tmp_path, refusal):
    message = "hardware: field `tokens_per_second`: found '1e400', expected a finite number"
    assert message in refusal(main, [manifests.write(tmp_path, hardware={"tokens_per_second": "1e400"})])


@pytest.mark.parametrize(("word", "prefix"), [(7, "7"), (False, "False"), ("x" * 300, "x" * 300)])
def test_data_paths_may_be_any_word(word, prefix, tmp_path):
    """A word that is a number is a weight."""
    pretrain = manifests.BASE["pretrain"] | {"data_path": word, "tokenizer": "x" * 300}
    graph, _ = planned(manifests.write(tmp_path, pretrain=pretrain, corpus={"vocab_size": 1024}))
    flags = graph.runs["toy-mlm40-400"].flags
    assert flags["tokenizer"] == "x" * 300
    assert [str(path) for path in flags["data_path"]] == [prefix if word == 7 else str(tmp_path / prefix)]


def test_paths_of_validation_sets_are_in_the_folder_of_the_data(tmp_path):
    """As those of data_path; a word without a path is left for the run to refuse."""
    pretrain = manifests.BASE["pretrain"] | {"data_path": "a", "tokenizer": "t"}
    for words, expected in ((["web=w", "law=/l"], [f"web={tmp_path / 'w'}", "law=/l"]), ("web", ["web"])):
        file = manifests.write(tmp_path, pretrain=pretrain | {"valid_data_path": words}, corpus={"vocab_size": 1024})
        graph, _ = planned(file)
        assert graph.runs["toy-mlm40-400"].flags["valid_data_path"] == expected


def test_no_data_path_is_missing(tmp_path, refusal):
    pretrain = manifests.BASE["pretrain"] | {"data_path": "", "tokenizer": "x"}
    manifest = manifests.write(tmp_path, pretrain=pretrain, corpus={"vocab_size": 1024})
    assert "--data-path: missing" in refusal(run.main, [manifest, "--output", tmp_path / "study", "--dry-run"])


def test_a_run_refuses_names_that_are_too_long_for_a_file(tmp_path, refusal):
    study, name = ["--output", tmp_path / "study"], "x" * 300
    text = manifests.write(tmp_path, corpus={"text": [name], "vocab_size": 1024})
    assert f"corpus: field `text`: {tmp_path / name}: no such file" in refusal(run.main, [text, *study])
    corpus = manifests.write(tmp_path, corpus={"vocab_size": 1024})
    message = refusal(run.main, [corpus, *study, "--data-path", tmp_path / name, "--tokenizer", name])
    assert f"--data-path {tmp_path / name}: no " in message and "expected the prefix of a corpus" in message


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
