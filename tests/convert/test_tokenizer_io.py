"""A text has the ids of the source's tokenizer.json in training, in the run folder and in every export."""

import json
import shutil

import hf_models
import hf_tokenizers
import pytest
from tokenizers import Tokenizer

from megaenc.convert import to_hf
from megaenc.convert.command import main
from megaenc.data.tokenizer.tokenizer import encode_documents, load_tokenizer, read_vocabulary
from megaenc.training.run_dir import TOKENIZER_DIR

TEXTS = [
    "The quick brown fox don't jump",
    " a space before",
    "  two, and  within   it ",
    "12345 in 2024, 3.14",
    "e\u0301 \u212b na\u00efve caf\u00e9 \u4e2d\u6587",
    "stan\n\n  plark\tx",
    "",
]


def came(name, folder, **changes):
    """The Hugging Face folder of a model with the tokenizer `name`, with spare rows of the vocabulary."""
    make, model, _ = hf_tokenizers.KINDS[name]
    made = make()
    tokenizer = hf_tokenizers.save(made, folder / "tokenizer", **changes)
    return hf_models.write(hf_models.build(model, vocab_size=made[0].get_vocab_size() + 13), folder / "hf", tokenizer)


def convert(hf, core, *flags):
    main(["from-hf", "--input", str(hf), "--output", str(core), *flags])
    return core


