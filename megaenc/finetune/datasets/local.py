"""Labelled data in local files.

A data set is a directory with a file per split, a directory in BEIR's layout, or a single file.
"""

import functools
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from megaenc.data.preprocess.outputs import compute_sha256
from megaenc.errors import InputError
from megaenc.finetune.datasets import beir, formats
from megaenc.finetune.datasets.pair_rows import merge_queries
from megaenc.finetune.datasets.parquet import read_parquet_label_names
from megaenc.finetune.examples import (
    SEQUENCE_FAMILIES,
    TOKENIZER_PAIRS,
    Dataset,
    Examples,
    RankingQuery,
    SplitName,
    TaskFamily,
    format_too_few_error,
    get_split_key,
    hash_json,
    print_once,
    split_by_fraction,
    split_validation_rows,
)
from megaenc.flags import FractionBelowHalf
from megaenc.json_files import read_json_object

PAIR_TEMPLATE = "Text 1: {text}\nText 2: {text_pair}"
"""The study's template for pairs of data that is not its own."""
STUDY_PAIRS = "study"
"""Value of --pair-template that stands for PAIR_TEMPLATE."""
Part = TypeVar("Part", Path, str)
_SPLIT_WORDS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


@dataclass(frozen=True)
class DatasetConfig:
    """Options of data sets: task, text pairs, documents to search, training set.

    Each field is a flag of `megaenc finetune run` and `grid`, and an option of `find_dataset`.
    `task` is a family such as SC, "" to infer it. `pair_template` is "tokenizer", "study" or a text
    with {text} and {text_pair} (see `check`). `validation_fraction` of a single file validates, as
    much tests; 0 for no split. `whole_corpus` searches all documents of local retrieval data.
    `train_on` is a retrieval set to train on, "" for each set's own pairs, `demo_folder` the
    directory of the demo sets. The constructor checks nothing.
    """

    task: Literal["", "SC", "TC", "QA", "IR", "regression", "multi_label", "reranking"] = ""
    """task of local data, by default inferred from the files: SC sequence classification, TC token
    classification, QA question answering, IR retrieval, regression a number for each text,
    multi_label any number of labels, reranking the relevance of documents to a query"""
    pair_template: str = TOKENIZER_PAIRS
    """tokenizer: the two texts of a pair are joined by the tokenizer's own special tokens, in
    reranking always; study: by the study's template; or a template with {text} and {text_pair};
    local data named like a data set of the study uses the study's template"""
    validation_fraction: FractionBelowHalf = 0.0
    """split a single file of labelled data: this fraction validates, as much tests, the rest
    trains; seed 42, labels in proportion (of a text with several, the rarest counts), equal texts
    in one split; refused for data that has splits; 0: no split"""
    whole_corpus: bool = False
    """search all documents of local retrieval data; by default only those judged for validation or
    test, as in the study"""
    train_on: str = ""
    """retrieval data set to train on; by default each set's own training pairs; other tasks ignore
    it"""
    demo_folder: str = "demo/finetune"
    """directory of the demo sets; missing ones are written there"""

    def check(self) -> None:
        """Check that `pair_template` can join two texts.

        Raises:
            InputError: It is neither "tokenizer" nor "study" nor a format string of exactly `text`
                and `text_pair`.
        """
        if self.pair_template in (TOKENIZER_PAIRS, STUDY_PAIRS):
            return
        flag = f"--pair-template {self.pair_template!r}"
        try:
            parts = list(string.Formatter().parse(self.pair_template))
            if any(spec or conversion for _, _, spec, conversion in parts):
                raise ValueError("found a format or conversion of a field")
            fields = {part for _, part, _, _ in parts if part is not None}
            if fields == {"text", "text_pair"}:
                self.pair_template.format(text="", text_pair="")
        except (ValueError, LookupError) as error:
            raise InputError(
                f"{flag}: {error}; expected {{text}} and {{text_pair}}, other braces doubled"
            ) from None
        if fields != {"text", "text_pair"}:
            field_names = ", ".join(sorted(fields)) or "no field"
            raise InputError(
                f"{flag}: found {field_names}, expected {{text}} and {{text_pair}} in it"
            )


