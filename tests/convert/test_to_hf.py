"""Exports: the same logits as the megatron-core model, the mask they promise, and no folder where something is wrong."""

import json
import shutil

import pytest
import runs
import torch
from transformers import AutoTokenizer, EuroBertForMaskedLM, LlamaForCausalLM
from whole_models import core_to_hf, hf_to_core, load_weights

from megaenc import backend
from megaenc.convert.command import main
from megaenc.convert.run_checkpoint import open_run_checkpoint
from megaenc.objectives import Attention

pytestmark = pytest.mark.multiprocess

EXPORTED = (Attention.CAUSAL, Attention.BIDIRECTIONAL)  # transformers has no model that reads a prefix


@pytest.fixture(scope="module")
def trained_run(small_corpus, tmp_path_factory):
    """Twenty float32 steps at TP2 x PP2."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder)]
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, [*flags, *layout], processes=4)
    return folder


@pytest.fixture(scope="module")
def exports(trained_run, tmp_path_factory):
    """By attention: the model as transformers loads it, and its folder."""
    folder = tmp_path_factory.mktemp("hf")
    loaded = {}
    for attention, name, kind in (
        (Attention.BIDIRECTIONAL, "eurobert", EuroBertForMaskedLM),
        (Attention.CAUSAL, "llama", LlamaForCausalLM),
    ):
        output = folder / name
        main(["to-hf", "--load", str(trained_run), "--output", str(output), "--as", name])
        model, report = kind.from_pretrained(output, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        loaded[attention] = (model.eval(), output)
    return loaded


def core_logits(run, tokens, attention):
    """Logits [T, vocabulary] of the megatron-core model on one document."""
    backend.init_distributed(backend.ParallelConfig(), seed=0)
    try:
        from megaenc.model.encoder import build_encoder
        from megaenc.model.packed_sequences import PackedSequences
        from megaenc.training.checkpoint.loader import CheckpointLoader, load_model_weights

        saved = open_run_checkpoint(run)
        encoder = build_encoder(saved.model, saved.vocab_size, saved.seq_length, backend.ParallelConfig(), saved.dtype, seed=None)
        load_model_weights(CheckpointLoader(run / "checkpoints"), 20, encoder)
        packing = PackedSequences.from_edges([0, len(tokens)], attention, torch.device("cpu"))
        with torch.no_grad():
            return encoder(tokens[None], torch.arange(len(tokens)), packing, None)[:, : saved.vocab_size]
    finally:
        backend.destroy_distributed()


@pytest.mark.parametrize("attention", EXPORTED)
def test_logits_are_those_of_the_megatron_core_model(attention, trained_run, exports):
    model, _ = exports[attention]
    tokens = torch.arange(2, 62)
    with torch.no_grad():
        found = model(tokens[None]).logits[0]
    expected = core_logits(trained_run, tokens, attention)
    assert found.shape == expected.shape
    assert expected.std() > 0.1, "the model learnt nothing: equal logits would say little"
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("attention", EXPORTED)
def test_export_sees_what_its_mask_allows(attention, exports):
    model, _ = exports[attention]
    tokens = torch.arange(2, 26)
    with torch.no_grad():
        before = model(tokens[None]).logits[0]
        for changed in range(len(tokens)):
            other = tokens.clone()
            other[changed] = 300
            moved = (model(other[None]).logits[0] != before).any(dim=1)
            assert moved[changed:].all()
            assert moved[:changed].all() if attention == Attention.BIDIRECTIONAL else not moved[:changed].any()


def test_folder_holds_safetensors_and_the_tokenizer(exports, small_corpus):
    _, folder = exports[Attention.BIDIRECTIONAL]
    config = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {file.name for file in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not list(folder.glob("*.bin"))
    assert config["vocab_size"] == len(tokenizer) == 400, "vocabulary padding is not exported"
    assert (config["mask_token_id"], config["eos_token_id"]) == (tokenizer.mask_token_id, tokenizer.eos_token_id)
    text = "stan plark"
    plain = AutoTokenizer.from_pretrained(small_corpus.tokenizer)(text)["input_ids"]
    assert tokenizer(text)["input_ids"] == [*plain, tokenizer.eos_token_id], "a document as it was trained"
    assert tokenizer(text, text)["input_ids"] == [*plain, tokenizer.eos_token_id] * 2
    assert tokenizer("")["input_ids"] == [tokenizer.eos_token_id]


def test_mapping_is_read_in_both_directions(trained_run):
    run = open_run_checkpoint(trained_run)
    _, state = load_weights(run, None)
    back = hf_to_core(core_to_hf(state, run.model, run.vocab_size), run.model)
    assert back.keys() == state.keys()
    for name, tensor in back.items():
        assert torch.equal(tensor, state[name][: len(tensor)]), name


def test_wrong_input_is_one_line_and_leaves_no_folder(trained_run, tmp_path, refusal):
    damaged = shutil.copytree(trained_run, tmp_path / "damaged")
    sorted((damaged / "checkpoints" / "iter_0000020").glob("*.distcp"))[0].unlink()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for load, output, complaint in (
        (tmp_path / "nothing", tmp_path / "out", "no config.yaml there"),
        (damaged, tmp_path / "out", "the checkpoint is incomplete"),
        (trained_run, tmp_path / "taken", "exists already"),
    ):
        assert complaint in refusal(main, ["to-hf", "--load", load, "--output", output])
        assert not (tmp_path / "out").exists()
