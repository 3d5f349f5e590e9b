"""Labelled data from local files: a folder with a file for each split, one in BEIR's layout, or a file alone."""

import functools
import re
import string
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from megaenc.data.preprocess.outputs import compute_sha256
from megaenc.errors import InputError
from megaenc.finetune.datasets import beir, formats
from megaenc.finetune.examples import (
    Dataset,
    Examples,
    SplitName,
    TaskFamily,
    format_too_few_error,
    hash_json,
    print_once,
    split_validation_rows,
)
from megaenc.json_files import read_json_object

PAIR_TEMPLATE = "Text 1: {text}\nText 2: {text_pair}"
_SPLIT_WORDS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}


@dataclass(frozen=True)
class DatasetConfig:
    """How data sets are read that are local files; those of the study have their own ways."""

    task: Literal["", "SC", "TC", "QA", "IR"] = ""
    """kind of task of local data, where the files do not tell: classification of texts, of words, answering, retrieval"""
    pair_template: str = PAIR_TEMPLATE
    """how the two texts of a pair become one, in local data of another name than the study's"""
    whole_corpus: bool = False
    """search all documents of local retrieval data; unless given those that validation and test judge, as in the study"""
    train_on: str = ""
    """data set whose pairs models are trained on before retrieval, and no other task; unless given each set's own"""
    demo_folder: str = "demo/finetune"
    """where the demo sets are; they are made there when missing"""

    def check(self) -> None:
        """Raise InputError for a template that no pair can be put into."""
        flag = f"--pair-template {self.pair_template!r}"
        try:
            fields = {part for _, part, _, _ in string.Formatter().parse(self.pair_template) if part is not None}
            if fields == {"text", "text_pair"}:
                self.pair_template.format(text="", text_pair="")
        except (ValueError, LookupError) as error:
            raise InputError(f"{flag}: {error}; expected {{text}} and {{text_pair}}, other braces twice") from None
        if fields != {"text", "text_pair"}:
            found = ", ".join(sorted(fields)) or "no field"
            raise InputError(f"{flag}: found {found}, expected {{text}} and {{text_pair}} in it")


def load_local(name: str, path: Path, flags: DatasetConfig, pair_template: str) -> Dataset:
    """Return the data set at `path`, a folder or a file, under the name `name`. Raises InputError if there is none."""
    if path.is_dir() and beir.is_beir_folder(path):
        if flags.task not in ("", "IR"):
            raise InputError(f"--task {flags.task}: {path} holds corpus.jsonl and queries.jsonl, which are read as IR alone")
        return beir.load_beir(name, path, flags.whole_corpus)
    if flags.task == "IR":
        raise InputError(f"--task IR: {path} holds no corpus.jsonl, queries.jsonl and qrels/, expected BEIR's layout")
    files = _find_split_files(path)
    first = files.get("train") or next(iter(files.values()))
    place, row = next(formats.read_rows(first), ("", {}))
    if not row:
        raise InputError(f"{first}: holds no example, expected {formats.EXPECTED_FORMATS}")
    family = TaskFamily(flags.task) if flags.task else formats.infer_family(first, row)
    if family is TaskFamily.SC and isinstance(row.get("label"), float):
        formats.parse_label(row["label"], place)  # refuses it before a grid is planned
    template = pair_template if family is TaskFamily.SC else ""
    labels = _read_label_set(path / "meta.json", family, first)
    content = {key: compute_sha256(file) for key, file in sorted(files.items())}
    fingerprint = hash_json({"files": content, "rules": [family, labels.labels, template]})

    def split_of(split: SplitName) -> Examples:
        read = functools.partial(_read_examples, family=family, labels=labels, template=template)
        if split in files and ("train" not in files or len(files) == 3):
            return read(files[split])
        if "train" not in files or len(files) == 1:
            raise InputError(f"{path}: no {split} split, expected a file {_SPLIT_WORDS[split][0]}.*")
        other, missing, role = "test", "validation", ""
        if "test" not in files:
            other, missing, role = "validation", "test", f", and {files['validation'].name} is the test split"
        print_once(f"{name}: no {missing} file: 5 % of train validate (seed 42){role}")
        if split == "test":
            return read(files[other])
        examples = read(files["train"])
        if len(examples) < 2:
            raise InputError(f"{files['train']}: {format_too_few_error(len(examples), 'examples', f'{missing}.*')}")
        train, validation = split_validation_rows(len(examples))
        return [examples[at] for at in (train if split == "train" else validation)]

    return Dataset(name, family, labels.labels, name, fingerprint, fingerprint, split_of)


