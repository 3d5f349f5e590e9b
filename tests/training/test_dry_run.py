"""The plan that `--dry-run` prints without writing, and the first lines of a run."""

from dataclasses import replace

import pytest
import runs
import torch
from training_helpers import plan_of

from megaenc.data.preprocess import command as preprocess
from megaenc.training.callbacks.run_messages import format_run_header
from megaenc.training.command import main

# 200 steps of 8 packs of 64 tokens.
RUN = [
    *runs.SHORT_RUN,
    "--train-iters",
    "200",
    "--lr-warmup-iters",
    "10",
    "--lr-wsd-decay-iters",
    "20",
]


@pytest.fixture
def printed(small_corpus, capfd, tmp_path):
    """Return the lines of a dry run with single spaces; nothing may be written."""

    def dry_run(*flags):
        main([*small_corpus.flags, *RUN, "--dry-run", "--save", str(tmp_path / "run"), *flags])
        assert not (tmp_path / "run").exists()
        return [
            " ".join(line.split()) for line in capfd.readouterr().out.splitlines() if line.strip()
        ]

    return dry_run


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        ("mlm(mask=0.4->0.15):1.0", ["mlm(mask=0.4->0.15) 1 to 200 102,400 102,400"]),
        (
            "clm:50,mix(clm:0.2,mlm:0.8):150",
            ["clm 1 to 50 25,600 25,600", "mix(clm:1,mlm:4) 51 to 200 76,800 102,400"],
        ),
        (
            "2x(clm:0.1,mlm:0.4)",
            [
                "clm 1 to 20 10,240 10,240",
                "mlm 21 to 100 40,960 51,200",
                "clm 101 to 120 10,240 61,440",
                "mlm 121 to 200 40,960 102,400",
            ],
        ),
    ],
)
def test_phases_with_their_steps_and_tokens(schedule, rows, printed):
    lines = printed("--objective-schedule", schedule)
    first = lines.index("phase steps tokens tokens so far") + 2
    assert lines[first : first + len(rows) + 1] == [
        *rows,
        "objective steps tokens predicted, about",
    ]


def test_totals_of_each_objective_and_its_predictions(printed):
    """Every step of a short ramp counts alike."""
    lines = printed("--objective-schedule", "clm:198,mlm(mask=0.8->0.2):2")
    first = lines.index("objective steps tokens predicted, about") + 2
    for line, start, share in zip(
        lines[first:], ("clm 198 101,376", "mlm(mask=0.8->0.2) 2 1,024"), (98, 50), strict=False
    ):
        assert line.startswith(start)
        assert float(line.split()[4].strip("(%)")) == pytest.approx(share, abs=4)


