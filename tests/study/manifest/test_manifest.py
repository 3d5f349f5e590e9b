"""Manifests: the models that an entry makes, and what is refused in one line."""

from collections import Counter
from dataclasses import replace

import manifests
import pytest
from manifests import EMBED, TOY, read

from megaenc import flags
from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.results.aggregate import GridSpec
from megaenc.study.manifest import expand
from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.manifest.scope import build_scope
from megaenc.study.plan.command import format_plan
from megaenc.study.plan.cost import compute_study_cost
from megaenc.training.config import read_config_file


def test_the_paper_has_38_models_and_12_checkpoints_under_their_published_names():
    manifest = read_manifest(manifests.STUDY / "paper.yaml")
    settings = manifest.model_keys()
    assert (len(manifest.models), len(settings)) == (38, 50)
    assert {name: parse_model_name(name) for name in settings} == settings
    assert settings["610m-mlm40-42k-1000"] == ModelKey(
        "610M", mlm_steps=1000, mask_ratio=0.4, decayed=False
    )
    assert settings["610m-clm-40k-mlm20-42k"] == ModelKey("610M", 40_000, 2_000, mask_ratio=0.2)
    counts = Counter(model.group for model in manifest.models)
    assert counts == {"base": 15, "pfs": 17, "cpt": 6}


@pytest.mark.parametrize("file", ["paper", "open"])
def test_the_studys_models_are_fine_tuned_in_its_precision(file):
    manifest = read_manifest(manifests.STUDY / f"{file}.yaml")
    assert manifest.finetune.protocol == replace(FinetuneConfig(), precision="paper-bf16")
    assert manifest.finetune_flags["precision"] == "paper-bf16"


@pytest.mark.parametrize("size", ["210m", "1b"])
def test_the_recipe_of_a_single_run_is_the_manifests(size):
    """configs/pretrain/encoder-*.yaml is MLM at 40 % with the manifest's settings."""
    manifest = read_manifest(manifests.STUDY / "paper.yaml")
    [model] = [model for model in manifest.models if model.name == f"{size}-mlm40-42k"]
    recipe = flags.flatten(
        read_config_file(f"{manifests.STUDY.parent}/pretrain/encoder-{size}.yaml")
    )
    assert (recipe["train_iters"], recipe["objective_schedule"]) == (
        model.steps,
        f"{model.schedule}:1.0",
    )
    assert (recipe["lr_warmup_iters"], recipe["lr_wsd_decay_iters"]) == (model.warmup, model.decay)
    assert recipe["packing"] == "random-length"
    values = flags.flatten(model.config)
    for name in model.flags:
        if name != "bf16":  # on if the machine has it
            assert values[name] == recipe[name], name


def test_an_entry_makes_every_combination_and_clm_alone_only_once(tmp_path):
    entry = {"size": "toy", "steps": [100, 200], "clm_share": [0, 0.5, 1], "mask": [0.2, 0.4]}
    assert [model.name for model in read(tmp_path, entry).models] == [
        *(
            "toy-mlm20-100",
            "toy-mlm40-100",
            "toy-clm-50-mlm20-100",
            "toy-clm-50-mlm40-100",
            "toy-clm-100",
        ),
        *(
            "toy-mlm20-200",
            "toy-mlm40-200",
            "toy-clm-100-mlm20-200",
            "toy-clm-100-mlm40-200",
            "toy-clm-200",
        ),
    ]


def test_a_share_that_is_no_whole_number_of_steps_is_rounded_as_schedules_are(tmp_path):
    entry = TOY | {"steps": 101, "clm_share": 0.5}
    (model,) = read(tmp_path, entry).models
    assert (model.key.clm_steps, model.schedule) == (51, "clm:51,mlm(mask=0.4):50")


def test_a_continued_model_has_no_warm_up_and_its_parents_size_and_seed(tmp_path):
    first = TOY | {"seed": [1, 2]}
    then = {"after": "toy-mlm40-400-seed2", "steps": 100, "mask": 0.4}
    *_, model = read(tmp_path, then, first).models  # in any order of the file
    assert (model.name, model.warmup, model.key.seed) == ("toy-mlm40-dec400-mlm40-500-seed2", 0, 2)
    assert model.key == parse_model_name(model.name)


