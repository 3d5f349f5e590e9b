"""Fixed, growing and measured batches of any size on any number of ranks."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import runs
import yaml

from megaenc.backend import prepare_megatron
from megaenc.errors import InputError
from megaenc.estimate.command import main as estimate_main
from megaenc.training.command import main
from megaenc.training.config import parse_config
from megaenc.training.micro_batches import DataParallelSampler
from megaenc.training.phases import build_batch_sizes

AUTO = runs.WORKERS / "auto_batch.py"
GROWING = [
    *runs.SHORT_RUN, "--train-iters", "12", "--micro-batch-size", "1",
    "--rampup-batch-size", "2", "2", "30", "--no-bf16",
]  # fmt: skip


@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2, 3, 8])
def test_each_pack_of_a_batch_is_read_once(micro, multiple):
    for batch, ranks in itertools.product((1, 2, 7, 8, 17, 19), (1, 2, 3, 8)):
        samplers = [
            DataParallelSampler(batch, micro, rank, ranks, multiple) for rank in range(ranks)
        ]
        rows = [sampler.samples(100) for sampler in samplers]
        assert sorted(sample for rank in rows for row in rank for sample in row) == list(
            range(100, 100 + batch)
        )
        shares = [sum(map(len, rank)) for rank in rows]
        assert max(shares) - min(shares) <= 1 and max(shares) == samplers[0].max_packs_per_rank
        for rank, share in zip(rows, shares, strict=True):
            least = -(-max(1, -(-share // micro)) // multiple) * multiple
            assert len(rank) == least
            assert max(map(len, rank)) <= micro and max(map(len, rank)) - min(map(len, rank)) <= 1


def test_a_batch_that_divides_is_dealt_in_turn():
    """Micro-batches go to the ranks in turn."""
    dealt = [DataParallelSampler(12, 2, rank, 3).samples(5) for rank in range(3)]
    assert dealt == [
        [range(5, 7), range(11, 13)],
        [range(7, 9), range(13, 15)],
        [range(9, 11), range(15, 17)],
    ]


@pytest.mark.parametrize(
    ("batch", "ranks", "excess", "nearest"),
    [(1152, 64, 0, 0), (2001, 100, 0, 0), (1152, 504, 31, 1008), (3, 8, 167, 8)],
)
def test_the_start_names_the_nearest_batch_of_equal_shares(
    batch, ranks, excess, nearest, short_run, capsys, monkeypatch
):
    """It does so only if the largest part is over 5 % above the mean."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    main([*short_run, "--global-batch-size", str(batch), "--dry-run"])
    output = capsys.readouterr().out
    said = (
        f"the ranks with most packs have {excess} % more than the mean, "
        f"which all others wait for; {nearest} packs are equal"
    )
    assert ("packs are equal" in output) == (said in output) == bool(excess)


def test_a_micro_batch_of_the_command_replaces_those_of_phases(small_corpus, tmp_path):
    config = tmp_path / "config.yaml"
    phases = (
        "[{objective: clm, train_iters: 2, micro_batch_size: 4}, {objective: mlm, train_iters: 2}]"
    )
    config.write_text(f"micro_batch_size: 2\nphases: {phases}\n")
    for flags, expected in (
        ([], [4, 2]),
        (["--micro-batch-size", "1"], [1, 1]),
        (["--micro-batch-size", "auto"], ["auto"] * 2),
    ):
        settings = parse_config([*small_corpus.flags, "--config", str(config), *flags], "test")
        assert [phase.settings.micro_batch_size for phase in settings.phase_configs] == expected


def test_work_is_compared_per_pack(engine_of, short_run):
    """A rank with three packs takes longer than one with two, and is no straggler."""
    engine = engine_of(*short_run, "--global-batch-size", "5")
    assert engine.relative_load(1) == 1.0
    for rank, packs in ((0, 3), (1, 2)):
        engine.sampler = replace(engine.sampler, rank=rank, size=2)
        assert engine.relative_load(1) == packs / 2.5


def test_rows_in_eight_bits_by_transformer_engine_have_lengths_that_sixteen_divides():
    """This holds on each of two ranks under sequence parallelism."""
    from megaenc.training.engine import Engine

    kernels = SimpleNamespace(fp8_format="hybrid", transformer_impl="transformer_engine")
    layout = SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=True)
    engine = SimpleNamespace(
        layout=layout, plan=SimpleNamespace(settings=SimpleNamespace(kernels=kernels))
    )
    assert Engine._row_divisor.fget(engine) == 32


