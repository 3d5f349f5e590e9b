"""Merges equal references computed from the stored tensors, and are what runs start from and exports are made of."""

import json
import math
import os
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

from megaenc.convert.command import main
from megaenc.convert.merge import methods
from megaenc.convert.merge.methods import merge_linear, merge_slerp, merge_ties, trim_threshold
from megaenc.convert.run_checkpoint import open_run_checkpoint
from megaenc.training.command import main as pretrain

MASTER = "optimizer.state.fp32_param."
ROWS = 400  # of the vocabulary; the rest is padding
SHORT = [*runs.SHORT_RUN, "--train-iters", "4", "--lr-warmup-iters", "0", "--lr-wsd-decay-iters", "0", "--save-interval", "2"]


def stored(folder, step, prefix=""):
    """All tensors of a checkpoint whose names begin with `prefix` and `model.`, as torch reads them, without padding."""
    path = folder / "checkpoints" / f"iter_{step:07d}"
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = [name for name in known if name.startswith(f"{prefix}model.") and hasattr(known[name], "size")]
    tensors = {name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in names}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    rows = ("embedding", "output_layer")
    return {
        name.removeprefix(prefix): tensor[:ROWS] if any(part in name for part in rows) else tensor
        for name, tensor in tensors.items()
    }


def masters(folder, step):
    return {name: tensor.numpy().astype(np.float64) for name, tensor in stored(folder, step, MASTER).items()}


def merge(output, *words):
    main(["merge", *map(str, words), "--output", str(output)])
    return output


def assert_bits(found, expected):
    assert found.keys() == expected.keys() and len(found) > 5
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@pytest.fixture(scope="module")
def trained(small_corpus, tmp_path_factory):
    """A bf16 run with checkpoints of steps 2 and 4, and one of another seed, schedule and dtype. Not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    pretrain([*small_corpus.flags, *SHORT, "--save", str(folder / "a")])
    other = ["--seed", "2", "--no-bf16", "--seq-length", "32", "--objective-schedule", "mntp", "--train-iters", "2"]
    pretrain([*small_corpus.flags, *SHORT, *other, "--save", str(folder / "b")])
    return folder / "a", folder / "b"


def test_a_run_merged_with_itself_is_itself(trained, tmp_path):
    """In bf16 as its checkpoint, in float32 as its master weights, which are more than the former."""
    a, _ = trained
    kept = stored(a, 4)
    assert_bits(stored(merge(tmp_path / "bf16", "--load", a, a, a, "--weights", "0.3", "0.7", "0.1"), 0), kept)
    full = stored(a, 4, MASTER)
    assert any(not torch.equal(full[name], kept[name].float()) for name in full)
    for method in (["linear"], ["slerp", "--weights", "0.3"]):
        result = merge(tmp_path / method[0], "--load", f"{a}@4", a, "--dtype", "fp32", "--method", *method)
        assert_bits(stored(result, 0), full)
    assert not any(name.startswith("optimizer") for name in stored(result, 0))


def test_weights_that_no_family_has_are_merged_too(small_corpus, tmp_path):
    options = ["--prediction-head", "--output-layer-bias", "--normalization", "LayerNorm", "--norm-bias", "--no-bf16"]
    pretrain([*small_corpus.flags, *SHORT, *options, "--save", str(tmp_path / "run")])
    kept = stored(tmp_path / "run", 4)
    assert {"model.prediction_head.norm.bias", "model.decoder.final_layernorm.bias"} <= kept.keys()
    for method in (["linear"], ["ties", "--base", f"{tmp_path / 'run'}@2", "--density", "1"]):
        result = merge(tmp_path / method[0], "--load", f"{tmp_path / 'run'}@4", tmp_path / "run", "--method", *method)
        found = stored(result, 0)
        assert found.keys() == kept.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, kept[name], rtol=0, atol=1e-6 if method[0] == "ties" else 0)


def test_runs_with_other_special_tokens_are_named(trained, tmp_path, capsys):
    """The merge has those of the checkpoint with the most steps."""
    a, _ = trained
    shutil.copytree(a, tmp_path / "c")
    facts = json.loads((tmp_path / "c" / "run.json").read_text())
    assert facts["special_tokens"] == {"mode": "eod", "before": [], "after": [0]}
    (tmp_path / "c" / "run.json").write_text(json.dumps(facts | {"special_tokens": {"mode": "none", "before": [], "after": []}}))
    main(["merge", "--load", f"{tmp_path / 'c'}@2", f"{a}@4", "--output", str(tmp_path / "out")])
    assert f"{tmp_path / 'c'}@2 was trained with --special-tokens none, {a}@4 with eod" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "run.json").read_text())["special_tokens"] == facts["special_tokens"]


def test_linear_is_the_weighted_mean(trained, tmp_path):
    a, b = trained
    result = merge(tmp_path / "m", "--load", f"{a}@2,4", b, "--weights", "1", "2", "5")
    sources = masters(a, 2), masters(a, 4), {name: tensor.double().numpy() for name, tensor in stored(b, 2).items()}
    for name, tensor in stored(result, 0).items():  # float32, as one source is
        expected = (sources[0][name] + 2 * sources[1][name] + 5 * sources[2][name]) / 8
        np.testing.assert_array_equal(tensor.numpy(), expected.astype(np.float32), strict=True, err_msg=name)
    assert yaml.safe_load((result / "config.yaml").read_text())["seq_length"] == 32


def slow_slerp(a, b, t):
    """Shoemake's formula on flat vectors."""
    angle = math.acos(np.dot(a.ravel(), b.ravel()) / np.linalg.norm(a) / np.linalg.norm(b))
    return (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)


