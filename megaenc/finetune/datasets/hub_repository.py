"""Data sets of the Hugging Face Hub by their repository, ORG/NAME.

Columns, labels and splits are found in the data.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megaenc.data.sources.text_files import format_names
from megaenc.errors import InputError
from megaenc.finetune.datasets import formats
from megaenc.finetune.datasets.hub import HubSpec, build_hub_examples, load_from_hub
from megaenc.finetune.datasets.local import (
    DatasetConfig,
    build_split_reader,
    find_split_names,
    leave_out_hidden_test,
    template_rule,
)
from megaenc.finetune.examples import (
    SEQUENCE_FAMILIES,
    Dataset,
    Examples,
    SplitName,
    TaskFamily,
    hash_json,
)

_PART = r"[A-Za-z0-9_][\w.-]*"
_REFERENCE = re.compile(
    rf"(?P<prefix>hf:)?(?P<repository>(?:{_PART}/)?{_PART})"
    r"(?::(?P<config>[^:@/=\s]+))?(?:@(?P<revision>[\w./-]+))?"
)
# Column on the Hub by our field name, the first that are all there; pairs come before single texts.
_TAG_COLUMNS = [
    {"tokens": tokens, "tags": tags}
    for tokens in ("tokens", "words")
    for tags in ("tags", "ner_tags", "ner")
]
_QA_COLUMNS = [{"question": "question", "context": "context", "answers": "answers"}]
_PAIRS = (
    "text text_pair",
    "sentence1 sentence2",
    "premise hypothesis",
    "question1 question2",
    "question sentence",
)
_TEXT_COLUMNS = [
    {**dict(zip(("text", "text_pair"), texts.split(), strict=False)), "label": label}
    for texts in (*_PAIRS, "text", "sentence", "content")
    for label in ("label", "labels")
]
_COLUMNS = {TaskFamily.TC: _TAG_COLUMNS, TaskFamily.QA: _QA_COLUMNS, TaskFamily.SC: _TEXT_COLUMNS}
_EXPECTED = (
    "text (or sentence) and label (SC, regression, multi_label), tokens and tags (or ner_tags) "
    "(TC), or question, context and answers (QA); "
    "other columns need local files"
)


class HubReference(NamedTuple):
    """Repository of a data set on the Hub, its configuration and its revision.

    `parse_hub_reference` builds it. `repository` is NAME or ORG/NAME; `config` and `revision`
    (commit, branch or tag) are empty for the Hub's defaults.
    """

    repository: str
    config: str
    revision: str

    @property
    def name(self) -> str:
        """Return the name in results: the repository without owner, and `-CONFIG` if any."""
        name = self.repository.rpartition("/")[2]
        return f"{name}-{self.config}" if self.config else name


def parse_hub_reference(text: str) -> HubReference | None:
    """Return the HubReference of `ORG/NAME`, or None for any other text.

    `hf:NAME` and `hf:ORG/NAME` are repositories whatever paths exist, ORG/NAME only if neither that
    path nor a directory ORG exists. Each may end in :CONFIG, @REVISION or both, in this order.
    The Hub is not asked.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None or os.path.exists(text):
        return None
    organisation, slash, _ = match["repository"].partition("/")
    if not match["prefix"] and (not slash or os.path.isdir(organisation)):
        return None
    return HubReference(match["repository"], match["config"] or "", match["revision"] or "")


