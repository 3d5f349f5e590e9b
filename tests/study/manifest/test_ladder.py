"""The manifest section `ladder`: its rule, its budgets, and what its runs share."""

import math
from collections import defaultdict

import pytest
from manifests import STUDY, graph, read

from megaenc.errors import InputError
from megaenc.study.manifest.ladder import LADDER, TRIED_RATES, count_parameters
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.training_cost import compute_training_cost

PRETRAIN = {
    "seq_length": 128,
    "micro_batch_size": 8,
    "untie_embeddings_and_output_weights": False,
    "bf16": False,
}
LADDER_KEYS = {
    "depths": [4, 2, 3],
    "budgets": [4e13, 1e13],
    "objectives": [{"clm_share": 1.0}, {"mask": 0.3}, {"clm_share": 0.25, "mask": 0.3}],
}
BASE = {
    "sizes": None,
    "models": None,
    "finetune": None,
    "pretrain": PRETRAIN,
    "corpus": {"demo": True, "vocab_size": 4096},
}


def read_ladder(directory, pretrain=PRETRAIN, **changes):
    """Return the manifest of LADDER_KEYS with some of them changed."""
    return read(directory, **BASE | {"pretrain": pretrain, "ladder": LADDER_KEYS | changes})


def test_the_rule_by_hand(tmp_path):
    models = {model.key.size: model for model in read_ladder(tmp_path).models}
    config = models["d3"].config
    shape = config.shape
    assert (shape.num_layers, shape.hidden_size, shape.ffn_hidden_size) == (3, 192, 512)
    assert (shape.num_attention_heads, shape.num_query_groups) == (3, 3)
    # 3 layers of 4 x 192^2 and 3 x 192 x 512, 7 norms of 192, and the output layer
    parameters = 3 * (4 * 192**2 + 3 * 192 * 512) + 7 * 192 + 4096 * 192
    assert count_parameters(shape, 4096) == parameters
    assert config.learning_rate.lr == pytest.approx(
        0.003239 - 0.0001395 * math.log(parameters), rel=5e-3
    )
    assert shape.init_method_std == pytest.approx(math.sqrt(2 / (5 * 192)), rel=5e-3)
    tokens = 2e13 / (6 * parameters)
    step = 0.58 * tokens**0.571
    assert config.global_batch_size == 2 ** round(math.log2(step / 128))
    assert config.global_batch_size * config.output.eval_iters * 128 == 65_536
    assert config.micro_batch_size == 8


def test_runs_of_a_budget_have_its_flops(tmp_path):
    manifest = read_ladder(tmp_path)
    flops = defaultdict(list)
    for model in manifest.models:
        objective = (model.key.clm_share, model.key.mask_ratio is None)
        cost = compute_training_cost(manifest, model, 0, model.steps)
        flops[model.key.size, objective[1], objective[0] > 0].append(cost.flops)
    assert len(flops) == 9
    for low, high in map(sorted, flops.values()):
        assert (low, high) == pytest.approx((1e13, 4e13), rel=5e-3)


def test_tokens_per_parameter(tmp_path):
    manifest = read_ladder(tmp_path, budgets=[], tokens_per_parameter=[2, 8])
    for model in manifest.models:
        config = model.config
        tokens = model.steps * config.global_batch_size * config.data.seq_length
        ratio = tokens / count_parameters(config.shape, 4096)
        assert min(abs(ratio / 2 - 1), abs(ratio / 8 - 1)) < 0.02


def test_a_size_has_the_budgets_within_its_ratios(tmp_path):
    # budget / (6 N^2) is 1.8 and 7.4, 0.37 and 1.5, 0.09 and 0.37
    manifest = read_ladder(tmp_path, ratio_range=[0.36, 5])
    steps = defaultdict(set)
    for model in manifest.models:
        if model.key.clm_share == 1:
            steps[model.key.size].add(model.steps)
    assert {size: len(counts) for size, counts in steps.items()} == {"d2": 1, "d3": 2, "d4": 1}


def test_decays_branch_off_one_trunk_of_a_size(tmp_path):
    changes = BASE | {"ladder": LADDER_KEYS}
    runs = graph(tmp_path, **changes).runs
    new = [run.name for run in runs.values() if run.start == "new"]
    # of each size: one of MLM, and one that begins with CLM
    assert len(new) == 6
    assert len(runs) == 18


def test_seeds_and_rates_at_some_sizes(tmp_path):
    manifest = read_ladder(tmp_path, seeds=2, rate_factors=[0.5, 1, 2])
    by_group = defaultdict(list)
    for model in manifest.models:
        by_group[model.group].append(model)
    seeds = {model.key.size for model in by_group[LADDER] if model.key.seed == 2}
    assert seeds == {"d3"}
    assert len(by_group[LADDER]) == 18 + 6
    tried = by_group[TRIED_RATES]
    assert {model.key.size for model in tried} == {"d2", "d3"}
    assert len(tried) == 2 * 3 * 2
    fitted = {(model.key.size, model.steps): model for model in by_group[LADDER]}
    for model in tried:
        rule = fitted[model.key.size, model.steps].config.learning_rate.lr
        factor = model.config.learning_rate.lr / rule
        assert min(abs(factor - 0.5), abs(factor - 2)) < 0.01
        assert not model.evaluate


