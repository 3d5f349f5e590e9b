"""What `megaenc study run` is told, and what it says before it does anything."""

import shlex

import manifests
import pytest

from megaenc.errors import InputError
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.dag import build_graph
from megaenc.study.run.command import StudyRunConfig, device_slots, main, print_summary, select_stages
from megaenc.study.run.executor import with_dependencies


def test_only_takes_what_is_needed_along(tmp_path):
    nodes = build_graph(read_manifest(manifests.write(tmp_path)), tmp_path / "study").stages
    ids = [node.id for node in select_stages(nodes, ["toy-clm-dec400-mlm40-420"])]
    name = "toy-clm-dec400-mlm40-420"
    assert ids == ["corpus", "pretrain/toy-clm-400", f"pretrain/{name}", f"export/{name}", f"finetune/{name}"]
    assert [node.id for node in select_stages(nodes, ["pretrain/toy-clm-4*"])] == ["corpus", "pretrain/toy-clm-400"]
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
    main([str(manifests.write(tmp_path)), "--output", str(tmp_path / "study"), "--dry-run", "--only", "toy-clm-400"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        *3 * ["corpus"],
        "pretrain/toy-clm-400",
        "export/toy-clm-400",
        "finetune/toy-clm-400",
    ]
    assert lines[0] == f"corpus: would run: megaenc demo --output {tmp_path / 'study' / 'corpus'}"
    assert ": would run: megaenc tokenizer " in lines[1] and ": would run: megaenc preprocess " in lines[2]
    assert ": would run: megaenc pretrain --" in lines[3] and " --seq-length 64 " in lines[3]
    assert " --objective-schedule clm --train-iters 400 " in lines[3]
    assert not (tmp_path / "study").exists()


def said(capsys, *words) -> str:
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as refused:
        main([str(word) for word in words])
    assert refused.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_a_manifest_without_a_corpus_is_told_what_to_train_on(tmp_path, capsys, monkeypatch):
    """It would be the demo corpus under the study's names otherwise."""
    monkeypatch.chdir(tmp_path)
    study = ["--output", tmp_path / "study", "--dry-run"]
    paper = manifests.STUDY / "paper.yaml"
    assert "--data-path: missing" in said(capsys, paper, *study)
    assert "--tokenizer: missing" in said(capsys, paper, *study, "--data-path", "text")
    (tmp_path / "words").mkdir()
    main([str(word) for word in (paper, *study, "--data-path", "0.3", "a", "0.7", "/b", "--tokenizer", "words")])
    lines = capsys.readouterr().out.splitlines()
    assert sum("megaenc pretrain" in line or "torchrun" in line for line in lines) == 38
    where = f" --data-path 0.3 {tmp_path / 'a'} 0.7 /b --tokenizer {tmp_path / 'words'}"
    assert all(where in line for line in lines if line.startswith("pretrain/"))
    manifest = manifests.write(tmp_path)
    assert "--data-path: found here, but" in said(capsys, manifest, *study, "--data-path", "text")


def test_a_manifests_own_text_begins_where_its_data_do(tmp_path, capsys):
    pretrain = {**manifests.BASE["pretrain"], "data_path": ["text"], "tokenizer": "org/name"}
    path = manifests.write(tmp_path, pretrain=pretrain, corpus={"vocab_size": 1024})
    command = [str(path), "--output", str(tmp_path / "study"), "--dry-run", "--only", "pretrain/toy-clm-400"]
    main(command)
    output = capsys.readouterr().out
    assert f" --data-path {tmp_path / 'text'} " in output and " --tokenizer org/name " in output
    main([*command, "--data-path", "/elsewhere/text"])
    output = capsys.readouterr().out
    assert " --data-path /elsewhere/text " in output and " --tokenizer org/name " in output


def test_paths_of_commands_are_absolute(tmp_path, capsys, monkeypatch):
    """Jobs elsewhere are not begun in this folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets" / "sc").mkdir(parents=True)
    grid = {**manifests.BASE["finetune"], "datasets": ["mine=sc"], "task": "SC"}
    name = manifests.write(tmp_path, finetune=grid, corpus={"text": ["t.jsonl"], "vocab_size": 1024}).name
    main([name, "--output", "study", "--data", "sets", "--dry-run", "--only", "toy-clm-400"])
    output = capsys.readouterr().out
    assert f" --input {tmp_path}/sets/t.jsonl " in output and f"mine={tmp_path}/sets/sc" in output


def test_flags_that_would_change_nothing_are_refused(tmp_path, capsys):
    words = [manifests.write(tmp_path), "--output", tmp_path / "study"]
    assert "--jobs: found together with --slurm" in said(capsys, *words, "--slurm", "--jobs", "2")
    assert "--slurm-gpus: found without --slurm" in said(capsys, *words, "--slurm-gpus", "2")
    assert "--jobs: found 100,000, expected at most " in said(capsys, *words, "--jobs", "100000")
    assert "--processes: found 100,000, expected at most " in said(capsys, *words, "--processes", "100000")
    assert "--slurm-cluster: found without --slurm" in said(capsys, *words, "--slurm-cluster", "local")
    assert not (tmp_path / "study").exists()


def test_the_next_command_can_be_typed_as_it_is(tmp_path, capsys):
    study = tmp_path / "my study"
    print_summary([], study, {}, 1.0, StudyRunConfig("a manifest.yaml"))
    words = shlex.split(capsys.readouterr().out.split("`")[1])
    assert words[:4] == ["megaenc", "study", "report", "a manifest.yaml"] and words[5] == str(study / "results")


def test_help_gives_each_example_a_line(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = [line.strip(" │") for line in capsys.readouterr().out.splitlines()]
    assert "megaenc study run configs/study/mini.yaml --output study" in lines
    assert "megaenc study status configs/study/mini.yaml --output study" in lines


@pytest.mark.parametrize(("corpus", "words"), [("nowhere", "nowhere.idx"), ("there", "--tokenizer")])
def test_a_manifests_own_corpus_or_tokenizer_that_is_missing_is_one_line(tmp_path, refusal, corpus, words):
    (tmp_path / "there.idx").touch()
    text = {"data_path": [corpus], "tokenizer": "./none"}
    path = manifests.write(tmp_path, corpus={"vocab_size": 1024}, pretrain=manifests.BASE["pretrain"] | text)
    assert words in refusal(main, [path, "--output", tmp_path / "study"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["study.yaml", "there.idx"]
