"""The recipes of published encoders against the files that they cite, key by key: recipe_sources.yaml has these.

A difference fails unless the head of the recipe names the key, and so does a named key without a difference.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import runs
import yaml

from megaenc.training.config import PretrainConfig, parse_config
from megaenc.training.planning import build_plan

RECIPES = runs.ROOT / "configs" / "recipes"
SOURCES = yaml.safe_load((runs.ROOT / "tests" / "recipe_sources.yaml").read_text(encoding="utf-8"))
GPUS = {"modernbert": 8, "ettin": 4, "mmbert": 8, "eurobert": 192, "neobert": 8}
# The phases of the recipe that the phases of the source are.
PHASES = {"modernbert": [0, 1, 2], "ettin": [0, 1, 2], "mmbert": [0, 1, 2], "eurobert": [0], "neobert": [0, 2]}


class _Anything:
    """A value that has no effect in this phase."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None


ANYTHING = _Anything()
Rule = Callable[[PretrainConfig, PretrainConfig, int], Any]
"""Function of a phase's settings, the recipe and the number of GPUs to the value in the source's units."""


def option(settings: PretrainConfig, name: str, otherwise: float = 0.0) -> float:
    """An option of the phase's objective."""
    match = re.search(rf"\b{name}=([\d.]+)", settings.objective_schedule)
    return float(match[1]) if match else otherwise


def tokens(number: float) -> str:
    return f"{round(number)} tokens"


def phase_tokens(settings: PretrainConfig, *_: object) -> str:
    return tokens(settings.tokens_after(settings.own_iters))


def is_decaying(settings: PretrainConfig) -> bool:
    return settings.optimizer.lr_decay_style != "constant"


def composer_schedules(settings: PretrainConfig, *_: object) -> set[str]:
    """The names of schedulers that do what the phase does."""
    optimizer = settings.optimizer
    if not is_decaying(settings):
        return {"warmup_stable_decay", "constant_with_warmup"}
    whole = optimizer.lr_decay_style == "WSD" and optimizer.lr_wsd_decay_fraction == 1 and not optimizer.lr_warmup_iters
    return {"one_minus_sqrt"} if whole and optimizer.lr_wsd_decay_style == "minus_sqrt" else set()


def first_rate(recipe: PretrainConfig) -> float:
    return recipe.phase_configs[0].settings.optimizer.lr


def rampup(settings: PretrainConfig, place: int) -> int:
    return (settings.rampup_batch_size or (0, 0, 0))[place]


