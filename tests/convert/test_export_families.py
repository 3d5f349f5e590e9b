"""Every family is exported bit by bit from any layout, and loads in transformers."""

import shutil
import sys
from pathlib import Path

import hf_models
import plain_loop
import pytest
import runs
import torch
from safetensors.torch import load_file
from small_data import read_json, write_file

from megaenc.convert.command import main
from megaenc.data.preprocess import command as preprocess
from megaenc.training.command import main as pretrain

TIED = {name: given.get("tie_word_embeddings", False) for name, given in hf_models.MODELS.items()}
BOTH_TIES = [
    (name, tied) for name in TIED for tied in (False, True) if name != "neobert" or not tied
]


@pytest.fixture(scope="session")
def cores(came_in):
    """Return a function that finds both directories of a model by name and tie.

    These are the Hugging Face and the run directory. Not to be changed.
    """

    def find(name, tied=False):
        if name == "neobert":
            return came_in(name)
        return came_in(name, tie_word_embeddings=tied)

    return find


@pytest.fixture(scope="module")
def begun(cores, small_corpus, tmp_path_factory):
    """Start a run of two ranks from each imported model and change nothing.

    The first and the last stage of a pipeline hold a tied embedding, tensor-parallel ranks hold
    halves of untied weights.
    """
    directory = tmp_path_factory.mktemp("begun")
    corpus = [
        "--input",
        str(small_corpus.text),
        "--tokenizer",
        str(cores("qwen2", True)[1] / "tokenizer"),
        "--append-eod",
    ]
    preprocess.main([*corpus, "--output-prefix", str(directory / "qwen")])
    jobs = {}
    for name in hf_models.MODELS:
        core = cores(name, TIED[name])[1]
        flags = [
            *small_corpus.flags,
            "--config",
            core / "config.yaml",
            "--init-from",
            core,
            *runs.STANDSTILL,
        ]
        flags += [
            "--pipeline-model-parallel-size" if TIED[name] else "--tensor-model-parallel-size",
            2,
        ]
        if name == "qwen2":
            flags += ["--data-path", directory / "qwen_text_document", *corpus[2:4]]
        jobs[name] = runs.Job(directory / name, [str(flag) for flag in flags], processes=2)
    runs.in_turn(list(jobs.values()), directory, timeout=800)
    return {name: job.save for name, job in jobs.items()}


def way_back(name):
    """Return the flags that export a model as the family it was imported from."""
    family = hf_models.MODELS[name]["model_type"]
    return ["--as", family if family in hf_models.ONLY_CAUSAL else "source"]


def config(directory):
    return read_json(directory / "config.json")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


FIELDS = [
    "model_type",
    "architectures",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rope_parameters",
    "layer_types",
]
FIELDS += [
    "head_dim",
    "intermediate_size",
    "local_attention",
    "query_pre_attn_scalar",
    "norm_bias",
    "decoder_bias",
    "norm_eps",
]
FIELDS += [
    "rms_norm_eps",
    "hidden_activation",
    "classifier_activation",
    "max_length",
    "decoder_init_range",
]


@pytest.mark.parametrize(("name", "tied"), BOTH_TIES)
def test_source_is_what_came_in(name, tied, cores):
    hf, core = cores(name, tied)
    written = hf_models.to_hf(core, "hf", *way_back(name))
    assert_same(hf_models.weights(written), hf_models.weights(hf))
    there = config(hf)
    here = config(written)
    for field in FIELDS:
        if field in there:
            assert here[field] == there[field], field
    kind = there["model_type"]
    bidirectional = {
        field: here[field]
        for field in ("is_causal", "use_bidirectional_attention")
        if field in here
    }
    if kind in (*hf_models.ENCODERS, *hf_models.ONLY_CAUSAL):
        assert bidirectional == {}
    else:
        assert bidirectional == (
            {"use_bidirectional_attention": True} if kind == "gemma3_text" else {"is_causal": False}
        )


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_what_a_run_in_parts_saves_is_what_came_in(name, cores, begun):
    """No rank holds the whole model: the export joins its parts."""
    hf = cores(name, TIED[name])[0]
    assert (
        len(
            {
                file.name.split("_")[2]
                for file in begun[name].glob("checkpoints/iter_0000001/*.distcp")
            }
        )
        == 2
    )
    assert_same(
        hf_models.weights(hf_models.to_hf(begun[name], "hf", *way_back(name))),
        hf_models.weights(hf),
    )