def test_flags_of_a_size_win_over_those_of_all_and_an_entrys_own_over_both(tmp_path):
    sizes = {"toy": {"lr": 2e-3, "seq_length": 32}}
    entry = TOY | {"steps": 100, "peak_rate": [1e-3, 5e-4], "pretrain": {"seq_length": 16}}
    models = read(tmp_path, entry, sizes=sizes).models
    assert [(model.name, model.flags["lr"], model.flags["seq_length"]) for model in models] == [
        ("toy-mlm40-100-lr1e-03", 1e-3, 16),
        ("toy-mlm40-100-lr5e-04", 5e-4, 16),
    ]


@pytest.mark.parametrize(
    ("schedule", "setting"),
    [
        (
            "2x(clm:50,mlm:150)",
            ModelKey("toy", 100, 300, mask_ratio=0.4, schedule="2x(clm:50,mlm:150)"),
        ),
        ("mntp(mask=0.2)", ModelKey("toy", 0, 400, mask_ratio=0.2, schedule="mntp(mask=0.2)")),
        (
            "mlm(mask=0.5->0.3)",
            ModelKey("toy", 0, 400, mask_ratio=0.4, schedule="mlm(mask=0.5->0.3)"),
        ),
        ("mlm(random=0.1)", ModelKey("toy", 0, 400, mask_ratio=0.4, schedule="mlm(random=0.1)")),
    ],
)
def test_a_schedule_is_kept_where_the_columns_cannot_say_it(tmp_path, schedule, setting):
    (model,) = read(tmp_path, {"size": "toy", "steps": 400, "schedule": schedule}).models
    assert model.key == setting


def test_a_checkpoint_on_the_way_is_what_has_been_trained_by_then(tmp_path):
    entry = TOY | {"clm_steps": 100, "checkpoints": [50, 100, 250]}
    settings = read(tmp_path, entry).model_keys()
    assert settings == {name: parse_model_name(name) for name in settings}
    assert settings["toy-clm-100-mlm40-400-250"] == ModelKey(
        "toy", 100, 150, mask_ratio=0.4, decayed=False
    )
    alternating = {
        "size": "toy",
        "steps": 400,
        "name": "turns",
        "schedule": "4x(clm:50,mlm:50)",
        "checkpoints": [125],
    }
    assert read(tmp_path, alternating).model_keys()["turns-125"].clm_steps == 75