SHARED = {
    "max_seq_len": lambda s, *_: s.data.seq_length,
    "tokenizer_name": lambda s, *_: s.data.tokenizer,
    "mlm_probability": lambda s, *_: option(s, "mask"),
}
# Of the code of ModernBERT, which Ettin and mmBERT are trained by too.
FLEX_BERT: dict[str, Rule] = {
    **SHARED,
    "model.tokenizer_name": SHARED["tokenizer_name"],
    **{f"model.model_config.{name}": rule for name, rule in {
        "vocab_size": lambda s, *_: s.shape.vocab_size,
        "init_method": lambda s, *_: s.shape.init_method,
        "num_hidden_layers": lambda s, *_: s.shape.num_layers,
        "hidden_size": lambda s, *_: s.shape.hidden_size,
        "intermediate_size": lambda s, *_: s.shape.ffn_hidden_size,
        "num_attention_heads": lambda s, *_: s.shape.num_attention_heads,
        "attention_layer": lambda *_: "rope",
        "attention_probs_dropout_prob": lambda *_: 0,
        "attn_out_bias": lambda *_: False,
        "attn_out_dropout_prob": lambda s, *_: s.shape.attention_output_dropout,
        "attn_qkv_bias": lambda s, *_: s.shape.add_qkv_bias,
        "bert_layer": lambda s, *_: "prenorm" if not s.shape.post_norms else "",
        "embed_dropout_prob": lambda *_: 0,
        "embed_norm": lambda s, *_: s.shape.embedding_norm,
        "final_norm": lambda *_: True,
        "skip_first_prenorm": lambda s, *_: s.shape.embedding_norm,
        "embedding_layer": lambda *_: "sans_pos",
        "mlp_dropout_prob": lambda *_: 0,
        "mlp_in_bias": lambda *_: False,
        "mlp_layer": lambda *_: "glu",
        "mlp_out_bias": lambda *_: False,
        "normalization": lambda s, *_: s.shape.normalization.lower(),
        "norm_kwargs.eps": lambda s, *_: s.shape.norm_epsilon,
        "norm_kwargs.bias": lambda s, *_: s.shape.norm_bias,
        "hidden_act": lambda s, *_: s.shape.activation,
        "head_pred_act": lambda s, *_: s.shape.activation if s.shape.prediction_head else "",
        "rotary_emb_base": lambda s, *_: s.shape.rotary_base,
        "local_attn_rotary_emb_base": lambda s, *_: s.shape.local_rotary_base or s.shape.rotary_base,
        "rotary_emb_interleaved": lambda *_: False,
        "sliding_window": lambda s, *_: 2 * s.shape.window_size,
        "global_attn_every_n_layers": lambda s, *_: s.shape.global_attn_every_n_layers,
    }.items()},
    "train_loader.dataset.tokenizer_name": SHARED["tokenizer_name"],
    "train_loader.dataset.max_seq_len": SHARED["max_seq_len"],
    "train_loader.dataset.mlm_probability": SHARED["mlm_probability"],
    "train_loader.sequence_packing": lambda *_: True,
    "train_loader.batch_size_warmup_min_size": lambda s, r, n: rampup(s, 0) / n if s.rampup_batch_size else ANYTHING,
    "train_loader.batch_size_warmup_tokens": lambda s, *_: tokens(rampup(s, 2) * s.data.seq_length),
    "eval_loader.dataset.tokenizer_name": SHARED["tokenizer_name"],
    "eval_loader.dataset.max_seq_len": SHARED["max_seq_len"],
    "eval_loader.dataset.mlm_probability": lambda s, r, _: evaluated_mask(s, r),
    "scheduler.name": composer_schedules,
    "scheduler.t_warmup": lambda s, *_: tokens(s.tokens_after(s.optimizer.lr_warmup_iters)),
    "scheduler.alpha_f": lambda s, *_: s.optimizer.min_lr / s.optimizer.lr if is_decaying(s) else ANYTHING,
    "scheduler.t_decay": lambda s, *_: phase_tokens(s) if is_decaying(s) else "0 tokens",
    "scheduler.t_max": phase_tokens,
    "optimizer.name": lambda s, *_: f"decoupled_{s.optimizer.optimizer.replace('_', '')}",
    "optimizer.lr": lambda s, *_: s.optimizer.lr,
    "optimizer.betas": lambda s, *_: [s.optimizer.adam_beta1, s.optimizer.adam_beta2],
    "optimizer.eps": lambda s, *_: s.optimizer.adam_eps,
    "optimizer.weight_decay": lambda s, r, _: s.optimizer.weight_decay * first_rate(r),
    "optimizer.filter_bias_norm_wd": lambda s, *_: s.optimizer.no_weight_decay_norm_bias,
    "max_duration": phase_tokens,
    "eval_interval": lambda s, r, _: f"{r.output.eval_interval} steps",
    "global_train_batch_size": lambda s, *_: s.global_batch_size,
    "seed": lambda s, *_: s.seed,
    "device_train_microbatch_size": lambda s, *_: s.micro_batch_size,
    "save_interval": lambda s, r, _: f"{r.output.save_interval} steps",
    "code.hidden_as_mask_token": lambda s, *_: 1 - option(s, "random") - option(s, "keep"),
    "code.hidden_as_random_token": lambda s, *_: option(s, "random"),
    "code.hidden_as_they_are": lambda s, *_: option(s, "keep"),
    "code.model_config.init_std": lambda s, *_: s.shape.init_method_std,
    "code.model_config.init_cutoff_factor": lambda s, *_: s.shape.init_cutoff,
    "code.packing": lambda *_: "documents end to end, the last one cut",
    "code.hides_special_tokens": lambda *_: False,
    "code.random_token": lambda *_: "any of the vocabulary",
    "code.growing_batch": lambda s, *_: "equal packs" if s.rampup_batch_size else ANYTHING,
}  # fmt: skip
OPTIMUS: dict[str, Rule] = {
    "train.lr": lambda s, *_: s.optimizer.lr,
    "train.clip_grad_norm": lambda s, *_: s.optimizer.clip_grad,
    "train.optimizer": lambda s, *_: {"adamw": "AdamW"}[s.optimizer.optimizer],
    "train.weight_decay": lambda s, *_: 0 if s.optimizer.no_weight_decay_norm_bias else s.optimizer.weight_decay,
    "train.beta1": lambda s, *_: s.optimizer.adam_beta1,
    "train.beta2": lambda s, *_: s.optimizer.adam_beta2,
    "train.eps": lambda s, *_: s.optimizer.adam_eps,
    "train.lr_scheduler": lambda s, *_: "WarmupStableDecayLR" if not is_decaying(s) else "",
    "train.run_validation": lambda s, r, _: r.output.eval_interval is not None,
    "train.save_step": lambda s, r, _: r.output.save_interval,
    "train.mlm_probability": lambda s, *_: option(s, "mask"),
    "train.mask_probability": lambda s, *_: 1 - option(s, "random") - option(s, "keep"),
    "train.random_probability": lambda s, *_: option(s, "random"),
    "train.original_probability": lambda s, *_: option(s, "keep"),
    "train.seed": lambda s, *_: s.seed,
    "model.tokenizer_path_or_name": lambda s, *_: s.data.tokenizer,
    "model.vocab_size": lambda s, *_: s.shape.vocab_size,
    "model.dropout": lambda s, *_: s.shape.attention_output_dropout or None,
    "dataset.batch_size": lambda s, *_: s.micro_batch_size,
    "dataset.length": lambda s, *_: s.data.seq_length,
    "code.init_std": lambda s, *_: s.shape.init_method_std if s.shape.init_method == "normal" else None,
}
NEOBERT: dict[str, Rule] = {
    "model.hidden_size": lambda s, *_: s.shape.hidden_size,
    "model.num_hidden_layers": lambda s, *_: s.shape.num_layers,
    "model.num_attention_heads": lambda s, *_: s.shape.num_attention_heads,
    "model.intermediate_size": lambda s, *_: 3 * s.shape.ffn_hidden_size // 2,  # of which SwiGLU takes two thirds
    "model.rope": lambda *_: True,
    "model.rms_norm": lambda s, *_: s.shape.normalization == "RMSNorm",
    "model.hidden_act": lambda s, *_: {"silu": "swiglu"}[s.shape.activation],
    "model.dropout_prob": lambda s, *_: s.shape.attention_output_dropout,
    "model.norm_eps": lambda s, *_: s.shape.norm_epsilon,
    "model.embedding_init_range": lambda s, *_: 3**0.5 * s.shape.init_method_std,
    "model.decoder_init_range": lambda s, *_: 3**0.5 * s.shape.init_method_std,
    "optimizer.name": lambda s, *_: {"adamw": "AdamW"}[s.optimizer.optimizer],
    "optimizer.hparams.lr": lambda s, *_: s.optimizer.lr,
    "optimizer.hparams.betas": lambda s, *_: [s.optimizer.adam_beta1, s.optimizer.adam_beta2],
    "optimizer.hparams.eps": lambda s, *_: s.optimizer.adam_eps,
    "optimizer.hparams.weight_decay": lambda s, *_: s.optimizer.weight_decay,
    "scheduler.warmup_steps": lambda s, *_: s.optimizer.lr_warmup_iters or ANYTHING,
    "scheduler.decay_steps": lambda s, *_: s.train_iters if is_decaying(s) else 0,
    "scheduler.constant_steps": lambda s, *_: 0 if is_decaying(s) else s.train_iters,
    "scheduler.decay": lambda s, *_: s.optimizer.lr_decay_style if is_decaying(s) else ANYTHING,
    "datacollator.mlm_probability": lambda s, *_: option(s, "mask"),
    "datacollator.mask_all": lambda s, *_: option(s, "random") + option(s, "keep") == 0,
    "trainer.max_steps": lambda s, r, _: s.train_iters if not is_decaying(s) else r.phase_configs[1].last_step,
    "trainer.gradient_accumulation_steps": lambda s, r, n: s.global_batch_size / (n * {1024: 64, 4096: 8}[s.data.seq_length]),
    "trainer.gradient_clipping": lambda s, *_: s.optimizer.clip_grad,
    "trainer.model.save_steps": lambda s, r, _: r.output.save_interval,
    "tokenizer.pretrained_model_name_or_path": lambda s, *_: s.data.tokenizer,
    "tokenizer.max_length": lambda s, *_: s.data.seq_length,
    "tokenizer.vocab_size": lambda s, *_: s.shape.vocab_size or 30522,
    "dataloader.train.batch_size": lambda s, *_: s.micro_batch_size,
    "dataloader.train.pack_sequences": lambda *_: True,
    "dataset.min_length": lambda *_: None,
    "code.weights": lambda *_: "normal",
}
RULES = {"modernbert": FLEX_BERT, "ettin": FLEX_BERT, "mmbert": FLEX_BERT, "eurobert": OPTIMUS, "neobert": NEOBERT}

