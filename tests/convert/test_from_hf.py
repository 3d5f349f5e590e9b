"""Hugging Face models become what runs start from: every weight as it was, a mask token, one line where something is wrong."""

import json
import shutil

import hf_models
import plain_loop
import pytest
import runs
import torch
import yaml
from safetensors.torch import save_file
from whole_models import core_to_hf, load_weights

from megaenc.convert.command import main
from megaenc.convert.run_checkpoint import open_run_checkpoint
from megaenc.convert.verify_export import ProbeBatch, compute_core_outputs
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.objectives import Attention
from megaenc.training.command import main as pretrain
from megaenc.training.run_dir import TOKENIZER_DIR


def convert(folder, output, *flags):
    main(["from-hf", "--input", str(folder), "--output", str(output), *flags])
    return output


def held(core):
    """The weights of the checkpoint of step 0 under Hugging Face's names."""
    run = open_run_checkpoint(core)
    return core_to_hf(load_weights(run, 0)[1], run.model, run.vocab_size, run.origin.family)


def assert_same(found, expected):
    zeros = {name for name in expected if name.endswith("o_proj.bias")}
    assert found.keys() == expected.keys() - zeros
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


@pytest.fixture(scope="module")
def llama(small_corpus, tmp_path_factory):
    """An untied Llama with spare rows of the vocabulary. Not to be changed."""
    model = hf_models.build("llama with stretched positions", vocab_size=410, tie_word_embeddings=False)
    return hf_models.write(model, tmp_path_factory.mktemp("hf") / "llama", small_corpus.tokenizer)


@pytest.fixture(scope="module")
def came_in(small_corpus, tmp_path_factory):
    """By name: a Hugging Face folder and the run folder made of it. Not to be changed."""
    folder, found = tmp_path_factory.mktemp("came in"), {}
    for name in hf_models.MODELS:
        hf = hf_models.write(hf_models.build(name), folder / name / "hf", small_corpus.tokenizer)
        found[name] = hf, convert(hf, folder / name / "core")
    return found


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_every_weight_is_there_as_it_was(name, came_in):
    folder, core = came_in[name]
    given, family = hf_models.weights(folder), hf_models.MODELS[name]["model_type"]
    assert_same(held(core), given)
    facts = json.loads((core / "run.json").read_text())
    assert facts["parameters"] == sum(tensor.numel() for n, tensor in given.items() if not n.endswith("o_proj.bias"))
    assert facts["source"]["family"] == family and "model.safetensors" in facts["source"]["files"]
    assert facts["source"]["mask_token"] == {"token": "<|mask|>", "id": 1, "origin": "own"}
    kept = yaml.safe_load((core / "config.yaml").read_text())
    assert kept["seq_length"] == 512 and kept["objective_schedule"] == ("mlm" if name in hf_models.BIDIRECTIONAL else "clm")