def load_local(name: str, path: Path, flags: DatasetConfig, pair_template: str) -> Dataset:
    """Return the Dataset `name` of the directory or file `path`.

    Files are hashed now and, except in BEIR's layout, read to find task family and labels;
    `load_split` parses them again. A test file with hidden labels (-1) is left out with a message.

    Args:
        flags: Options; `train_on` and `demo_folder` are not read.
        pair_template: Template that joins pairs of texts, or TOKENIZER_PAIRS; it may differ from
            that of `flags`, which reranking refuses.

    Raises:
        InputError: A file is unreadable, or of unknown format, labels or task, or
            `validation_fraction` is given for data that has splits.
    """
    fraction = flags.validation_fraction
    if fraction:
        check_split_fraction(fraction, path)
    if path.is_dir() and beir.is_beir_directory(path):
        if flags.task not in ("", "IR"):
            raise InputError(
                f"--task {flags.task}: {path} holds corpus.jsonl and queries.jsonl, "
                "expected --task IR"
            )
        return beir.load_beir(name, path, flags.whole_corpus)
    if flags.task == "IR":
        raise InputError(
            f"--task IR: {path} holds no corpus.jsonl, queries.jsonl and qrels/, "
            "expected BEIR's layout"
        )
    files = find_split_files(path)
    first_file, location, row = _read_first_row(files)
    family = TaskFamily(flags.task) if flags.task else formats.infer_family(first_file, row)
    if family is TaskFamily.SC and isinstance(row.get("label"), float):
        formats.parse_label(row["label"], location)  # refuses floats before a grid is planned
    if family is TaskFamily.REGRESSION and not flags.task:
        rows = formats.read_rows(first_file)
        formats.print_whole_numbers(name, (row.get("label") for _, row in rows))
    # The study's template may be there for the other data of a grid; reranking is not the study's.
    ignored = (TOKENIZER_PAIRS, PAIR_TEMPLATE)
    if family is TaskFamily.RERANKING and flags.pair_template not in ignored:
        raise InputError(
            f"--pair-template {flags.pair_template!r}: found {name} of the task {family}, "
            f"expected {TOKENIZER_PAIRS}, as CrossEncoder joins pairs"
        )
    template = pair_template if family in SEQUENCE_FAMILIES else ""
    labels = _read_label_set(path / "meta.json", family, list(files.values()))
    content = {key: compute_sha256(file) for key, file in sorted(files.items())}
    rule = template_rule(
        template,
        lambda: any(
            row.get("text_pair") is not None
            for file in files.values()
            for _, row in formats.read_rows(file)
        ),
    )
    rules = [family, labels.labels, rule]
    if fraction:
        rules.append(fraction)
    fingerprint = hash_json({"files": content, "rules": rules})
    if (
        family in SEQUENCE_FAMILIES
        and "test" in files
        and formats.is_hidden_test(formats.read_rows(files["test"]), labels)
    ):
        leave_out_hidden_test(name, f"{path}", family, files)

    read_file = functools.partial(_read_examples, family=family, labels=labels, template=template)
    if fraction:
        read_split = functools.partial(_read_drawn_split, name, first_file, read_file, fraction)
    else:
        read_split = build_split_reader(name, f"{path}", files, read_file)
    return Dataset(
        name, family, labels.labels, name, fingerprint, fingerprint, read_split, template
    )


def check_split_fraction(fraction: float, path: Path) -> None:
    """Check that --validation-fraction can split `path`, a single file of data.

    Args:
        fraction: Value of the flag, above 0.

    Raises:
        InputError: It is in BEIR's layout or has several files, or no file is found.
    """
    if path.is_dir() and beir.is_beir_directory(path):
        raise InputError(format_split_error(fraction, f"{path}", "retrieval data"))
    files = find_split_files(path)
    if len(files) > 1:
        names = ", ".join(file.name for file in files.values())
        raise InputError(format_split_error(fraction, f"{path}", names))