# Keys that change no weight and no batch, with the reason where it is not seen at once.
NO_EFFECT = {
    "count_padding_tokens": "packs have no padding",
    "model.model_config.loss_function": "",
    "model.model_config.loss_kwargs.reduction": "the mean over all hidden tokens of a batch",
    "model.model_config.activation_function": "not read",
    "model.model_config.padding": "",
    "model.model_config.rotary_emb_dim": "null: all of the head",
    "model.model_config.rotary_emb_scale_base": "null: none",
    "model.model_config.local_attn_rotary_emb_dim": "null: all of the head",
    "model.model_config.allow_embedding_resizing": "",
    "model.model_config.unpad_embeddings": "",
    "model.model_config.compile_model": "",
    "model.model_config.masked_prediction": "logits of hidden tokens only",
    "model.name": "",
    "model.pretrained_model_name": "not read for new weights",
    "model.disable_train_metrics": "",
    "drop_last": "",
    "num_workers": "",
    "streaming": "",
    "shuffle": "true: each epoch is shuffled",
    "shuffle_seed": "",
    "local": "",
    "remote": "",
    "split": "",
    "path": "",
    "path_to_disk": "",
    "name": "",
    "column": "",
    "bos_token_id": "those of the tokenizer, as the next four",
    "eos_token_id": "",
    "pad_token_id": "",
    "sep_token_id": "",
    "mask_token_id": "",
    "eval_loader.sequence_packing": "a document sees itself alone in either case",
    "global_eval_batch_size": "--eval-iters batches are evaluated",
    "device_eval_batch_size": "",
    "optimizer.log_grad_norm": "",
    "precision": "bf16 where the device has it",
    "mixed_precision": "",
    "mixed_bfloat16": "",
    "tf32": "",
    **dict.fromkeys(("run_name", "pretrain_run_name", "context_extension_run_name", "save_folder", "load_path", "dir"), ""),
    **dict.fromkeys(("progress_bar", "log_to_console", "console_log_interval", "disable_tqdm", "resume", "max_ckpt"), ""),
    **dict.fromkeys(("save_num_checkpoints_to_keep", "autoresume", "reset_time", "reset_time_once"), ""),
    "restart_override": "sets the rate; its weight decay is divided by the first phase's rate all the same (modernbert.yaml)",
    "trainer.accelerate.save_steps": "of the optimizer, to resume",
    **dict.fromkeys(("pin_memory", "persistent_workers", "prefetch_factor", "predownload", "num_canonical_nodes"), ""),
    "datacollator.pad_to_multiple_of": "packs have no padding",
    "tokenizer.trust_remote_code": "",
    "model.classifier_init_range": "of fine-tuning",
    **dict.fromkeys(("project_name", "reload_checkpoint", "output_dir", "num_epochs", "tensorboard", "log_every_n_steps"), ""),
    **dict.fromkeys(("fused", "compile_model", "compile_mode", "compile_options", "fsdp", "ddp", "profile", "gpu"), ""),
    **dict.fromkeys(("exit_end_profiling", "profiler_output", "step_to_skip", "validation_step", "huggingface_id"), ""),
    **dict.fromkeys(("save_model", "save_optimizer", "save_scheduler", "save_data_loader", "save_config"), ""),
    **dict.fromkeys(("skip_reload_scheduler", "skip_reload_dataloader", "skip_reload_tensorboard", "data_mix_path"), ""),
    **dict.fromkeys(("pct_start", "div_factor", "end_start", "final_div_factor"), "of another scheduler"),
    "train.gradient_accumulation_steps": "the global batch is that of the paper",
    "model.model_name": "",
    "model.model_size": "its shape is that of the paper (test_recipes.py)",
    **dict.fromkeys(("embedding_size", "num_head", "num_kv_head", "num_layer", "block_size", "mlp_hidden_dim", "bias"), "null"),
    **dict.fromkeys(("attn_impl", "rope_base", "fused_rms_norm", "fused_rope", "fused_swiglu", "fused_cross_entropy"), ""),
    "fused_linear_cross_entropy": "",
    "dataset.var_len": "false: documents are cut to the length",
    "dataset.seed": "",
    "neobert.seed": "ours is 1",
}


