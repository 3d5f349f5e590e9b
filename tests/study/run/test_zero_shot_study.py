"""A study of two objectives with zero-shot retrieval, from text to report, by the commands themselves."""

import csv
import importlib.util
import json
from pathlib import Path

import manifests
import pytest
import runs

from megaenc.data import demo as corpus
from megaenc.finetune.datasets.beir import load_beir_test
from megaenc.finetune.datasets.demo import ensure_demo_datasets
from megaenc.study.report import command as report
from megaenc.study.run import command as run
from megaenc.study.run import status

TRAINING = {"batch_size": 4, "epochs": 4, "max_steps": 4, "warmup": 0, "max_length": 32}


def write_demo_set(folder, monkeypatch) -> Path:
    """Build demo_ir of the documentation of part of networkx in `folder`."""
    [package] = importlib.util.find_spec("networkx").submodule_search_locations
    sources = [(f"networkx/{path.relative_to(package)}", str(path)) for path in Path(package).glob("algorithms/[c-d]*.py")]
    monkeypatch.setattr(corpus, "_find_source_files", lambda: iter(sources))
    return ensure_demo_datasets(folder, ["demo_ir"]) / "demo_ir"


def write_pairs(file, beir) -> None:
    """Write pairs of test queries and their documents: the point is that training changes the scores."""
    data = load_beir_test(beir)
    rows = [
        {"query": data.queries[query], "document": data.documents[document]}
        for query, grades in data.relevant.items()
        for document in grades
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_from_text_to_report(tmp_path, monkeypatch, capsys):
    study = tmp_path / "study"
    write_pairs(tmp_path / "pairs.jsonl", write_demo_set(study / "demo", monkeypatch))
    runs.write_text(tmp_path / "text.jsonl")
    path = manifests.write(
        tmp_path,
        corpus={"text": ["text.jsonl"], "vocab_size": 400},
        pretrain=manifests.BASE["pretrain"] | {"lr_warmup_iters": 2, "lr_wsd_decay_iters": 4},
        models=[{"size": "toy", "steps": 12, "clm_share": [0, 1], "mask": 0.4}],
        finetune=None,
        embed={"datasets": ["demo_ir"], "train": "pairs.jsonl", "seeds": 2, **TRAINING},
    )
    run.main([str(path), "--output", str(study), "--jobs", "2"])
    assert "7 of 7 stages are done" in capsys.readouterr().out
    for name in ("toy-mlm40-12", "toy-clm-12"):
        details = json.loads((study / "embed" / name / "seed-1" / "training.json").read_text())
        assert (details["config"]["seed"], details["config"]["batch_size"], details["steps"]) == (1, 4, 4)
        scores = [
            json.loads((study / "embed" / name / f"{of}.json").read_text())["scores"][of] for of in ("pretrained", "seed-0")
        ]
        assert scores[0] != scores[1]
    status.main([str(path), "--output", str(study)])
    assert capsys.readouterr().out.splitlines()[0].startswith("7 stages: 7 done; 100 %")
    run.main([str(path), "--output", str(study)])
    assert "7 stages, 7 done, 0 to do" in capsys.readouterr().out
    flags = ["--results", str(study / "results"), "--runs", str(study / "runs"), "--output", str(study / "report")]
    report.main([str(path), *flags])
    assert "1f MLM is above CLM on ZS" in capsys.readouterr().out
    with (study / "report" / "tables" / "zero-shot.csv").open() as stream:
        head, *rows = csv.reader(stream)
    assert head[-2:] == ["demo_ir as pretrained", "demo_ir after contrastive training"]
    assert [row[0] for row in rows] == ["toy-clm-12", "toy-mlm40-12", "BM25", "random ranking"]
    assert all(row[-1] for row in rows[:2]) and (study / "report" / "figures" / "zero-shot.png").is_file()
    path.write_text(path.read_text().replace("warmup: 0", "warmup: 0.5"))
    with pytest.raises(SystemExit):
        run.main([str(path), "--output", str(study)])
    assert "embed: warmup is 0.0 there, 0.5 here (seed-0)" in capsys.readouterr().err
