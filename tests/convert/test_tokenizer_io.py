"""Texts have the ids of the source's tokenizer.json in runs and in every export."""

import shutil
from pathlib import Path

import hf_models
import hf_tokenizers
import pytest
from small_data import read_json, write_file
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


def came(name, directory, spare=13, **changes):
    """Write a model with the tokenizer `name` and `spare` rows of the vocabulary."""
    make, model, _ = hf_tokenizers.KINDS[name]
    made = make()
    tokenizer = hf_tokenizers.save(made, directory / "tokenizer", **changes)
    return hf_models.write(
        hf_models.build(model, vocab_size=made[0].get_vocab_size() + spare),
        directory / "hf",
        tokenizer,
    )


@pytest.fixture(scope="module")
def cores(tmp_path_factory):
    """Return the Hugging Face and run directories by tokenizer. Not to be changed."""
    found = {}
    for name, (_, _, flags) in hf_tokenizers.KINDS.items():
        directory = tmp_path_factory.mktemp("kind")
        hf = came(name, directory)
        found[name] = hf, hf_models.from_hf(hf, directory / "core", *flags)
    return found


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize("name", hf_tokenizers.KINDS)
def test_training_reads_a_text_as_tokenizer_json_does(name, cores):
    hf, core = cores[name]
    reference = Tokenizer.from_file(str(hf / "tokenizer.json"))
    tokenizer = load_tokenizer(core / TOKENIZER_DIR)
    trained = encode_documents(tokenizer, TEXTS)
    for text, ids in zip(TEXTS, trained, strict=True):
        assert (
            ids.tolist()
            == plain(tokenizer, text)
            == reference.encode(text, add_special_tokens=False).ids
        )
        assert tokenizer(text)["input_ids"] == reference.encode(text).ids
    roles = read_json(hf / "tokenizer_config.json")
    for role in ("bos_token", "eos_token", "unk_token"):
        assert getattr(tokenizer, role) == roles.get(role)
    saved = read_json(core / TOKENIZER_DIR / "tokenizer_config.json")
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast", (
        "what older versions of transformers know too"
    )


@pytest.mark.parametrize("written", [[], ["--as", "source"]])
@pytest.mark.parametrize("name", hf_tokenizers.KINDS)
def test_users_of_an_export_get_the_ids_of_training(name, written, cores):
    from transformers import AutoTokenizer

    _, core = cores[name]
    hf_models.to_hf(core, "hf", *written)
    trained = load_tokenizer(core / TOKENIZER_DIR)
    loaded = AutoTokenizer.from_pretrained(Path("hf"))
    mask = trained.mask_token
    spelled = [
        f"The {mask} quick",
        f"{mask} x",
        f"a{mask}b {mask}  {mask}.",
        f"a {trained.eos_token} b",
    ]
    for text in [*TEXTS, *spelled]:
        ids = trained(text)["input_ids"]
        assert loaded(text)["input_ids"] == ids, text
        assert loaded.decode(ids) == trained.decode(ids)
        assert plain(loaded, text) == encode_documents(trained, [text])[0].tolist(), text
    assert (loaded.bos_token, loaded.eos_token, len(loaded)) == (
        trained.bos_token,
        trained.eos_token,
        len(trained),
    )
    certificate = read_json(Path("hf/conversion.json"))["tokenizer"]
    assert (certificate["class"], certificate["mask_token"]) == (
        type(loaded).__name__,
        loaded.mask_token,
    )
    assert certificate["fingerprint"] == read_vocabulary(trained).fingerprint
    if name == "qwen2" and written:
        # transformers would take the space before it for a token of its own: it has no role, but
        # remains one token.
        assert (
            loaded.mask_token is None
            and loaded.convert_tokens_to_ids(mask) == trained.mask_token_id
        )
    else:
        before = loaded("The", add_special_tokens=False)["input_ids"]
        masked = loaded(f"The {mask}", add_special_tokens=False)["input_ids"]
        assert loaded.mask_token == mask and masked == [*before, loaded.mask_token_id]


