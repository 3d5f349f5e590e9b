"""Merges, against references computed from the stored tensors, and their use."""

import math
import shutil
from pathlib import Path

import hf_models
import numpy as np
import pytest
import runs
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from small_data import read_json, write_file

from megaenc.convert.command import main
from megaenc.convert.merge import methods
from megaenc.convert.merge.methods import merge_slerp, merge_ties, trim_threshold
from megaenc.training.command import main as pretrain

MASTER = "optimizer.state.fp32_param."
ROWS = 400  # of the vocabulary; the rest is padding
SHORT = [
    *runs.SHORT_RUN,
    "--train-iters",
    "4",
    "--lr-warmup-iters",
    "0",
    "--lr-wsd-decay-iters",
    "0",
    "--save-interval",
    "2",
]


def stored(directory, step, prefix=""):
    """Load the tensors of a checkpoint below `prefix` and `model.`, without padding."""
    path = Path(directory) / "checkpoints" / f"iter_{step:07d}"
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = [
        name
        for name in known
        if name.startswith(f"{prefix}model.") and hasattr(known[name], "size")
    ]
    tensors = {
        name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in names
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    rows = ("embedding", "output_layer")
    return {
        name.removeprefix(prefix): tensor[:ROWS] if any(part in name for part in rows) else tensor
        for name, tensor in tensors.items()
    }


def merge(output, *words):
    main(["merge", *map(str, words), "--output", str(output)])
    return Path(output)


def assert_bits(found, expected):
    assert found.keys() == expected.keys() and len(found) > 5
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@pytest.fixture(autouse=True)
def chunked(monkeypatch):
    """Merge small tensors in parts too, as large ones are."""
    monkeypatch.setattr(methods, "_CHUNK", 1000)


@pytest.fixture(scope="module")
def trained(small_corpus, tmp_path_factory):
    """Train a bf16 run to step 4, and one of another seed, schedule and dtype.

    The first has checkpoints of steps 2 and 4. Not to be changed.
    """
    directory = tmp_path_factory.mktemp("trained")
    pretrain([*small_corpus.flags, *SHORT, "--save", str(directory / "a")])
    other = [
        "--seed",
        "2",
        "--no-bf16",
        "--seq-length",
        "32",
        "--objective-schedule",
        "mntp",
        "--train-iters",
        "2",
    ]
    pretrain([*small_corpus.flags, *SHORT, *other, "--save", str(directory / "b")])
    return directory / "a", directory / "b"


@pytest.fixture(scope="module")
def exact(trained):
    """Return float64 weights of the three checkpoints, master weights for bf16 ones."""
    a, b = trained
    tensors = {"a2": stored(a, 2, MASTER), "a4": stored(a, 4, MASTER), "b": stored(b, 2)}
    return {
        which: {name: tensor.double().numpy() for name, tensor in of.items()}
        for which, of in tensors.items()
    }


def test_a_run_merged_with_itself_is_itself(trained):
    """It equals the checkpoint in bf16, and its more exact master weights in float32."""
    a, _ = trained
    kept = stored(a, 4)
    full = stored(a, 4, MASTER)
    assert_bits(stored(merge("bf16", "--load", a, a, a, "--weights", "0.3", "0.7", "0.1"), 0), kept)
    assert any(not torch.equal(full[name], kept[name].float()) for name in full)
    result = merge(
        "fp32", "--load", f"{a}@4", a, "--dtype", "fp32", "--method", "slerp", "--weights", "0.3"
    )
    assert_bits(stored(result, 0), full)
    assert not stored(result, 0, "optimizer")


def test_weights_that_no_family_has_are_merged_too(small_corpus):
    options = [
        "--prediction-head",
        "--output-layer-bias",
        "--normalization",
        "LayerNorm",
        "--norm-bias",
        "--no-bf16",
    ]
    run = Path("run")
    pretrain([*small_corpus.flags, *SHORT, *options, "--save", str(run)])
    kept = stored(run, 4)
    assert {"model.prediction_head.norm.bias", "model.decoder.final_layernorm.bias"} <= kept.keys()
    assert_bits(stored(merge("linear", "--load", f"{run}@4", run), 0), kept)
    ties = merge(
        "ties", "--load", run, run, "--method", "ties", "--base", f"{run}@2", "--density", "1"
    )
    torch.testing.assert_close(stored(ties, 0), kept, rtol=0, atol=1e-6)


def test_runs_with_other_special_tokens_are_named(trained, capsys):
    """The merge has those of the checkpoint with the most steps."""
    a, _ = trained
    copy = shutil.copytree(a, Path("c"))
    facts = read_json(copy / "run.json")
    write_file(
        copy / "run.json", facts | {"special_tokens": {"mode": "none", "before": [], "after": []}}
    )
    result = merge("out", "--load", f"{copy}@2", f"{a}@4")
    assert (
        f"{copy}@2 was trained with --special-tokens none, {a}@4 with eod"
        in capsys.readouterr().out
    )
    assert read_json(result / "run.json")["special_tokens"] == {
        "mode": "eod",
        "before": [],
        "after": [0],
    }


def test_linear_is_the_weighted_mean(trained, exact):
    a, b = trained
    result = merge("m", "--load", f"{a}@2,4", b, "--weights", "1", "2", "5")
    for name, tensor in stored(result, 0).items():  # float32, as one source is
        expected = (exact["a2"][name] + 2 * exact["a4"][name] + 5 * exact["b"][name]) / 8
        np.testing.assert_array_equal(
            tensor.numpy(), expected.astype(np.float32), strict=True, err_msg=name
        )
    assert yaml.safe_load((result / "config.yaml").read_text())["seq_length"] == 32


def slow_slerp(a, b, t):
    """Compute Shoemake's formula on flat vectors."""
    angle = math.acos(np.dot(a.ravel(), b.ravel()) / np.linalg.norm(a) / np.linalg.norm(b))
    return (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)


def test_slerp_follows_the_arc_of_each_tensor_of_the_export(trained, exact):
    a, b = trained
    found = stored(merge("m", "--load", f"{a}@4", b, "--method", "slerp", "--weights", "0.25"), 0)
    # Two groups of two queries, a key and a value of 16 rows each.
    rows = np.arange(128).reshape(2, 4, 16)
    parts = {"linear_fc1": [slice(0, 160), slice(160, 320)]}
    parts["linear_qkv"] = [rows[:, :2].ravel(), rows[:, 2].ravel(), rows[:, 3].ravel()]
    for name, tensor in found.items():
        pieces = next((pieces for part, pieces in parts.items() if f"{part}.weight" in name), [...])
        for layer in range(2) if ".layers." in name else [...]:
            for piece in pieces:
                x = exact["a4"][name][layer][piece]
                y = exact["b"][name][layer][piece]
                z = tensor.numpy()[layer][piece]
                np.testing.assert_allclose(
                    z, slow_slerp(x, y, 0.25), rtol=1e-6, atol=1e-9, err_msg=name
                )


def test_slerp_of_parallel_opposite_and_zero_vectors_is_linear():
    x = torch.tensor([3.0, 0.0])
    y = torch.tensor([0.0, 3.0])
    torch.testing.assert_close(
        merge_slerp([x, y], 1 / 3), 3 * torch.tensor([math.cos(math.pi / 6), 0.5])
    )
    assert torch.equal(merge_slerp([x, y], 0.0), x) and torch.equal(merge_slerp([x, y], 1.0), y)
    near = torch.tensor([3.0, 1e-3])  # just beyond parallel, the two formulas agree
    for other in (3 * x, -x, 0 * x, near):
        torch.testing.assert_close(
            merge_slerp([x, other], 0.25), 0.75 * x + 0.25 * other, rtol=1e-6, atol=1e-9
        )


def slow_ties(base, others, density):
    """Compute algorithm 1 of arXiv 2306.01708 with lambda 1 on one vector of weights."""
    vectors = []
    for other in others:
        vector = other - base
        smallest = sorted(np.abs(vector).astype(np.float32))[-max(1, round(density * len(vector)))]
        vectors.append([value if np.float32(abs(value)) >= smallest else 0.0 for value in vector])
    result = base.copy()
    for place, values in enumerate(zip(*vectors, strict=True)):
        sign = np.sign(sum(values))
        agreeing = [value for value in values if np.sign(value) == sign]
        result[place] += sum(agreeing) / len(agreeing) if agreeing else 0.0
    return result.astype(np.float32)


@pytest.mark.parametrize("density", [0.2, 1.0])
def test_ties_is_algorithm_1_over_all_weights(density, trained, exact):
    a, b = trained
    words = ["--method", "ties", "--base", f"{a}@2", "--density", density, "--dtype", "fp32"]
    found = stored(merge("m", "--load", f"{a}@4", b, *words), 0)
    flat = {
        which: np.concatenate([weights[name].ravel() for name in found])
        for which, weights in exact.items()
    }
    merged = np.concatenate([tensor.numpy().ravel() for tensor in found.values()])
    np.testing.assert_array_equal(merged, slow_ties(flat["a2"], [flat["a4"], flat["b"]], density))
    changed = (merged != flat["a2"].astype(np.float32)).mean()
    assert density * 0.9 < changed <= min(1, 2 * density)


def test_ties_by_hand():
    """Cancelling, minority and trimmed values do not count in the mean."""
    base = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    rows = [1.0, 2.0, 0.25, 4.0, 0.0], [-1.0, 4.0, 8.0, -1.0, 0.0], [0.0, -1.0, 4.0, 2.0, 0.0]
    others = [base + torch.tensor(row) for row in rows]
    found = merge_ties(base, others, [0.5, 0.5, 0.5])
    assert torch.equal(found, base + torch.tensor([0.0, 3.0, 6.0, 3.0, 0.0]))
    assert trim_threshold(np.array([5, 1, 4, 2, 3], dtype=np.float32), 0.4) == 4.0


def test_a_merge_starts_a_run_and_is_exported(trained, small_corpus):
    a, _ = trained
    result = merge("m", "--load", f"{a}@2,4")
    start = [
        "--config",
        str(result / "config.yaml"),
        "--init-from",
        str(result),
        *small_corpus.flags,
        *runs.STANDSTILL,
    ]
    pretrain([*start, "--save", "c"])
    merged = stored(result, 0)
    assert_bits(stored(Path("c"), 1), merged)  # after a step that changes nothing
    hf_models.to_hf(result, "all", "--all")
    [exported] = Path("all").iterdir()
    assert exported.name == "0.138m-clm-2-mlm40-dec4-linear"
    weights = load_file(exported / "model.safetensors")
    assert torch.equal(
        weights["model.embed_tokens.weight"], merged["model.embedding.word_embeddings.weight"]
    )
    assert "merged by linear from `a@2 (1)`, `a@4 (1)`" in (exported / "README.md").read_text()
    hf_models.to_hf("c", "hfc")
    assert "trained in other runs: `a@2 + a@4` to step 4" in Path("hfc/README.md").read_text()
    assert_bits(stored(merge("again", "--load", result, "c"), 0), merged)


def test_run_json_records_the_sources(trained, refusal):
    a, b = trained
    result = merge(
        "m", "--load", f"{a}@2", b, "--method", "ties", "--base", f"{a}@4", "--density", "0.5"
    )
    facts = read_json(result / "run.json")
    record = facts["source"]["merge"]
    assert (record["method"], record["density"]) == ("ties", 0.5)
    parts = [*record["checkpoints"], record["base"]]
    assert [(part["run"], part["step"]) for part in parts] == [
        (str(a), 2),
        (str(b), 2),
        (str(a), 4),
    ]
    for part in parts:
        state = read_json(Path(part["run"]) / f"checkpoints/iter_{part['step']:07d}/state.json")
        assert part["sha256"] == state["sha256"]
    [stage] = facts["start"]["before"]
    assert (stage["run"], stage["step"], stage["schedule"]) == ("a@2 + b@2", 2, "clm:0.5,mlm:0.5")
    facts["source"]["merge"]["checkpoints"] = [{"run": "x"}]
    write_file(result / "run.json", facts)
    assert f"{result}/run.json: " in refusal(main, ["to-hf", "--load", result, "--output", "hf"])


def test_converted_models_of_one_family_stay_in_it(small_corpus, tmp_path):
    """They have biases, query and key norms and a tied output layer."""
    cores = ["x", "y"]
    for number, core in enumerate(cores):
        model = hf_models.build(
            "qwen3 with biases and YaRN", bos_token_id=5, eos_token_id=[0, 7 + number]
        )
        model.model.norm.weight.data += number
        hf = hf_models.write(model, tmp_path / f"hf-{number}", small_corpus.tokenizer)
        hf_models.from_hf(hf, core)
    result = merge("m", "--load", *cores)
    left = stored(cores[0], 0)
    right = stored(cores[1], 0)
    assert_bits(stored(result, 0), {name: (left[name] + right[name]) / 2 for name in left})
    hf_models.to_hf(result, "hf")
    config = read_json(Path("hf/config.json"))
    assert config["model_type"] == "qwen3"
    assert (config["bos_token_id"], config["eos_token_id"]) == (5, 0), (
        "only what all sources have is theirs"
    )


@pytest.mark.multiprocess
def test_sources_in_parts(trained, small_corpus, tmp_path):
    """Distributed optimizers hold parts of the master weights, merged exactly."""
    layout = ["--use-distributed-optimizer", "--train-iters", "2"]
    parted = tmp_path / "t"
    one = trained[0]
    runs.script(
        runs.PRETRAIN, [*small_corpus.flags, *SHORT, *layout, "--save", str(parted)], processes=2
    )
    assert len(list((parted / "checkpoints/iter_0000002").glob("*.distcp"))) == 2
    mixed = stored(merge("mixed", "--load", parted, f"{one}@2", "--dtype", "fp32"), 0)
    left = stored(parted, 2, MASTER)
    right = stored(one, 2, MASTER)
    assert_bits(
        mixed, {name: ((left[name].double() + right[name].double()) / 2).float() for name in left}
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("a", "--load: found 1 checkpoint, expected 2 or more for --method linear"),
        ("a@2,4 b --method slerp", "--load: found 3 checkpoints, expected 2 for --method slerp"),
        ("a@3 b", "a@3: no checkpoint of step 3, expected one of 2, 4"),
        (
            "a@2,last b",
            "a@2,last: found '2,last' after the @, expected a step or steps, such as a@1000,1200",
        ),
        ("a b --weights 1", "--weights 1: found 1, expected 2, one for each checkpoint"),
        ("a b --weights nan 1", "--weights: found nan, expected a finite number"),
        ("a b --weights 0 0", "--weights 0 0: expected numbers with a finite sum above 0"),
        (
            "a b --method slerp --weights 1.5",
            "--weights 1.5: expected for --method slerp one number from 0",
        ),
        ("a b --base a@2", "--base a@2: only for --method ties, found --method linear"),
        ("a b --method ties", "--base: missing, expected for --method ties"),
        (
            "a b --method ties --base a@2",
            "--density: missing, expected for --method ties a fraction",
        ),
        (
            "a b --method ties --base a@2 --density nan",
            "--density: found nan, expected a finite number",
        ),
        (
            "a b --method ties --base a@2 --density 1 --weights 1 1",
            "--weights 1 1: not for --method ties",
        ),
        ("a b --method ties --base a@2,4 --density 1", "--base a@2,4: found 2 steps, expected one"),
    ],
)
def test_wrong_options_are_one_line(words, complaint, trained, tmp_path, refusal, monkeypatch):
    monkeypatch.chdir(trained[0].parent)
    line = refusal(main, ["merge", "--output", "new/m", "--load", *words.split()])
    assert complaint in line and not list(tmp_path.iterdir())


