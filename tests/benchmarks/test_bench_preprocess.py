"""The benchmark of tokenization: all libraries read the same and find equal ids."""

import functools
import json

import preprocess
import pytest


def flags(corpus, output) -> list[str]:
    sizes = ["--megabytes", "0.02", "--rounds", "1", "--workers", "2"]
    return [
        "--input",
        str(corpus.text),
        "--tokenizer",
        str(corpus.tokenizer),
        "--output",
        str(output),
        *sizes,
    ]


@pytest.mark.slow
def test_all_have_read_the_same_and_found_the_same(small_corpus, tmp_path, monkeypatch):
    """One turn serves both checks, as each takes a process."""
    monkeypatch.setattr(preprocess, "_run_turn", functools.cache(preprocess._run_turn))
    output = tmp_path / "bench.json"
    preprocess.main(flags(small_corpus, output))
    report = json.loads(output.read_text())
    assert set(report["ways"]) == {
        "megaenc",
        "gigatoken",
        "encode_batch",
        "encode_batch_fast",
        "datasets.map",
    }
    results = {
        (turn["sha256"], turn["documents"], turn["tokens"])
        for turns in report["turns"].values()
        for turn in turns
    }
    assert results == {
        (report["turns"]["megaenc"][0]["sha256"], report["documents"], report["tokens"])
    }
    assert 0.02e6 <= report["bytes"] < 0.021e6
    _, ours = report["turns"]["megaenc"]
    _, theirs = report["turns"]["encode_batch"]
    assert report["ratio_encode_batch"]["median"] == theirs["seconds"] / ours["seconds"]


def test_ids_that_differ_end_it_before_anything_is_timed(
    small_corpus, tmp_path, monkeypatch, refusal
):
    def turn(way, *_):
        return {
            "sha256": "1" * 64 if way == "gigatoken" else "0" * 64,
            "documents": 5,
            "tokens": 70,
        }

    monkeypatch.setattr(preprocess, "_run_turn", turn)
    line = refusal(preprocess.main, flags(small_corpus, tmp_path / "bench.json"))
    assert (
        "gigatoken: found 5 documents, 70 tokens, sha256 111111111111; "
        "expected the ids of megaenc: 5, 70, 0000" in line
    )
    assert not (tmp_path / "bench.json").exists()
