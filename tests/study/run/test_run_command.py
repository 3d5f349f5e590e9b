"""What `megaenc study run` is told, and what it says before it does anything."""

import shlex

import manifests
import pytest

from megaenc.errors import InputError
from megaenc.study.plan.dag import build_graph
from megaenc.study.run.command import (
    StudyRunConfig,
    device_slots,
    main,
    print_summary,
    select_stages,
)
from megaenc.study.run.executor import with_dependencies


def test_only_takes_what_is_needed_along(tmp_path):
    nodes = build_graph(manifests.read(tmp_path), tmp_path / "study").stages
    ids = [node.id for node in select_stages(nodes, ["toy-clm-dec400-mlm40-420"])]
    name = "toy-clm-dec400-mlm40-420"
    grid = [f"finetune/{name}@demo_sc", f"finetune/{name}@demo_ir"]
    assert ids == ["corpus", "pretrain/toy-clm-400", f"pretrain/{name}", f"export/{name}", *grid]
    assert [node.id for node in select_stages(nodes, ["pretrain/toy-clm-4*"])] == [
        "corpus",
        "pretrain/toy-clm-400",
    ]
    assert [node.id for node in select_stages(nodes, [f"finetune/{name}"])] == ids
    assert [node.id for node in select_stages(nodes, ["finetune/*@demo_ir"])][-1].endswith(
        "@demo_ir"
    )
    assert select_stages(nodes, []) == list(nodes.values()) == with_dependencies(nodes, nodes)
    with pytest.raises(InputError, match="--only: found toy-clm-40, did you mean toy-clm-400"):
        select_stages(nodes, ["toy-clm-40"])


def test_places(monkeypatch):
    monkeypatch.setattr("megaenc.study.run.command.accelerator_names", lambda: ["one", "another"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert device_slots(0) == ["3", "5"] and device_slots(3) == ["3", "5", "3"]
    monkeypatch.setattr("megaenc.study.run.command.accelerator_names", list)
    assert device_slots(2) == ["", ""]


def test_a_dry_run_says_each_command_and_does_nothing(tmp_path, capsys):
    main(
        [
            str(manifests.write(tmp_path)),
            "--output",
            str(tmp_path / "study"),
            "--dry-run",
            "--only",
            "toy-clm-400",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        *3 * ["corpus"],
        "pretrain/toy-clm-400",
        "export/toy-clm-400",
        "finetune/toy-clm-400@demo_sc",
        "finetune/toy-clm-400@demo_ir",
    ]
    assert lines[0] == f"corpus: would run: megaenc demo --output {tmp_path / 'study' / 'corpus'}"
    assert (
        " --seq-length 64 " in lines[3]
        and " --objective-schedule clm --train-iters 400 " in lines[3]
    )
    assert (
        " --datasets demo_sc --learning-rates " in lines[5]
        and " --datasets demo_ir --learning-rates " in lines[6]
    )
    corpus = tmp_path / "study" / "corpus"
    assert (
        f" --data-path {corpus}/corpus_text_document --tokenizer {corpus}/tokenizer "
        in f"{lines[3]} "
    )
    assert not (tmp_path / "study").exists()


def test_a_manifest_without_a_corpus_is_told_what_to_train_on(tmp_path, capfd, monkeypatch):
    """It would be the demo corpus under the study's names otherwise."""
    monkeypatch.chdir(tmp_path)
    study = ["--output", tmp_path / "study", "--dry-run"]
    paper = manifests.STUDY / "paper.yaml"
    (tmp_path / "words").mkdir()
    main(
        [
            str(word)
            for word in (
                paper,
                *study,
                "--data-path",
                "0.3",
                "a",
                "0.7",
                "/b",
                "--tokenizer",
                "words",
            )
        ]
    )
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("pretrain/")]
    where = f" --data-path 0.3 {tmp_path / 'a'} 0.7 /b --tokenizer {tmp_path / 'words'}"
    assert len(lines) == 38 and all(where in line for line in lines)


def test_paths_of_commands_are_absolute(tmp_path, capsys, monkeypatch):
    """Jobs elsewhere are not begun in this directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets" / "sc").mkdir(parents=True)
    grid = {**manifests.BASE["finetune"], "datasets": ["mine=sc"], "task": "SC"}
    name = manifests.write(
        tmp_path, finetune=grid, corpus={"text": ["t.jsonl"], "vocab_size": 1024}
    ).name
    main([name, "--output", "study", "--data", "sets", "--dry-run", "--only", "toy-clm-400"])
    output = capsys.readouterr().out
    assert f" --input {tmp_path}/sets/t.jsonl " in output and f"mine={tmp_path}/sets/sc" in output


def test_the_next_command_can_be_typed_as_it_is(tmp_path, capsys):
    study = tmp_path / "my study"
    print_summary([], study, {}, 1.0, StudyRunConfig("a manifest.yaml"))
    words = shlex.split(capsys.readouterr().out.split("`")[1])
    assert words[:4] == ["megaenc", "study", "report", "a manifest.yaml"] and words[5] == str(
        study / "results"
    )
