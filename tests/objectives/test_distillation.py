"""Distillation: the masks of MLM, and label distributions of a plain forward pass."""

import json
import shutil

import numpy as np
import pytest
import torch
from objective_helpers import SPECIAL, VOCABULARY, random_pack, write_teacher
from small_models import save_model
from transformers import AutoModelForMaskedLM

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.errors import InputError
from megaenc.objectives import Distillation, MaskedLanguageModeling, Schedule, check_targets
from megaenc.objectives.check import command as check
from megaenc.objectives.check import measure


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Return the directory of a tiny EuroBERT, which must not be changed."""
    return write_teacher(tmp_path_factory.mktemp("teacher"))


def load(directory):
    """Return the model as transformers loads it in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import megaenc.hf.neobert_model  # noqa: F401, registers our class of NeoBERT

    decoder = AutoConfig.from_pretrained(directory).architectures[0].endswith("ForCausalLM")
    return (
        (AutoModelForCausalLM if decoder else AutoModelForMaskedLM)
        .from_pretrained(directory, dtype=torch.float32)
        .eval()
    )


def densify(soft_labels, size=VOCABULARY.size):
    """Return probabilities of all tokens, float64[N, size]."""
    dense = np.zeros((len(soft_labels.ids), size))
    np.add.at(dense, (np.arange(len(dense))[:, None], soft_labels.ids), soft_labels.probabilities)
    return dense


@torch.no_grad()
def plain_distributions(model, objective, pack, targets):
    """Return distributions, computed one document and one prediction at a time."""
    rows = []
    for start, stop in zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True):
        logits = (
            model(torch.from_numpy(targets.inputs[start:stop])[None])
            .logits[0, :, : VOCABULARY.size]
            .double()
        )
        for at in targets.predict_at[(targets.predict_at >= start) & (targets.predict_at < stop)]:
            logits[at - start, list(SPECIAL)] = -torch.inf
            best = logits[at - start].topk(min(objective.top_k, VOCABULARY.size - len(SPECIAL)))
            row = np.zeros(VOCABULARY.size)
            row[best.indices] = objective.share * (best.values / objective.temperature).softmax(0)
            row[pack.tokens[at]] += 1 - objective.share
            rows.append(row)
    return np.array(rows).reshape(-1, VOCABULARY.size)


OPTIONS = [
    {"top_k": 3, "temperature": 2.0, "share": 0.9, "span": 3.0},
    {"top_k": 500, "share": 1.0, "mask": 0.15, "random": 0.1, "keep": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_label_distributions_are_those_of_a_plain_forward(options, teacher):
    objective = Distillation(VOCABULARY, teacher=str(teacher), **options)
    model = load(teacher)
    predictions = 0
    shared = {
        name: value for name, value in options.items() if name in ("mask", "random", "keep", "span")
    }
    masking = MaskedLanguageModeling(VOCABULARY, **shared)
    for sample in range(20):
        pack = random_pack(sample)
        randomness = SampleRandomness(3, sample, 2)
        actual = objective.targets(pack, randomness)
        expected = masking.targets(pack, randomness)
        assert all(map(np.array_equal, actual.parts[:-2], expected.parts[:-2])), (
            "the inputs, places and labels of mlm"
        )
        distributions = plain_distributions(model, objective, pack, actual)
        np.testing.assert_allclose(densify(actual.soft_labels), distributions, atol=1e-5)
        check_targets(objective, pack, seed=5)
        predictions += len(distributions)
    assert predictions > 100


@pytest.mark.parametrize(
    "name", ["modernbert", "neobert", "gemma3 read bidirectionally", "roberta"]
)
def test_teachers_of_other_families(name, tmp_path):
    """RoBERTa's positions depend on padding; its vocabulary exceeds the tokenizer's."""
    if name == "roberta":
        sizes = {
            "vocab_size": 64,
            "max_position_embeddings": 66,
            "pad_token_id": 1,
            "initializer_range": 0.5,
        }
        save_model(tmp_path, name, auto=AutoModelForMaskedLM, **sizes)
    else:
        write_teacher(tmp_path, name)
    tokens = np.random.default_rng(0).integers(8, VOCABULARY.size, size=64)
    pack = Pack(0, 0, tokens, np.array([0, 1, 30, 64], dtype=np.int32))
    # The mask token must not be RoBERTa's padding.
    vocabulary = VOCABULARY.__class__(VOCABULARY.size, 0, 7, (0, 1, 7), VOCABULARY.fingerprint)
    objective = Distillation(vocabulary, teacher=str(tmp_path), top_k=8)
    actual = objective.targets(pack, SampleRandomness(0, 0, 0))
    expected = plain_distributions(load(tmp_path), objective, pack, actual)
    np.testing.assert_allclose(densify(actual.soft_labels), expected, atol=1e-5)
    assert len(actual.labels) > 20 and actual.soft_labels.ids.max() < VOCABULARY.size


def test_documents_are_read_separately_in_batches_of_any_size(teacher, monkeypatch):
    from megaenc.objectives import distillation

    objective = Distillation(VOCABULARY, teacher=str(teacher))
    pack = next(pack for pack in map(random_pack, range(20)) if len(pack.cu_seqlens) > 10)
    together = objective.targets(pack, SampleRandomness(0, 0, 0))
    monkeypatch.setattr(distillation, "_BATCH_TOKENS", 1)
    apart = objective.targets(pack, SampleRandomness(0, 0, 0))
    np.testing.assert_allclose(densify(together.soft_labels), densify(apart.soft_labels), atol=1e-5)


def test_only_predicted_positions_get_logits(teacher, monkeypatch):
    from megaenc.objectives.distillation import load_teacher

    objective = Distillation(VOCABULARY, teacher=str(teacher))
    pack = random_pack(1)
    shapes = []
    head = load_teacher(str(teacher), VOCABULARY).model.get_output_embeddings()
    with head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape)):
        targets = objective.targets(pack, SampleRandomness(0, 0, 0))
    assert sum(shape[0] for shape in shapes) == len(targets.labels) < len(pack.tokens)
    assert (
        load_teacher(str(teacher), VOCABULARY).model is load_teacher(str(teacher), VOCABULARY).model
    )