@pytest.mark.parametrize("name", ["mistral", "neobert", "modernbert", "gemma3"])
def test_an_encoder_only_has_all_weights_but_the_output_layers(name, cores):
    from transformers import AutoModel

    core = cores(name)[1]
    complete = hf_models.weights(hf_models.to_hf(core, "complete"))
    written = hf_models.to_hf(core, "encoder", "--encoder-only")
    assert_same(
        hf_models.weights(written),
        {key[6:]: tensor for key, tensor in complete.items() if key.startswith("model.")},
    )
    proof = read_json(written / "conversion.json")
    assert proof["compared"] == "hidden states"
    model, report = AutoModel.from_pretrained(written, output_loading_info=True)
    assert [type(model).__name__] == config(written)["architectures"] == [proof["class"]]
    assert not any(report.values())


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_a_decoder_goes_out_as_an_encoder_that_fills_masks(name, cores):
    """EuroBERT has an output bias with those of queries, keys and values: zeros."""
    from transformers import EuroBertForMaskedLM

    hf, core = cores(name)
    model, report = EuroBertForMaskedLM.from_pretrained(
        hf_models.to_hf(core, "hf"), output_loading_info=True
    )
    assert not any(report.values())
    found = dict(model.named_parameters())
    zeros = [found.pop(key) for key in list(found) if key.endswith("o_proj.bias")]
    assert len(zeros) == (2 if name == "qwen2" else 0) and not any(tensor.any() for tensor in zeros)
    assert_same(found, hf_models.weights(hf))


@pytest.mark.parametrize(
    "name",
    ["llama with stretched positions", "mistral", "qwen2", "qwen3", "modernbert-decoder", "gemma3"],
)
def test_read_causally_it_is_the_decoder_that_came_in(name, cores):
    """The logits of transformers' model are the same before and after."""
    from transformers import AutoModelForCausalLM

    hf, core = cores(name, True)
    family = hf_models.MODELS[name]["model_type"]
    written = hf_models.to_hf(core, "hf", "--as", family)
    assert "is_causal" not in config(written) and config(written)["model_type"] == family
    tokens = torch.arange(60)[None] * 7 % 400
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(written)(tokens).logits
        expected = AutoModelForCausalLM.from_pretrained(hf)(tokens).logits
    assert torch.equal(found, expected)


def test_a_modernbert_decoder_goes_out_as_modernbert_and_back(cores, refusal):
    """The weights have other names; the encoder with a causal mask gives equal logits."""
    from transformers import ModernBertDecoderForCausalLM, ModernBertForMaskedLM

    hf, core = cores("modernbert-decoder", True)
    written = hf_models.to_hf(core, "encoder")
    assert (config(hf)["sliding_window"], config(written)["local_attention"]) == (17, 32), (
        "16 tokens before each token in both"
    )
    encoder, report = ModernBertForMaskedLM.from_pretrained(written, output_loading_info=True)
    assert not any(report.values())
    tokens = torch.arange(60)[None] * 7 % 400
    masks = plain_loop.attention_masks(encoder.config, [0, 60], "causal", None)
    with torch.no_grad():
        expected = ModernBertDecoderForCausalLM.from_pretrained(hf)(tokens).logits
        torch.testing.assert_close(
            encoder(tokens, attention_mask=masks).logits, expected, rtol=0, atol=1e-4
        )
        assert (encoder(tokens).logits - expected).abs().max() > 0.1
    hf_models.from_hf(written, "core")
    again = hf_models.to_hf("core", "decoder", *way_back("modernbert-decoder"))
    assert_same(hf_models.weights(again), hf_models.weights(hf))


@pytest.mark.parametrize("family", ["source", "gemma3_text"])
def test_gemma3_in_bfloat16_rounds_what_transformers_rounds(family, cores):
    """The embedding is rounded as in transformers, in documents past the window too."""
    written = hf_models.to_hf(cores("gemma3", True)[1], "hf", "--dtype", "bf16", "--as", family)
    proof = read_json(written / "conversion.json")
    assert proof["documents"][0] > 2 * 24 and proof["attention"] == (
        "bidirectional" if family == "source" else "causal"
    )
    assert max(max(kernel.values()) for kernel in proof["largest_difference"].values()) < 1e-4


def begin(core, small_corpus, save):
    """Start a run from `core` that changes nothing."""
    flags = [
        "--config",
        core / "config.yaml",
        "--init-from",
        core,
        *small_corpus.flags,
        *runs.STANDSTILL,
        "--save",
        save,
    ]
    pretrain([str(flag) for flag in flags])
    return save