def test_the_demo_corpus_is_not_built_for_it(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--data-path", "demo/python_text_document"]):
        assert "demo/ holds no corpus yet" in refusal(main, ["--dry-run", *words])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metadata", [True, False])
def test_the_special_tokens_of_documents_are_reported(
    printed, small_corpus, tmp_path, metadata, refusal
):
    """Without metadata the first document shows them; validation on others is refused."""
    tokenizer = ["--tokenizer", str(small_corpus.tokenizer)]
    remedy = "; `megaenc preprocess --special-tokens template` or `--append-eod` adds some"
    for name, flags, said in (
        ("none", [], f"(none){remedy}"),
        ("eod", ["--append-eod"], "<|eos|> (eod)"),
    ):
        preprocess.main(
            [
                "--input",
                str(small_corpus.text),
                "--output-prefix",
                str(tmp_path / name),
                *tokenizer,
                *flags,
            ]
        )
        prefix = tmp_path / f"{name}_text_document"
        if not metadata:  # as Megatron's own tool leaves it
            prefix.with_suffix(".json").unlink()
        lines = printed("--data-path", str(prefix), "--objective-schedule", "clm:1.0")
        assert f"special tokens of a document: ... {said}" in lines
    none = str(tmp_path / "none_text_document")
    eod = str(tmp_path / "eod_text_document")
    line = refusal(main, ["--data-path", none, "--valid-data-path", f"web={eod}", *tokenizer])
    assert f"--valid-data-path: {none} has --special-tokens none" in line
    assert f"{eod} has --special-tokens eod" in line


def test_a_mixture_is_counted_as_it_will_be_drawn(printed, small_corpus):
    schedule = ["--objective-schedule", "mix(clm:0.3,mlm:0.7):1.0"]
    plan = plan_of(*small_corpus.flags, *RUN, *schedule)
    drawn = [plan.schedule.text_at(step) for step in range(1, 201)]
    lines = printed(*schedule)
    for text in ("clm", "mlm"):
        assert any(line.startswith(f"{text} {drawn.count(text)} ") for line in lines)


def test_thousands_of_phases_are_not_all_printed(printed):
    lines = printed("--objective-schedule", "100x(clm:1,mlm:1)")
    assert "... 188 more phases to 200" in lines and len(lines) < 40


def test_corpora_and_how_often_they_are_read(printed, small_corpus):
    lines = printed()
    assert lines[1] == "200 steps of 8 packs of 64 tokens (concat): 102,400 tokens"
    assert lines[2].startswith("makes steps 1 to 200, from new weights")
    [row] = [line.split() for line in lines if line.startswith(str(small_corpus.prefix))]
    assert row[1:3] == ["100.00", "%"] and row[4] == "1,600"
    assert float(row[5]) == pytest.approx(102_400 / 21_000, rel=0.05)


def test_a_billion_steps_are_not_counted_one_by_one(printed):
    lines = printed("--train-iters", "1000000000", "--objective-schedule", "mix(clm:1,mlm:1)")
    [line] = [line for line in lines if line.startswith("clm ")]
    steps = line.removeprefix("clm ").removeprefix("about ").split()[0]
    assert int(steps.replace(",", "")) == pytest.approx(5e8, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            [
                "--train-iters",
                "1" + 9 * "0",
                "--global-batch-size",
                "1" + 7 * "0",
                "--seq-length",
                "8192",
            ],
            "tokens (--global-batch-size x --seq-length a step); "
            "expected at most 4,611,686,018,427,387,904",
        ),
        (
            ["--rampup-batch-size", "2", "2", "1" + 18 * "0"],
            "expected SAMPLES of at most 1,000,000 x START",
        ),
        (["--skip-packs", 5000 * "1"], "expected the number of a pack"),
    ],
)
def test_numbers_beyond_any_run_are_one_line(flags, complaint, small_corpus, refusal):
    assert complaint in refusal(
        main, [*small_corpus.flags, "--seq-length", "64", "--dry-run", *flags]
    )


def test_a_pseudo_perplexity_is_among_the_validations(printed):
    lines = printed(
        "--objective-schedule", "mix(clm:1,mntp:1):1.0", "--eval-pseudo-perplexity-passes", "8"
    )
    names = "clm, mlm, mntp, pseudo_perplexity(passes=8), pseudo_perplexity(passes=8,shift=1)"
    assert f"validation: every 10 steps under {names}" in lines


@pytest.mark.parametrize(
    ("machine", "used", "text"),
    [
        (
            "cuda",
            {"norm": True, "rotary": False, "loss": True},
            "attention by flash; fused kernels: norm, loss)",
        ),
        ("rocm", {"norm": False, "rotary": False}, "attention by flash; fused kernels: none)"),
        ("cpu", {"norm": False, "rotary": False}, "attention by flash)"),  # where there are none
    ],
)
def test_fused_kernels_are_named_where_there_is_an_accelerator(
    machine, used, text, short_run, one_process, monkeypatch
):
    plan = plan_of(*short_run)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: machine)
    backend = replace(one_process, name=machine)
    first = format_run_header(
        plan, backend, {"attention": "flash", "fused": used}, resumed=0
    ).splitlines()[0]
    assert text in first