@pytest.fixture(scope="module")
def cores(tmp_path_factory):
    """By kind of tokenizer: the Hugging Face folder and the run folder made of it. Not to be changed."""
    found = {}
    for name, (_, _, flags) in hf_tokenizers.KINDS.items():
        folder = tmp_path_factory.mktemp("kind")
        hf = came(name, folder)
        found[name] = hf, convert(hf, folder / "core", *flags)
    return found


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize("name", hf_tokenizers.KINDS)
def test_training_reads_a_text_as_tokenizer_json_does(name, cores):
    hf, core = cores[name]
    reference, tokenizer = Tokenizer.from_file(str(hf / "tokenizer.json")), load_tokenizer(core / TOKENIZER_DIR)
    trained = encode_documents(tokenizer, TEXTS)
    for text, ids in zip(TEXTS, trained, strict=True):
        assert ids.tolist() == plain(tokenizer, text) == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer(text)["input_ids"] == reference.encode(text).ids
    roles = json.loads((hf / "tokenizer_config.json").read_text())
    for role in ("bos_token", "eos_token", "unk_token"):
        assert getattr(tokenizer, role) == roles.get(role)
    saved = json.loads((core / TOKENIZER_DIR / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast", "what older versions of transformers know too"


@pytest.mark.parametrize("written", [[], ["--as", "source"], ["--as", "the decoder"]])
@pytest.mark.parametrize("name", hf_tokenizers.KINDS)
def test_users_of_an_export_get_the_ids_of_training(name, written, cores, tmp_path):
    from transformers import AutoTokenizer

    _, core = cores[name]
    family = hf_tokenizers.KINDS[name][1].split()[0]
    main(["to-hf", "--load", str(core), "--output", str(tmp_path / "hf"), *[w.replace("the decoder", family) for w in written]])
    trained, loaded = load_tokenizer(core / TOKENIZER_DIR), AutoTokenizer.from_pretrained(tmp_path / "hf")
    mask = trained.mask_token
    spelled = [f"The {mask} quick", f"{mask} x", f"a{mask}b {mask}  {mask}.", f"a {trained.eos_token} b"]
    for text in [*TEXTS, *spelled]:
        assert loaded(text)["input_ids"] == trained(text)["input_ids"], text
        assert plain(loaded, text) == encode_documents(trained, [text])[0].tolist(), text
        assert loaded.decode(loaded(text)["input_ids"]) == trained.decode(trained(text)["input_ids"])
    assert (loaded.bos_token, loaded.eos_token, len(loaded)) == (trained.bos_token, trained.eos_token, len(trained))
    certificate = json.loads((tmp_path / "hf" / "conversion.json").read_text())["tokenizer"]
    assert certificate["class"] == type(loaded).__name__ and certificate["mask_token"] == loaded.mask_token
    assert certificate["fingerprint"] == read_vocabulary(trained).fingerprint
    assert certificate["texts"] > len(spelled) and certificate["same"][0] == "ids"
    if family == "qwen2" and written:
        # transformers would take the space before it for a token of its own: no role, but still the one token that it is.
        assert loaded.mask_token is None and loaded.convert_tokens_to_ids(mask) == trained.mask_token_id
    else:
        assert loaded.mask_token == mask
        before, masked = (loaded(text, add_special_tokens=False)["input_ids"] for text in ("The", f"The {mask}"))
        assert masked == [*before, loaded.mask_token_id]


def test_a_class_that_reads_texts_otherwise_is_refused(tmp_path, refusal):
    """Beside a qwen2 config.json transformers splits every text as Qwen2 does, whatever tokenizer.json says."""
    made = hf_tokenizers.llama3()
    tokenizer = hf_tokenizers.save(made, tmp_path / "tokenizer")
    model = hf_models.build("qwen2", vocab_size=made[0].get_vocab_size())
    core = convert(hf_models.write(model, tmp_path / "hf", tokenizer), tmp_path / "core")
    line = refusal(main, ["to-hf", "--load", core, "--output", tmp_path / "no", "--as", "qwen2"])
    assert "the tokenizer that transformers loads with a qwen2 config.json, Qwen2Tokenizer, is not the run's" in line
    assert "expected --as llama" in line
    line = refusal(main, ["to-hf", "--load", core, "--output", tmp_path / "no", "--as", "source"])
    assert "expected --as eurobert" in line and not (tmp_path / "no").exists()
    main(["to-hf", "--load", str(core), "--output", str(tmp_path / "encoder")])


def test_another_pipeline_is_refused_where_no_text_tells(cores, tmp_path, refusal, monkeypatch):
    """Texts are examples; the parts of the pipeline are all there is."""
    _, core = cores["llama 3"]
    right = to_hf.write_tokenizer

    def wrong(tokenizer, folder):
        right(tokenizer, folder)
        values = json.loads((folder / "tokenizer.json").read_text())
        values["normalizer"] = {"type": "Replace", "pattern": {"String": "never in any text"}, "content": "x"}
        (folder / "tokenizer.json").write_text(json.dumps(values))

    monkeypatch.setattr(to_hf, "write_tokenizer", wrong)
    line = refusal(main, ["to-hf", "--load", core, "--output", tmp_path / "no"])
    assert "is not the run's: `normalizer` differs" in line


def test_another_tokenizer_than_the_runs_is_refused(cores, tmp_path, refusal):
    _, core = cores["llama 3"]
    for name in ("smollm", "qwen2"):
        copy = shutil.copytree(core, tmp_path / name)
        shutil.rmtree(copy / TOKENIZER_DIR)
        shutil.copytree(cores[name][1] / TOKENIZER_DIR, copy / TOKENIZER_DIR)
        line = refusal(main, ["to-hf", "--load", copy, "--output", tmp_path / "no"])
        assert f"{copy / TOKENIZER_DIR}: found another tokenizer than the run's" in line


def test_code_that_a_tokenizer_names_is_left_alone(tmp_path):
    hf = came("llama 3", tmp_path, auto_map={"AutoTokenizer": [None, "code.Tokenizer"]})
    (hf / "code.py").write_text("raise SystemExit('run')")
    core = convert(hf, tmp_path / "core")
    assert "auto_map" not in json.loads((core / TOKENIZER_DIR / "tokenizer_config.json").read_text())


def test_a_class_names_the_roles_that_the_files_leave_open(tmp_path):
    """GPT-2's end of a text, where the file of roles says nothing of it."""
    hf = came("smollm", tmp_path)
    (hf / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_tokenizer(convert(hf, tmp_path / "core", "--add-mask-token") / TOKENIZER_DIR)
    assert tokenizer.eos_token == "<|endoftext|>"


def test_a_class_gives_no_token_that_tokenizer_json_has_not(tmp_path):
    """GPT2Tokenizer would add <|endoftext|>, for which neither the tokenizer nor the model has a place."""
    made = hf_tokenizers.llama3()
    tokenizer = hf_tokenizers.save(made, tmp_path / "tokenizer", tokenizer_class="GPT2Tokenizer")
    model = hf_models.build("llama with stretched positions", vocab_size=made[0].get_vocab_size())
    core = convert(hf_models.write(model, tmp_path / "hf", tokenizer), tmp_path / "core")
    assert len(load_tokenizer(core / TOKENIZER_DIR)) == made[0].get_vocab_size()


def test_what_is_wrong_with_a_tokenizer_is_one_line(tmp_path, refusal):
    made = hf_tokenizers.llama3()
    rows = made[0].get_vocab_size()
    source = hf_models.write(
        hf_models.build("llama with stretched positions", vocab_size=rows),
        tmp_path / "hf",
        hf_tokenizers.save(made, tmp_path / "tokenizer"),
    )
    config = json.loads((source / "tokenizer_config.json").read_text())
    for number, (name, content, words) in enumerate(
        (
            ("tokenizer.json", "{", "cannot be loaded; expected a Hugging Face fast tokenizer (Expecting"),
            ("tokenizer_config.json", "[", "tokenizer_config.json: not JSON"),
            ("tokenizer_config.json", json.dumps(config | {"eos_token": 5}), "tokenizer.json cannot be loaded"),
            (
                "tokenizer_config.json",
                json.dumps(config | {"pad_token": "[PAD]"}),
                "tokenizer_config.json: field `pad_token`: found '[PAD]', expected a token of tokenizer.json: the",
            ),
        )
    ):
        folder = shutil.copytree(source, tmp_path / f"bad {number}")
        (folder / name).write_text(content)
        line = refusal(main, ["from-hf", "--input", folder, "--output", tmp_path / "core"])
        assert words in line and "/tmp/tmp" not in line, line
