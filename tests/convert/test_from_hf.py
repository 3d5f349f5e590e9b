"""Imported Hugging Face models: equal weights, a mask token, errors of one line."""

import shutil
from pathlib import Path

import hf_models
import hostile_directories
import plain_loop
import pytest
import runs
import torch
import yaml
from safetensors.torch import save_file
from small_data import read_json, write_file
from whole_models import core_to_hf, load_weights

from megaenc.convert.command import main
from megaenc.convert.run_checkpoint import open_run_checkpoint
from megaenc.convert.verify_export import ProbeBatch, compute_core_outputs
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.objectives import Attention
from megaenc.training.command import main as pretrain
from megaenc.training.run_dir import TOKENIZER_DIR


def held(core):
    """Return the weights of the checkpoint of step 0 under Hugging Face's names."""
    run = open_run_checkpoint(core)
    return core_to_hf(load_weights(run, 0)[1], run.model, run.vocab_size, run.origin.family)


def assert_same(found, expected):
    zeros = {name for name in expected if name.endswith("o_proj.bias")}
    assert found.keys() == expected.keys() - zeros
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


@pytest.fixture
def llama(came_in):
    """Return an untied Llama with spare rows of the vocabulary. Not to be changed."""
    return came_in("llama with stretched positions", tie_word_embeddings=False)[0]


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_a_run_directory_says_what_came_in(name, came_in):
    directory, core = came_in(name)
    facts = read_json(core / "run.json")
    sizes = {name: tensor.numel() for name, tensor in hf_models.weights(directory).items()}
    assert facts["parameters"] == sum(
        size for name, size in sizes.items() if not name.endswith("o_proj.bias")
    )
    source = facts["source"]
    assert (
        source["family"] == hf_models.MODELS[name]["model_type"]
        and "model.safetensors" in source["files"]
    )
    assert (source["mask_token"]["token"], source["mask_token"]["origin"]) == ("<|mask|>", "own")
    kept = yaml.safe_load((core / "config.yaml").read_text())
    assert kept["seq_length"] == 512 and kept["objective_schedule"] == (
        "mlm" if name in hf_models.BIDIRECTIONAL else "clm"
    )


