"""Hostile Hugging Face directories are refused with one line.

No code or file that they name is touched.
"""

import shutil
import sys
from pathlib import Path

import pytest
import runs
from convert import hf_models, hostile_directories
from small_data import read_json, write_file, write_splits
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from megaenc.convert.command import main as convert
from megaenc.finetune import fill_mask
from megaenc.finetune.command import run_main
from megaenc.hf.checkpoint import HFCheckpoint


@pytest.fixture(scope="module")
def model(small_corpus, tmp_path_factory):
    """Write a small EuroBERT with its tokenizer. Not to be changed."""
    built = hf_models.build("eurobert", max_position_embeddings=64)
    return hf_models.write(built, tmp_path_factory.mktemp("model"), small_corpus.tokenizer)


@pytest.fixture
def hostile(model, tmp_path):
    """Return a function that makes a changed copy of the model."""

    def changed(change):
        directory = shutil.copytree(model, tmp_path / "hf")
        change(directory)
        return directory

    return changed


@pytest.mark.parametrize("case", hostile_directories.CASES)
def test_from_hf_refuses_in_one_line_and_leaves_nothing(case, hostile, tmp_path, refusal):
    change, words = hostile_directories.CASES[case]
    line = refusal(
        convert, ["from-hf", "--input", hostile(change), "--output", tmp_path / "out" / "core"]
    )
    assert words in line and "/hf" in line and "Traceback" not in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["fine-tuning", "fill-mask"])
@pytest.mark.parametrize("case", hostile_directories.SOME)
def test_other_commands_refuse_in_one_line_and_leave_no_result(
    case, command, hostile, tmp_path, refusal
):
    change, words = hostile_directories.SOME[case]
    data = write_splits(
        tmp_path / "data", "jsonl", [{"text": f"a cat {n}", "label": n % 2} for n in range(4)]
    )
    if command == "fill-mask":
        line = refusal(
            fill_mask.main, ["--model", hostile(change), "--input", f"{data}/test.jsonl"]
        )
    else:
        flags = ["--dataset", data, "--output", tmp_path / "out", "--max-steps", "1"]
        line = refusal(run_main, ["--model", hostile(change), *flags])
    assert words in line and "/hf" in line
    assert not list((tmp_path / "out").rglob("*.json"))


def test_settings_say_nothing_of_how_to_load(hostile):
    kernel = "org/kernel@main"
    inner = {"hidden_size": 8}
    loading = {
        "attn_implementation": kernel,
        "_attn_implementation": kernel,
        "_attn_implementation_internal": kernel,
    }
    loading |= {
        "auto_map": {"AutoModel": "code.Model"},
        "fusion_config": {"a": 1},
        "transformers_weights": "adapter_model.bin",
    }
    directory = hostile(
        hostile_directories.edit(
            **loading, text_config=inner | loading, layers_config=[inner | loading]
        )
    )
    config = HFCheckpoint(directory).config
    assert config["text_config"] == inner and config["layers_config"] == [inner]
    assert not config.keys() & loading.keys() and config["hidden_size"] == 64


# Each names code of others, or a place for it, in a way of its own.
_KERNEL = {
    name: "org/kernel@main"
    for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
}
_CODE = {
    name: "code.Marked"
    for name in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoTokenizer")
}
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


TOUCH = "open('marker', 'a').write(__name__ + chr(10))\n"
KERNELS = f"""
class Stub:
    def __init__(self, *given, **named): pass
    def __call__(self, decorated): return decorated
def get_kernel(*given, **named):
    {TOUCH}
    raise ValueError('no')
def __getattr__(name):
    if name.startswith('__'): raise AttributeError(name)
    return Stub
"""
LOAD = """
import sys
from pathlib import Path
marker = Path("marker").absolute()
def hook(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "pickle.find_class"):
        open(marker, "a").write(event + chr(10))
sys.addaudithook(hook)
from megaenc.console import silence_libraries
silence_libraries()
import torch
from transformers.integrations import hub_kernels
from transformers.utils import is_peft_available
assert hub_kernels.is_kernels_available() and is_peft_available(), "the plants are not seen"
open(marker, "w").close()
from megaenc.finetune import fill_mask
from megaenc.finetune.model.load import load_backbone
for directory in sorted(Path("models").iterdir(), key=lambda path: int(path.name)):
    load_backbone(str(directory), "bidirectional", device="cpu", dtype=torch.float32)
    fill_mask.load_masked_lm(directory)
    assert not marker.read_text(), (directory, marker.read_text())
print("loaded")
"""


def test_no_code_or_network_is_reached_by_what_a_directory_names(model, tmp_path, monkeypatch):
    """The packages that would download or run it seem to be installed."""
    monkeypatch.chdir(tmp_path)
    for package, version, code in (
        ("kernels", KERNELS_MIN_VERSION, KERNELS),
        ("peft", "99.0", TOUCH),
    ):
        directory = Path("packages") / package
        about = directory.with_name(f"{package}-{version}.dist-info")
        directory.mkdir(parents=True)
        about.mkdir()
        (directory / "__init__.py").write_text(code)
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
    for index, settings in enumerate(SETTINGS):
        directory = shutil.copytree(model, Path("models") / f"{index}")
        hostile_directories.edit(**settings)(directory)
        (directory / "code.py").write_text(TOUCH)
        (directory / "config.9.0.json").write_text("{")
        (directory / "adapter_model.bin").write_bytes(b"c__builtin__\nopen\n(S'marker'\nS'w'\ntR.")
        (directory / "adapter_config.json").write_text(
            '{"base_model_name_or_path": "org/repository", "peft_type": "LORA"}'
        )
        (directory / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
        tokenizer = read_json(directory / "tokenizer_config.json")
        tokenizer |= {
            "auto_map": {"AutoTokenizer": ["code.Marked", "code.Marked"]},
            "name_or_path": "org/repository",
        }
        write_file(directory / "tokenizer_config.json", tokenizer)
    online = {"HF_HUB_OFFLINE": "0"}
    ended = runs.run(
        [sys.executable, "-c", LOAD],
        packages=tmp_path / "packages",
        environment=online,
        cwd=tmp_path,
    )
    assert ended.stdout == "loaded\n"