CONTINUED = {"steps": 20, "mask": 0.4}
WRONG_ENTRIES = {
    "unknown key of an entry": (
        TOY | {"maks": 0.3},
        "models, entry 1: unknown field `maks`; did you mean `mask`?",
    ),
    "type": (TOY | {"steps": "many"}, "entry 1: field `steps`: found 'many', expected a int"),
    "no plateau": (
        TOY | {"pretrain": {"lr_decay_style": "cosine"}},
        "entry 1: field `lr_decay_style`: found cosine, expected WSD",
    ),
    "decay too long": (TOY | {"steps": 15}, "entry 1: a decay of 20 steps in a run of 15"),
    "no mask": ({"size": "toy", "steps": 400}, "entry 1: field `mask`: missing"),
    "twice": (TOY | {"mask": [0.4, 0.4]}, "entry 1: field `mask`: found 0.4 twice"),
    "clm steps": (
        TOY | {"clm_steps": 500},
        "entry 1: field `clm_steps`: found 500, expected at most the 400",
    ),
    "no parent": (CONTINUED | {"after": []}, "entry 1: field `size`: missing"),
    "schedule": (
        {"size": "toy", "steps": 400, "schedule": "clm:100,mlm:200"},
        "steps add up to 300, expected 400",
    ),
    "schedule beside": (
        TOY | {"schedule": "mlm"},
        "entry 1: found `mask` together with `schedule`",
    ),
    "checkpoint": (
        TOY | {"checkpoints": [390]},
        "field `checkpoints`: found 390, expected 1 to 380",
    ),
    "name of several": (
        TOY | {"mask": [0.2, 0.4], "name": "one"},
        "field `name`: found one for 2 models",
    ),
    "too many models": (
        TOY | {"steps": [*range(1000, 1100)], "seed": [*range(100)], "mask": [0.2, 0.4]},
        "makes more than 1,000 models",
    ),
    "a text without end": (TOY | {"group": "x" * 10_100}, "at most 10,000 printable letters"),
    "a step too many": (TOY | {"steps": 10**15 + 1}, "at most 1,000,000,000,000,000"),
    "a name out of a long schedule": (
        {"size": "toy", "steps": 1000, "schedule": ",".join(["clm:20", "mlm:20"] * 25)},
        "180 bytes",
    ),
    "a name that is a directory": (TOY | {"name": ".."}, "expected letters, digits and . _ -"),
    "a long size": (TOY | {"size": "x" * 9000}, "xxx..., expected one of toy"),
    "infinity as text": (TOY | {"peak_rate": "1e400"}, "found '1e400', expected a finite number"),
    "repetitions": (
        {"size": "toy", "steps": 100, "schedule": "1000000000x(clm:1,mlm:1)"},
        "phases",
    ),
    "packs without end": (
        TOY | {"pretrain": {"packing": "random-length", "seq_length": 10**17}},
        "at most",
    ),
    "frozen layers that are missing": (
        TOY | {"pretrain": {"freeze": "layers.0-99"}},
        "entry 1: --freeze layers.0-99: not a part of this model, expected embedding",
    ),
    "heads that do not divide": (TOY | {"pretrain": {"num_attention_heads": 3}}, "--hidden-size"),
}
WRONG = {
    "flag of the study": (
        {"pretrain": {"save": "x"}},
        "pretrain: field `save`: found here, expected nowhere",
    ),
    "unknown preset": (
        {"sizes": {"toy": {"model": "610"}}},
        "sizes: toy: --model: unknown preset '610'",
    ),
    "duplicate": (
        {"models": [TOY, TOY | {"mask": [0.2, 0.4]}]},
        "entry 2: model toy-mlm40-400 exists already",
    ),
    "parent": (
        {"models": [TOY, {"after": "toy-mlm4-400", "steps": 20, "mask": 0.4}]},
        "found toy-mlm4-400, did you mean toy-mlm40-400?",
    ),
    "data set": ({"finetune": {"datasets": ["sst"]}}, "found sst; did you mean sst2?"),
    "data set with no name near": (
        {"finetune": {"datasets": ["zzzzzzzz"]}},
        "found zzzzzzzz; expected one of ",
    ),
    "data set twice": (
        {"finetune": {"datasets": ["sst2", "sst2"]}},
        "finetune: field `datasets`: found sst2 twice",
    ),
    "threshold of no task": (
        {"finetune": {"datasets": ["sst2"], "threshold": "auto"}},
        "finetune: field `threshold`: found auto, expected 0.5",
    ),
    "fraction of a named set": (
        {"finetune": {"datasets": ["sst2"], "validation_fraction": 0.1}},
        "finetune: --validation-fraction 0.1: found a named data set at sst2, expected a single",
    ),
    "grid's flag": (
        {"finetune": {"datasets": ["sst2"], "slurm": True}},
        "finetune: field `slurm`: found here",
    ),
    "size of a throughput": (
        {"hardware": {"tokens_per_second_of": {"tiy": 512}}},
        "hardware: tokens_per_second_of: unknown name `tiy`, did you mean toy?",
    ),
    "negative throughput": (
        {"hardware": {"tokens_per_second_of": {"toy": -1}}},
        "field `toy`: found -1, expected a number of 0 or more",
    ),
    "no device": (
        {"hardware": {"devices": 0}},
        "hardware: field `devices`: found 0, expected 1 or more",
    ),
    "reported costs": (
        {"reported": {"source": "x"}},
        "`reported` was removed; docs/study-plan.md has",
    ),
    "nothing to retrieve": (
        {"embed": {"train": "x"}},
        "embed: field `datasets`: found none, expected at least one BEIR directory",
    ),
    "retrieval of the Hub": (
        {"embed": {"datasets": ["msmarco@1"]}},
        "found msmarco@1, expected BEIR directories as PATH or NAME=PATH",
    ),
    "name of retrieval": (
        {"embed": {"datasets": ["a b=c"]}},
        "found the name 'a b', expected letters, digits",
    ),
    "no contrastive seed": (
        {"embed": {**EMBED, "seeds": 0}},
        "embed: field `seeds`: found 0, expected 1 to 1,000",
    ),
    "the seed": (
        {"embed": {**EMBED, "seed": 1}},
        "embed: field `seed`: found here, expected `seeds`",
    ),
    "nothing to train on": (
        {"embed": {"datasets": ["demo_ir"], "seeds": 2}},
        "embed: field `seeds`: found without `train`",
    ),
    "too many results": (
        {
            "finetune": {
                "datasets": ["demo_sc"],
                "learning_rates": [1e-6 * rate for rate in range(1, 202)],
                "seeds": 5_000,
            }
        },
        "found 1,005,000 results per model (datasets x learning_rates x seeds), expected at most "
        "1,000,000",
    ),
    "the name of a log": (
        {"models": [TOY | {"name": "n" * 170}], "finetune": {"datasets": ["d" * 170 + "=data"]}},
        "of 170 bytes, expected at most 80 with the model nnn",
    ),
    "two corpora": (
        {"pretrain": {"data_path": "x"}},
        "pretrain: found `data_path`, but `corpus` builds its own",
    ),
    **{
        name: ({"models": [entry]}, complaint) for name, (entry, complaint) in WRONG_ENTRIES.items()
    },
}


