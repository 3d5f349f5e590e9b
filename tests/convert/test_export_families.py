"""Every family goes out as it came in, bit by bit, from a run in any layout, and loads where nothing but transformers is."""

import json
import shutil
import sys

import hf_models
import hf_tokenizers
import plain_loop
import pytest
import runs
import torch
from safetensors.torch import load_file

from megaenc.convert.command import main
from megaenc.data.preprocess import command as preprocess
from megaenc.training.command import main as pretrain

CAME_IN = [name for name in hf_models.MODELS]
LAYOUTS = {"TP2": (2, 1), "PP2": (1, 2), "TP2 x PP2": (2, 2)}  # sizes of the tensor-parallel and the pipeline-parallel groups
TIED = {name: hf_models.MODELS[name].get("tie_word_embeddings", False) for name in CAME_IN}
BOTH_TIES = [(name, tied) for name in CAME_IN for tied in (False, True) if name != "neobert" or not tied]  # which has no tied one


@pytest.fixture(scope="module")
def cores(small_corpus, tmp_path_factory):
    """By name and whether the embedding is tied: the Hugging Face folder and the run folder made of it. Not to be changed."""
    folder, found = tmp_path_factory.mktemp("cores"), {}
    # Beside Qwen2's config.json transformers splits texts as Qwen2 does, whoever's the tokenizer is.
    qwen = hf_tokenizers.save(hf_tokenizers.qwen("<|mask|>"), folder / "tokenizer", mask_token="<|mask|>")
    for name, tied in BOTH_TIES:
        model = hf_models.build(name, vocab_size=410, **({} if tied == TIED[name] else {"tie_word_embeddings": tied}))
        work = folder / f"{name} {tied}"
        hf = hf_models.write(model, work / "hf", qwen if name == "qwen2" else small_corpus.tokenizer)
        main(["from-hf", "--input", str(hf), "--output", str(work / "core")])
        found[name, tied] = hf, work / "core"
    return found


@pytest.fixture(scope="module")
def begun(cores, small_corpus, tmp_path_factory):
    """By name, whether the embedding is tied, and layout: a run that began with what came in and changed nothing."""
    folder, found = tmp_path_factory.mktemp("begun"), {}
    text, tokenizer = small_corpus.text, cores["qwen2", True][1] / "tokenizer"
    corpus = ["--input", text, "--output-prefix", folder / "qwen", "--tokenizer", tokenizer]
    preprocess.main([*map(str, corpus), "--append-eod"])
    read = ["--data-path", folder / "qwen_text_document", "--split", "90,10,0"]
    for (name, tied), (_, core) in cores.items():
        for layout, (tensor, pipeline) in LAYOUTS.items():
            flags = ["--config", core / "config.yaml", "--init-from", core, *runs.STANDSTILL]
            flags += read if name == "qwen2" else small_corpus.flags
            flags += ["--tensor-model-parallel-size", tensor, "--pipeline-model-parallel-size", pipeline]
            save = folder / f"{name} {tied} {layout}"
            found[name, tied, layout] = runs.Job(save, [str(flag) for flag in flags], processes=tensor * pipeline)
    runs.in_turn(list(found.values()), folder, timeout=800)
    return {which: job.save for which, job in found.items()}


def out(core, folder, *flags):
    main(["to-hf", "--load", str(core), "--output", str(folder), *flags])
    return folder


def way_back(name):
    """The flags with which a model goes out as the family that it came in as."""
    family = hf_models.MODELS[name]["model_type"]
    return ["--as", family if family in hf_models.ONLY_CAUSAL else "source"]


