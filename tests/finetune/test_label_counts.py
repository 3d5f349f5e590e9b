"""Lines on imbalanced, absent and unseen labels before a training."""

import numpy as np
import pytest
from small_data import write_files
from text_helpers import text_encoder

from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.finetune.command import run_main
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.examples import Dataset, TaggedWords, TaskFamily
from megaenc.finetune.label_counts import describe_label_counts
from megaenc.finetune.tasks.token_classification import TokenClassification


@pytest.mark.parametrize("train, validation, test, lines", [
    ([10, 50], [1, 1], [3, 1], []),
    ([10, 51], [1, 1], [3, 1], [
        "x: pos is 5.1 times as frequent as neg; train: pos 51, neg 10; always predicting neg is "
        "right in 75.00 % of test"]),
    ([10, 10], [4, 0], [1, 1], [
        "x: validation has no pos; train: neg 10, pos 10; always predicting neg is right in 50.00 "
        "% of test"]),
    ([10, 0], [4, 0], [5, 3], [
        "x: train has no pos; validation has no pos; train: neg 10, pos 0; always predicting neg "
        "is right in 62.50 % of test",
        "x: warning: labels without a training example cannot be learned: pos (test: 3)"]),
])  # fmt: skip
def test_what_is_said_of_classes(train, validation, test, lines):
    counts = {"train": np.array(train), "validation": np.array(validation), "test": np.array(test)}
    assert describe_label_counts("x", ("neg", "pos"), counts) == lines


def test_the_tag_of_no_span_is_no_class():
    counts = np.array([1000, 10, 12])
    assert (
        describe_label_counts(
            "x", ("O", "B-X", "I-X"), dict.fromkeys(("train", "validation", "test"), counts)
        )
        == []
    )
    [line] = describe_label_counts(
        "x", ("O", "B-X", "I-X"), dict.fromkeys(("train", "validation", "test"), counts * [1, 9, 1])
    )
    assert line.startswith(
        "x: B-X is 7.5 times as frequent as I-X; train: O 1,000, B-X 90, I-X 12; always predicting "
        "O is right"
    )


@pytest.mark.parametrize("add_eos", [True, False])
def test_words_are_counted_once(model, add_eos):
    labels = ("O", "B-X", "I-X")
    sentences = [(1,), (0, 1, 2, 2), (0,), (0,), (1, 2)]
    examples = [
        TaggedWords(f"{at}", ("unbelievable",) * len(tags), tags)
        for at, tags in enumerate(sentences)
    ]
    task = TokenClassification(
        Dataset("x", TaskFamily.TC, labels, "x", "", "", lambda split: examples), FinetuneConfig()
    )
    encoded = task.encode(examples, text_encoder(load_tokenizer(str(model)), 60, add_eos=add_eos))
    assert (
        encoded.lengths > [len(tags) + 1 for tags in sentences]
    ).all()  # a word has several sub-tokens
    assert (
        task.count_labels(encoded).tolist() == np.bincount(sum(sentences, ())).tolist() == [3, 3, 3]
    )


def test_a_run_counts_labels_before_it_trains(model, tmp_path, capfd):
    rows = [{"text": f"stan {at}", "label": "pos" if at % 8 else "neg"} for at in range(16)]
    files = {
        "train.jsonl": rows,
        "valid.jsonl": rows[1:3],
        "test.jsonl": [*rows[:4], {"text": "mill", "label": "odd"}],
    }
    films = write_files(
        tmp_path / "films", files | {"meta.json": {"labels": ["neg", "pos", "odd"]}}
    )
    run_main(
        [
            "--model",
            str(model),
            "--dataset",
            films,
            "--output",
            str(tmp_path / "out"),
            "--batch-size",
            "8",
        ]
    )
    said = capfd.readouterr().out.splitlines()
    assert (
        "films: pos is 7.0 times as frequent as neg; train has no odd; validation has no neg, odd; "
        "train: pos 14, neg 2, odd 0; "
        "always predicting pos is right in 60.00 % of test"
    ) in said
    assert (
        "films: warning: labels without a training example cannot be learned: odd (test: 1)" in said
    )
    assert any(line.startswith("test: score") and "(60.00)" in line for line in said)


@pytest.mark.parametrize(
    "train, test, lines",
    [
        (
            [["a"], ["b", "a"]],
            [["a"], ["c"]],
            ["labels without a training example cannot be learned: c (validation: 1, test: 1)"],
        ),
        (
            [1.0, 2.0],
            [2.0, 2.0],
            [
                "the task is regression, as labels are numbers with a point, such as 1.0; write "
                "classes as 1",
                "all labels of validation are equal: its correlations are undefined and count as 0",
                "all labels of test are equal: its correlations are undefined and count as 0",
            ],
        ),
    ],
)
def test_a_run_warns_of_labels_and_numbers_that_teach_nothing(
    model, tmp_path, capfd, train, test, lines
):
    files = {"train.jsonl": [{"text": "stan", "label": label} for label in train]}
    for name in ("valid.jsonl", "test.jsonl"):
        files[name] = [{"text": "mill", "label": label} for label in test]
    if isinstance(train[0], list):
        files["meta.json"] = {"labels": ["a", "b", "c"]}
    path = write_files(tmp_path / "films", files)
    flags = ["--output", str(tmp_path / "out"), "--warmup", "0"]
    run_main(["--model", str(model), "--dataset", path, *flags])
    said = capfd.readouterr().out.splitlines()
    found = [line.replace("warning: ", "") for line in said if line.startswith("films: ")]
    assert [f"films: {line}" for line in lines] == [line for line in found if "step" not in line]
