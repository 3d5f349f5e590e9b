"""A Hugging Face folder that wants to harm its reader is refused in one line, and no code or file that it names is touched."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from convert import hf_models, hostile_folders
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from megaenc.convert.command import main as convert
from megaenc.data.tokenizer.tokenizer import train_tokenizer
from megaenc.finetune import fill_mask
from megaenc.finetune.command import run_main
from megaenc.hf.checkpoint import HFCheckpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small EuroBERT with its tokenizer. Not to be changed."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["The cat sat on the mat."] * 4, 300)
    tokenizer.save_pretrained(folder / "tokenizer")
    built = hf_models.build("eurobert", vocab_size=len(tokenizer), max_position_embeddings=64)
    return hf_models.write(built, folder / "hf", folder / "tokenizer")


@pytest.fixture
def hostile(model, tmp_path):
    """Make a copy of the model, changed."""

    def changed(change):
        folder = tmp_path / "hf"
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        change(folder)
        return folder

    return changed


@pytest.mark.parametrize("case", hostile_folders.CASES)
def test_from_hf_refuses_in_one_line_and_leaves_nothing(case, hostile, tmp_path, refusal):
    change, words = hostile_folders.CASES[case]
    line = refusal(convert, ["from-hf", "--input", hostile(change), "--output", tmp_path / "out" / "core"])
    assert words in line and "/hf" in line and "Traceback" not in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", hostile_folders.CASES | hostile_folders.BESIDES)
def test_fine_tuning_refuses_in_one_line_and_leaves_no_result(case, hostile, tmp_path, refusal):
    change, words = (hostile_folders.CASES | hostile_folders.BESIDES)[case]
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "validation", "test"):
        (data / f"{split}.jsonl").write_text("".join(f'{{"text": "a cat {n}", "label": {n % 2}}}\n' for n in range(4)))
    flags = ["--model", hostile(change), "--dataset", data, "--output", tmp_path / "out", "--max-steps", "1"]
    line = refusal(run_main, flags)
    if case != "only a pickle" and case != "only a checkpoint":
        assert words in line or "there, expected config.json, *.safetensors and tokenizer.json" in line
    assert "/hf" in line and not list((tmp_path / "out").rglob("*.json"))


@pytest.mark.parametrize("case", hostile_folders.CASES | hostile_folders.BESIDES)
def test_fill_mask_refuses_in_one_line(case, hostile, tmp_path, refusal):
    change, words = (hostile_folders.CASES | hostile_folders.BESIDES)[case]
    (tmp_path / "text.txt").write_text("The cat sat on the mat.\n")
    line = refusal(fill_mask.main, ["--model", hostile(change), "--input", tmp_path / "text.txt"])
    assert words in line and "/hf" in line


def test_settings_say_nothing_of_how_to_load(hostile):
    kernel, inner = "org/kernel@main", {"hidden_size": 8}
    loading = {"attn_implementation": kernel, "_attn_implementation": kernel, "_attn_implementation_internal": kernel}
    loading |= {"auto_map": {"AutoModel": "code.Model"}, "fusion_config": {"a": 1}, "transformers_weights": "adapter_model.bin"}
    folder = hostile(hostile_folders.edit(**loading, text_config=inner | loading, layers_config=[inner | loading]))
    config = HFCheckpoint(folder).config
    assert config["text_config"] == inner and config["layers_config"] == [inner]
    assert not config.keys() & loading.keys() and config["hidden_size"] == 64


# Each names code of others, or a place for it, in a way of its own.
_KERNEL = {name: "org/kernel@main" for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")}
_CODE = {name: "code.Marked" for name in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoTokenizer")}
SETTINGS = [
    *({name: value} for name, value in _KERNEL.items()),
    {"attn_implementation": {"": "org/kernel@main"}},
    {"attn_implementation": "flash_attention_3"},
    {"experts_implementation": "sonicmoe"},
    {"use_kernels": True, "kernel_config": {"kernel_mapping": {"RMSNorm": "org/kernel:RMSNorm"}}},
    {"fusion_config": {"patch_embeddings": True}},
    {"auto_map": _CODE},
    {"auto_map": {name: f"org/repository--{code}" for name, code in _CODE.items()}},
    {"configuration_files": ["config.9.0.json"]},
    {"transformers_weights": "adapter_model.bin"},
    {"attribute_map": {"more": "_attn_implementation"}, "more": "org/kernel@main"},
    {"name_or_path": "org/repository", "_name_or_path": "org/repository", "_commit_hash": "main"},
]


def test_no_code_or_network_is_reached_by_what_a_folder_names(model, tmp_path):
    """With the packages that would download or run it installed, as far as transformers can tell."""
    planted, folders, marker = tmp_path / "packages", tmp_path / "models", tmp_path / "marker"
    touch = f"open({str(marker)!r}, 'a').write(__name__ + chr(10))\n"
    stub = "class Stub:\n    def __init__(self, *given, **named): pass\n    def __call__(self, decorated): return decorated\n"
    get = f"def get_kernel(*given, **named):\n    {touch}    raise ValueError('no')\n"
    others = "def __getattr__(name):\n    if name.startswith('__'): raise AttributeError(name)\n    return Stub\n"
    for package, version, code in (("kernels", KERNELS_MIN_VERSION, stub + get + others), ("peft", "99.0", touch)):
        (planted / package).mkdir(parents=True)
        (planted / package / "__init__.py").write_text(code)
        about = planted / f"{package}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    for number, settings in enumerate(SETTINGS):
        folder = folders / f"{number}"
        folder.mkdir(parents=True)
        for file in model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        hostile_folders.edit(**settings)(folder)
        (folder / "code.py").write_text(touch)
        (folder / "config.9.0.json").write_text("{")
        (folder / "adapter_model.bin").write_bytes(b"c__builtin__\nopen\n(S'" + str(marker).encode() + b"'\nS'w'\ntR.")
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/repository", "peft_type": "LORA"}')
        (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        tokenizer |= {"auto_map": {"AutoTokenizer": ["code.Marked", "code.Marked"]}, "name_or_path": "org/repository"}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    code = f"""
        import sys
        from pathlib import Path
        def hook(event, arguments):
            if event in ("socket.connect", "socket.getaddrinfo", "pickle.find_class"):
                open({str(marker)!r}, "a").write(event + chr(10))
        sys.addaudithook(hook)
        from megaenc.console import silence_libraries
        silence_libraries()
        import torch
        from transformers.integrations import hub_kernels
        from transformers.utils import is_peft_available
        assert hub_kernels.is_kernels_available() and is_peft_available(), "the plants are not seen"
        open({str(marker)!r}, "w").close()
        from megaenc.errors import InputError
        from megaenc.finetune import fill_mask
        from megaenc.finetune.model.load import load_backbone
        for folder in sorted(Path({str(folders)!r}).iterdir(), key=lambda path: int(path.name)):
            load_backbone(str(folder), "bidirectional", device="cpu", dtype=torch.float32)
            fill_mask.load_masked_lm(folder)
            assert not Path({str(marker)!r}).read_text(), (folder, Path({str(marker)!r}).read_text())
        print("loaded")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(planted), "HF_HUB_OFFLINE": "0"},
        timeout=240,
    )
    assert ended.stdout == "loaded\n", ended.stderr
