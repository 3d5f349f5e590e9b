import json
import time

import psutil
import pytest
import runs

from megaenc.bench import data, preprocess_scaling, tokenize_backends
from megaenc.data.sources import text_files
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.processes import Worker


@pytest.fixture(scope="module")
def report(small_corpus, tmp_path_factory):
    """What a small benchmark writes."""
    output = tmp_path_factory.mktemp("bench") / "bench.json"
    flags = ["--input", small_corpus.text, "--tokenizer", small_corpus.tokenizer, "--output", output]
    data.main([*map(str, flags), "--megabytes", "0.2", "--rounds", "2", "--workers", "2"])
    return json.loads(output.read_text())


@pytest.mark.slow
def test_all_ways_have_read_the_same_and_found_the_same(report):
    assert set(report["ways"]) == {"megaenc", "gigatoken", "encode_batch", "encode_batch_fast", "datasets.map"}
    results = {(turn["sha256"], turn["documents"], turn["tokens"]) for turns in report["turns"].values() for turn in turns}
    assert results == {(report["turns"]["megaenc"][0]["sha256"], report["documents"], report["tokens"])}
    assert 0.2e6 <= report["bytes"] < 0.21e6
    assert all(len(turns) == 3 for turns in report["turns"].values())  # the first is not counted


@pytest.mark.slow
def test_figures_follow_from_the_turns(report):
    ours, theirs = ([turn["seconds"] for turn in report["turns"][way][1:]] for way in ("megaenc", "encode_batch"))
    ratios = [second / first for first, second in zip(ours, theirs, strict=True)]
    assert report["ratio_encode_batch"] == {"median": sum(ratios) / 2, "lowest": min(ratios), "highest": max(ratios)}
    row = report["ways"]["megaenc"]
    assert row["megabytes_per_second"]["highest"] == report["bytes"] / 1e6 / min(ours)
    assert row["tokens_per_second"]["lowest"] == report["tokens"] / max(ours)
    assert row["peak_mib"] > 50
    assert "the ids of all are identical" in data.format_table(
        report
    ) and "times as fast as a loop of encode_batch" in data.format_table(report)


def test_simulated_workers_return_as_much_as_real_ones():
    block = text_files.LineBlock("text.jsonl", 0, 1, b"x" * 4000, 4000)
    started = time.perf_counter()
    result = preprocess_scaling.SleepingTokenizer(1e-5, 0.25, 0.01, "uint16")(block)
    assert time.perf_counter() - started >= 0.04
    assert (result.documents, len(result.tokens[0]), result.size, result.position) == (40, 1000, 4000, 4000)
    assert result.lengths[0].tolist() == [25] * 40 and result.counts[0].tolist() == [1] * 40


def test_simulated_nodes_write_every_partition_once(tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess_scaling, "_PARTITIONS", 12)
    monkeypatch.setattr(preprocess_scaling, "_PARTITION_SECONDS", 0.05)
    row = preprocess_scaling._measure_nodes(2, tmp_path)
    assert (row["written"], row["twice"]) == (12, 0) and 12 <= row["claims"] < 24 and row["seconds"] >= 6 * 0.05


@pytest.mark.slow
def test_workers_are_compared(small_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preprocess_scaling, "_PARTITIONS", 12)
    monkeypatch.setattr(preprocess_scaling, "_PARTITION_SECONDS", 0.05)
    flags = ["--input", small_corpus.text, "--tokenizer", small_corpus.tokenizer, "--output", tmp_path / "bench.json"]
    flags += ["--compare", "workers", "--megabytes", "0.2", "--rounds", "1", "--workers", "2", "--simulated-workers", "3"]
    data.main(list(map(str, flags)))
    results = json.loads((tmp_path / "bench.json").read_text())
    assert {"read", "tokenize", "threads 1", "processes 2", "merge", "instant 2", "simulated 3"} <= set(results["stages"])
    assert set(results["nodes"]) == {"1", "2", "3"} and all(row["twice"] == 0 for row in results["nodes"].values())
    assert "3 nodes: " in capsys.readouterr().out


def test_ids_that_differ_end_it_before_anything_is_timed(small_corpus, tmp_path, monkeypatch, refusal):
    def turn(way, *_):
        return {"sha256": "1" * 64 if way == "gigatoken" else "0" * 64, "documents": 5, "tokens": 70}

    monkeypatch.setattr(data, "_run_turn", turn)
    flags = ["--input", small_corpus.text, "--tokenizer", small_corpus.tokenizer, "--output", tmp_path / "bench.json"]
    line = refusal(data.main, flags)
    assert "gigatoken: found 5 documents, 70 tokens, sha256 111111111111; expected the ids of megaenc: 5, 70, 0000" in line
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds 0: expected more than 0"),
        (["--compare", "workers", "--simulated-workers", "0"], "--simulated-workers 0: expected more than 0"),
        (["--megabytes", "-1"], "--megabytes -1.0: expected more than 0"),
        (["--input", "missing.jsonl"], "missing.jsonl: no such file or folder"),
        (["--input", "TEXT", "--json-key", "title"], "no key `title`"),
        (["--input", "TEXT", "--tokenizer", "./nothing"], "--tokenizer ./nothing: no such folder"),
    ],
)
def test_wrong_input_is_one_line(small_corpus, tmp_path, refusal, flags, message):
    flags = [str(small_corpus.text) if flag == "TEXT" else flag for flag in flags]
    assert message in refusal(data.main, [*flags, "--output", tmp_path / "bench.json"])


def test_a_way_that_is_killed_leaves_no_process(small_corpus, tmp_path):
    """Also where another program forked it, that would wait for work."""
    text = runs.write_text(tmp_path / "text.jsonl", documents=5000)
    way = Worker(tokenize_backends.run_backend, runs.surroundings())
    way.send(("datasets.map", str(text), str(small_corpus.tokenizer), 2))
    below, deadline = [], time.monotonic() + 120
    while len(below) < 3:  # a manager and two workers
        assert way.exit_code() is None and time.monotonic() < deadline
        below = psutil.Process(way.process.pid).children()
    way.process.kill()
    way.process.wait()
    _, remaining = psutil.wait_procs(below, timeout=20)
    for process in remaining:
        process.kill()
    assert not remaining, remaining


def test_without_input_text_and_tokenizer_are_made(tmp_path, monkeypatch):
    """From a demo of its own, here a small one."""
    monkeypatch.setattr("megaenc.data.demo.build_demo_corpus", lambda folder: small_demo(tmp_path))
    settings = data.DataBenchConfig(megabytes=0.1)
    (tmp_path / "work").mkdir()
    text, tokenizer = data._prepare_inputs(settings, tmp_path / "work")
    assert text.stat().st_size >= 0.1e6
    assert load_tokenizer(tokenizer).mask_token_id is not None
    run = tokenize_backends.prepare_megaenc(str(text), tokenizer, 2, str(tmp_path / "work"))
    ids, lengths = run()()
    assert len(ids) == lengths.sum() > 1000


def small_demo(folder):
    from megaenc.data.demo import DemoPaths

    return DemoPaths(runs.write_text(folder / "demo.jsonl"), folder / "heldout.jsonl", folder / "tokenizer", folder / "corpus")