def test_slerp_follows_the_arc_of_each_tensor_of_the_export(trained, tmp_path):
    a, b = trained
    result = merge(tmp_path / "m", "--load", f"{a}@4", b, "--method", "slerp", "--weights", "0.25")
    left, right, found = masters(a, 4), {name: x.double().numpy() for name, x in stored(b, 2).items()}, stored(result, 0)
    for name, tensor in found.items():
        for layer in range(2) if ".layers." in name else [...]:
            x, y, z = left[name][layer], right[name][layer], tensor[layer].numpy()
            if "linear_fc1" in name:
                pieces = [slice(0, 160), slice(160, 320)]
            elif "linear_qkv" in name:  # two groups of two queries, a key and a value of 16 rows each
                rows = np.arange(128).reshape(2, 4, 16)
                pieces = [rows[:, :2].ravel(), rows[:, 2].ravel(), rows[:, 3].ravel()]
            else:
                pieces = [...]
            for piece in pieces:
                np.testing.assert_allclose(z[piece], slow_slerp(x[piece], y[piece], 0.25), rtol=1e-6, atol=1e-9, err_msg=name)


def test_slerp_of_parallel_opposite_and_zero_vectors_is_linear():
    x, y = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])
    torch.testing.assert_close(merge_slerp([x, y], 0.5), torch.tensor([3.0, 3.0]) / math.sqrt(2))
    torch.testing.assert_close(merge_slerp([x, y], 1 / 3), 3 * torch.tensor([math.cos(math.pi / 6), 0.5]))
    for other in (3 * x, -x, 0 * x, x * (1 + 1e-7)):
        assert torch.equal(merge_slerp([x, other], 0.25), (0.75 * x.double() + 0.25 * other.double()).float())
    near = torch.tensor([3.0, 1e-3])  # just beyond parallel, the two formulas agree
    torch.testing.assert_close(merge_slerp([x, near], 0.25), 0.75 * x + 0.25 * near, rtol=1e-6, atol=1e-9)
    assert torch.equal(merge_slerp([x, y], 0.0), x) and torch.equal(merge_slerp([x, y], 1.0), y)