def test_models_that_differ_are_one_line(trained, small_corpus, refusal):
    a, _ = trained
    wide = Path("wide")
    copy = shutil.copytree(a, Path("copy"))
    narrow = [
        "--hidden-size",
        "32",
        "--objective-schedule",
        "mlm",
        "--train-iters",
        "1",
        "--save",
        str(wide),
    ]
    pretrain([*small_corpus.flags, *SHORT, *narrow])
    facts = read_json(copy / "run.json")
    facts["identity"]["tokenizer"] = "0" * 64
    write_file(copy / "run.json", facts)
    for words, complaint in (
        (
            [a, wide],
            f"--load {wide}@1: hidden_size is 64 in {a}, 32 in {wide}; only weights of one shape",
        ),
        (
            [a, a, "--method", "ties", "--density", "0.5", "--base", wide],
            f"--base {wide}@1: hidden_size is",
        ),
        ([a, copy], ": tokenizer is "),
    ):
        assert complaint in refusal(main, ["merge", "--load", *words, "--output", "m"])
        assert not Path("m").exists()


def test_a_damaged_source_is_one_line_before_anything_is_merged(
    trained, tmp_path, refusal, monkeypatch
):
    monkeypatch.setattr(
        "megaenc.convert.merge.checkpoints._merge_weights", lambda *given: pytest.fail("merged")
    )
    copy = shutil.copytree(trained[0], Path("copy"))
    shard = next((copy / "checkpoints/iter_0000004").glob("*.distcp"))
    with open(shard, "r+b") as stream:
        stream.seek(2000)
        stream.write(b"\xff\x01\xfe")
    line = refusal(main, ["merge", "--load", trained[0], f"{copy}@4", "--output", "new/m"])
    assert (
        f"{shard}: its content changed" in line
        and "choose one of steps 2 (--load RUN@STEP)" in line
    )
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