@pytest.mark.parametrize("rampup", [(2, 2, 30), (16, 16, 1000), (8, 120, 1), (32, 32, 999)])
def test_sizes_are_those_of_megatron_core(rampup):
    prepare_megatron()
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    full = 8 if rampup[0] == 2 else 128
    sizes = build_batch_sizes(full, rampup)
    rule = RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, *rampup)
    read = 0
    for step in range(1, 60):
        rule.update(read, consistency_check=False)
        assert (
            sizes.first_sample(step) == read
            and sizes.size(step) == rule.get_current_global_batch_size()
        )
        read += sizes.size(step)


@pytest.mark.parametrize("rampup", [None, (2, 2, 30)])
def test_steps_that_read_so_many_samples(rampup):
    sizes = build_batch_sizes(8, rampup)
    for samples in range(1, 100):
        steps = sizes.steps_for(samples)
        assert sizes.first_sample(steps) < samples <= sizes.first_sample(steps + 1)


def test_a_dry_run_counts_the_tokens_of_each_phase(small_corpus, capsys):
    main([*small_corpus.flags, *GROWING, "--objective-schedule", "clm:7,mlm:5", "--dry-run"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    # 2 packs, then 4, 6 and 8, over the first 30 packs.
    # Steps 1 to 5 have 2, 6 to 8 have 4, 9 and 10 have 6, the others 8.
    assert "clm 1 to 7 1,152 1,152" in lines
    assert "mlm 8 to 12 2,048 3,200" in lines
    assert any(line.startswith("12 steps of 2 to 8 packs of 64 tokens") for line in lines)


def test_so_many_tokens_with_growing_batches(small_corpus):
    flags = [
        *small_corpus.flags,
        *runs.SHORT_RUN[:12],
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "8",
    ]
    config = parse_config(
        [
            *flags,
            "--rampup-batch-size",
            "2",
            "2",
            "30",
            "--seq-length",
            "64",
            "--train-tokens",
            "1300",
        ],
        "test",
    )
    assert (config.total_iters, config.tokens_after(8)) == (8, 1408)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_agree_on_the_smallest_and_train_as_with_the_number(short_run, tmp_path):
    """9 packs fit on the first rank and 5 on the second: 8 packs are two rows of 4.

    A resumed run measures again.
    """
    flags = [*short_run, "--seq-length", "32", "--global-batch-size", "16"]
    flags += ["--train-iters", "6", "--lr-wsd-decay-iters", "2"]
    auto = [*flags, "--micro-batch-size", "auto", "--save", str(tmp_path / "auto")]
    for more in (["--exit-interval", "4"], []):
        ended = runs.script(AUTO, [*auto, *more], processes=2)
        assert "--micro-batch-size auto: 5 packs at once, the most that fit" in ended.stdout
    runs.script(
        runs.PRETRAIN,
        [*flags, "--micro-batch-size", "4", "--save", str(tmp_path / "four")],
        processes=2,
    )
    assert runs.curve(tmp_path / "auto") == runs.curve(tmp_path / "four")
    config = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())
    assert config["micro_batch_size"] == "auto"


def test_each_phase_has_a_measured_micro_batch_of_its_own(small_corpus, tmp_path):
    """Of 16 packs 9 fit, of 6 all; the third phase has a number."""
    phases = [
        "{objective: mlm, train_iters: 2, global_batch_size: 16}",
        "{objective: clm, train_iters: 2, global_batch_size: 6, seq_length: 16}",
        "{objective: mlm, train_iters: 2, global_batch_size: 4, micro_batch_size: 2}",
    ]
    flags = [
        *small_corpus.flags,
        "--no-bf16",
        "--seq-length",
        "32",
        "--eval-interval",
        "0",
        "--lr-warmup-iters",
        "1",
    ]
    flags += ["--lr-wsd-decay-iters", "1", "--phases", *phases]
    ended = runs.script(
        AUTO, [*flags, "--micro-batch-size", "auto", "--save", str(tmp_path / "run")]
    )
    assert "--micro-batch-size auto: 9 and 6 and 2 packs at once" in ended.stdout
    assert [row["step"] for row in runs.metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (
            main,
            [],
            "--micro-batch-size auto: fills the memory of an accelerator, "
            "and this machine has none",
        ),
        (
            estimate_main,
            ["--gpu", "h100"],
            "--micro-batch-size: found auto, expected a number of packs",
        ),
    ],
)
def test_where_nothing_can_be_measured(command, flags, message, refusal):
    assert message in refusal(command, ["--micro-batch-size", "auto", *flags])


def test_model_parallelism_is_refused():
    settings = parse_config(
        ["--micro-batch-size", "auto", "--tensor-model-parallel-size", "2"], "test"
    )
    with pytest.raises(
        InputError, match="measures a model on one device, found tensor or pipeline parallelism"
    ):
        settings.check(2)
