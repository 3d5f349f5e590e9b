"""Any batch on any number of ranks: shares differ by a pack, and a run is that of one process."""

import itertools

import pytest
import runs
from runs import Job

from megaenc.training.micro_batches import DataParallelSampler

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2, 3, 8])
def test_each_pack_of_a_batch_is_read_once(micro, multiple):
    for batch, ranks in itertools.product(range(1, 20), range(1, 9)):
        samplers = [DataParallelSampler(batch, micro, rank, ranks, multiple) for rank in range(ranks)]
        rows = [sampler.samples(100) for sampler in samplers]
        assert sorted(sample for rank in rows for row in rank for sample in row) == list(range(100, 100 + batch))
        shares = [sum(map(len, rank)) for rank in rows]
        assert max(shares) - min(shares) <= 1 and max(shares) == samplers[0].largest_share
        for rank, share in zip(rows, shares, strict=True):
            least = -(-max(1, -(-share // micro)) // multiple) * multiple
            assert len(rank) == least
            assert max(map(len, rank)) <= micro and max(map(len, rank)) - min(map(len, rank)) <= 1


@pytest.mark.parametrize(("batch", "micro", "ranks"), [(8, 2, 4), (16, 2, 2), (12, 1, 3), (16, 16, 1), (24, 4, 2)])
def test_a_batch_that_divides_is_dealt_in_turn(batch, micro, ranks):
    """As it always was: micro-batches go to the ranks in turn."""
    for rank in range(ranks):
        expected = [range(first, first + micro) for first in range(5 + rank * micro, 5 + batch, micro * ranks)]
        assert DataParallelSampler(batch, micro, rank, ranks).samples(5) == expected


RUN = [*runs.SHORT_RUN, "--num-layers", "4", "--no-bf16", "--eval-interval", "10"]
BATCHES = {
    "16": ["--global-batch-size", "16"],
    "17": ["--global-batch-size", "17"],
    "3 to 17": ["--global-batch-size", "17", "--rampup-batch-size", "3", "7", "60"],
}
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce"]
INTERLEAVED = [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"]
LAYOUTS = {
    "DP2": (2, []),
    "DP3": (3, ["--use-distributed-optimizer"]),
    "DP5": (5, []),
    "DP7": (7, ["--use-distributed-optimizer"]),
    "TP2, SP, PP2, DP2": (8, [TP, "2", PP, "2", "--sequence-parallel", "--use-distributed-optimizer"]),
    "PP2, interleaved, DP3": (6, [*INTERLEAVED, "--micro-batch-size", "3"]),
    "TP2, SP, odd rows": (2, [TP, "2", "--sequence-parallel", "--micro-batch-size", "5"]),
}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("batch", "seq_length"), [("16", "64"), ("17", "63"), ("3 to 17", "64")])
def test_twenty_steps_are_those_of_one_process(batch, seq_length, small_corpus, tmp_path):
    """Losses, gradient norms and held-out losses, in float32."""
    flags = [*small_corpus.flags, *RUN, *BATCHES[batch], "--seq-length", seq_length]
    folders = {name: tmp_path / f"layout{number}" for number, name in enumerate(LAYOUTS)}
    jobs = [Job(tmp_path / "one", flags)]
    jobs += [Job(folders[name], [*flags, *more], processes) for name, (processes, more) in LAYOUTS.items()]
    runs.in_turn(jobs, tmp_path)
    for name, folder in folders.items():
        loss, norm = (runs.largest_difference(field, folder, tmp_path / "one") for field in ("loss", "grad_norm"))
        print(f"{name:24}{loss:10.1e}{norm:10.1e}")
        assert loss <= 1e-6 and norm <= 1e-5, name
        for row, expected in zip(runs.metrics(folder), runs.metrics(tmp_path / "one"), strict=True):
            # With sequence parallelism the last layer computes all rows.
            for field in ("tokens", "predicted_tokens", *(["flops"] if "SP" not in name else [])):
                assert row[field] == expected[field], (name, field)
        held_out, expected = (runs.validations(each)[-1] for each in (folder, tmp_path / "one"))
        assert held_out.keys() == expected.keys()


def test_the_start_names_the_nearest_batch_of_equal_shares(small_corpus, capsys, monkeypatch):
    """Only where the largest share is over 5 % above the mean."""
    from megaenc.training import dry_run
    from megaenc.training.config import parse_config

    def lines(batch, ranks):
        monkeypatch.setattr(dry_run, "get_world_size", lambda: ranks)
        settings = parse_config([*small_corpus.flags, "--global-batch-size", str(batch)], "test")
        return dry_run._describe_uneven_shares(settings)

    assert lines(1152, 64) == lines(2001, 100) == lines(16, 16) == []
    [line] = lines(1152, 504)
    assert line.startswith("--global-batch-size 1152: the ranks with most packs have 31 % more than the mean")
    assert line.endswith("; 1008 packs are equal shares")
    [line] = lines(3, 8)
    assert "167 % more" in line and line.endswith("; 8 packs are equal shares")


def test_a_micro_batch_of_the_command_replaces_those_of_phases(small_corpus, tmp_path):
    from megaenc.training.config import parse_config

    config = tmp_path / "config.yaml"
    phases = "[{objective: clm, train_iters: 2, micro_batch_size: 4}, {objective: mlm, train_iters: 2}]"
    config.write_text(f"micro_batch_size: 2\nphases: {phases}\n")
    for flags, expected in (([], [4, 2]), (["--micro-batch-size", "1"], [1, 1]), (["--micro-batch-size", "auto"], ["auto"] * 2)):
        settings = parse_config([*small_corpus.flags, "--config", str(config), *flags], "test")
        assert [phase.settings.micro_batch_size for phase in settings.phase_configs] == expected


def test_work_is_compared_per_pack(one_process, small_corpus):
    """A rank with three packs does one and a half times the work of one with two, and that is no straggler."""
    from dataclasses import replace

    from megaenc.training.config import parse_config
    from megaenc.training.engine import Engine
    from megaenc.training.planning import build_plan

    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--global-batch-size", "5"]
    engine = Engine(build_plan(parse_config(flags, "test")), one_process)
    assert engine.work_share(1) == 1.0
    shares = []
    for rank in range(2):
        engine.sampler = replace(engine.sampler, rank=rank, size=2)
        shares.append(engine.work_share(1))
    assert shares == [3 / 2.5, 2 / 2.5]


@pytest.mark.parametrize(
    ("parallel", "implementation", "divisor"), [(False, "local", 1), (True, "local", 2), (True, "transformer_engine", 32)]
)
def test_rows_have_lengths_that_the_layout_divides(parallel, implementation, divisor):
    """Under sequence parallelism of two ranks, and in 8 bits by Transformer Engine in sixteens; in a pipeline, all the same."""
    from types import SimpleNamespace

    from megaenc.training.engine import Engine

    kernels = SimpleNamespace(fp8_format="hybrid", transformer_impl=implementation)
    for stages in (1, 2):
        layout = SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=parallel, pipeline_model_parallel_size=stages)
        settings = SimpleNamespace(kernels=kernels, shape=SimpleNamespace(attention_output_dropout=0.0))
        engine = SimpleNamespace(layout=layout, plan=SimpleNamespace(settings=settings))
        engine._row_divisor = Engine._row_divisor.fget(engine)
        assert engine._row_divisor == divisor
        specs = Engine._list_specs(engine, SimpleNamespace(seq_length=63), [range(3), range(2), ()], None, 1)
        lengths = [spec.length for spec in specs]
        assert all(length % divisor == 0 for length in lengths)
        assert all(0 <= length - 63 * packs < divisor for length, packs in zip(lengths, (3, 2, 1), strict=True)) or stages == 2
        assert stages == 1 or len(set(lengths)) == 1


@pytest.mark.parametrize("ranks", [8, 64, 256, 504, 512])
@pytest.mark.parametrize("name", ["ettin", "eurobert", "mmbert", "modernbert", "neobert"])
def test_recipes_run_on_any_number_of_ranks(name, ranks):
    """Of their own: the others begin with a folder of weights."""
    from megaenc.training.config import parse_config

    settings = parse_config(["--config", str(runs.ROOT / "configs" / "recipes" / f"{name}.yaml")], "test")
    settings.check(ranks)
    for phase in settings.phase_configs:
        batch, micro = phase.settings.global_batch_size, phase.settings.packs_at_once
        shares = {sum(map(len, DataParallelSampler(batch, micro, rank, ranks).samples(0))) for rank in range(ranks)}
        assert max(shares) - min(shares) <= 1
