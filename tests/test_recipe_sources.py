"""Recipes of published encoders against the cited files in recipe_sources.yaml.

A difference fails unless the head of the recipe names the key; so does a named key without a
difference.
"""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import runs
import yaml

from megaenc.training.config import PretrainConfig, parse_config
from megaenc.training.planning import build_plan

RECIPES = runs.ROOT / "configs" / "recipes"
SOURCES, READING = yaml.safe_load_all(
    (runs.ROOT / "tests" / "recipe_sources.yaml").read_text(encoding="utf-8")
)
GPUS = {"modernbert": 8, "ettin": 4, "mmbert": 8, "eurobert": 192, "neobert": 8}
# The phases of the recipe that the phases of the source are.
PHASES = {
    "modernbert": [0, 1, 2],
    "ettin": [0, 1, 2],
    "mmbert": [0, 1, 2],
    "eurobert": [0],
    "neobert": [0, 2],
}


class _Anything:
    """Value that has no effect in this phase."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None


ANYTHING = _Anything()
Rule = Callable[[PretrainConfig, PretrainConfig, int], Any]
"""Function of a phase, the recipe and the number of GPUs; returns the source's value."""


def option(settings: PretrainConfig, name: str, otherwise: float = 0.0) -> float:
    """Return an option of the phase's objective."""
    match = re.search(rf"\b{name}=([\d.]+)", settings.objective_schedule)
    return float(match[1]) if match else otherwise


def share(name: str) -> Rule:
    """Return the rule for an option of the phase's objective."""
    return lambda settings, *_: option(settings, name)


def tokens(number: float) -> str:
    return f"{round(number)} tokens"


def phase_tokens(settings: PretrainConfig, *_: object) -> str:
    return tokens(settings.tokens_after(settings.phase_iters))


def is_decaying(settings: PretrainConfig) -> bool:
    return settings.learning_rate.lr_decay_style != "constant"


def composer_schedules(settings: PretrainConfig, *_: object) -> set[str]:
    """Return the names of schedulers that do what the phase does."""
    rates = settings.learning_rate
    if not is_decaying(settings):
        return {"warmup_stable_decay", "constant_with_warmup"}
    whole = (
        rates.lr_decay_style == "WSD"
        and rates.lr_wsd_decay_fraction == 1
        and not rates.lr_warmup_iters
    )
    return {"one_minus_sqrt"} if whole and rates.lr_wsd_decay_style == "minus_sqrt" else set()


def betas(settings: PretrainConfig, *_: object) -> list[float]:
    return [settings.optimizer.adam_beta1, settings.optimizer.adam_beta2]


def shown_as_mask(settings: PretrainConfig, *_: object) -> float:
    """Return the fraction of hidden tokens that the mask token replaces."""
    return 1 - option(settings, "random") - option(settings, "keep")


def rampup(settings: PretrainConfig, place: int) -> int:
    return (settings.rampup_batch_size or (0, 0, 0))[place]