@pytest.mark.parametrize("stops", ["generation_config.json", "config.json"])
def test_a_decoder_stops_where_it_did(stops, small_corpus):
    """A chat model ends its turn at other tokens than a document, after a run too."""
    from transformers import AutoModelForCausalLM

    model = hf_models.build(
        "llama with stretched positions", eos_token_id=[0, 7, 9], bos_token_id=5
    )
    hf = hf_models.write(model, "hf", small_corpus.tokenizer)
    if stops == "config.json":
        (hf / "generation_config.json").unlink()
    else:
        values = {"eos_token_id": [0, 7, 9], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
        write_file(hf / "generation_config.json", values)
    hf_models.from_hf(hf, "core")
    run = begin(Path("core"), small_corpus, Path("run"))
    written = hf_models.to_hf(run, "out", "--as", "llama")
    found = AutoModelForCausalLM.from_pretrained(written).generation_config
    expected = AutoModelForCausalLM.from_pretrained(hf).generation_config
    for name in ("eos_token_id", "temperature", "top_p", "do_sample"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (config(written)["eos_token_id"], config(written)["bos_token_id"]) == ([0, 7, 9], 5)
    assert not (hf_models.to_hf(run, "both ways") / "generation_config.json").exists()


@pytest.mark.parametrize("values", ['{"eos_token_id": "end"}', "[1]"])
def test_what_says_no_way_to_write_text_is_one_line(values, cores, refusal):
    hf = shutil.copytree(cores("qwen3")[0], Path("hf"))
    (hf / "generation_config.json").write_text(values)
    assert "generation_config.json: " in refusal(
        main, ["from-hf", "--input", hf, "--output", "core"]
    )


def test_special_ids_and_pooling_go_through_runs_and_merges(small_corpus, tmp_path, capfd):
    """A value that the tokenizer contradicts is reported."""
    model = hf_models.build("eurobert", classifier_pooling="late", bos_token_id=5, mask_token_id=7)
    hf = hf_models.write(model, "hf", small_corpus.tokenizer)
    hf_models.from_hf(hf, "core")
    begin(Path("core"), small_corpus, Path("run"))
    main(["merge", "--load", "core", "run", "--output", "merged"])
    for load in ("run", "merged"):
        capfd.readouterr()
        values = config(hf_models.to_hf(tmp_path / load, tmp_path / f"{load} hf"))
        assert (values["classifier_pooling"], values["bos_token_id"], values["mask_token_id"]) == (
            "late",
            5,
            1,
        )
        change = "config.json: mask_token_id 1 instead of the 7 that came in, as in the tokenizer"
        assert [
            line for line in capfd.readouterr().out.splitlines() if line.startswith("config.json")
        ] == [change]


def test_dtype_and_shards(cores):
    hf, core = cores("qwen3")
    written = hf_models.to_hf(core, "hf", "--dtype", "bf16", "--max-shard-size", "100KB")
    index = read_json(written / "model.safetensors.index.json")
    files = list(written.glob("*.safetensors"))
    assert len(files) > 2 and {*index["weight_map"].values()} == {file.name for file in files}
    for file in files:
        tensors = load_file(file).values()
        assert sum(tensor.nbytes for tensor in tensors) <= 100_000 or len(tensors) == 1
    weights = hf_models.weights(written)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert_same(
        weights, {name: tensor.bfloat16() for name, tensor in hf_models.weights(hf).items()}
    )
    assert config(written)["dtype"] == "bfloat16"


LOAD = """
import sys, transformers
assert not [name for name in sys.modules if name.startswith("mega")]
directory, name = sys.argv[1:]
model, report = getattr(transformers, name).from_pretrained(directory, output_loading_info=True)
for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
    assert not report[kind], report
tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
model(**tokenizer(["a stone", "a much longer text than that"], padding=True, return_tensors="pt"))
"""


def test_nothing_but_transformers_is_needed(cores, tmp_path):
    """The export has no code and needs none of this package."""
    written = hf_models.to_hf(
        cores("llama with stretched positions", True)[1], "hf", "--sentence-transformers"
    )
    assert not [*written.rglob("*.py")] and "auto_map" not in config(written)
    command = [sys.executable, "-c", LOAD, str(written), "AutoModelForMaskedLM"]
    runs.run(command, cwd=tmp_path, environment={"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("name", ["eurobert", "qwen3"])
def test_sentence_transformers_gives_the_mean_of_the_states(name, cores):
    """Means are float32, for bfloat16 weights too, unless another dtype is asked for."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoTokenizer

    flags = ["--sentence-transformers", "--license", "apache-2.0", "--dtype", "bf16"]
    written = hf_models.to_hf(cores(name)[1], "hf", *flags)
    embedder = SentenceTransformer(str(written), device="cpu")
    assert embedder.max_seq_length == 512
    assert {parameter.dtype for parameter in embedder.parameters()} == {torch.float32}
    half = SentenceTransformer(str(written), device="cpu", model_kwargs={"dtype": torch.bfloat16})
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(written)
    model = AutoModel.from_pretrained(written, dtype=torch.float32)
    texts = ["a stone", "a much longer text than that", "stan plark"]
    found = embedder.encode(texts, convert_to_tensor=True)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(vector, states.mean(dim=0), rtol=0, atol=1e-5)
    card = (written / "README.md").read_text()
    assert (
        "library_name: sentence-transformers\n"
        "pipeline_tag: sentence-similarity\n"
        "license: apache-2.0\n" in card
    )
    assert config(written)["architectures"] == [
        "EuroBertForMaskedLM" if name == "eurobert" else "Qwen3ForCausalLM"
    ]
    assert read_json(written / "conversion.json")["compared"] == "logits"
