"""`--dry-run`: the phases with their steps and tokens, the data, and nothing written."""

from pathlib import Path

import pytest
import runs

from megaenc.data.preprocess import command as preprocess
from megaenc.training.command import main

# 200 steps of 8 packs of 64 tokens.
RUN = [*runs.SHORT_RUN, "--train-iters", "200", "--lr-warmup-iters", "10", "--lr-wsd-decay-iters", "20"]


@pytest.fixture
def printed(small_corpus, capsys, tmp_path):
    """What a dry run prints, as lists of words; it must leave the run folder alone."""

    def dry_run(*flags):
        main([*small_corpus.flags, *RUN, "--dry-run", "--save", str(tmp_path / "run"), *flags])
        assert not (tmp_path / "run").exists()
        return [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]

    return dry_run


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (
            "clm:0.25,mlm:0.75",
            [["clm", "1", "to", "50", "25,600", "25,600"], ["mlm", "51", "to", "200", "76,800", "102,400"]],
        ),
        ("mlm(mask=0.4->0.15):1.0", [["mlm(mask=0.4->0.15)", "1", "to", "200", "102,400", "102,400"]]),
        (
            "2x(clm:0.1,mlm:0.4)",
            [
                ["clm", "1", "to", "20", "10,240", "10,240"],
                ["mlm", "21", "to", "100", "40,960", "51,200"],
                ["clm", "101", "to", "120", "10,240", "61,440"],
                ["mlm", "121", "to", "200", "40,960", "102,400"],
            ],
        ),
        (
            "clm:50,mix(clm:0.2,mlm:0.8):150",
            [["clm", "1", "to", "50", "25,600", "25,600"], ["mix(clm:1,mlm:4)", "51", "to", "200", "76,800", "102,400"]],
        ),
    ],
)
def test_phases_with_their_steps_and_tokens(schedule, rows, printed):
    lines = printed("--objective-schedule", schedule)
    first = lines.index(["phase", "steps", "tokens", "tokens", "so", "far"]) + 2
    assert lines[first : first + len(rows)] == rows
    assert lines[first + len(rows)] == ["objective", "steps", "tokens", "predicted,", "about"]


def test_totals_of_each_objective_and_its_predictions(printed):
    lines = printed("--objective-schedule", "clm:100,mlm(mask=0.4->0.2):100")
    first = lines.index(["objective", "steps", "tokens", "predicted,", "about"]) + 2
    clm, mlm = lines[first : first + 2]
    assert clm[:3] == ["clm", "100", "51,200"] and mlm[:3] == ["mlm(mask=0.4->0.2)", "100", "51,200"]
    assert float(clm[4].strip("(%)")) == pytest.approx(98, abs=1.5)
    assert float(mlm[4].strip("(%)")) == pytest.approx(30, abs=3)


def test_every_step_of_a_short_ramp_counts_alike(printed):
    lines = printed("--objective-schedule", "mlm(mask=0.8->0.2):2,clm:198")
    share = next(line for line in lines if line[0] == "mlm(mask=0.8->0.2)" and line[1] == "2")[4]
    assert float(share.strip("(%)")) == pytest.approx(50, abs=4)