def config(folder):
    return json.loads((folder / "config.json").read_text())


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("name", "tied"), BOTH_TIES)
def test_source_is_what_came_in(name, tied, cores, tmp_path):
    hf, core = cores[name, tied]
    written = out(core, tmp_path / "hf", *way_back(name))
    assert_same(hf_models.weights(written), hf_models.weights(hf))
    there, here = config(hf), config(written)
    if there["model_type"].startswith("modernbert"):
        layers = ("layer_types", "local_attention", "norm_bias", "decoder_bias", "hidden_activation", "classifier_activation")
    elif there["model_type"] == "neobert":
        there["max_position_embeddings"] = here["max_position_embeddings"] = there["max_length"]
        there["rope_parameters"] = here["rope_parameters"] = None
        layers = ("max_length", "intermediate_size", "norm_eps", "decoder_init_range")
    elif there["model_type"] == "gemma3_text":
        layers = ("head_dim", "layer_types", "query_pre_attn_scalar", "hidden_activation", "rms_norm_eps")
    else:
        there.setdefault("head_dim", there["hidden_size"] // there["num_attention_heads"])  # Qwen2's does not say it
        layers = ("head_dim",)
    same = ("model_type", "architectures", "rope_parameters", "tie_word_embeddings", "max_position_embeddings", *layers)
    for field in same:
        assert here[field] == there[field], field
    field = "use_bidirectional_attention" if there["model_type"] == "gemma3_text" else "is_causal"
    own = (*hf_models.ENCODERS, *hf_models.ONLY_CAUSAL)
    assert here.get(field) is (None if there["model_type"] in own else field != "is_causal")
    again = tmp_path / "again"
    main(["from-hf", "--input", str(written), "--output", str(again)])
    assert_same(hf_models.weights(out(again, tmp_path / "hf again", *way_back(name))), hf_models.weights(hf))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "tied"), BOTH_TIES)
def test_what_a_run_in_any_layout_saves_is_what_came_in(name, tied, layout, cores, begun, tmp_path):
    """No rank holds the whole model: its parts go out as one."""
    hf, _ = cores[name, tied]
    run = begun[name, tied, layout]
    tensor, pipeline = LAYOUTS[layout]
    ranks = {file.name.split("_")[2] for file in (run / "checkpoints" / "iter_0000001").glob("*.distcp")}
    assert len(ranks) == tensor * pipeline
    assert_same(hf_models.weights(out(run, tmp_path / "hf", *way_back(name))), hf_models.weights(hf))