def slow_ties(base, others, density):
    """Algorithm 1 of arXiv 2306.01708 with lambda 1, an element at a time, over all weights as one vector."""
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
def test_ties_is_algorithm_1_over_all_weights(density, trained, tmp_path):
    a, b = trained
    words = ["--method", "ties", "--base", f"{a}@2", "--density", density, "--dtype", "fp32"]
    found = stored(merge(tmp_path / "m", "--load", f"{a}@4", b, *words), 0)
    base, others = masters(a, 2), [masters(a, 4), {name: x.double().numpy() for name, x in stored(b, 2).items()}]

    def flat(tensors):
        return np.concatenate([np.asarray(tensors[name]).ravel() for name in found])

    expected = slow_ties(flat(base), [flat(other) for other in others], density)
    np.testing.assert_array_equal(flat(found), expected)
    changed = (flat(found) != flat(base).astype(np.float32)).mean()
    assert density * 0.9 < changed <= min(1, 2 * density)


def test_ties_by_hand():
    """Signs that cancel leave the base, the minority's sign is left out, trimmed ones do not count in the mean."""
    base = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    rows = [1.0, 2.0, 0.25, 4.0, 0.0], [-1.0, 4.0, 8.0, -1.0, 0.0], [0.0, -1.0, 4.0, 2.0, 0.0]
    others = [base + torch.tensor(row) for row in rows]
    found = merge_ties(base, others, [0.5, 0.5, 0.5])
    assert torch.equal(found, base + torch.tensor([0.0, 3.0, 6.0, 3.0, 0.0]))
    assert trim_threshold(np.array([5, 1, 4, 2, 3], dtype=np.float32), 0.4) == 4.0
    assert trim_threshold(np.array([5, 1, 4, 2, 3], dtype=np.float32), 1e-9) == 5.0


def test_chunks_do_not_matter(monkeypatch):
    tensors = list(torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)))
    ways = [
        lambda: merge_linear(tensors, [1.0, 2.0, 4.0]),
        lambda: merge_slerp(tensors[:2], 0.3),
        lambda: merge_ties(tensors[0], tensors[1:], [0.5, 0.7]),
    ]
    whole = [way() for way in ways]
    monkeypatch.setattr(methods, "_CHUNK", 4)
    for way, expected in zip(ways, whole, strict=True):
        torch.testing.assert_close(way(), expected, rtol=1e-7, atol=0)


def test_run_json_records_the_sources(trained, tmp_path):
    a, b = trained
    result = merge(tmp_path / "m", "--load", f"{a}@2", b, "--method", "ties", "--base", f"{a}@4", "--density", "0.5")
    facts = json.loads((result / "run.json").read_text())
    record = facts["source"]["merge"]
    assert (record["method"], record["density"]) == ("ties", 0.5)
    assert [(part["run"], part["step"]) for part in (*record["checkpoints"], record["base"])] == [
        (str(a), 2),
        (str(b), 2),
        (str(a), 4),
    ]
    for part in (*record["checkpoints"], record["base"]):
        state = json.loads((Path(part["run"]) / f"checkpoints/iter_{part['step']:07d}/state.json").read_text())
        assert part["sha256"] == state["sha256"]
    assert open_run_checkpoint(result).merge.as_dict() == record
    [stage] = facts["start"]["before"]
    assert (stage["run"], stage["step"], stage["schedule"]) == ("a@2 + b@2", 2, "clm:0.5,mlm:0.5")


def test_a_merge_starts_a_run_and_is_exported(trained, small_corpus, tmp_path):
    a, _ = trained
    result = merge(tmp_path / "m", "--load", f"{a}@2,4")
    start = ["--config", str(result / "config.yaml"), "--init-from", str(result), *small_corpus.flags, *runs.STANDSTILL]
    pretrain([*start, "--save", str(tmp_path / "c")])
    merged = stored(result, 0)
    assert_bits(stored(tmp_path / "c", 1), merged)  # after a step that changes nothing
    main(["to-hf", "--load", str(result), "--output", str(tmp_path / "hf")])
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(exported["model.embed_tokens.weight"], merged["model.embedding.word_embeddings.weight"])
    assert json.loads((tmp_path / "hf" / "conversion.json").read_text())["largest_difference"]
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "merged by linear from `a@2 (1)`, `a@4 (1)`" in card and "| `mlm` | bidirectional | token i |" in card
    main(["to-hf", "--load", str(result), "--output", str(tmp_path / "all"), "--all"])
    assert os.listdir(tmp_path / "all") == ["0.138m-clm-2-mlm40-dec4-linear"]
    main(["to-hf", "--load", str(tmp_path / "c"), "--output", str(tmp_path / "hfc")])
    assert "trained in other runs: `a@2 + a@4` to step 4" in (tmp_path / "hfc" / "README.md").read_text()
    again = merge(tmp_path / "again", "--load", result, tmp_path / "c")
    assert_bits(stored(again, 0), merged)