def test_a_class_that_reads_texts_otherwise_is_refused(refusal):
    """A qwen2 config.json makes transformers split as Qwen2, not as tokenizer.json."""
    made = hf_tokenizers.llama3()
    model = hf_models.build("qwen2", vocab_size=made[0].get_vocab_size())
    hf = hf_models.write(model, "hf", hf_tokenizers.save(made, Path("tokenizer")))
    core = hf_models.from_hf(hf, "core")
    line = refusal(main, ["to-hf", "--load", core, "--output", "no", "--as", "qwen2"])
    assert (
        "the tokenizer that transformers loads with a qwen2 config.json, Qwen2Tokenizer, "
        "is not the run's" in line
    )
    assert "expected --as llama" in line and not Path("no").exists()


def test_another_pipeline_is_refused_where_no_text_tells(cores, refusal, monkeypatch):
    """No text shows the difference, but the parts of the pipeline do."""
    _, core = cores["llama 3"]
    right = to_hf.write_tokenizer

    def wrong(tokenizer, directory):
        right(tokenizer, directory)
        values = read_json(directory / "tokenizer.json")
        values["normalizer"] = {
            "type": "Replace",
            "pattern": {"String": "never in any text"},
            "content": "x",
        }
        write_file(directory / "tokenizer.json", values)

    monkeypatch.setattr(to_hf, "write_tokenizer", wrong)
    line = refusal(main, ["to-hf", "--load", core, "--output", "no"])
    assert "is not the run's: `normalizer` differs" in line


def test_another_tokenizer_than_the_runs_is_refused(cores, refusal):
    copy = shutil.copytree(cores["llama 3"][1], Path("core"))
    shutil.rmtree(copy / TOKENIZER_DIR)
    shutil.copytree(cores["smollm"][1] / TOKENIZER_DIR, copy / TOKENIZER_DIR)
    line = refusal(main, ["to-hf", "--load", copy, "--output", "no"])
    assert f"{copy / TOKENIZER_DIR}: found another tokenizer than the run's" in line


def test_code_that_a_tokenizer_names_is_left_alone(tmp_path):
    hf = came("llama 3", tmp_path, auto_map={"AutoTokenizer": [None, "code.Tokenizer"]})
    (hf / "code.py").write_text("raise SystemExit('run')")
    core = hf_models.from_hf(hf, "core")
    assert "auto_map" not in read_json(core / TOKENIZER_DIR / "tokenizer_config.json")


@pytest.mark.parametrize(("name", "flags"), [("smollm", ["--add-mask-token"]), ("llama 3", [])])
def test_a_class_names_roles_that_the_files_leave_open_and_adds_no_token(name, flags, tmp_path):
    """GPT-2's EOS is used only if tokenizer.json has the token; Llama 3's has not."""
    hf = came(name, tmp_path, spare=0)
    config = read_json(hf / "tokenizer_config.json") if name == "llama 3" else {}
    write_file(hf / "tokenizer_config.json", config | {"tokenizer_class": "GPT2Tokenizer"})
    tokenizer = load_tokenizer(hf_models.from_hf(hf, "core", *flags) / TOKENIZER_DIR)
    assert ("<|endoftext|>" in tokenizer.get_vocab()) == (name == "smollm")
    assert (tokenizer.eos_token == "<|endoftext|>") == (name == "smollm")


def test_what_is_wrong_with_a_tokenizer_is_one_line(tmp_path, refusal):
    directory = came("llama 3", tmp_path, spare=0)
    config = read_json(directory / "tokenizer_config.json")
    for changed, words in (
        ({"eos_token": 5}, "tokenizer.json cannot be loaded"),
        (
            {"pad_token": "[PAD]"},
            "tokenizer_config.json: field `pad_token`: found '[PAD]', "
            "expected a token of tokenizer.json",
        ),
    ):
        write_file(directory / "tokenizer_config.json", config | changed)
        line = refusal(main, ["from-hf", "--input", directory, "--output", "core"])
        assert words in line and "/tmp/tmp" not in line, line