def evaluated_mask(settings: PretrainConfig, recipe: PretrainConfig) -> float:
    """The mask ratio of the validation: its own objective, or the phase's."""
    [objective] = recipe.output.valid_objective or [settings.objective_schedule]
    return float(re.search(r"mask=([\d.]+)", objective)[1])


def find_rule(name: str, key: str) -> Rule | None:
    """The rule for a key; None if it has no effect. KeyError if it is not known."""
    if rule := RULES[name].get(key):
        return rule
    last = key.rpartition(".")[2]
    if key.startswith("callbacks.") or {key, last, f"{name}.{key}"} & NO_EFFECT.keys():
        return None
    raise KeyError(f"{name}: no rule for {key}")


def is_equal(value: Any, cited: Any) -> bool:
    """Whether a value of the recipe is the cited one; numbers of steps are rounded."""
    if isinstance(value, set):
        return cited in value
    if isinstance(value, str) and isinstance(cited, str) and value.endswith(" tokens") and cited.endswith(" tokens"):
        value, cited = (int(text.split()[0]) for text in (value, cited))
    if isinstance(value, (int, float, list)) and not isinstance(value, bool):
        return cited is not None and not isinstance(cited, str) and value == pytest.approx(cited, rel=1e-3)
    return value == cited


def cited_phases(name: str) -> list[dict[str, Any]]:
    """The keys and values of each phase of a source."""
    values, phases = {}, []
    for phase in SOURCES[name]["phases"]:
        values = {key: value for key, value in values.items() if key not in phase.get("without", ())} | phase["values"]
        phases.append(values)
    return phases


