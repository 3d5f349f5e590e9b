"""The working directory of mistaken commands, with good files and bad ones."""

import json
import os
import shutil
from pathlib import Path

import runs
import yaml
from finetune.trees import published
from study import manifests, run_directories

DATA = "--data-path c_text_document --tokenizer tok --split 90,10,0"
SHAPE = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 64 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 2 --eval-iters 1"
)
# Right command lines that make what the wrong ones are about.
SETUP = (
    "megaenc tokenizer --input text.jsonl --vocab-size 400 --output tok",
    "megaenc tokenizer --input text.jsonl --vocab-size 300 --output tok300",
    "megaenc preprocess --input text.jsonl --output-prefix c --tokenizer tok --append-eod "
    "--workers 1",
    f"megaenc pretrain {DATA} {SHAPE} --save run",
    f"megaenc pretrain {DATA} {SHAPE} --exit-interval 1 --save part",
    "megaenc convert to-hf --load run --output hf",
    "tests/mistakes/directory.py",  # damage, below
)
# What the tables abbreviate; some of the first hold some of the last.
WORDS = {
    "{learn}": "megaenc tokenizer --output new --input",
    "{read}": "megaenc preprocess --output-prefix new --tokenizer tok",
    "{find}": "megaenc objective collocations --data-path c_text_document --tokenizer tok",
    "{inspect}": "megaenc data inspect c_text_document --tokenizer tok",
    "{train}": "megaenc pretrain {data} --save new",
    "{phases}": "megaenc pretrain {corpus} --save new --phases",
    "{cost}": "megaenc estimate --gpu h100",
    "{out}": "megaenc convert to-hf --output new",
    "{in}": "megaenc convert from-hf --output new",
    "{merge}": "megaenc convert merge --output new",
    "{tune}": "megaenc finetune run {set} --output new",
    "{grid}": "megaenc finetune grid {set} --output new --learning-rates 1e-4 --seeds 1",
    "{predict}": "megaenc finetune predict --model kept-sc",
    "{fill}": "megaenc fill-mask --model hf --input text.jsonl",
    "{eval}": "megaenc embed eval --output new.json",
    "{pairs}": "megaenc embed pairs --output new.jsonl --method adjacent",
    "{mine}": "megaenc embed mine --output new.jsonl",
    "{contrast}": "megaenc embed train --output new --data pairs.jsonl",
    "{study}": "megaenc study run study.yaml --output new --dry-run",
    "{data}": f"{DATA} {SHAPE}",
    "{corpus}": DATA,
    "{long}": 300 * "x",
    "{set}": "--model hf --max-steps 2 --max-length 32 --warmup 0",
}


# Fields of config.json that are refused before weights are read: the weights in the directories are
# those of another model.
_NEOBERT = {"model_type": "neobert", "hidden_act": "swiglu"}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "is_causal": None,
    "rope_parameters": None,
    "layer_types": None,
}
_FIELDS = {
    "family": {"model_type": "t5"},
    "neobert-head": _NEOBERT | {"dim_head": 7},
    "gemma3-attncap": _GEMMA3 | {"sliding_window": 8, "attn_logit_softcapping": 50.0},
    "gemma3-window": _GEMMA3 | {"sliding_window": 1},
    "gemma3-relu": _GEMMA3 | {"sliding_window": 8, "hidden_activation": "relu"},
}


_COPIES = {
    "hf": ("noweights", "badconfig", "pickled", "nomask", "cut", *_FIELDS),
    "run": ("norun", "badrun", "nocheckpoint", "cut", "base"),
}
_DAMAGED = {
    "sidecar_text_document.json": "{",
    "hf-badconfig/config.json": "{",
    "hf-nomask/tokenizer.json": "{",
    "run-badrun/run.json": "[1]",
}


def write_texts(directory: Path) -> None:
    """Write files that need no command: texts, settings, data, manifests and results."""
    runs.write_text(directory / "text.jsonl")
    for name, content in _TEXTS.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (directory / "nothing").mkdir()
    os.mkfifo(directory / "fifo")
    for rate in (1e-4, 1e-3):
        for seed in range(2):
            published(directory / "results", "toy-clm-400", "SC/demo_sc", rate, seed, 0.5, 0.6)
    (directory / "badresults/m/SC/d/lr1e-04_sd0").mkdir(parents=True)
    (directory / "badresults/m/SC/d/lr1e-04_sd0/results.json").write_text("{")
    run_directories.write_run(directory / "rows")
    for name, change in _MANIFESTS.items():
        values = {
            key: value for key, value in (manifests.BASE | change).items() if value is not None
        }
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(values))


