"""Report of imbalanced, absent and unseen labels before training."""

from collections.abc import Mapping, Sequence

import numpy as np

from megaenc.finetune.datasets.formats import format_name_list

_MAX_RATIO = 5
"""Ratio of the largest to the smallest class up to which classes count as balanced."""


def describe_label_counts(
    name: str, labels: Sequence[str], counts: Mapping[str, np.ndarray]
) -> list[str]:
    """Return lines about imbalanced, absent and unseen labels; [] if there are none.

    One line is about labels that are imbalanced (in train, the most frequent has over 5 times the
    examples of the rarest) or absent from train or validation, another about labels of validation
    or test that train lacks. The tag O is not compared with other classes.

    Args:
        name: Name of the data set, the start of each line.
        labels: Label names in the order of their indices.
        counts: Number of texts or words of each label, int64[labels], by split: train, validation
            and test.
    """
    train = counts["train"]
    test = counts["test"]
    compared = [index for index, label in enumerate(labels) if label != "O" and train[index]]
    reasons = []
    lines = []
    if compared:
        most = max(compared, key=lambda index: train[index])
        least = min(compared, key=lambda index: train[index])
        if train[most] > _MAX_RATIO * train[least]:
            reasons.append(
                f"{labels[most]} is {train[most] / train[least]:.1f} times as frequent as "
                f"{labels[least]}"
            )
    for split in ("train", "validation"):
        absent = [label for label, count in zip(labels, counts[split], strict=True) if not count]
        if absent:
            reasons.append(f"{split} has no {format_name_list(absent)}")
    if reasons:
        order = sorted(range(len(labels)), key=lambda index: -train[index])
        in_train = format_name_list([f"{labels[index]} {train[index]:,}" for index in order])
        majority = int(test.argmax())
        baseline = (
            f"always predicting {labels[majority]} is right in "
            f"{100 * test[majority] / max(test.sum(), 1):.2f} % of test"
        )
        lines.append(f"{name}: {'; '.join(reasons)}; train: {in_train}; {baseline}")
    return lines + describe_unseen_labels(name, labels, counts)


def describe_unseen_labels(
    name: str, labels: Sequence[str], counts: Mapping[str, np.ndarray]
) -> list[str]:
    """Return a line about labels of the evaluation splits that train lacks, or [].

    The arguments are those of `describe_label_counts`.
    """
    unseen = []
    for index, label in enumerate(labels):
        places = [
            f"{split}: {counts[split][index]:,}"
            for split in ("validation", "test")
            if counts[split][index]
        ]
        if places and not counts["train"][index]:
            unseen.append(f"{label} ({', '.join(places)})")
    if not unseen:
        return []
    return [
        f"{name}: warning: labels without a training example cannot be learned: "
        f"{format_name_list(unseen)}"
    ]