def format_split_error(fraction: float, place: str, content: str) -> str:
    """Return the error text that --validation-fraction needs a single file of data.

    It begins with the flag and fits no other cause.

    Args:
        fraction: Value of the flag.
        place: Name or path of the data.
        content: Words after "found", such as the names of several files.
    """
    return (
        f"--validation-fraction {fraction:g}: found {content} at {place}, "
        "expected a single file of labelled data"
    )


def _read_drawn_split(
    name: str,
    file: Path,
    read_file: Callable[[Path], Examples],
    fraction: float,
    split: SplitName,
) -> Examples:
    """Read a split of a single file, of which `fraction` validates and as much tests.

    Raises:
        InputError: The file is invalid, or has too few examples.
    """
    examples = read_file(file)
    rows = split_by_fraction(examples, fraction)
    if not rows["test"]:
        different = len({get_split_key(example) for example in examples})
        raise InputError(
            f"{file}: found {len(examples):,} examples (different texts: {different:,}), expected "
            f"more, so that --validation-fraction {fraction:g} validates on one text, tests on "
            "another and trains with every label"
        )
    print_once(
        f"{name}: {file.name} is split (seed 42, equal texts together): "
        f"{len(rows['train']):,} examples train, {len(rows['validation']):,} validate, "
        f"{len(rows['test']):,} test"
    )
    return [examples[row] for row in rows[split]]


def infer_local_family(path: Path) -> TaskFamily:
    """Return the task family of the directory or file `path`, not in BEIR's layout.

    The first row of train, or of the first other split, determines it.

    Raises:
        InputError: No file can be read, or no family fits.
    """
    first_file, _, row = _read_first_row(find_split_files(path))
    return formats.infer_family(first_file, row)


def _read_first_row(files: Mapping[SplitName, Path]) -> tuple[Path, str, dict[str, Any]]:
    """Return the train file, or another one, and location and fields of its first row."""
    file = files.get("train") or next(iter(files.values()))
    location, row = next(formats.read_rows(file), ("", {}))
    if not row:
        raise InputError(f"{file}: holds no example, expected {formats.EXPECTED_FORMATS}")
    return file, location, row


def leave_out_hidden_test(
    name: str, place: str, family: TaskFamily, parts: dict[SplitName, Part]
) -> None:
    """Remove a test split with hidden labels if it is one of three splits.

    A message says so.

    Args:
        name, place: Data set, and source of `parts`, in messages.
        parts: Files, or splits on the Hub, by split; changed in place.

    Raises:
        InputError: There are fewer in regression, which would take -1 for a number. Where -1 is no
            class, reading the split raises it.
    """
    test = getattr(parts["test"], "name", parts["test"])
    if len(parts) == 3:
        del parts["test"]
        print_once(f"{name}: {test} is not used: its labels are hidden (-1)")
    elif family is TaskFamily.REGRESSION:
        raise InputError(
            f"{place}: {test}: its labels are hidden (-1), expected numbers or a validation split"
        )


def template_rule(template: str, has_pairs: Callable[[], bool]) -> str:
    """Return the pair template to hash into a data set's fingerprint.

    It is `template`, except that TOKENIZER_PAIRS without pairs, which has no effect, becomes the
    study's template, as in fingerprints of earlier versions.

    Args:
        has_pairs: Function that returns whether there are pairs, called only for TOKENIZER_PAIRS.
    """
    return PAIR_TEMPLATE if template == TOKENIZER_PAIRS and not has_pairs() else template