def test_the_demo_corpus_is_not_built_for_it(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--data-path", "demo/python_text_document"]):
        assert "demo/ holds no corpus yet" in refusal(main, ["--dry-run", *words])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokenizer", [True, False])
def test_text_that_is_not_tokenized_is_sent_to_preprocess(small_corpus, tokenizer, refusal):
    words = ["--data-path", small_corpus.text, *(["--tokenizer", small_corpus.tokenizer] if tokenizer else [])]
    expected = "found a file, expected the prefix of a .bin and an .idx file; run `megaenc preprocess` first"
    assert refusal(main, words) == f"error: {small_corpus.text}: {expected}"


@pytest.mark.parametrize("metadata", [True, False])
def test_the_special_tokens_of_documents_are_reported(printed, capsys, small_corpus, tmp_path, metadata):
    """Without metadata they follow from the end of the first document; corpora that differ are refused."""
    words = ["--input", str(small_corpus.text), "--tokenizer", str(small_corpus.tokenizer), "--workers", "1"]
    prefixes = {flags: str(tmp_path / f"corpus{len(flags)}_text_document") for flags in [(), ("--append-eod",)]}
    for flags, prefix in prefixes.items():
        preprocess.main([*words, "--output-prefix", prefix.removesuffix("_text_document"), *flags])
        if not metadata:  # as Megatron's own tool leaves it
            Path(f"{prefix}.json").unlink()
    said = []
    for prefix in prefixes.values():
        lines = [" ".join(line) for line in printed("--data-path", prefix, "--objective-schedule", "clm:1.0")]
        said += [line for line in lines if line.startswith("special tokens of a document")]
    remedy = "; `megaenc preprocess --special-tokens template` or `--append-eod` adds some"
    start = "special tokens of a document: ..."
    assert said == [f"{start} (none){remedy}", f"{start} <|eos|> (eod)"]
    with pytest.raises(SystemExit):
        main(["--data-path", *prefixes.values(), "--tokenizer", str(small_corpus.tokenizer), "--dry-run"])
    assert "expected one mode for all corpora of a run" in capsys.readouterr().err
    first, second = prefixes.values()
    with pytest.raises(SystemExit):
        main(["--data-path", first, "--valid-data-path", f"web={second}", "--tokenizer", str(small_corpus.tokenizer)])
    line = capsys.readouterr().err
    assert f"--valid-data-path: {first} has --special-tokens none" in line and f"{second} has --special-tokens eod" in line


def test_a_mixture_is_counted_as_it_will_be_drawn(printed, small_corpus):
    from megaenc.training.config import parse_config
    from megaenc.training.planning import build_plan

    schedule = "mix(clm:0.3,mlm:0.7):1.0"
    lines = printed("--objective-schedule", schedule)
    plan = build_plan(parse_config([*small_corpus.flags, *RUN, "--objective-schedule", schedule], "test"))
    drawn = [plan.schedule.text_at(step) for step in range(1, 201)]
    assert {line[0]: int(line[1]) for line in lines if line[0] in ("clm", "mlm")} == {
        text: drawn.count(text) for text in ("clm", "mlm")
    }


def test_thousands_of_phases_are_not_all_printed(printed):
    lines = printed("--objective-schedule", "100x(clm:1,mlm:1)")
    assert ["...", "188", "more", "phases", "to", "200"] in lines and len(lines) < 40


def test_corpora_and_how_often_they_are_read(small_corpus, capsys):
    sizes = ["--seq-length", "64", "--global-batch-size", "8", "--train-tokens", "102400"]
    main([*small_corpus.flags, *sizes, "--dry-run"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["200", "steps", "of", "8", "packs", "of", "64", "tokens", "(concat):", "102,400", "tokens"]
    assert lines[2] == ["makes", "steps", "1", "to", "200,", "from", "new", "weights"]
    row = next(line for line in lines if line and line[0] == str(small_corpus.prefix))
    assert row[1:3] == ["100.00", "%"] and row[4] == "1,600" and float(row[5]) == pytest.approx(102_400 / 21_000, rel=0.05)


@pytest.mark.parametrize("schedule", ["clm:0.5,mlm:0.5", "mix(clm:1,mlm:1)"])
def test_a_billion_steps_are_not_counted_one_by_one(schedule, printed):
    lines = printed("--train-iters", "1000000000", "--objective-schedule", schedule)
    for name, share in (("clm", 98), ("mlm", 40)):
        words = [line for line in lines if line[0] == name][-1]
        steps, _, _, percent = [word for word in words[1:] if word not in ("about", "%)")]
        assert int(steps.replace(",", "")) == pytest.approx(5e8, rel=0.02)
        assert float(percent.strip("(")) == pytest.approx(share, abs=3)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--train-iters", "1" + 20 * "0"], f"--train-iters: found 1{20 * '0'}, expected at most 1,000,000,000 steps"),
        (["--train-tokens", "1" + 30 * "0"], f"--train-tokens: found 1{30 * '0'}, expected at most 1,000,000,000 steps"),
        (
            ["--train-iters", "1" + 9 * "0", "--global-batch-size", "1" + 7 * "0", "--seq-length", "8192"],
            "tokens (--global-batch-size x --seq-length a step); expected at most 4,611,686,018,427,387,904",
        ),
        (["--rampup-batch-size", "2", "2", "1" + 18 * "0"], "expected SAMPLES of at most 1,000,000 x START"),
        (["--skip-packs", 5000 * "1"], "expected the number of a pack"),
    ],
)
def test_numbers_beyond_any_run_are_one_line(flags, complaint, small_corpus, refusal):
    iterations = [] if "--train-tokens" in flags else ["--train-iters", "200"]
    assert complaint in refusal(main, [*small_corpus.flags, "--seq-length", "64", "--dry-run", *iterations, *flags])


def test_a_pseudo_perplexity_is_among_the_validations(printed):
    lines = printed("--objective-schedule", "mix(clm:1,mntp:1):1.0", "--eval-pseudo-perplexity-passes", "8")
    [validation] = [line for line in lines if line[0] == "validation:"]
    names = ["clm,", "mlm,", "mntp,", "pseudo_perplexity(passes=8),", "pseudo_perplexity(passes=8,shift=1)"]
    assert validation == ["validation:", "every", "10", "steps", "under", *names]
