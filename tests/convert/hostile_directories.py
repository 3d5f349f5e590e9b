"""Hostile changes to a Hugging Face directory, with words of the refusal.

The directory has one file of weights and a tokenizer.
"""

import json
import os
import struct

from safetensors.torch import load_file, save_file


def edit(**values):
    """Return a function that changes fields of config.json in a directory."""

    def change(directory):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def content(name, data):
    """Return a function that replaces the bytes of a file."""
    return lambda directory: (directory / name).write_bytes(data)


def instead(name, make):
    """Return a function that replaces a file with one made by `make`."""

    def change(directory):
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return change


def header(text, tail=b"\0" * 8):
    """Return a function that writes a safetensors file with this header."""
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    return content("model.safetensors", struct.pack("<Q", len(raw)) + raw + tail)


def index(where, tensor="model.norm.weight"):
    """Return a function that writes sharded weights, one tensor in the file `where`."""

    def change(directory):
        (directory / "model.safetensors").rename(directory / "model-1.safetensors")
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {tensor: where}})
        )

    return change


def spoil(name, value):
    """Return a function that changes a number of one tensor."""

    def change(directory):
        file = directory / "model.safetensors"
        tensors = load_file(file)
        tensors[name].view(-1)[-1] = value
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def pickle(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def tensor(begin, end, shape=(2,)):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}


CONFIG = {
    "deep config": (content("config.json", b'{"a":' * 100_000), "config.json"),
    "config of another encoding": (
        content("config.json", b'{"a": "\xff"}'),
        "config.json: not JSON",
    ),
    "config is a number": (content("config.json", b"7"), "config.json: found int"),
    "config is a FIFO": (instead("config.json", os.mkfifo), "config.json"),
    "config is a loop": (
        instead("config.json", lambda path: os.symlink(path.name, path)),
        "config.json",
    ),
    "config is huge": (
        instead("config.json", lambda path: (path.touch(), os.truncate(path, 1 << 30))),
        "config.json",
    ),
    "quantized": (
        edit(quantization_config={"quant_method": "mxfp4"}),
        "`quantization_config`: found",
    ),
    "layers without end": (
        edit(num_hidden_layers=10**9),
        "`num_hidden_layers`: found 1000000000, expected at most",
    ),
    "wide": (edit(hidden_size=10**9), ""),
    "huge vocabulary": (edit(vocab_size=10**12), ""),
    "no heads": (edit(num_attention_heads=0), ""),
    "nothing for a size": (edit(hidden_size=None), ""),
    "an object for a size": (edit(vocab_size={"a": 1}), "vocab_size"),
    "a list for the family": (edit(model_type=["llama"]), "`model_type`: found"),
    "family with an escape": (edit(model_type="\x1b[2Jowned"), "`model_type`: found"),
    "rope of nothing": (edit(rope_parameters={"rope_type": "dynamic", "rope_theta": -1.0}), ""),
}
WEIGHTS = {
    "NaN in a layer": (
        spoil("model.layers.1.mlp.up_proj.weight", float("nan")),
        "model.safetensors: tensor `model.layers.1.mlp.up_proj.weight`: "
        "found nan, expected finite weights",
    ),
    "only a pickle": (pickle, "pytorch_model.bin: a pickle, which could run any code when loaded"),
    "weights are a FIFO": (instead("model.safetensors", os.mkfifo), "safetensors"),
    "header of 2^60 bytes": (
        content("model.safetensors", struct.pack("<Q", 1 << 60) + b"{}"),
        "not a complete safetensors file",
    ),
    "deep header": (header(b'{"a":' * 10_000), "not a complete safetensors file"),
    "overlapping tensors": (
        header({"a": tensor(0, 8), "b": tensor(4, 12)}, b"\0" * 12),
        "not a complete safetensors file",
    ),
    "offsets beyond the file": (
        header({"a": tensor(0, 1 << 50, (1 << 48,))}),
        "not a complete safetensors file",
    ),
    "shard above": (
        index("../model.safetensors"),
        "expected the name of a file in the same directory",
    ),
    "shard anywhere": (index("/etc/passwd"), "expected the name of a file in the same directory"),
    "shard is missing": (index("model-2.safetensors"), "model-2.safetensors: missing"),
    "deep index": (
        lambda directory: (
            index("x")(directory),
            content("model.safetensors.index.json", b"[" * 100_000)(directory),
        ),
        "index.json: not JSON",
    ),
}
TOKENIZER = {
    "tokenizer is a FIFO": (instead("tokenizer.json", os.mkfifo), "tokenizer.json"),
    "tokenizer config is a FIFO": (
        instead("tokenizer_config.json", os.mkfifo),
        "tokenizer_config.json",
    ),
    "damaged tokenizer": (
        content("tokenizer.json", b'{"model": {"type": "BPE", "vocab": 5}}'),
        "tokenizer.json",
    ),
    "deep tokenizer": (content("tokenizer.json", b'{"model":' * 100_000), "tokenizer.json"),
    "deep tokenizer config": (
        content("tokenizer_config.json", b'{"a":' * 100_000),
        "tokenizer_config.json: not JSON",
    ),
    "another directory's tokenizer": (
        content("tokenizer_config.json", b'{"fast_tokenizer_files": ["../tokenizer.4.0.json"]}'),
        "`fast_tokenizer_files`",
    ),
}
# What from-hf does not look at: the class of a tokenizer, and chats.
BESIDES = {
    "template is a FIFO": (instead("chat_template.jinja", os.mkfifo), "chat_template.jinja"),
    "class is a number": (
        content("tokenizer_config.json", b'{"tokenizer_class": 7}'),
        "tokenizer.json cannot be loaded",
    ),
}
CASES = CONFIG | WEIGHTS | TOKENIZER
# Of each file what a reader of its own could meet.
A_FEW = [
    "deep config",
    "huge vocabulary",
    "NaN in a layer",
    "header of 2^60 bytes",
    "shard anywhere",
    "tokenizer is a FIFO",
]
SOME = {name: CASES[name] for name in A_FEW} | BESIDES