def by_transformers(directory, attention):
    """Return transformers' own model of a directory, with the mask of `attention`."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        EuroBertForMaskedLM,
        LlamaForCausalLM,
    )

    config = AutoConfig.from_pretrained(directory)
    causal = attention == Attention.CAUSAL
    if config.model_type in ("modernbert", "modernbert-decoder", "neobert"):
        is_encoder = config.model_type in hf_models.ENCODERS
        kind = AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM
        model, report = kind.from_pretrained(directory, output_loading_info=True)
        if causal == is_encoder:  # it has no such mask of its own
            masks = plain_loop.attention_masks
            return lambda tokens: model(
                tokens, attention_mask=masks(config, [0, tokens.size(1)], attention, None)
            )
    elif config.model_type == "eurobert":  # Llama's class computes the same layers, and causally
        model, report = (LlamaForCausalLM if causal else EuroBertForMaskedLM).from_pretrained(
            directory, output_loading_info=True
        )
    else:
        if config.model_type == "gemma3_text":
            config.use_bidirectional_attention = not causal
        elif not causal:
            config.is_causal = False
        model, report = AutoModelForCausalLM.from_pretrained(
            directory, config=config, output_loading_info=True
        )
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("attention", [Attention.CAUSAL, Attention.BIDIRECTIONAL])
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_logits_are_those_of_transformers(name, attention, came_in):
    """megatron-core reads the documents as one pack, transformers one at a time."""
    directory, core = came_in(name)
    documents = tuple(
        (torch.arange(length) * 7919 + length) % 400 for length in (300, 120, 50, 7, 1)
    )
    with open_run_checkpoint(core).load_encoder(0, length=300) as (_, encoder):
        packed = compute_core_outputs(
            encoder, ProbeBatch(documents, documents[-1][None]), attention
        )
    model = by_transformers(directory, attention)
    with torch.no_grad():
        expected = [model(document[None]).logits[0] for document in documents]
        cut = model(documents[0][None, :-1]).logits[0]
    sees_the_last = (cut - expected[0][:-1]).abs().amax(dim=1) > 1e-4
    assert sees_the_last.any() == (attention == Attention.BIDIRECTIONAL), (
        "the reference reads in another way"
    )
    for found, wanted in zip(packed.documents, expected, strict=True):
        assert wanted.std() > 0.5
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_shards_and_a_base_model_hold_the_same(llama, small_corpus):
    from transformers import AutoModel, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama)
    shards = hf_models.write(model, "shards", small_corpus.tokenizer, max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    expected = hf_models.weights(llama)
    assert_same(held(hf_models.from_hf(shards, "core")), expected)

    base = hf_models.write(AutoModel.from_pretrained(llama), "base", small_corpus.tokenizer)
    assert "norm.weight" in hf_models.weights(base)
    del expected["lm_head.weight"]
    assert_same(held(hf_models.from_hf(base, "tied", "--tie-word-embeddings")), expected)


@pytest.mark.parametrize(
    ("stored", "flags", "expected"),
    [
        (torch.bfloat16, [], torch.bfloat16),
        (torch.float16, [], torch.float32),
        (torch.float32, ["--dtype", "bf16"], torch.bfloat16),
    ],
)
def test_dtype_is_that_of_the_weights_unless_asked(stored, flags, expected, llama):
    directory = shutil.copytree(llama, Path("hf"))
    weights = {name: tensor.to(stored) for name, tensor in hf_models.weights(llama).items()}
    save_file(weights, directory / "model.safetensors")
    found = held(hf_models.from_hf(directory, "core", *flags))
    assert {tensor.dtype for tensor in found.values()} == {expected}
    assert_same(found, weights)


def test_code_of_released_weights_is_not_run(llama):
    directory = shutil.copytree(llama, Path("hf"))
    hostile_directories.edit(
        model_type="sl_model", auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    )(directory)
    (directory / "code.py").write_text("raise SystemExit('run')")
    assert_same(held(hf_models.from_hf(directory, "core")), hf_models.weights(llama))


def rename_mask(directory, output, new):
    """Copy `directory`, with another name and no role for its mask token."""
    shutil.copytree(directory, output)
    tokenizer = read_json(output / "tokenizer.json")
    config = read_json(output / "tokenizer_config.json")
    tokenizer["added_tokens"][1] |= {"content": new, "lstrip": False}
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[new] = vocabulary.pop("<|mask|>")
    write_file(output / "tokenizer.json", tokenizer)
    write_file(output / "tokenizer_config.json", config | {"mask_token": None})
    return output


@pytest.mark.parametrize(
    "name", ["<|reserved_special_token_7|>", "[control_8]", "<unused1>", "[MASK]"]
)
def test_a_reserved_token_becomes_the_mask(name, llama):
    core = hf_models.from_hf(rename_mask(llama, Path("hf"), name), "core")
    tokenizer = load_tokenizer(core / TOKENIZER_DIR)
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == (name, 1)
    assert read_json(core / "run.json")["source"]["mask_token"]["origin"] == "reserved"
    assert tokenizer(f"stan {name} plark")["input_ids"].count(1) == 1
    assert len(tokenizer(f"stan {name}")["input_ids"]) == len(tokenizer("stan")["input_ids"]) + 1, (
        "it takes the space before it"
    )


@pytest.mark.parametrize("rows", [400, 410])
def test_an_added_token_has_the_mean_of_the_others(rows, small_corpus, refusal):
    """It takes the first spare row of the vocabulary, or a new one."""
    model = hf_models.build("qwen3", vocab_size=rows)
    directory = hf_models.write(model, "plain", small_corpus.tokenizer)
    directory = rename_mask(directory, Path("hf"), "<|fim_pad|>")
    assert "give --add-mask-token" in refusal(
        main, ["from-hf", "--input", directory, "--output", "core"]
    )
    core = hf_models.from_hf(directory, "core", "--add-mask-token")
    card = hf_models.to_hf(core, "out") / "README.md"
    assert (
        "The row of its mask token, `<|mask|>`, was added: the mean of the others."
        in card.read_text()
    )
    assert (
        load_tokenizer(core / TOKENIZER_DIR).mask_token_id == 400
        and open_run_checkpoint(core).added_token == "<|mask|>"
    )
    assert open_run_checkpoint(core).vocab_size == max(rows, 401)
    found = held(core)
    given = hf_models.weights(directory)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(found[name][400], given[name][:400].mean(dim=0))
        for tensors in (found, given):
            tensors[name] = torch.cat([tensors[name][:400], tensors[name][401:]])
    assert_same(found, given)


def test_where_it_was_called_is_of_no_account(llama, tmp_path, monkeypatch):
    """The tokenizer is found from any directory, and `--input .` has a name."""
    core = tmp_path / "core"
    monkeypatch.chdir(shutil.copytree(llama, "a-llama"))
    hf_models.from_hf(".", "../core")
    monkeypatch.chdir("/")
    assert open_run_checkpoint(core).settings.data.tokenizer == str(core / TOKENIZER_DIR)
    hf_models.to_hf(core, tmp_path / "all", "--all")
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["a-llama"]


def test_a_reserved_token_whose_row_nothing_trained_has_the_mean_of_the_others(llama):
    """Rows of Llama 3's reserved tokens are almost zero; RMSNorm would enlarge them."""
    directory = rename_mask(llama, Path("hf"), "<|reserved_special_token_7|>")
    matrices = ("lm_head.weight", "model.embed_tokens.weight")
    given = hf_models.weights(directory)
    for name in matrices:
        given[name][[1, 5]] *= 1e-6  # the one that becomes the mask token, and another
    save_file(given, directory / "model.safetensors")
    core = hf_models.from_hf(directory, "core")
    source = read_json(core / "run.json")["source"]
    assert source["mask_token"] == {
        "token": "<|reserved_special_token_7|>",
        "id": 1,
        "origin": "untrained",
    }
    found = held(core)
    others = [0, *range(2, 400)]  # ids of the tokenizer; rows beyond are spare
    for name in matrices:
        torch.testing.assert_close(found[name][1], given[name][others].mean(dim=0))
        found[name][1] = given[name][1]
    assert_same(found, given)