# Of the code of ModernBERT, which Ettin and mmBERT are trained by too.
FLEX_BERT: dict[str, Rule] = {
    "mlm_probability": share("mask"),
    "model.model_config.bert_layer": lambda s, *_: "prenorm" if not s.shape.post_norms else "",
    "model.model_config.normalization": lambda s, *_: s.shape.normalization.lower(),
    "model.model_config.head_pred_act": lambda s, *_: (
        s.shape.activation if s.shape.prediction_head else ""
    ),
    "model.model_config.local_attn_rotary_emb_base": lambda s, *_: (
        s.shape.local_rotary_base or s.shape.rotary_base
    ),
    "model.model_config.sliding_window": lambda s, *_: 2 * s.shape.window_size,
    "train_loader.dataset.mlm_probability": share("mask"),
    "train_loader.batch_size_warmup_min_size": lambda s, r, n: (
        rampup(s, 0) / n if s.rampup_batch_size else ANYTHING
    ),
    "train_loader.batch_size_warmup_tokens": lambda s, *_: tokens(rampup(s, 2) * s.data.seq_length),
    "eval_loader.dataset.mlm_probability": lambda s, r, _: evaluated_mask(s, r),
    "scheduler.name": composer_schedules,
    "scheduler.t_warmup": lambda s, *_: tokens(s.tokens_after(s.learning_rate.lr_warmup_iters)),
    "scheduler.alpha_f": lambda s, *_: (
        s.learning_rate.min_lr / s.learning_rate.lr if is_decaying(s) else ANYTHING
    ),
    "scheduler.t_decay": lambda s, *_: phase_tokens(s) if is_decaying(s) else "0 tokens",
    "scheduler.t_max": phase_tokens,
    "optimizer.name": lambda s, *_: f"decoupled_{s.optimizer.optimizer.replace('_', '')}",
    "optimizer.betas": betas,
    "optimizer.weight_decay": lambda s, r, _: (
        s.optimizer.weight_decay * r.phase_configs[0].settings.learning_rate.lr
    ),
    "max_duration": phase_tokens,
    "eval_interval": lambda s, r, _: f"{r.output.eval_interval} steps",
    "save_interval": lambda s, r, _: f"{r.output.save_interval} steps",
    "code.hidden_as_mask_token": shown_as_mask,
    "code.hidden_as_random_token": share("random"),
    "code.hidden_as_they_are": share("keep"),
    "code.growing_batch": lambda s, *_: "equal packs" if s.rampup_batch_size else ANYTHING,
}
OPTIMUS: dict[str, Rule] = {
    "train.optimizer": lambda s, *_: {"adamw": "AdamW"}[s.optimizer.optimizer],
    "train.weight_decay": lambda s, *_: (
        0 if s.optimizer.no_weight_decay_norm_bias else s.optimizer.weight_decay
    ),
    "train.lr_scheduler": lambda s, *_: "WarmupStableDecayLR" if not is_decaying(s) else "",
    "train.run_validation": lambda s, r, _: r.output.eval_interval is not None,
    "train.save_step": lambda s, r, _: r.output.save_interval,
    "train.mlm_probability": share("mask"),
    "train.mask_probability": shown_as_mask,
    "train.random_probability": share("random"),
    "train.original_probability": share("keep"),
    "model.dropout": lambda s, *_: s.shape.attention_output_dropout or None,
    "code.init_std": lambda s, *_: (
        s.shape.init_method_std if s.shape.init_method == "normal" else None
    ),
}
NEOBERT: dict[str, Rule] = {
    "model.intermediate_size": lambda s, *_: (
        3 * s.shape.ffn_hidden_size // 2
    ),  # of which SwiGLU takes two thirds
    "model.rms_norm": lambda s, *_: s.shape.normalization == "RMSNorm",
    "model.hidden_act": lambda s, *_: {"silu": "swiglu"}[s.shape.activation],
    "model.embedding_init_range": lambda s, *_: 3**0.5 * s.shape.init_method_std,
    "model.decoder_init_range": lambda s, *_: 3**0.5 * s.shape.init_method_std,
    "optimizer.name": lambda s, *_: {"adamw": "AdamW"}[s.optimizer.optimizer],
    "optimizer.hparams.betas": betas,
    "scheduler.warmup_steps": lambda s, *_: s.learning_rate.lr_warmup_iters or ANYTHING,
    "scheduler.decay_steps": lambda s, *_: s.train_iters if is_decaying(s) else 0,
    "scheduler.constant_steps": lambda s, *_: 0 if is_decaying(s) else s.train_iters,
    "scheduler.decay": lambda s, *_: s.learning_rate.lr_decay_style if is_decaying(s) else ANYTHING,
    "datacollator.mlm_probability": share("mask"),
    "datacollator.mask_all": lambda s, *_: shown_as_mask(s) == 1,
    "trainer.max_steps": lambda s, r, _: (
        s.train_iters if not is_decaying(s) else r.phase_configs[1].last_step
    ),
    "trainer.gradient_accumulation_steps": lambda s, r, n: (
        s.global_batch_size / (n * {1024: 64, 4096: 8}[s.data.seq_length])
    ),
    "trainer.model.save_steps": lambda s, r, _: r.output.save_interval,
    "tokenizer.vocab_size": lambda s, *_: s.shape.vocab_size or 30522,
}
RULES = {"flex_bert": FLEX_BERT, "optimus": OPTIMUS, "neobert": NEOBERT}
KINDS = dict.fromkeys(("modernbert", "ettin", "mmbert"), "flex_bert") | {
    "eurobert": "optimus",
    "neobert": "neobert",
}


