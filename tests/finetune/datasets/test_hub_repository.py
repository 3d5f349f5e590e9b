"""Repositories of the Hub by name, read from Parquet files without network."""

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from small_data import write_splits

from megaenc.errors import InputError
from megaenc.finetune.datasets.registry import find_dataset, parse_dataset_name
from megaenc.finetune.examples import Answer, LabelledText, Question, TaggedWords, TaskFamily

REVIEWS = Features(
    {"sentence": Value("string"), "label": ClassLabel(names=["neg", "pos"]), "idx": Value("int32")}
)


def reviews(count, label=lambda row: row % 2):
    columns = {
        "sentence": [f"text {row}" for row in range(count)],
        "label": [label(row) for row in range(count)],
    }
    return Dataset.from_dict(columns | {"idx": list(range(count))}, features=REVIEWS)


SPLITS = ("train", "validation", "test")


@pytest.fixture
def on_hub(monkeypatch, tmp_path):
    """Put a data set on a Hub, {split: Dataset}; return the calls."""
    calls = []
    load_dataset = datasets.load_dataset
    monkeypatch.chdir(tmp_path)

    def put(splits):
        for split, data in splits.items():
            (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
            data.to_parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")

        def load(repository, config=None, *, revision=None):
            calls.append((repository, config, revision))
            return load_dataset(str(tmp_path / "hub"), cache_dir=str(tmp_path / "cache"))

        monkeypatch.setattr(datasets, "load_dataset", load)
        return calls

    return put


def test_a_name_is_enough_for_texts_with_named_classes(on_hub):
    calls = on_hub({"train": reviews(10), "validation": reviews(4), "test": reviews(3)})
    found = find_dataset("org/films")
    assert (found.name, found.family, found.labels, found.train_on) == (
        "films",
        TaskFamily.SC,
        ("neg", "pos"),
        "films",
    )
    assert found.load_split("validation")[1] == LabelledText("validation-1", "text 1", 1)
    assert [len(found.load_split(split)) for split in ("train", "validation", "test")] == [10, 4, 3]
    assert calls == [("org/films", None, None)]
    assert (
        find_dataset("org/films").fingerprint
        == found.fingerprint
        != find_dataset("org/films@abc").fingerprint
    )


@pytest.mark.parametrize("given, name, call", [
    ("org/films:en.v1", "films-en.v1", ("org/films", "en.v1", None)),
    ("org/films@0abc", "films", ("org/films", None, "0abc")),
    ("hf:org/films:en@refs/pr/3", "films-en", ("org/films", "en", "refs/pr/3")),
    ("hf:films", "films", ("films", None, None)),
    ("mine=org/films", "mine", ("org/films", None, None)),
])  # fmt: skip
def test_configurations_revisions_and_other_names(on_hub, given, name, call):
    calls = on_hub({"train": reviews(40), "test": reviews(3)})
    assert parse_dataset_name(given)[0] == find_dataset(given).name == name and calls == [call]


def test_an_existing_path_is_read_instead(on_hub, tmp_path):
    calls = on_hub({"train": reviews(4)})
    write_splits(tmp_path / "org" / "films", "jsonl", [{"text": "good", "label": "yes"}])
    assert find_dataset("org/films").labels == ("yes",)
    with pytest.raises(
        InputError,
        match=r"data set org/flims: found no file or directory org/flims, expected one with",
    ):
        find_dataset("org/flims")
    assert not calls


def test_hidden_labels_are_not_used(on_hub, capsys):
    on_hub({"train": reviews(40), "validation": reviews(5), "test": reviews(3, lambda row: -1)})
    hidden = find_dataset("org/hidden")
    assert [len(hidden.load_split(split)) for split in SPLITS] == [38, 2, 5]
    said = capsys.readouterr().out
    assert "hidden: test is not used: its labels are hidden (-1)\n" in said
    assert (
        "hidden: no test split: 5 % of train validate (seed 42), and validation is the test split\n"
        in said
    )


def test_hidden_numbers_need_a_validation_split(on_hub):
    hidden = Dataset.from_dict({"text": ["It rains."], "label": [-1.0]})
    on_hub({"train": Dataset.from_dict({"text": ["It snows."], "label": [2.5]}), "test": hidden})
    with pytest.raises(InputError, match=r"test: its labels are hidden \(-1\), expected"):
        find_dataset("org/rated")


def test_pairs_and_labels_without_names(on_hub):
    pairs = Dataset.from_dict(
        {"premise": ["It rains.", "It snows."], "hypothesis": ["Wet.", "Hot."], "label": [7, 3]}
    )
    on_hub(dict.fromkeys(SPLITS, pairs))
    found = find_dataset("org/pairs", pair_template="{text} | {text_pair}")
    assert (found.labels, found.pair_template) == (("3", "7"), "{text} | {text_pair}")
    assert found.load_split("test")[0] == LabelledText("test-0", "It rains. | Wet.", 1)


PEOPLE = Features(
    {"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=["O", "B-PER"]))}
)


def test_tags(on_hub):
    on_hub(
        dict.fromkeys(
            SPLITS,
            Dataset.from_dict(
                {"tokens": [["Ada", "wrote"]], "ner_tags": [[1, 0]]}, features=PEOPLE
            ),
        )
    )
    found = find_dataset("org/people")
    assert (found.family, found.labels) == (TaskFamily.TC, ("O", "B-PER"))
    assert found.load_split("train") == [TaggedWords("train-0", ("Ada", "wrote"), (1, 0))]


def test_questions(on_hub):
    """Impossible ones have no answer; answers that stand elsewhere are left out."""
    answers = [{"text": ["Ada"], "answer_start": [start]} for start in (4, 0, 4)]
    columns = {
        "question": ["Who?"] * 3,
        "context": ["Yes Ada did."] * 3,
        "answers": answers,
        "id": list("abc"),
    }
    on_hub(
        dict.fromkeys(SPLITS, Dataset.from_dict(columns | {"is_impossible": [False, False, True]}))
    )
    found = find_dataset("org/asked")
    expected = [
        Question("a", "Who?", "Yes Ada did.", (Answer("Ada", 4),)),
        Question("c", "Who?", "Yes Ada did.", ()),
    ]
    assert found.family is TaskFamily.QA and found.load_split("test") == expected
    message = (
        r"found the columns `question`, .*, expected for --task SC text \(or sentence\) and label"
    )
    with pytest.raises(InputError, match=message):
        find_dataset("org/asked", task="SC")
    with pytest.raises(InputError, match=r"--task reranking: .* of the Hub, expected local files"):
        find_dataset("org/asked", task="reranking")


def test_a_split_of_the_hub_without_a_column_is_one_line(on_hub, monkeypatch):
    splits = {
        "train": reviews(4),
        "validation": reviews(4),
        "test": reviews(4).remove_columns("label"),
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: splits)
    with pytest.raises(
        InputError,
        match=r"data set films \(org/films\): test: no column `label`; found `sentence`, `idx`",
    ):
        find_dataset("org/films")


def test_numbers_of_the_hub_are_labels_of_regression(on_hub):
    columns = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [4.5, 0.0]}
    on_hub({split: Dataset.from_dict(columns) for split in ("train", "validation", "test")})
    found = find_dataset("org/similar")
    assert (found.family, found.labels) == (TaskFamily.REGRESSION, ("score",))
    assert found.load_split("test")[0] == LabelledText("test-0", "a", 4.5, "c")
    assert find_dataset("org/similar", task="regression").fingerprint == found.fingerprint
    with pytest.raises(InputError, match=r"label 4.5: .* numbers need --task regression"):
        find_dataset("org/similar", task="SC")


def test_lists_of_class_names_of_the_hub_are_labels_of_multi_label(on_hub):
    names = datasets.ClassLabel(names=["joy", "anger"])
    features = datasets.Features({"text": datasets.Value("string"), "labels": [names]})
    table = Dataset.from_dict({"text": ["a", "b"], "labels": [[1, 0], []]}, features=features)
    on_hub({split: table for split in ("train", "validation", "test")})
    found = find_dataset("org/emotions")
    assert (found.family, found.labels) == (TaskFamily.MULTI_LABEL, ("joy", "anger"))
    assert [example.label for example in found.load_split("test")] == [(0, 1), ()]


@pytest.mark.parametrize("content, message", [
    ({"train": Dataset.from_dict({"body": ["x"], "stars": [1]})},
     r"data set odd \(org/odd\): found the columns `body`, `stars`, expected text \(or sentence\) "
     r"and label"),
    ({"train": Dataset.from_dict({"text": ["x", "y"], "label": ["5", "4.8"]})},
     r"data set odd \(org/odd\): train row 2: label '4.8': .* need --task regression"),
    ({"train": Dataset.from_dict({"tokens": [["x"]], "tags": [["NN"]]})},
     r"train row 1: tag 1: found 'NN', expected IOB2"),
    ({"unsupervised": reviews(2)},
     r"found the splits `unsupervised`, expected train, validation and test"),
    ({"train": reviews(2)}, r"data set odd \(org/odd\): no test split, expected a split test"),
])  # fmt: skip
def test_what_is_no_labelled_data_is_one_line(on_hub, content, message):
    on_hub(content)
    with pytest.raises(InputError, match=message):
        find_dataset("org/odd").load_split("test")


@pytest.mark.parametrize("given, error, message", [
    ("runs/nowhere", ConnectionError("Couldn't reach it"),
     r"^data set runs/nowhere: found no file or directory runs/nowhere; runs/nowhere of the "
     r"Hugging Face Hub cannot be read: "
     r"Couldn't reach it; expected a data set of the Hub and a network once, or a path of local "
     r"data$"),
    ("hf:glue",
     ValueError("Config name is missing.\nPlease pick one among the available configs: "
                "['cola', 'sst2']\nExample"),
     r"^data set hf:glue: glue of .*: Config name is missing. Please pick one among the available "
     r"configs: \['cola', 'sst2'\];"),
])  # fmt: skip
def test_what_the_hub_does_not_give_is_one_line(on_hub, monkeypatch, given, error, message):
    on_hub({})

    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match=message):
        find_dataset(given)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        InputError,
        match="not in the cache, and HF_DATASETS_OFFLINE or HF_HUB_OFFLINE forbids the network",
    ):
        find_dataset(given)