def _read_examples(path: Path, family: TaskFamily, labels: formats.LabelSet, template: str) -> Examples:
    """Return the examples of a file, without sentences that have no word."""
    examples, left_out = [], 0
    seen: dict[str, str] = {}
    for number, (place, row) in enumerate(formats.read_rows(path)):
        if family is TaskFamily.TC and row.get("tokens") == [] and row.get("tags") == []:
            left_out += 1
            continue
        examples.append(formats.build_example(family, row, place, f"{number}", labels, template))
        formats.register_id(seen, examples[-1].id, place)
    if left_out:
        print_once(f"{path}: {left_out:,} sentences without a word are left out")
    if family is TaskFamily.TC:
        loose = 0  # as in IOB1: seqeval and conlleval read them as beginnings
        for example in examples:
            tags = [labels.labels[index] for index in example.tags]
            loose += sum(tag.startswith("I-") and before[1:] != tag[1:] for before, tag in pairwise(["O", *tags]))
        if loose:
            print_once(f"{path}: {loose:,} tags I- without a B- or I- of their type before them; metrics read them as beginnings")
    return examples


def _read_label_set(file: Path, family: TaskFamily, first: Path) -> formats.LabelSet:
    """Return the labels that meta.json next to the files lists, else those of the rows of train."""
    if family is TaskFamily.QA:
        return formats.LabelSet((), is_indexed=False)
    key = "labels" if family is TaskFamily.SC else "tags"
    meta = read_json_object(file, "an object with labels or tags") if file.exists() else {}
    listed = meta.get(key, meta.get("labels"))
    if listed is None:
        return formats.collect_labels(family, formats.read_rows(first))
    names = isinstance(listed, list) and listed and all(isinstance(name, str) for name in listed)
    if not names or len(set(listed)) != len(listed):
        raise InputError(f"{file}: key `{key}`: expected a list of names that differ")
    if family is TaskFamily.TC:
        for name in listed:
            formats.check_tag(name, f"{file}: key `{key}`", is_indexed=False)
        if "O" not in listed:
            raise InputError(f"{file}: key `{key}`: found no O, expected the tags of IOB2, O among them")
    return formats.LabelSet(tuple(listed), is_indexed=True)


def _find_split_files(path: Path) -> dict[SplitName, Path]:
    """Return the file of each split, in a folder known by its name or a part of it: `train`, `en_ewt-ud-train`."""
    if path.is_file():
        if formats.strip_format_suffix(path) is None:
            raise InputError(f"{path}: found a file that is not read, expected {', '.join(formats.SUFFIXES)}")
        return {"test": path}
    try:
        named = {
            file: stem
            for file in sorted(path.iterdir())
            if file.is_file() and (stem := formats.strip_format_suffix(file)) is not None
        }
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    named = {file: stem for file, stem in named.items() if not file.name.startswith((".", "meta.json"))}
    files: dict[SplitName, Path] = {}
    for split, words in _SPLIT_WORDS.items():
        found = [file for file, stem in named.items() if stem in words]
        found = found or [file for file, stem in named.items() if set(words).intersection(re.split(r"[-_.\s]", stem))]
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise InputError(f"{path}: found {names} for the {split} split, expected one file; move the others elsewhere")
        if found:
            files[split] = found[0]
    if not files:
        held = formats.format_name_list([file.name for file in named]) or "no file that is read"
        raise InputError(
            f"{path}: found {held}, expected train.*, valid.* and test.* ({', '.join(formats.SUFFIXES)}) or BEIR's layout"
        )
    if len(set(files.values())) < len(files):
        raise InputError(
            f"{path}: one file is named after two splits: {formats.format_name_list([file.name for file in files.values()])}"
        )
    return files