def evaluated_mask(settings: PretrainConfig, recipe: PretrainConfig) -> float:
    """Return the mask ratio of the validation: its own objective, or the phase's."""
    [objective] = recipe.output.valid_objective or [settings.objective_schedule]
    return float(re.search(r"mask=([\d.]+)", objective)[1])


def find_rule(name: str, key: str) -> Rule | None:
    """Return the rule for a key, None if it has no effect; KeyError if it is unknown."""
    if rule := RULES[KINDS[name]].get(key):
        return rule
    if field := READING["fields"][KINDS[name]].get(key):
        return lambda settings, *_: attrgetter(field)(settings)
    if key in READING["constants"]:
        return lambda *_: READING["constants"][key]
    last = key.rpartition(".")[2]
    if key.startswith("callbacks.") or {key, last, f"{name}.{key}"} & READING["no_effect"].keys():
        return None
    raise KeyError(f"{name}: no rule for {key}")


def is_equal(value: Any, cited: Any) -> bool:
    """Return whether a value of the recipe is the cited one, up to rounding of steps."""
    if isinstance(value, set):
        return cited in value
    if (
        isinstance(value, str)
        and isinstance(cited, str)
        and value.endswith(" tokens")
        and cited.endswith(" tokens")
    ):
        value = int(value.split()[0])
        cited = int(cited.split()[0])
    if isinstance(value, (int, float, list)) and not isinstance(value, bool):
        return (
            cited is not None
            and not isinstance(cited, str)
            and value == pytest.approx(cited, rel=1e-3)
        )
    return value == cited


def cited_phases(name: str) -> list[dict[str, Any]]:
    """Return the keys and values of each phase of a source."""
    values = {}
    phases = []
    for phase in SOURCES[name]["phases"]:
        values = {
            key: value for key, value in values.items() if key not in phase.get("without", ())
        } | phase["values"]
        phases.append(values)
    return phases


def listed_differences(name: str) -> set[str]:
    """Return the keys that the head of a recipe names as different from its source.

    Each line is `#   KEY, KEY: what is different`.
    """
    lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    head = lines[lines.index("# As published but for:") + 1 :]
    keys = set()
    for line in head:
        if not line.startswith("#   "):
            return keys
        if match := re.match(r"#   ([\w.]+(?:, [\w.]+)*): ", line):
            keys |= set(match[1].split(", "))
    return keys


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_is_what_it_cites_but_for_what_it_says(name):
    recipe = parse_config(["--config", str(RECIPES / f"{name}.yaml")], "test")
    differences = set()
    for number, cited in zip(PHASES[name], cited_phases(name), strict=True):
        settings = recipe.phase_configs[number].settings
        for key, value in cited.items():
            rule = find_rule(name, key)
            if rule and not is_equal(rule(settings, recipe, GPUS[name]), value):
                differences.add(key)
    assert differences == listed_differences(name)
    assert SOURCES[name]["commit"] in (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SOURCES)
def test_the_engine_of_its_tiny_cut_has_its_weight_decay_and_dropout(
    name, small_corpus, one_process
):
    from megaenc.training.engine import Engine
    from megaenc.training.optimizers import list_shards

    flags = [
        "--config",
        str(RECIPES / "tiny" / f"{name}.yaml"),
        *small_corpus.flags,
        "--no-bf16",
        "--eval-interval",
        "0",
    ]
    plan = build_plan(
        parse_config(
            [*flags, "--phases", "{objective: mlm, train_iters: 2, seq_length: 128}"], "test"
        )
    )
    engine = Engine(plan, one_process)
    cited = cited_phases(name)[0]
    optimizer = engine.optimizer.chained_optimizers[0]
    [chunk] = engine.chunks
    for (key, weight), shard in zip(
        chunk.named_parameters(), list_shards(engine.chunks, optimizer), strict=True
    ):
        decays = weight.dim() == 2 or not cited.get("optimizer.filter_bias_norm_wd")
        assert optimizer.param_groups[shard.group]["wd_mult"] == decays, key
    dropout = cited.get("model.model_config.attn_out_dropout_prob", 0)
    while hasattr(chunk, "module"):
        chunk = chunk.module
    assert {layer.output_dropout for layer in chunk.decoder.layers} == {dropout}
