"""Recipes of configs/recipes match their papers; tiny ones train and export."""

import json
import shutil
from itertools import pairwise
from unittest import mock

import pytest
import runs
from small_models import save_model
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from megaenc.training.config import parse_config
from megaenc.training.phases import build_learning_rate

RECIPES = runs.ROOT / "configs" / "recipes"
TINY = sorted(file.stem for file in (RECIPES / "tiny").iterdir())
# By recipe: the GPUs of its paper, tokens in billions and context of each phase, learning rates of
# first, middle and last steps.
FROM_SCRATCH = {
    "eurobert": (192, [4800, 200], [2048, 8192], [(5e-8, 1e-4, 1e-4), (1e-4, 5e-5, 0)]),
    "modernbert": (
        8,
        [1719, 250, 50],
        [1024, 8192, 8192],
        [(2.1e-7, 8e-4, 8e-4), (3e-4,) * 3, (3e-4, 8.8e-5, 3.14e-7)],
    ),
    "ettin": (
        4,
        [1700, 250, 50],
        [1024, 7999, 7999],
        [(1.26e-6, 8e-4, 8e-4), (8e-4, 5.17e-4, 4e-4), (4e-4, 1.28e-4, 1.6e-5)],
    ),
    "mmbert": (
        8,
        [2300, 600, 100],
        [1024, 8192, 8192],
        [(1.05e-7, 8e-4, 8e-4), (8e-4,) * 3, (8e-4, 2.46e-4, 1.6e-5)],
    ),
    "neobert": (
        8,
        [1887, 210, 105],
        [1024, 1024, 4096],
        [(3e-7, 3.3e-4, 6e-5), (6e-5,) * 3, (6e-5,) * 3],
    ),
}
# The models that the others start from, by the directory in which their recipes look for them.
STARTED = {"dapt": "encoder", "bidirlm": "decoder", "clm-detour": "encoder"}
MODELS = {
    "encoder": ("modernbert", AutoModelForMaskedLM, {"local_attention": 32}),
    "decoder": ("qwen3", AutoModelForCausalLM, {"head_dim": 16}),
}
GPUS_OF_STARTED = {"dapt": 4, "bidirlm": 96, "clm-detour": 4}
# Of a recipe that starts from a model, with a shape from its directory.
PHASES_OF_STARTED = {
    "clm-detour": ([50, 5], [8192] * 2, [(6.25e-6, 2e-4, 2e-4), (2e-4, 7.27e-5, 2e-5)])
}


def config(name: str):
    """Return the configuration of a recipe of this repository."""
    return parse_config(["--config", str(RECIPES / f"{name}.yaml")], "test")


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_a_recipe_has_the_lengths_and_rates_of_its_paper(name):
    """Check steps and learning rates on one process and on the GPUs of the paper."""
    gpus, *phases = FROM_SCRATCH[name]
    recipe = config(name)
    for processes in (1, gpus):
        recipe.check(processes)
    check_phases(recipe, *phases)


def check_phases(recipe, tokens, contexts, rates) -> None:
    """Assert billions of tokens, contexts and rates of each phase."""
    ends = [0, *(recipe.tokens_after(phase.last_step) for phase in recipe.phase_configs)]
    assert [round((end - start) / 1e9) for start, end in pairwise(ends)] == tokens
    assert [phase.settings.data.seq_length for phase in recipe.phase_configs] == contexts
    learning_rate = build_learning_rate(recipe)
    for phase, expected in zip(recipe.phase_configs, rates, strict=True):
        steps = phase.first_step, (phase.first_step + phase.last_step) // 2, phase.last_step
        assert [learning_rate(step) for step in steps] == pytest.approx(
            expected, rel=0.02, abs=2e-8
        )


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_the_tiny_cut_has_the_phases_of_its_recipe(name):
    def phases(recipe):
        for phase in recipe.phase_configs:
            settings = phase.settings
            rates = settings.learning_rate
            yield (
                settings.objective_schedule,
                settings.data.blend_temperature,
                settings.shape.rotary_base,
            )
            yield rates.lr_decay_style, rates.lr_wsd_decay_style, rates.lr_wsd_decay_fraction
            yield bool(rates.lr_warmup_iters), round(rates.min_lr / rates.lr, 6)

    def shape(recipe):
        ignored = {
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "vocab_size",
        }
        return {key: value for key, value in vars(recipe.shape).items() if key not in ignored}

    recipe = config(name)
    tiny = config(f"tiny/{name}")
    tiny.check(1)
    assert list(phases(tiny)) == list(phases(recipe))
    assert shape(tiny) == shape(recipe)