def by_transformers(folder, attention):
    """transformers' own model of a folder, made to read under `attention`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, EuroBertForMaskedLM, LlamaForCausalLM

    config, causal = AutoConfig.from_pretrained(folder), attention == Attention.CAUSAL
    if config.model_type in ("modernbert", "modernbert-decoder", "neobert"):
        is_encoder = config.model_type in hf_models.ENCODERS
        kind = AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM
        model, report = kind.from_pretrained(folder, output_loading_info=True)
        if causal == is_encoder:  # it has no such mask of its own
            masks = plain_loop.attention_masks
            return lambda tokens: model(tokens, attention_mask=masks(config, [0, tokens.size(1)], attention, None))
    elif config.model_type == "eurobert":  # Llama's class computes the same layers, and causally
        model, report = (LlamaForCausalLM if causal else EuroBertForMaskedLM).from_pretrained(folder, output_loading_info=True)
    else:
        if config.model_type == "gemma3_text":
            config.use_bidirectional_attention = not causal
        elif not causal:
            config.is_causal = False
        model, report = AutoModelForCausalLM.from_pretrained(folder, config=config, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("attention", [Attention.CAUSAL, Attention.BIDIRECTIONAL])
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_logits_are_those_of_transformers(name, attention, came_in):
    """megatron-core reads documents of several lengths as one pack, transformers each alone."""
    folder, core = came_in[name]
    documents = tuple((torch.arange(length) * 7919 + length) % 400 for length in (300, 120, 50, 7, 1))
    with open_run_checkpoint(core).load_encoder(0, length=300) as (_, encoder):
        packed = compute_core_outputs(encoder, ProbeBatch(documents, documents[-1][None]), attention)
    model = by_transformers(folder, attention)
    with torch.no_grad():
        expected = [model(document[None]).logits[0] for document in documents]
        cut = model(documents[0][None, :-1]).logits[0]
    sees_the_last = (cut - expected[0][:-1]).abs().amax(dim=1) > 1e-4
    assert sees_the_last.any() == (attention == Attention.BIDIRECTIONAL), "the reference reads in another way"
    for found, wanted in zip(packed.documents, expected, strict=True):
        assert wanted.std() > 0.5
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_shards_and_a_base_model_hold_the_same(llama, small_corpus, tmp_path):
    from transformers import AutoModel, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama)
    shards = hf_models.write(model, tmp_path / "shards", small_corpus.tokenizer, max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert_same(held(convert(shards, tmp_path / "core")), hf_models.weights(llama))

    base = hf_models.write(AutoModel.from_pretrained(llama), tmp_path / "base", small_corpus.tokenizer)
    assert "norm.weight" in hf_models.weights(base)
    core = convert(base, tmp_path / "tied", "--tie-word-embeddings")
    expected = hf_models.weights(llama)
    del expected["lm_head.weight"]
    assert_same(held(core), expected)
    assert open_run_checkpoint(core).settings.shape.untie_embeddings_and_output_weights is False


def test_dtype_is_that_of_the_weights_unless_asked(llama, small_corpus, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama)
    for stored, flags, expected in (
        (torch.bfloat16, [], torch.bfloat16),
        (torch.float16, [], torch.float32),
        (torch.float32, ["--dtype", "bf16"], torch.bfloat16),
    ):
        folder = hf_models.write(model.to(stored), tmp_path / f"{stored}", small_corpus.tokenizer)
        found = held(convert(folder, tmp_path / f"core {stored}", *flags))
        assert {tensor.dtype for tensor in found.values()} == {expected}
        assert_same(found, hf_models.weights(folder))


def test_released_weights_of_the_study_are_read_by_name(llama, small_corpus, tmp_path):
    """A type that transformers does not know and code of its own, which is not run."""
    folder = shutil.copytree(llama, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "sl_model", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('run')")
    assert_same(held(convert(folder, tmp_path / "core")), hf_models.weights(llama))


def with_tokenizer(folder, output, change):
    """A copy of `folder` whose tokenizer.json and tokenizer_config.json `change` has been at."""
    shutil.copytree(folder, output)
    values = [json.loads((output / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")]
    change(*values)
    for name, content in zip(("tokenizer.json", "tokenizer_config.json"), values, strict=True):
        (output / name).write_text(json.dumps(content))
    return output


def rename_mask(new):
    """The token in the mask token's place gets another name and no role."""

    def change(tokenizer, config):
        tokenizer["added_tokens"][1] |= {"content": new, "lstrip": False}
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary[new] = vocabulary.pop("<|mask|>")
        config["mask_token"] = None

    return change


@pytest.mark.parametrize("name", ["<|reserved_special_token_7|>", "[control_8]", "<unused1>", "[MASK]"])
def test_a_reserved_token_becomes_the_mask(name, llama, tmp_path):
    core = convert(with_tokenizer(llama, tmp_path / "hf", rename_mask(name)), tmp_path / "core")
    tokenizer = load_tokenizer(core / TOKENIZER_DIR)
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == (name, 1)
    assert json.loads((core / "run.json").read_text())["source"]["mask_token"]["origin"] == "reserved"
    assert tokenizer(f"stan {name} plark")["input_ids"].count(1) == 1
    assert len(tokenizer(f"stan {name}")["input_ids"]) == len(tokenizer("stan")["input_ids"]) + 1, "it takes the space before it"
    assert_same(held(core), hf_models.weights(llama))


@pytest.mark.parametrize("rows", [400, 410])
def test_an_added_token_has_the_mean_of_the_others(rows, small_corpus, tmp_path, refusal):
    """Where the model has spare rows the first of them is its own; otherwise there is one more."""
    model = hf_models.build("qwen3", vocab_size=rows)
    folder = hf_models.write(model, tmp_path / "plain", small_corpus.tokenizer)
    folder = with_tokenizer(folder, tmp_path / "hf", rename_mask("<|fim_pad|>"))
    assert "give --add-mask-token" in refusal(main, ["from-hf", "--input", folder, "--output", tmp_path / "core"])
    core = convert(folder, tmp_path / "core", "--add-mask-token")
    assert load_tokenizer(core / TOKENIZER_DIR).mask_token_id == 400 and open_run_checkpoint(core).added_token == "<|mask|>"
    assert open_run_checkpoint(core).vocab_size == max(rows, 401)
    found, given = held(core), hf_models.weights(folder)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(found[name][400], given[name][:400].mean(dim=0))
        found[name], given[name] = (torch.cat([matrix[:400], matrix[401:]]) for matrix in (found[name], given[name]))
    assert_same(found, given)