def test_converted_models_of_one_family_stay_in_it(small_corpus, tmp_path):
    """Biases, norms of queries and keys and a tied output layer, which the weights of a plain run lack."""
    cores = []
    for name in ("x", "y"):
        model = hf_models.build("qwen3 with biases and YaRN", bos_token_id=5, eos_token_id=[0, 7 + len(cores)])
        with torch.no_grad():
            model.model.norm.weight += len(cores)
        hf = hf_models.write(model, tmp_path / f"hf-{name}", small_corpus.tokenizer)
        main(["from-hf", "--input", str(hf), "--output", str(tmp_path / name)])
        cores.append(tmp_path / name)
    result = merge(tmp_path / "m", "--load", *cores)
    left, right = stored(cores[0], 0), stored(cores[1], 0)
    assert_bits(stored(result, 0), {name: (left[name] + right[name]) / 2 for name in left})
    main(["to-hf", "--load", str(result), "--output", str(tmp_path / "hf")])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert (config["bos_token_id"], config["eos_token_id"]) == (5, 0), "only what all sources have is theirs"
    assert "those of `x@0 + y@0`, a Hugging Face model of type qwen3" in (tmp_path / "hf" / "README.md").read_text()


@pytest.mark.multiprocess
def test_any_layout_of_the_sources(trained, small_corpus, tmp_path):
    """Split by tensor and pipeline, with the distributed optimizer: the master weights, exactly."""
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"]
    flags = [*small_corpus.flags, *SHORT, "--train-iters", "2"]
    parted, one = tmp_path / "t", trained[0]
    runs.script(runs.PRETRAIN, [*flags, *layout, "--save", str(parted)], processes=4)
    assert len(list((parted / "checkpoints/iter_0000002").glob("*.distcp"))) == 4
    full = stored(parted, 2, MASTER)
    assert_bits(stored(merge(tmp_path / "m", "--load", parted, parted, "--dtype", "fp32"), 0), full)
    mixed = stored(merge(tmp_path / "mixed", "--load", parted, f"{one}@2", "--dtype", "fp32"), 0)
    other = stored(one, 2, MASTER)
    assert_bits(mixed, {name: ((full[name].double() + other[name].double()) / 2).float() for name in full})
    main(["to-hf", "--load", str(tmp_path / "m"), "--output", str(tmp_path / "hf")])