def test_every_recipe_has_a_tiny_cut_and_is_tested():
    assert (
        TINY
        == sorted(file.stem for file in RECIPES.glob("*.yaml"))
        == sorted({**FROM_SCRATCH, **STARTED})
    )


@pytest.fixture(scope="module")
def directory(shared_directory):
    """Build a corpus, imported models and tokenized corpora for the tiny recipes."""
    from megaenc.convert.command import main as convert
    from megaenc.data import demo
    from megaenc.data.preprocess.command import main as preprocess

    def make(directory):
        shutil.copytree(RECIPES, directory / "configs" / "recipes")
        sources = demo._find_source_files
        few = (
            "python/asyncio",
            "python/email",
            "python/multiprocessing",
            "python/unittest",
            "matplotlib/",
            "networkx/algorithms",
        )
        with mock.patch.object(
            demo,
            "_find_source_files",
            lambda: (source for source in sources() if source[0].startswith(few)),
        ):
            paths = demo.ensure_demo(directory / "demo")
        tokenizer = AutoTokenizer.from_pretrained(paths.tokenizer)
        for kind, (model_type, auto, options) in MODELS.items():
            sizes = dict(
                hidden_size=64,
                intermediate_size=96,
                num_key_value_heads=2,
                max_position_embeddings=512,
            )
            save_model(directory / "hf" / kind, model_type, tokenizer, auto, **(sizes | options))
            convert(
                [
                    "from-hf",
                    "--input",
                    str(directory / "hf" / kind),
                    "--output",
                    str(directory / "core" / kind),
                ]
            )
        corpora = {
            "dapt-own": (paths.heldout, "encoder"),
            "dapt-general": (paths.corpus, "encoder"),
            "bidirlm": (paths.corpus, "decoder"),
        }
        for name, (text, kind) in corpora.items():
            tokenizer = [
                "--tokenizer",
                str(directory / "core" / kind / "tokenizer"),
                "--special-tokens",
                "template",
            ]
            preprocess(
                [
                    "--input",
                    str(text),
                    "--output-prefix",
                    str(directory / "data" / name),
                    *tokenizer,
                ]
            )

    return shared_directory("recipes", make)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED)
def test_a_recipe_that_starts_from_a_model_plans(name, directory, monkeypatch):
    monkeypatch.chdir(directory)
    for recipe, processes in ((name, 1), (name, GPUS_OF_STARTED[name]), (f"tiny/{name}", 1)):
        parse_config(["--config", f"configs/recipes/{recipe}.yaml"], "test").check(processes)
    if name in PHASES_OF_STARTED:
        started = parse_config(["--config", f"configs/recipes/{name}.yaml"], "test")
        check_phases(started, *PHASES_OF_STARTED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_recipe_goes_from_nothing_to_a_verified_export(name, directory, tmp_path):
    """Parts of the demo that mmBERT's blends name are built on the way."""
    save = tmp_path / "run"
    export = tmp_path / "hf"

    def run(*words):
        return runs.script(runs.WORKERS / "in_directory.py", [str(directory), *map(str, words)])

    run("pretrain", "--config", f"configs/recipes/tiny/{name}.yaml", "--save", save)
    run("convert", "to-hf", "--load", save, "--output", export)
    rows = runs.metrics(save)
    assert rows[-1]["step"] == len(rows) == 60
    start = rows[0]["loss"], sum(row["loss"] for row in rows[35:40]) / 5
    assert start[1] < start[0] - (1.0 if name in FROM_SCRATCH else 0.1)
    assert json.loads((export / "conversion.json").read_text())["step"] == 60
    blends = {"mmbert": ["demo/p*", "demo/corpus"], "dapt": ["data/dapt-own", "data/dapt-general"]}
    used = (save / "config.yaml").read_text()
    assert all(f"{corpus}_text_document" in used for corpus in blends.get(name, []))