@pytest.mark.parametrize(("changes", "complaint"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_in_one_line(tmp_path, changes, complaint):
    with pytest.raises(InputError) as error:
        read(tmp_path, **changes)
    assert complaint in str(error.value) and str(tmp_path / "study.yaml") in str(error.value)
    assert "\n" not in str(error.value)


def test_phases_of_many_models_are_limited_together(tmp_path, monkeypatch):
    monkeypatch.setitem(expand._LIMITS, "phases", 1000)  # what memory has room for takes seconds
    entry = {"size": "toy", "steps": 400, "schedule": "200x(clm:1,mlm:1)"}
    read(tmp_path, entry | {"seed": [1, 2]})
    with pytest.raises(InputError, match="entry 1: makes more than 1,000 phases together"):
        read(tmp_path, entry | {"seed": [1, 2, 3]})


def test_a_long_chain_of_branches_is_planned(tmp_path):
    """Each share of CLM is a branch of the next larger one, without recursion."""
    shares = [number / 1000 for number in range(300)]
    entry = TOY | {"steps": 100_000, "clm_share": shares}
    graph = manifests.graph(tmp_path, models=[entry], finetune=None)
    assert len(graph.runs) == 300
    assert len(list(format_plan(graph, compute_study_cost(graph)))) > 300


def test_sizes_models_and_grid_of_a_report_are_the_manifests(tmp_path):
    shape = manifests.BASE["sizes"]["toy"]
    sizes = {
        "large": shape | {"num_layers": 4},
        "small": shape,
        "medium": shape | {"num_layers": 3},
    }
    models = [{"size": list(sizes), "steps": 100, "clm_share": 1, "checkpoints": [50]}]
    scope = build_scope(read(tmp_path, sizes=sizes, models=models))
    assert scope.sizes == ("small", "medium", "large")
    assert (
        scope.model_keys["small-clm-100"] == ModelKey("small", 100) and len(scope.model_keys) == 6
    )
    assert scope.grid == GridSpec((1e-4, 1e-3), (0, 1, 2)) and scope.datasets == (
        ("SC", "demo_sc"),
        ("IR", "demo_ir"),
    )
    assert build_scope(read(tmp_path, finetune=None)).grid is None
