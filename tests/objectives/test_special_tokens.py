"""No objective hides or predicts a special token, wherever templates of documents or cuts of packs put it."""

import numpy as np
import pytest
from objective_helpers import MASK, SPECIAL, VOCABULARY, WORDS, random_pack, write_phrases, write_teacher

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.objectives import PseudoPerplexity, Schedule, check_targets

CLS, SEP = 7, VOCABULARY.eos_id
LENGTH = 64


OBJECTIVES = [
    "clm", "mlm(mask=1,random=1)", "mlm(mask=0.5,random=0.3,keep=0.3)", "mlm(span=3)", "mlm(mask=1,random=0.5,unit=word)",
    "mlm(mask=1,random=0.5,unit=FILE)", "mntp(mask=1,random=0.5)", "mntp(mask=1,random=0.5,unit=FILE)", "prefix_lm(high=0)",
    "prefix_lm(low=1)", "diffusion(low=1)", "span_corruption(mask=0.6,random=0.5)", "gpt_bert(mask=1,causal=0.5,random=0.5)",
    "distill(teacher=FOLDER,mask=1,top_k=50)", "pseudo_perplexity", "pseudo_perplexity ahead",
]  # fmt: skip


def stream_pack(sample: int, cuts: str) -> Pack:
    """Documents `[CLS] text [SEP]` one after the other, with edges at `documents`, `chunks` (random places) or `both`."""
    rng = np.random.default_rng([1, sample])
    documents = [[CLS, *rng.integers(8, VOCABULARY.size, size=rng.integers(0, 12)), SEP] for _ in range(LENGTH)]
    start = int(rng.integers(0, 20))
    tokens = np.concatenate(documents)[start : start + LENGTH]
    edges = {0, LENGTH}
    if cuts != "chunks":
        edges |= {at for at in range(1, LENGTH) if tokens[at] == CLS}
    if cuts != "documents":
        edges |= set(rng.integers(1, LENGTH, size=3).tolist())
    return Pack(sample, 0, tokens, np.array(sorted(edges), dtype=np.int32))


PACKS = [stream_pack(sample, cuts) for cuts in ("documents", "chunks", "both") for sample in range(10)]
PACKS += [random_pack(sample) for sample in range(10)]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Return a function that builds an objective from its text."""
    directory = tmp_path_factory.mktemp("special")
    teacher = write_teacher(directory / "teacher")
    # Collocations that no search would find, because they hold special tokens.
    phrases = write_phrases(directory / "phrases.npz", [(8, 9, 10), (CLS, 8), (9, SEP, CLS, 10)])

    def build(text):
        if text.startswith("pseudo_perplexity"):
            return PseudoPerplexity(WORDS, passes=2, ahead=int(text.endswith("ahead")))
        text = text.replace("FOLDER", str(teacher)).replace("FILE", phrases)
        return Schedule.build(text, 1, WORDS).objective(1)

    return build


@pytest.mark.parametrize("text", OBJECTIVES)
def test_special_tokens_are_neither_hidden_nor_predicted(text, build):
    objective, predictions = build(text), 0
    never_predicted = [token for token in SPECIAL if text != "clm" or token != VOCABULARY.eos_id]
    for pack in PACKS:
        check_targets(objective, pack, seed=5)
        targets = objective.targets(pack, SampleRandomness(5, pack.sample, pack.epoch))
        assert not np.isin(targets.labels, never_predicted).any()
        is_special = np.isin(pack.tokens, SPECIAL)
        changed = targets.inputs != pack.tokens
        assert not changed[is_special].any()
        replacements = targets.inputs[changed]
        assert not np.isin(replacements[replacements != MASK], SPECIAL).any()
        if "random=1" in text:
            assert not (replacements == MASK).any()
        if targets.soft_labels is not None:
            assert not np.isin(targets.soft_labels.ids, SPECIAL).any()
        if targets.count is not None:
            assert targets.count <= (~is_special).sum()
        predictions += len(targets.labels)
    assert predictions > 20