def damage(directory: Path) -> None:
    """Write damaged copies of files that the commands of SETUP make."""
    for name in ("cut", "bare", "sidecar", "changed"):
        for extension in (".bin", ".idx", ".json"):
            shutil.copy(
                directory / f"c_text_document{extension}",
                directory / f"{name}_text_document{extension}",
            )
    for source, names in _COPIES.items():
        for name in names:
            shutil.copytree(directory / source, directory / f"{source}-{name}")
    (directory / "bare_text_document.idx").unlink()
    (directory / "hf-noweights/model.safetensors").unlink()
    (directory / "run-norun/run.json").unlink()
    shutil.rmtree(directory / "run-nocheckpoint/checkpoints")
    (directory / "hf-pickled/model.safetensors").rename(directory / "hf-pickled/pytorch_model.bin")
    for name, content in _DAMAGED.items():
        (directory / name).write_text(content)
    with open(directory / "changed_text_document.bin", "r+b") as stream:
        stream.write(b"\1\0\2\0")
    shards = (directory / "run-cut/checkpoints/iter_0000002").glob("*.distcp")
    for path in (
        directory / "cut_text_document.bin",
        directory / "hf-cut/model.safetensors",
        *shards,
    ):
        os.truncate(path, 1001)
    config = json.loads((directory / "hf/config.json").read_text())
    for name, changes in _FIELDS.items():
        fields = {key: value for key, value in (config | changes).items() if value is not None}
        (directory / f"hf-{name}/config.json").write_text(json.dumps(fields))
    facts = json.loads((directory / "run/run.json").read_text())
    facts["identity"]["rotary_base"] = 500.0
    (directory / "run-base/run.json").write_text(json.dumps(facts))


_ROW = '{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n'
_SET = {"train.jsonl": _ROW * 20, "valid.jsonl": _ROW, "test.jsonl": _ROW}


def _labelled(name: str, **changes: str | None) -> dict[str, str]:
    files = _SET | {f"{split}.jsonl": content for split, content in changes.items()}
    return {f"{name}/{file}": content for file, content in files.items() if content is not None}


def _alike(name: str, content: str) -> dict[str, str]:
    return _labelled(name, train=content, valid=content, test=content)