def test_where_it_was_called_is_of_no_account(llama, tmp_path, monkeypatch):
    """The tokenizer is found from any folder, and `--input .` has a name."""
    folder = shutil.copytree(llama, tmp_path / "a-llama")
    monkeypatch.chdir(folder)
    core = tmp_path / "core"
    main(["from-hf", "--input", ".", "--output", "../core"])
    monkeypatch.chdir("/")
    settings = open_run_checkpoint(core).settings
    assert settings.data.tokenizer == str(core / TOKENIZER_DIR) and load_tokenizer(settings.data.tokenizer).mask_token_id == 1
    main(["to-hf", "--load", str(core), "--output", str(tmp_path / "all"), "--all"])
    [name] = (path.name for path in (tmp_path / "all").iterdir())
    assert name == "a-llama"
    assert "Its weights are those of `a-llama`," in (tmp_path / "all" / name / "README.md").read_text()


def nearly_nothing(tensors):
    """The rows of two tokens, among them the one that becomes the mask token, are as no training touched them."""
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name][[1, 5]] *= 1e-6


def test_a_reserved_token_whose_row_nothing_trained_has_the_mean_of_the_others(llama, tmp_path):
    """As in Llama 3, whose reserved tokens have next to nothing for a row: RMSNorm would make it as large as any other."""
    folder = with_tokenizer(llama, tmp_path / "hf", rename_mask("<|reserved_special_token_7|>"))
    edit_weights(nearly_nothing)(folder)
    core = convert(folder, tmp_path / "core")
    source = json.loads((core / "run.json").read_text())["source"]
    assert source["mask_token"] == {"token": "<|reserved_special_token_7|>", "id": 1, "origin": "untrained"}
    found, given = held(core), hf_models.weights(folder)
    others = [0, *range(2, 400)]  # ids of the tokenizer; rows beyond are spare
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(found[name][1], given[name][others].mean(dim=0))
        found[name][1] = given[name][1]
    assert_same(found, given)


def test_it_can_go_out_again(llama, tmp_path):
    core = convert(llama, tmp_path / "core")
    main(["to-hf", "--load", str(core), "--output", str(tmp_path / "hf"), "--as", "llama"])
    found = hf_models.weights(tmp_path / "hf")
    assert_same(found, hf_models.weights(llama))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["rope_parameters"] == hf_models.LLAMA3
    assert "Its weights are those of `llama`, a Hugging Face model of type llama." in (tmp_path / "hf" / "README.md").read_text()


def test_a_run_that_does_not_fit_is_one_line(llama, small_corpus, tmp_path, refusal):
    core = convert(llama, tmp_path / "core")
    begin = ["--config", core / "config.yaml", *small_corpus.flags, *runs.STANDSTILL, "--save", tmp_path / "run"]
    init, branch = ["--init-from", core], ["--branch-from", core, "--branch-at", "0"]
    for flags, words in (
        (branch, "holds converted weights without optimizer state; expected --init-from"),
        ([*init, "--num-layers", "4"], "num_layers is 2 there, 4 here; its weights fit no other value"),
        ([*init, "--vocab-size", "420"], "vocab_size is 410 there, 420 here"),
        ([*init, "--vocab-size", "400"], "vocab_size is 410 there, not given here"),
        ([*init, "--vocab-size", "300"], "--vocab-size: found 300, expected at least the 400 ids of --tokenizer"),
        ([*init, "--no-untie-embeddings-and-output-weights"], "untie_embeddings_and_output_weights is True there, False here"),
        ([*init, "--skip-samples", "parent"], "its samples are numbered differently; give --skip-samples a number"),
    ):
        assert words in refusal(pretrain, [*begin, *flags])
        assert not (tmp_path / "run").exists()


def edit_config(**values):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return edit


def edit_weights(change):
    def edit(folder):
        tensors = hf_models.weights(folder)
        change(tensors)
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")

    return edit


def as_shards(index):
    def edit(folder):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return edit