TIES = ["--method", "ties", "--base", "A@2", "--density", "0.5"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["A"], "--load: found 1 checkpoint, expected 2 or more for --method linear"),
        (["A@2,4", "B", "--method", "slerp"], "--load: found 3 checkpoints, expected 2 for --method slerp"),
        (["A@3", "B"], "A@3: no checkpoint of step 3, expected one of 2, 4"),
        (["A@2,last", "B"], "A@2,last: found '2,last' after the @, expected a step or steps, such as A@1000,1200"),
        (["nowhere", "B"], "--load nowhere: no config.yaml there"),
        (["A", "B", "--weights", "1"], "--weights 1: found 1, expected 2, one for each checkpoint"),
        (["A", "B", "--weights", "1", "-1"], "--weights 1 -1: expected numbers of 0 or more with a sum above 0"),
        (["A", "B", "--weights", "nan", "1"], "--weights nan 1: expected numbers of 0 or more"),
        (["A", "B", "--weights", "0", "0"], "--weights 0 0: expected numbers of 0 or more"),
        (["A", "B", "--method", "slerp", "--weights", "1.5"], "--weights 1.5: expected for --method slerp one number from 0"),
        (["A", "B", "--method", "slerp", "--weights", "1", "0"], "--weights 1 0: expected for --method slerp one number"),
        (["A", "B", "--base", "A@2"], "--base A@2: only for --method ties, found --method linear"),
        (["A", "B", "--density", "0"], "--density 0.0: only for --method ties"),
        (["A", "B", "--method", "ties"], "--base: missing, expected for --method ties"),
        (["A", "B", *TIES[:4]], "--density: found None, expected for --method ties a share above 0 up to 1"),
        (["A", "B", *TIES[:5], "1.5"], "--density: found 1.5, expected for --method ties"),
        (["A", "B", *TIES[:5], "nan"], "--density: found nan, expected for --method ties"),
        (["A", "B", *TIES, "--weights", "1", "1"], "--weights 1 1: not for --method ties"),
        (["A", "B", *TIES, "--base", "A@7"], "--base A@7: no checkpoint of step 7, expected one of 2, 4"),
        (["A", "B", *TIES, "--base", "A@2,4"], "--base A@2,4: found 2 steps, expected one"),
        (["A", "B", *TIES, "--base", "file"], "--base file: no config.yaml there"),
    ],
)
def test_wrong_options_are_one_line(words, complaint, trained, tmp_path, refusal, monkeypatch):
    monkeypatch.chdir(trained[0].parent)
    words = [word.replace("A", "a").replace("B", "b") for word in words]
    complaint = complaint.replace("A@", "a@")
    assert complaint in refusal(main, ["merge", "--output", tmp_path / "new" / "m", "--load", *words])
    assert not list(tmp_path.iterdir())


def test_models_that_differ_are_one_line(trained, small_corpus, tmp_path, refusal):
    a, _ = trained
    wide = ["--hidden-size", "32", "--objective-schedule", "mlm", "--train-iters", "1", "--save", str(tmp_path / "wide")]
    pretrain([*small_corpus.flags, *SHORT, *wide])
    line = refusal(main, ["merge", "--load", a, tmp_path / "wide", "--output", tmp_path / "m"])
    assert f"--load {tmp_path}/wide@1: hidden_size is 64 in {a}, 32 in {tmp_path}/wide; only weights of one shape" in line
    words = ["--load", a, a, "--method", "ties", "--density", "0.5", "--base", tmp_path / "wide"]
    assert f"--base {tmp_path}/wide@1: hidden_size is" in refusal(main, ["merge", *words, "--output", tmp_path / "m"])
    copy = shutil.copytree(a, tmp_path / "copy")
    facts = json.loads((copy / "run.json").read_text())
    facts["identity"]["tokenizer"] = "0" * 64
    (copy / "run.json").write_text(json.dumps(facts))
    assert ": tokenizer is " in refusal(main, ["merge", "--load", a, copy, "--output", tmp_path / "m"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "wide"]


def test_a_damaged_source_is_one_line_before_anything_is_merged(trained, tmp_path, refusal, monkeypatch):
    monkeypatch.setattr("megaenc.convert.merge.checkpoints._merge_weights", lambda *given: pytest.fail("merged"))
    copy = shutil.copytree(trained[0], tmp_path / "copy")
    shard = next((copy / "checkpoints/iter_0000004").glob("*.distcp"))
    with open(shard, "r+b") as stream:
        stream.seek(2000)
        stream.write(b"\xff\x01\xfe")
    line = refusal(main, ["merge", "--load", trained[0], f"{copy}@4", "--output", tmp_path / "new" / "m"])
    assert f"{shard}: its content changed" in line and "choose one of steps 2 (--load RUN@STEP)" in line
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_record_that_no_merge_wrote_is_one_line(trained, tmp_path, refusal):
    result = merge(tmp_path / "m", "--load", f"{trained[0]}@2,4")
    facts = json.loads((result / "run.json").read_text())
    for change in ({"method": 1}, {"checkpoints": [{"run": "x"}]}, {"else": 1}, {"density": "high"}):
        merged = facts["source"]["merge"] | change
        (result / "run.json").write_text(json.dumps(facts | {"source": {"merge": merged}}))
        assert f"{result}/run.json: " in refusal(main, ["to-hf", "--load", result, "--output", tmp_path / "hf"])