def test_options_change_over_a_phase_and_the_teacher_is_part_of_the_identity(teacher):
    schedule = Schedule.build(
        f"distill(teacher={teacher},share=1->0,top_k=4->8):1.0", 5, VOCABULARY
    )
    assert [schedule.objective(step).share for step in (1, 3, 5)] == [1, 0.5, 0]
    assert [schedule.objective(step).top_k for step in (1, 3, 5)] == [4, 6, 8]
    soft_labels = (
        schedule.objective(5).targets(random_pack(0), SampleRandomness(0, 0, 0)).soft_labels
    )
    assert (soft_labels.probabilities[:, 0] == 1).all() and (
        soft_labels.probabilities[:, 1:] == 0
    ).all()
    assert schedule.objective(1).files() == (teacher / "config.json", teacher / "model.safetensors")
    [text] = schedule.packages().values()
    assert "config.json (" in text and "model.safetensors (" in text


def test_a_teacher_is_needed_at_a_path_that_a_schedule_can_hold():
    with pytest.raises(
        InputError,
        match=r"option `teacher`: missing, expected the directory .*: distill\(teacher=DIR\)",
    ):
        Distillation(VOCABULARY)
    for part in ("my directory", "a,b", "a(b)"):
        with pytest.raises(InputError, match=r"at character \d+ of .*here: "):
            Schedule.build(f"distill(teacher=/models/{part}):1.0", 1, VOCABULARY)


def change_config(directory, **values):
    """Change fields of config.json, or remove those that are None."""
    file = directory / "config.json"
    content = json.loads(file.read_text()) | values
    file.write_text(
        json.dumps({name: value for name, value in content.items() if value is not None})
    )


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (shutil.rmtree, "no such directory, expected one with config.json"),
        (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "a pickle, which could run any code",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"12"), "not a complete safetensors file"),
        (
            lambda f: change_config(f, model_type="vit"),
            "found a vit model; expected a masked language model",
        ),
        (
            lambda f: change_config(f, vocab_size=49),
            "a vocabulary of 49 ids, expected at least the 50 of the tokenizer",
        ),
        (lambda f: change_config(f, num_hidden_layers=3), "no weights `model.layers.2"),
        (
            lambda f: change_config(f, architectures=["LlamaForCausalLM"], model_type="llama"),
            "reads causally",
        ),
        (
            lambda f: change_config(f, prediction_shift=1),
            "predicts tokens 1 further (`prediction_shift`)",
        ),
        (
            lambda f: change_config(f, max_position_embeddings=63),
            "reads up to 63 tokens, expected the 64 of a pack",
        ),
    ],
)
def test_an_unusable_teacher_is_refused_in_one_line(damage, complaint, teacher, tmp_path):
    directory = shutil.copytree(teacher, tmp_path / "teacher")
    damage(directory)
    with pytest.raises(InputError) as error:
        check_targets(Distillation(VOCABULARY, teacher=str(directory)), random_pack(0), seed=0)
    line = str(error.value)
    assert (
        complaint in line
        and "\n" not in line
        and "InputError" not in line
        and str(directory) in line
    )
    assert line.startswith(f"objective `distill(teacher={directory})`, pack 0: ")


@pytest.mark.slow
def test_objective_check_passes(small_corpus, tmp_path, monkeypatch):
    """The context is shorter than the check's packs but not than their documents."""
    monkeypatch.setattr(measure, "_PACKS", 16)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    write_teacher(
        tmp_path, vocab_size=1000, max_position_embeddings=512, num_key_value_heads=1, **shape
    )
    shutil.copytree(small_corpus.tokenizer, tmp_path, dirs_exist_ok=True)
    _, results = check.run_checks(
        check.CheckConfig(f"distill(teacher={tmp_path},mask=0.1,top_k=4)")
    )
    assert [result.name for result in results if result.passed is False] == []
    rows = {result.name: result.text for result in results}
    assert (
        rows["leaks"].startswith("0.0 %")
        and rows["determinism"] == "equal in another order and in another process"
    )