def test_an_objective_may_have_another_rate_than_the_rules(tmp_path):
    objectives = [{"mask": 0.3, "rate_factor": 2}, {"clm_share": 1.0}]
    models = read_ladder(tmp_path, objectives=objectives).models
    rates = {model.key.mask_ratio: model.config.learning_rate.lr for model in models[:4]}
    assert rates[0.3] == pytest.approx(2 * rates[None], rel=5e-3)


def test_models_of_a_ladder_are_evaluated_if_anything_is(tmp_path):
    assert not any(model.evaluate for model in read_ladder(tmp_path).models)
    finetune = {"datasets": ["demo_sc"], "learning_rates": [1e-4], "seeds": 1}
    manifest = read(tmp_path, **BASE | {"ladder": LADDER_KEYS, "finetune": finetune})
    assert all(model.evaluate for model in manifest.models)


@pytest.mark.parametrize(
    ("pretrain", "changes", "complaint"),
    [
        ({}, {"budgets": []}, "found neither of `budgets` and `tokens_per_parameter`"),
        ({}, {"tokens_per_parameter": [2]}, "found budgets and tokens_per_parameter of"),
        ({}, {"depths": []}, "field `depths`: found none"),
        ({}, {"objectives": []}, "field `objectives`: found none"),
        ({}, {"objectives": ["clm"]}, "objectives, entry 1: found 'clm'"),
        ({}, {"objectives": [{"msk": 0.3}]}, "objectives, entry 1: unknown field `msk`"),
        (
            {},
            {"objectives": [{"clm_share": 0.5}]},
            "ladder: objectives, entry 1: field `mask`: missing",
        ),
        (
            {},
            {"objectives": [{"mask": 0.3}, {"mask": 0.3, "rate_factor": 2}]},
            "objectives, entry 2: found the recipe of an earlier entry",
        ),
        (
            {},
            {"budgets": [], "tokens_per_parameter": [2, 8], "ratio_range": [10, 20]},
            "field `ratio_range`: found 10 to 20, which no budget of d2 meets",
        ),
        ({}, {"depths": [2, 2]}, "field `depths`: found 2 twice"),
        ({}, {"budgets": [1e6]}, "a run of d2 has no step of"),
        ({}, {"ratio_range": [1e3, 1e4]}, "which no budget of d2 meets (950,912 parameters)"),
        ({}, {"seeds": 2, "seed_depths": [5]}, "field `seed_depths`: found 5"),
        ({}, {"rate_depths": [1]}, "field `rate_depths`: found 1"),
        ({"lr": 1e-3}, {}, "pretrain: field `lr`: found together with `ladder`"),
        ({"num_layers": 2}, {}, "pretrain: field `num_layers`: found together with `ladder`"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, pretrain, changes, complaint):
    with pytest.raises(InputError) as error:
        read_ladder(tmp_path, PRETRAIN | pretrain, **changes)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_size_of_a_ladder_has_a_name_of_its_own(tmp_path):
    changes = {"sizes": {"d2": {"model": "tiny"}}, "ladder": LADDER_KEYS}
    with pytest.raises(InputError, match="sizes: field `d2`: found a size of `ladder`"):
        read(tmp_path, **BASE | changes)


def test_a_model_beside_a_ladder_has_a_group_of_its_own(tmp_path):
    entry = {"size": "d2", "steps": 1000, "mask": 0.4, "group": "ladder"}
    with pytest.raises(InputError, match="models, entry 1: field `group`: found ladder, a group"):
        read(tmp_path, **BASE | {"models": [entry], "ladder": LADDER_KEYS})
    [model, *_] = read(
        tmp_path, **BASE | {"models": [entry | {"group": ""}], "ladder": LADDER_KEYS}
    ).models
    assert model.steps == 1000


@pytest.mark.parametrize("name", ["ladder", "ladder-two-cores"])
def test_the_ladders_of_the_repository(name):
    manifest = read_manifest(STUDY / f"{name}.yaml")
    sizes = {model.key.size: model.config.shape for model in manifest.models}
    counts = [count_parameters(shape, manifest.corpus.vocab_size) for shape in sizes.values()]
    assert len(counts) >= 6
    assert counts == sorted(counts)
    objectives = {(model.key.clm_steps > 0, model.key.mlm_steps > 0) for model in manifest.models}
    assert objectives == {(True, False), (False, True), (True, True)}