def test_a_run_that_does_not_fit_is_one_line(llama, small_corpus, refusal):
    core = hf_models.from_hf(llama, "core")
    begin = [
        "--config",
        core / "config.yaml",
        *small_corpus.flags,
        *runs.STANDSTILL,
        "--save",
        "run",
    ]
    init = ["--init-from", core]
    branch = ["--branch-from", core, "--branch-at", "0"]
    for flags, words in (
        (branch, "holds converted weights without optimizer state; expected --init-from"),
        (
            [*init, "--num-layers", "4"],
            "num_layers is 2 there, 4 here; its weights fit no other value",
        ),
        ([*init, "--vocab-size", "420"], "vocab_size is 410 there, 420 here"),
        (
            [*init, "--vocab-size", "300"],
            "--vocab-size: found 300, expected at least the 400 ids of --tokenizer",
        ),
        (
            [*init, "--skip-samples", "parent"],
            "its samples are numbered differently; give --skip-samples a number",
        ),
    ):
        assert words in refusal(pretrain, [*begin, *flags])
        assert not Path("run").exists()


def edit_weights(change):
    def edit(directory):
        tensors = hf_models.weights(directory)
        change(tensors)
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
            directory / "model.safetensors",
        )

    return edit


def without_tokenizer(directory):
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()


def small_vocabulary(directory):
    hostile_directories.edit(vocab_size=390)(directory)
    edit_weights(
        lambda t: t.update(
            {name: t[name][:390] for name in ("lm_head.weight", "model.embed_tokens.weight")}
        )
    )(directory)


NORM = "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
MORE = "model.layers.2.mlp.down_proj.weight"
BAD = {
    "another family": (
        hostile_directories.edit(model_type="gemma"),
        "found 'gemma', expected one of eurobert, llama, mistral",
    ),
    "no config": (
        lambda directory: (directory / "config.json").unlink(),
        "config.json: No such file or directory; expected",
    ),
    "no weights": (
        lambda directory: (directory / "model.safetensors").unlink(),
        "no model.safetensors and no model.safetensors.index",
    ),
    "not in its shard": (
        hostile_directories.index("model-1.safetensors", MORE),
        f"no tensor `{MORE}`, which",
    ),
    "missing tensor": (
        edit_weights(lambda t: t.pop(DOWN)),
        f"no tensor `{DOWN}`, expected one of shape [64, 160]",
    ),
    "unexpected tensor": (
        edit_weights(lambda t: t.update({MORE: t[DOWN]})),
        f"tensor `{MORE}`: found a weight that the model",
    ),
    "another shape": (
        edit_weights(lambda t: t.update({DOWN: t[DOWN].T})),
        f"`{DOWN}`: found shape [160, 64], expected",
    ),
    "unknown dtype": (
        edit_weights(lambda t: t.update({NORM: t[NORM].double()})),
        f"`{NORM}`: found dtype F64, expected one of",
    ),
    "no output layer": (
        edit_weights(lambda t: t.pop("lm_head.weight")),
        "saved without its output layer, which training needs",
    ),
    "tied in name": (
        hostile_directories.edit(tie_word_embeddings=True),
        "`tie_word_embeddings`: found true, but `lm_head.weight`",
    ),
    "a small vocabulary": (
        small_vocabulary,
        "`vocab_size`: found 390, expected at least the tokenizer's 400 ids",
    ),
    "no tokenizer": (without_tokenizer, "holds no tokenizer.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_no_directory(case, llama, refusal):
    change, words = BAD[case]
    directory = shutil.copytree(llama, Path("hf"))
    change(directory)
    line = refusal(main, ["from-hf", "--input", directory, "--output", "out/core"])
    assert words in line, line
    assert not Path("out").exists()


def test_what_does_not_fit_the_weights_is_one_line(llama, small_corpus, refusal):
    model = hf_models.build("qwen3 with biases and YaRN")
    torch.nn.init.ones_(model.model.layers[1].self_attn.o_proj.bias)
    biased = hf_models.write(model, "hf", small_corpus.tokenizer)
    for directory, flags, words in (
        (
            biased,
            [],
            "`model.layers.1.self_attn.o_proj.bias`: found a bias of attention's output, "
            "expected none or zeros",
        ),
        (llama, ["--add-mask-token"], "the tokenizer has a mask token, <|mask|>"),
        (llama, ["--tie-word-embeddings"], "holds an output layer, `lm_head.weight`"),
    ):
        assert words in refusal(main, ["from-hf", "--input", directory, "--output", "core", *flags])
        assert not Path("core").exists()