def build_split_reader(
    name: str,
    place: str,
    parts: Mapping[SplitName, Part],
    read_part: Callable[[Part], Examples],
    noun: str = "file",
) -> Callable[[SplitName], Examples]:
    """Return a function that reads a split, and draws validation from train if needed.

    Of train and one other part, the other is the test split, even if it is named validation, and 5
    % of train validate; a message says so at the first read. Without train only the splits in
    `parts` can be read. The function raises InputError for other splits, for any split if train is
    the only part, and for a train of one example that has to be split.

    Args:
        name, place: Data set, and source of `parts`, in messages.
        parts: Files, or splits on the Hub, by split.
        read_part: Function that reads the examples of a part.
        noun: Kind of `parts` in messages: "file" or "split".
    """
    ending = ".*" if noun == "file" else ""

    def read_split(split: SplitName) -> Examples:
        if split in parts and ("train" not in parts or len(parts) == 3):
            return read_part(parts[split])
        if "train" not in parts or len(parts) == 1:
            hint = "; --validation-fraction splits a file" if len(parts) == 1 and ending else ""
            raise InputError(
                f"{place}: no {split} split, expected a {noun} "
                f"{_SPLIT_WORDS[split][0]}{ending}{hint}"
            )
        test_source = "test"
        missing = "validation"
        role = ""
        if "test" not in parts:
            part_name = getattr(parts["validation"], "name", parts["validation"])
            test_source = "validation"
            missing = "test"
            role = f", and {part_name} is the test split"
        print_once(f"{name}: no {missing} {noun}: 5 % of train validate (seed 42){role}")
        if split == "test":
            return read_part(parts[test_source])
        examples = read_part(parts["train"])
        if len(examples) < 2:
            reason = format_too_few_error(len(examples), "examples", f"{missing}{ending}")
            raise InputError(f"{parts['train'] if noun == 'file' else place}: {reason}")
        train, validation = split_validation_rows(len(examples))
        return [examples[index] for index in (train if split == "train" else validation)]

    return read_split


def find_split_names(names: Iterable[str]) -> dict[SplitName, str]:
    """Return the names of train, validation and test among `names`, by split.

    A validation split may be named validation, valid, val or dev, of which the first in this order
    is returned. The others are named train and test. Splits without a name are left out.
    """
    known = set(names)
    matches = {
        split: [word for word in words if word in known] for split, words in _SPLIT_WORDS.items()
    }
    return {split: present[0] for split, present in matches.items() if present}


def _read_examples(
    path: Path, family: TaskFamily, labels: formats.LabelSet, template: str
) -> Examples:
    """Read the examples of a file, without empty sentences and what cannot be ranked."""
    if family is TaskFamily.RERANKING:
        return _read_ranking_queries(path)
    examples = []
    left_out = 0
    places: dict[str, str] = {}
    for row_index, (location, row) in enumerate(formats.read_rows(path)):
        if family is TaskFamily.TC and row.get("tokens") == [] and row.get("tags") == []:
            left_out += 1
            continue
        examples.append(
            formats.build_example(family, row, location, f"{row_index}", labels, template)
        )
        formats.register_id(places, examples[-1].id, location)
    if left_out:
        print_once(f"{path}: {left_out:,} sentences without a word are left out")
    if family is TaskFamily.TC:
        orphan_count = 0  # as in IOB1; seqeval and conlleval start a span there
        for example in examples:
            tags = [labels.labels[index] for index in example.tags]
            orphan_count += sum(
                tag.startswith("I-") and before[1:] != tag[1:]
                for before, tag in pairwise(["O", *tags])
            )
        if orphan_count:
            print_once(
                f"{path}: {orphan_count:,} tags I- without a B- or I- of their type before them; "
                "metrics start a span there"
            )
    return examples


def _read_ranking_queries(path: Path) -> list[RankingQuery]:
    """Read the queries of a file that have both relevant documents and others."""
    queries = merge_queries(formats.read_rows(path))
    ranked = [query for query in queries if query.positives and query.negatives]
    count = len(queries) - len(ranked)
    if queries and not ranked:
        raise InputError(
            f"{path}: found no query with a relevant document and another one, "
            "expected `negatives`, as `megaenc embed mine` adds them, or rows with `label` 0"
        )
    if count:
        print_once(
            f"{path}: {count:,} of {len(queries):,} queries are left out: they have no relevant "
            "document or no other one"
        )
    return ranked