_TEXTS = {
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "latin.jsonl": '{"text": "café"}\n'.encode("latin-1"),
    "list.jsonl": "[1, 2]\n",
    "number.jsonl": '{"text": 7}\n',
    "nokey.jsonl": '{"body": "words"}\n',
    "notjson.jsonl": '{"text": "one"}\nwords\n',
    "deep.jsonl": '{"text": ' + "[" * 100_000 + "\n",
    "bad.jsonl.gz": b"words",
    "bad.parquet": b"PAR1 words PAR1",
    "file": "words\n",
    "mine/notes": "mine\n",
    "kept-bad/finetuning.json": "{",
    "kept-odd/finetuning.json": '{"family": "XX", "protocol": {}}',
    "kept-ir/finetuning.json": '{"family": "IR", "protocol": {}}',
    "kept-sc/finetuning.json": '{"family": "SC", "protocol": {}}',
    "badtok/tokenizer.json": "{",
    "own/corpus.jsonl": '{"text": "mine"}\n',
    "own/heldout.jsonl": '{"text": "mine"}\n',
    "record/demo.json": "[]\n",
    "sets/demo_sc": "mine\n",
    "empty.yaml": "",
    "twice.yaml": "corpus: {demo: true}\ncorpus: {demo: true}\n",
    "unknown.yaml": "sequence_length: 4\nbatch: 3\n",
    "typed.yaml": "seq_length: many\n",
    "tab.yaml": "lr:\t\t- 1\n\tseed: 3\n",
    "list.yaml": "- lr: 1\n",
    "word.yaml": "words\n",
    "latin.yaml": "save: café\n".encode("latin-1"),
    "python.yaml": "save: !!python/object/apply:os.system ['touch marker']\n",
    "bomb.yaml": "a: &a [1]\n"
    + "".join(f"{b}: &{b} [{9 * f'*{a},'}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "rates.yaml": "learning_rates: [fast]\n",
    "threshold.yaml": "max_steps: -1\n",
    **_labelled("set"),
    **_labelled("set-notrain", train=None),
    **_labelled("set-badjson", train='{"text": "one", "label": 1}\nwords\n'),
    **_labelled("set-nolabel", train='{"text": "one"}\n'),
    **_labelled("set-newlabel", valid='{"text": "one", "label": 7}\n'),
    **_labelled("set-empty", test=""),
    **_labelled("set-latin", test='{"text": "café", "label": 1}\n'.encode("latin-1")),
    **_labelled("set-float", train='{"text": "one", "label": 1}\n{"text": "two", "label": 0.5}\n'),
    **_labelled(
        "set-numbers",
        train='{"text": "one", "label": 0.5}\n',
        valid='{"text": "one", "label": "good"}\n',
    ),
    **_labelled(
        "set-ranks",
        train='{"query": "one", "document": "two", "negatives": ["three"]}\n',
        valid='{"query": "one", "document": "two", "label": 7}\n',
    ),
    **_labelled(
        "set-lists",
        train='{"text": "one", "labels": ["a"]}\n',
        valid='{"text": "one", "labels": 7}\n',
    ),
    **_labelled("set-pairs", test='{"text": "one", "text_pair": "two", "label": 1}\n'),
    **_labelled(
        "set-scores",
        test='{"text": "a", "text_pair": "b", "label": 1.5}\n'
        '{"text": "a", "text_pair": "b", "label": []}\n',
    ),
    **_alike("set-tags", '{"tokens": ["a", "b"], "tags": ["O"]}\n'),
    **_alike("set-iob", '{"tokens": ["a", "b"], "tags": ["O", "X"]}\n'),
    **_labelled("set-parquet", train=None),
    "set-parquet/train.parquet": b"PAR1 words PAR1",
    **_alike(
        "set-answer",
        '{"question": "q", "context": "a b c", "answers": {"text": ["z"], "answer_start": [2]}}\n',
    ),
    "pairs.jsonl": '{"query": "one", "document": "two"}\n{"query": "three", "document": "four"}\n',
    "pairs-empty.jsonl": (
        '{"query": "one", "document": "two"}\n{"query": "three", "document": ""}\n'
    ),
    "pairs-same.jsonl": '{"query": "one", "document": "one"}\n',
    "pairs-judged.jsonl": '{"query": "one", "document": "two", "label": 0}\n',
    "pairs-one.jsonl": '{"query": "one", "document": "two"}\n',
    "set-beir/corpus.jsonl": '{"_id": "d", "text": "a document"}\n',
    "set-beir/queries.jsonl": '{"_id": "q", "text": "a query"}\n',
    "set-beir/qrels/train.tsv": "query-id\tcorpus-id\tscore\nq\tgone\t1\n",
    "set-beir/qrels/dev.tsv": "query-id\tcorpus-id\tscore\nq\td\t1\n",
    "set-beir/qrels/test.tsv": "query-id\tcorpus-id\tscore\nq\td\t1\n",
}

_MANIFESTS: dict[str, dict] = {
    "study": {},
    "text-study": {"corpus": {"text": ["nowhere.jsonl"], "vocab_size": 400}},
    "study-key": {"modles": []},
    "study-nomodels": {"models": None},
    "study-steps": {"models": [manifests.TOY | {"steps": 0}]},
    "study-mask": {"models": [manifests.TOY | {"mask": 1.5}]},
    "study-share": {"models": [manifests.TOY | {"clm_share": 1.2}]},
    "study-seeds": {"finetune": {**manifests.BASE["finetune"], "seeds": 0}},
    "study-rates": {"finetune": {**manifests.BASE["finetune"], "learning_rates": [-1e-4]}},
    "study-pretrain": {"pretrain": {**manifests.BASE["pretrain"], "leraning_rate": 1}},
    "study-corpus": {"corpus": {"demo": True, "text": ["text.jsonl"], "vocab_size": 400}},
    "study-embed": {"embed": {"datasets": ["nowhere"], "train": "text.jsonl"}},
    "study-pairs": {"embed": {"datasets": ["set=nothing"], "train": "nowhere.jsonl"}},
    "study-retrieval": {"embed": {"datasets": ["demo_ir"], "sedes": 2}},
    "study-nocorpus": {"corpus": {"vocab_size": 400}},
    "study-vocab": {"corpus": {"demo": True, "vocab_size": -1}},
}

if __name__ == "__main__":
    damage(Path.cwd())