def as_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


NORM, DOWN, FIRST = "model.norm.weight", "model.layers.1.mlp.down_proj.weight", "model-00001-of-00002.safetensors"
BAD = {
    "another family": (edit_config(model_type="gemma"), "found 'gemma', expected one of eurobert, llama, mistral, qwen2, qwen3"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: No such file or directory; expected"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: not JSON"),
    "config without an end": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json: not JSON"),
    "sliding window": (
        edit_config(model_type="mistral", sliding_window=256, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "`sliding_window`: found 256, expected none or at least the 512 tokens",
    ),
    "pickled weights": (as_pickle, "pytorch_model.bin: a pickle, which could run any code when loaded"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors and no model.safetensors.index"),
    "cut off": (cut_off, "model.safetensors: not a complete safetensors file"),
    "missing shard": (as_shards({"weight_map": {NORM: "model-00002-of-00002.safetensors"}}), "00002.safetensors: missing, and"),
    "shard elsewhere": (
        as_shards({"weight_map": {NORM: "../model.safetensors"}}),
        "expected the name of a file in the same folder",
    ),
    "not in its shard": (as_shards({"weight_map": {"model.more.weight": FIRST}}), "no tensor `model.more.weight`, which"),
    "no weight map": (as_shards({}), "found no `weight_map`"),
    "missing tensor": (edit_weights(lambda t: t.pop(DOWN)), f"no tensor `{DOWN}`, expected one of shape [64, 160]"),
    "unexpected tensor": (
        edit_weights(lambda t: t.update({"model.layers.2.mlp.down_proj.weight": t[DOWN]})),
        "tensor `model.layers.2.mlp.down_proj.weight`: found a weight that the model of config.json does not have",
    ),
    "another shape": (
        edit_weights(lambda t: t.update({DOWN: t[DOWN].T})),
        f"`{DOWN}`: found shape [160, 64], expected [64, 160]",
    ),
    "unknown dtype": (
        edit_weights(lambda t: t.update({NORM: t[NORM].double()})),
        f"`{NORM}`: found dtype F64, expected one of F32",
    ),
    "no output layer": (
        edit_weights(lambda t: t.pop("lm_head.weight")),
        "saved without its output layer, which training needs; give",
    ),
    "tied in name": (edit_config(tie_word_embeddings=True), "`tie_word_embeddings`: found true, but `lm_head.weight` is not"),
    "a small vocabulary": (
        lambda folder: (
            edit_config(vocab_size=390)(folder),
            edit_weights(lambda t: t.update({n: t[n][:390] for n in ("lm_head.weight", "model.embed_tokens.weight")}))(folder),
        ),
        "`vocab_size`: found 390, expected at least the tokenizer's 400 ids",
    ),
    "no tokenizer": (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "holds no tokenizer.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_no_folder(case, llama, tmp_path, refusal):
    change, words = BAD[case]
    folder = shutil.copytree(llama, tmp_path / "hf")
    change(folder)
    line = refusal(main, ["from-hf", "--input", folder, "--output", tmp_path / "out" / "core"])
    assert words in line, line
    assert not (tmp_path / "out").exists()


def test_a_bias_that_training_has_not_is_refused(small_corpus, tmp_path, refusal):
    model = hf_models.build("qwen3 with biases and YaRN")
    torch.nn.init.ones_(model.model.layers[1].self_attn.o_proj.bias)
    folder = hf_models.write(model, tmp_path / "hf", small_corpus.tokenizer)
    line = refusal(main, ["from-hf", "--input", folder, "--output", tmp_path / "core"])
    assert "`model.layers.1.self_attn.o_proj.bias`: found a bias of attention's output, expected none or zeros" in line


def test_flags_that_say_nothing_are_refused(llama, tmp_path, refusal):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for flags, words in (
        ([], "--input: missing"),
        (["--input", llama], "--output: missing"),
        (["--input", tmp_path / "none", "--output", tmp_path / "core"], "no such folder, expected one with config.json and"),
        (["--input", llama, "--output", tmp_path / "taken"], "exists already"),
        (["--input", llama, "--output", tmp_path / "core", "--add-mask-token"], "the tokenizer has a mask token, <|mask|>"),
        (["--input", llama, "--output", tmp_path / "core", "--tie-word-embeddings"], "holds an output layer, `lm_head.weight`"),
    ):
        assert words in refusal(main, ["from-hf", *flags])
    assert "did you mean from-hf?" in refusal(main, ["from-fh"])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