def _read_label_set(file: Path, family: TaskFamily, data_files: Sequence[Path]) -> formats.LabelSet:
    """Return the labels of meta.json, else of the first Parquet schema, else of rows.

    Raises:
        InputError: Class names of Parquet files differ, although rows hold positions in them.
    """
    if family in formats.FIXED_LABELS:
        return formats.FIXED_LABELS[family]
    key = "tags" if family is TaskFamily.TC else "labels"
    columns = [key]
    if family is TaskFamily.SC:
        columns = ["label"]
    elif family is TaskFamily.MULTI_LABEL:
        columns = ["labels", "label"]  # as `read_label_list`
    first_file = data_files[0]
    class_names = {
        data_file: read_parquet_label_names(data_file, columns)
        for data_file in data_files
        if data_file.suffix.lower() == ".parquet"
    }
    metadata = (
        read_json_object(file, "an object with labels or tags", unique_keys=True)
        if file.exists()
        else {}
    )
    label_names = metadata.get(key, metadata.get("labels"))
    first_names = class_names.get(first_file)
    column = "` or `".join(columns)
    if label_names is not None:
        return formats.check_label_names(
            family, label_names, f"{file}: key `{key}`", is_encoded=first_names is not None
        )
    for data_file, names in class_names.items():
        if names not in (None, first_names):
            name_list = formats.format_name_list(names)
            raise InputError(
                f"{data_file}: names of column `{column}`: found {name_list}, "
                f"expected those of {first_file} or a {file.name}"
            )
    if first_names is not None:
        place = f"{first_file}: names of column `{column}`"
        return formats.check_label_names(family, first_names, place, is_encoded=True)
    return formats.collect_labels(family, formats.read_rows(first_file))


def find_split_files(path: Path) -> dict[SplitName, Path]:
    """Return the file of each split in a directory, by split.

    A word of a file's name gives the split (`train`, `en_ewt-ud-train`): train, test, or one of
    validation, valid, val and dev. A name that is only this word has priority. Splits without a
    file are left out; hidden files, meta.json and files of unknown formats are ignored. If `path`
    is a file, it is the test split.

    Raises:
        InputError: `path` is unreadable or a file of unknown format, no file is of a split, several
            files are of one split, or a file is of two.
    """
    if path.is_file():
        if formats.strip_format_suffix(path) is None:
            raise InputError(
                f"{path}: found a file of unknown format, expected {', '.join(formats.SUFFIXES)}"
            )
        return {"test": path}
    try:
        stems = {
            file: stem
            for file in sorted(path.iterdir())
            if file.is_file()
            and not file.name.startswith((".", "meta.json"))
            and (stem := formats.strip_format_suffix(file)) is not None
        }
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    files: dict[SplitName, Path] = {}
    for split, words in _SPLIT_WORDS.items():
        matches = [file for file, stem in stems.items() if stem in words]
        matches = matches or [
            file
            for file, stem in stems.items()
            if set(words).intersection(re.split(r"[-_.\s]", stem))
        ]
        if len(matches) > 1:
            names = ", ".join(file.name for file in matches)
            raise InputError(
                f"{path}: found {names} for the {split} split, expected one file; "
                "move the others elsewhere"
            )
        if matches:
            files[split] = matches[0]
    if not files:
        contents = (
            formats.format_name_list([file.name for file in stems]) or "no file of a known format"
        )
        raise InputError(
            f"{path}: found {contents}, "
            f"expected train.*, valid.* and test.* ({', '.join(formats.SUFFIXES)}) or BEIR's layout"
        )
    if len(set(files.values())) < len(files):
        raise InputError(
            f"{path}: one file is named after two splits: "
            f"{formats.format_name_list([file.name for file in files.values()])}"
        )
    return files