@pytest.mark.parametrize("name", ["llama with stretched positions", "mistral", "qwen2"])
def test_a_decoder_goes_out_as_an_encoder_that_fills_masks(name, cores, tmp_path):
    from transformers import EuroBertForMaskedLM

    hf, core = cores[name, hf_models.MODELS[name].get("tie_word_embeddings", False)]
    written = out(core, tmp_path / "hf")
    model, report = EuroBertForMaskedLM.from_pretrained(written, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    given, zeros = hf_models.weights(hf), model.config.attention_bias
    found = hf_models.weights(written)
    assert {n for n in found if n not in given} == ({n for n in found if n.endswith("o_proj.bias")} if zeros else set())
    assert all(torch.equal(found[n], given[n]) for n in given)


@pytest.mark.parametrize(
    "name", ["eurobert", "llama with stretched positions", "mistral", "qwen2", "qwen3", "modernbert-decoder", "gemma3"]
)
def test_read_causally_it_is_the_decoder_that_came_in(name, cores, tmp_path):
    """The logits of transformers' own model, as which it came, and as which it goes out."""
    from transformers import AutoModelForCausalLM, EuroBertForMaskedLM

    hf, core = cores[name, hf_models.MODELS[name].get("tie_word_embeddings", False)]
    family = "llama" if name == "eurobert" else hf_models.MODELS[name]["model_type"]
    written = out(core, tmp_path / "hf", "--as", family)
    assert "is_causal" not in config(written) and config(written)["model_type"] == family
    tokens = torch.arange(60)[None] * 7 % 400
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(written)(tokens).logits
        if name == "eurobert":  # no decoder came in: the encoder itself, told not to look ahead
            encoder, ahead = EuroBertForMaskedLM.from_pretrained(hf), torch.full((1, 1, 60, 60), -1e30).triu(1)
            assert (encoder(tokens).logits - found).abs().max() > 0.1
            torch.testing.assert_close(found, encoder(tokens, attention_mask=ahead).logits, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found, AutoModelForCausalLM.from_pretrained(hf)(tokens).logits)


def test_a_modernbert_decoder_goes_out_as_modernbert_and_back(cores, tmp_path, refusal):
    """The same weights with other names and under another mask: the last is what transformers' encoder is told here."""
    from transformers import ModernBertDecoderForCausalLM, ModernBertForMaskedLM

    hf, core = cores["modernbert-decoder", True]
    written = out(core, tmp_path / "encoder")
    assert config(written)["architectures"] == ["ModernBertForMaskedLM"]
    assert (config(hf)["sliding_window"], config(written)["local_attention"]) == (17, 32), "16 tokens before each token in both"
    encoder, report = ModernBertForMaskedLM.from_pretrained(written, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(60)[None] * 7 % 400
    masks = plain_loop.attention_masks(encoder.config, [0, 60], "causal", None)
    with torch.no_grad():
        expected = ModernBertDecoderForCausalLM.from_pretrained(hf)(tokens).logits
        torch.testing.assert_close(encoder(tokens, attention_mask=masks).logits, expected, rtol=0, atol=1e-4)
        assert (encoder(tokens).logits - expected).abs().max() > 0.1
    main(["from-hf", "--input", str(written), "--output", str(tmp_path / "core")])
    again = out(tmp_path / "core", tmp_path / "decoder", *way_back("modernbert-decoder"))
    assert_same(hf_models.weights(again), hf_models.weights(hf))
    line = refusal(main, ["to-hf", "--load", core, "--output", tmp_path / "no", "--as", "source"])
    assert "--as modernbert-decoder: has no bidirectional attention; expected --as modernbert" in line


@pytest.mark.parametrize("stops", ["generation_config.json", "config.json"])
def test_a_decoder_stops_where_it_did(stops, small_corpus, tmp_path):
    """Also after a run: a chat model ends its turn at other tokens than a document."""
    from transformers import AutoModelForCausalLM

    model = hf_models.build("llama with stretched positions", eos_token_id=[0, 7, 9], bos_token_id=5)
    hf = hf_models.write(model, tmp_path / "hf", small_corpus.tokenizer)
    if stops == "config.json":
        (hf / "generation_config.json").unlink()
    else:
        values = {"eos_token_id": [0, 7, 9], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
        (hf / "generation_config.json").write_text(json.dumps(values))
    main(["from-hf", "--input", str(hf), "--output", str(tmp_path / "core")])
    flags = ["--config", tmp_path / "core" / "config.yaml", "--init-from", tmp_path / "core", *small_corpus.flags]
    pretrain([str(flag) for flag in (*flags, *runs.STANDSTILL, "--save", tmp_path / "run")])
    for run in ("core", "run"):
        written = out(tmp_path / run, tmp_path / f"{run} hf", "--as", "llama")
        found, expected = (AutoModelForCausalLM.from_pretrained(folder).generation_config for folder in (written, hf))
        for name in ("eos_token_id", "temperature", "top_p", "do_sample"):
            assert getattr(found, name) == getattr(expected, name), name
        assert found.eos_token_id == [0, 7, 9]
        assert (config(written)["eos_token_id"], config(written)["bos_token_id"]) == ([0, 7, 9], 5)
        assert not (out(tmp_path / run, tmp_path / f"{run} both ways") / "generation_config.json").exists()


def test_modernbert_keeps_its_pooling_and_special_ids(tmp_path, capfd):
    """ModernBERT's tokenizer has no tokens with the roles BOS and EOS, and its config.json has their ids."""
    tokenizer = hf_tokenizers.modernbert()
    saved = hf_tokenizers.save(tokenizer, tmp_path / "tokenizer")
    roles = {"bos": "[CLS]", "cls": "[CLS]", "eos": "[SEP]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    fields = {f"{role}_token_id": tokenizer[0].token_to_id(token) for role, token in roles.items()}
    fields["classifier_pooling"] = "cls"
    model = hf_models.build("modernbert", vocab_size=410, **fields)
    hf = hf_models.write(model, tmp_path / "hf", saved)
    main(["from-hf", "--input", str(hf), "--output", str(tmp_path / "core")])
    for flags in ([], ["--all"]):
        written = out(tmp_path / "core", tmp_path / f"out{len(flags)}", *flags)
        [file] = written.rglob("config.json")
        values = config(file.parent)
        assert {name: values[name] for name in fields} == {name: config(hf)[name] for name in fields} == fields
    assert "config.json" not in capfd.readouterr().out


def without_record(core, folder):
    """A copy of a converted model as versions wrote it that recorded no fields of config.json."""
    shutil.copytree(core, folder)
    facts = json.loads((folder / "run.json").read_text())
    for stage in facts["start"]["before"]:
        del stage["config_fields"]
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def test_a_run_keeps_what_came_in_and_names_what_changes(small_corpus, tmp_path, capfd):
    """Also a merge. A source without the record goes out with a mean and the ids of the tokenizer."""
    model = hf_models.build("eurobert", classifier_pooling="late", bos_token_id=5, mask_token_id=7)
    hf = hf_models.write(model, tmp_path / "hf", small_corpus.tokenizer)
    core, run, merged = tmp_path / "core", tmp_path / "run", tmp_path / "merged"
    main(["from-hf", "--input", str(hf), "--output", str(core)])
    flags = ["--config", core / "config.yaml", "--init-from", core, *small_corpus.flags, *runs.STANDSTILL, "--save", run]
    pretrain([str(flag) for flag in flags])
    old = without_record(core, tmp_path / "old")
    main(["merge", "--load", str(core), str(run), "--output", str(merged)])
    for load, fields, changes in (
        (run, ("late", 5, 1), ["config.json: mask_token_id 1 instead of the 7 that came in, as in the tokenizer"]),
        (merged, ("late", 5, 1), ["config.json: mask_token_id 1 instead of the 7 that came in, as in the tokenizer"]),
        (old, ("mean", None, 1), []),
    ):
        capfd.readouterr()
        values = config(out(load, tmp_path / f"{load.name} hf"))
        assert (values["classifier_pooling"], values["bos_token_id"], values["mask_token_id"]) == fields
        assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("config.json")] == changes


@pytest.mark.parametrize("values", ['{"eos_token_id": "end"}', '{"eos_token_id": [1, null]}', "[1]", "{"])
def test_what_says_no_way_to_write_text_is_one_line(values, cores, tmp_path, refusal):
    hf = shutil.copytree(cores["qwen3", False][0], tmp_path / "hf")
    (hf / "generation_config.json").write_text(values)
    assert "generation_config.json: " in refusal(main, ["from-hf", "--input", hf, "--output", tmp_path / "core"])
    assert not (tmp_path / "core").exists()


def test_the_default_for_what_eurobert_cannot_say_is_the_source(cores, tmp_path, refusal):
    _, core = cores["qwen3", False]
    assert config(out(core, tmp_path / "hf"))["model_type"] == "qwen3"
    line = refusal(main, ["to-hf", "--load", core, "--output", tmp_path / "no", "--as", "eurobert"])
    assert "--as eurobert: has no norms of queries and keys; expected --as qwen3" in line
    assert not (tmp_path / "no").exists()


def test_dtype_and_shards(cores, tmp_path):
    hf, core = cores["qwen3", False]
    written = out(core, tmp_path / "hf", "--dtype", "bf16", "--max-shard-size", "100KB")
    index = json.loads((written / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in written.glob("*.safetensors"))
    assert len(files) > 2 and {*index["weight_map"].values()} == {*files} and config(written)["dtype"] == "bfloat16"
    for file in files:
        tensors = load_file(written / file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 100_000 or len(tensors) == 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in hf_models.weights(written).values())
    assert_same(hf_models.weights(written), {name: tensor.bfloat16() for name, tensor in hf_models.weights(hf).items()})


@pytest.mark.parametrize("family", ["source", "gemma3_text"])
def test_gemma3_in_bfloat16_rounds_what_transformers_rounds(family, cores, tmp_path):
    """The factor of the embedding, and their product; the export compares the logits, longer documents than the window too."""
    written = out(cores["gemma3", True][1], tmp_path / "hf", "--dtype", "bf16", "--as", family)
    proof = json.loads((written / "conversion.json").read_text())
    assert proof["documents"][0] > 2 * 24 and proof["attention"] == ("bidirectional" if family == "source" else "causal")
    assert max(max(kernel.values()) for kernel in proof["largest_difference"].values()) < 1e-4


LOAD = """
import json, sys, transformers
assert not [name for name in sys.modules if name.startswith("mega")]
for folder, name in json.loads(sys.argv[1]):
    kind = getattr(transformers, name)
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    assert report["unexpected_keys"] <= ({"lm_head.weight"} if name == "AutoModel" else set()), report
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    output = model(**tokenizer(["a stone", "a much longer text than that"], padding=True, return_tensors="pt"))
"""


@pytest.mark.slow
def test_nothing_but_transformers_is_needed(cores, tmp_path):
    """No code of this package, no code in the folder. With the files of sentence-transformers it loads with the same classes."""
    wanted = []
    for name in ("llama with stretched positions", "qwen3"):
        core = cores[name, hf_models.MODELS[name].get("tie_word_embeddings", False)][1]
        head = "AutoModelForMaskedLM" if name.startswith("llama") else "AutoModelForCausalLM"
        for written in (out(core, tmp_path / f"{name} hf"), out(core, tmp_path / f"{name} st", "--sentence-transformers")):
            assert not [*written.rglob("*.py")]
            assert "auto_map" not in config(written)
            wanted += [(str(written), head), (str(written), "AutoModel")]
    runs.run(
        [sys.executable, "-c", LOAD, json.dumps(wanted)], cwd=tmp_path, environment={"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    )


@pytest.mark.parametrize("name", ["llama with stretched positions", "qwen3"])
def test_a_sentence_is_the_mean_of_its_tokens(name, cores, tmp_path):
    import sentence_transformers
    from transformers import AutoModel, AutoTokenizer

    written = out(cores[name, name != "qwen3"][1], tmp_path / "hf", "--sentence-transformers")
    texts = ["a stone", "a much longer text than that", "stan plark"]
    found = sentence_transformers.SentenceTransformer(str(written), device="cpu").encode(texts, convert_to_tensor=True)
    model, tokenizer = AutoModel.from_pretrained(written), AutoTokenizer.from_pretrained(written)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(vector, states.mean(dim=0), rtol=0, atol=1e-5)


def test_one_export_fills_masks_and_embeds_sentences(cores, tmp_path):
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModelForMaskedLM

    core = cores["eurobert", False][1]
    written = out(core, tmp_path / "st", "--sentence-transformers", "--dtype", "bf16")
    assert_same(hf_models.weights(written), hf_models.weights(out(core, tmp_path / "hf", "--dtype", "bf16")))
    model, report = AutoModelForMaskedLM.from_pretrained(written, output_loading_info=True)
    assert not any(report.values()) and model.dtype == torch.bfloat16
    embedder = SentenceTransformer(str(written), device="cpu")
    assert {parameter.dtype for parameter in embedder.parameters()} == {torch.float32}
    for name, tensor in embedder[0].auto_model.state_dict().items():
        assert torch.equal(tensor, model.model.state_dict()[name].float()), name
    for flag in ("dtype", "torch_dtype"):
        chosen = SentenceTransformer(str(written), device="cpu", model_kwargs={flag: torch.bfloat16})
        assert {parameter.dtype for parameter in chosen.parameters()} == {torch.bfloat16}


def test_what_sentence_transformers_reads(cores, tmp_path):
    written = out(cores["qwen3", False][1], tmp_path / "hf", "--sentence-transformers", "--license", "apache-2.0")
    assert (
        "library_name: sentence-transformers\npipeline_tag: sentence-similarity\nlicense: apache-2.0\n"
        in (written / "README.md").read_text()
    )
    modules = json.loads((written / "modules.json").read_text())
    assert [(module["path"], module["type"].split(".")[-1]) for module in modules] == [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
    ]
    pooling = json.loads((written / "1_Pooling" / "config.json").read_text())
    assert [name for name, on in pooling.items() if on is True] == ["pooling_mode_mean_tokens"]
    assert pooling["word_embedding_dimension"] == config(written)["hidden_size"]
    assert json.loads((written / "sentence_bert_config.json").read_text())["max_seq_length"] == 512
    assert config(written)["architectures"] == ["Qwen3ForCausalLM"]
    assert json.loads((written / "conversion.json").read_text())["compared"] == "logits"
    assert "`SentenceTransformer` gives the mean of its hidden states" in (written / "README.md").read_text()