def load_hub_repository(
    name: str, reference: HubReference, flags: DatasetConfig, start: str
) -> Dataset:
    """Return the Dataset `name` of a repository on the Hub.

    The repository is downloaded, unless it is in the cache, and read now to find its columns and
    labels. A test split whose labels are hidden (-1) is left out with a message.

    Args:
        flags: Options; `task` and `pair_template` (a template or TOKENIZER_PAIRS) are read.
        start: Start of the error, with its `: `, if the repository cannot be read.

    Raises:
        InputError: The repository cannot be read, even if temporarily, or its splits, columns or
            labels are of no known task.
    """
    repository, config, revision = reference
    advice = "expected a data set of the Hub and a network once, or a path of local data"
    data: Mapping[str, Any] = load_from_hub(
        name, repository, config or None, revision, start, advice
    )
    place = f"data set {name} ({repository})"
    splits = find_split_names(data)
    if not splits:
        raise InputError(
            f"{place}: found the splits {format_names(list(data))}, "
            "expected train, validation and test"
        )
    first = data[splits.get("train") or next(iter(splits.values()))]
    family, fields = _find_columns(place, first, flags.task)
    if family is TaskFamily.REGRESSION and not flags.task:
        formats.print_whole_numbers(name, first[fields["label"]])
    for on_hub in splits.values():
        columns = data[on_hub].column_names
        if missing := set(fields.values()) - set(columns):
            raise InputError(
                f"{place}: {on_hub}: no column `{min(missing)}`; found {format_names(columns)}"
            )
    labels = _find_labels(place, family, first, fields, splits)
    if family in SEQUENCE_FAMILIES and "test" in splits:
        test_rows = (("", {"label": label}) for label in data[splits["test"]][fields["label"]])
        if formats.is_hidden_test(test_rows, labels):
            leave_out_hidden_test(name, place, family, splits)
    template = flags.pair_template if family in SEQUENCE_FAMILIES else ""
    spec = HubSpec(family, repository, config, fields, template, labels.labels)
    counts = {split: data[on_hub].num_rows for split, on_hub in splits.items()}
    rule = template_rule(template, lambda: "text_pair" in fields)
    fingerprint = hash_json(
        {"hub": [repository, config, revision, dict(fields), labels.labels, rule, splits, counts]}
    )

    def read_part(on_hub: str) -> Examples:
        rows = data[on_hub]
        return build_hub_examples(name, on_hub, rows, range(len(rows)), spec, labels)

    read_split = build_split_reader(name, place, splits, read_part, noun="split")
    return Dataset(
        name, family, labels.labels, name, fingerprint, fingerprint, read_split, template
    )


def _find_columns(place: str, data: Any, task: str) -> tuple[TaskFamily, dict[str, str]]:
    """Return the task family of the table `data`, and its columns by field.

    Raises:
        InputError: No family fits, or `task` needs local files.
    """
    columns = data.column_names
    kind = TaskFamily.SC if task in SEQUENCE_FAMILIES else task
    if kind not in ("", *_COLUMNS):
        raise InputError(f"--task {task}: found {place} of the Hub, expected local files")
    for family, candidates in _COLUMNS.items():
        fields = next(
            (fields for fields in candidates if set(fields.values()) <= set(columns)), None
        )
        if not fields or kind not in ("", family):
            continue
        if family is TaskFamily.SC and task:
            family = TaskFamily(task)
        elif family is TaskFamily.SC:
            first_label = [*data[:1][fields["label"]], None][0]
            family = formats.infer_family(Path(place), {"label": first_label})
        return family, fields
    purpose = f" for --task {task}" if task else ""
    raise InputError(
        f"{place}: found the columns {format_names(columns)}, expected{purpose} {_EXPECTED}"
    )


def _find_labels(
    place: str,
    family: TaskFamily,
    data: Any,
    fields: Mapping[str, str],
    splits: Mapping[SplitName, str],
) -> formats.LabelSet:
    """Return the labels of the Hub's class names, else of the first split's rows.

    Labels of rows are sorted.
    """
    if family in formats.FIXED_LABELS:
        return formats.FIXED_LABELS[family]
    ours = "tags" if family is TaskFamily.TC else "label"
    feature = data.features[fields[ours]]
    names = getattr(
        feature if family is TaskFamily.SC else getattr(feature, "feature", None), "names", None
    )
    if names is not None:
        return formats.check_label_names(
            family, list(names), f"{place}: column `{fields[ours]}`", is_encoded=True
        )
    on_hub = splits.get("train") or next(iter(splits.values()))
    rows = enumerate(data[fields[ours]], start=1)
    return formats.collect_labels(
        family,
        ((f"{place}: {on_hub} row {row_number}", {ours: value}) for row_number, value in rows),
    )