def listed_differences(name: str) -> set[str]:
    """The keys that the head of a recipe names as different from its source, each in a line `#   KEY, KEY: what is different`."""
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


SPREAD_OF_CUT_NORMAL = 0.8796  # standard deviation of a normal distribution that is cut at 2 of its own


@pytest.mark.parametrize("name", SOURCES)
def test_the_engine_of_its_tiny_cut_does_it(name, small_corpus, one_process):
    """Groups of weight decay, spread of initial weights, and dropout."""
    from megaenc.bench.gpu.synthetic import unwrap_encoder
    from megaenc.training.engine import Engine
    from megaenc.training.optimizers import list_shards

    flags = ["--config", str(RECIPES / "tiny" / f"{name}.yaml"), *small_corpus.flags, "--no-bf16", "--eval-interval", "0"]
    plan = build_plan(parse_config([*flags, "--phases", "{objective: mlm, train_iters: 2, seq_length: 128}"], "test"))
    engine = Engine(plan, one_process)
    cited = cited_phases(name)[0]
    of_modernbert = RULES[name] is FLEX_BERT
    optimizer = engine.optimizer.chained_optimizers[0]
    [chunk] = engine.chunks
    for (key, weight), shard in zip(chunk.named_parameters(), list_shards(engine.chunks, optimizer), strict=True):
        decays = weight.dim() == 2 or not cited.get("optimizer.filter_bias_norm_wd")
        assert optimizer.param_groups[shard.group]["wd_mult"] == decays, key
        if weight.dim() == 2 and weight.numel() > 20_000:
            spread = 0.02 * SPREAD_OF_CUT_NORMAL if of_modernbert else plan.settings.shape.init_method_std
            if of_modernbert and key.endswith(("linear_proj.weight", "linear_fc2.weight")):
                spread /= (2 * plan.settings.shape.num_layers) ** 0.5
            rows = weight[: plan.vocab_size] if "embedding" in key or "output_layer" in key else weight
            assert float(rows.std()) == pytest.approx(spread, rel=0.02), key
    dropout = cited.get("model.model_config.attn_out_dropout_prob", 0)
    assert {layer.output_dropout for layer in unwrap_encoder(engine).decoder.layers} == {dropout}
    assert all(spec.dropout == of_modernbert for spec in engine._micro_batch_specs(1))
