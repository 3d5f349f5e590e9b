"""Special tokens around a text: the tokenizer's template, an EOS or none."""

import numpy as np
import pytest
import tokenizer_shapes
from text_helpers import small_tokenizer
from transformers import AutoTokenizer

from megaenc.data.tokenizer.special_tokens import (
    SpecialTokens,
    read_template,
    resolve_special_tokens,
    set_special_tokens,
    set_template,
)
from megaenc.errors import InputError


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Return a tokenizer with [CLS] and [SEP] around a text, and no EOS."""
    directory = tokenizer_shapes.save(
        tokenizer_shapes.SHAPES["bert"](), tmp_path_factory.mktemp("shapes") / "bert"
    )
    return AutoTokenizer.from_pretrained(directory)


def test_modes_of_a_tokenizer_with_a_template(bert):
    cls = bert.cls_token_id
    sep = bert.sep_token_id
    template = SpecialTokens("template", (cls,), (sep,))
    assert (
        resolve_special_tokens(bert, "template")
        == resolve_special_tokens(bert, "")
        == template
        == read_template(bert)
    )
    assert resolve_special_tokens(bert, "eod") == SpecialTokens("eod", after=(sep,))
    assert resolve_special_tokens(bert, "none") == SpecialTokens()
    assert template.surround(np.array([9, 8])).tolist() == [cls, 9, 8, sep]
    assert template.describe(bert) == "[CLS] ... [SEP]" and template.count == 2


def test_a_tokenizer_that_adds_nothing_ends_texts_instead():
    tokenizer = small_tokenizer()
    end = SpecialTokens("eod", after=(tokenizer.eos_token_id,))
    assert not read_template(tokenizer).count
    assert (
        resolve_special_tokens(tokenizer, "template")
        == resolve_special_tokens(tokenizer, "")
        == end
    )


def test_a_tokenizer_without_any_token_to_add():
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer().backend_tokenizer)
    assert resolve_special_tokens(bare, "") == SpecialTokens()
    for mode in ("template", "eod"):
        with pytest.raises(
            InputError, match=r"--append-eod: .* no end-of-sequence token .*--special-tokens none"
        ):
            resolve_special_tokens(bare, mode, "--append-eod")


def test_a_changed_template_holds_for_texts_and_pairs(bert):
    cls = bert.cls_token_id
    sep = bert.sep_token_id
    assert set_special_tokens(bert, read_template(bert)) is bert
    ended = set_special_tokens(bert, SpecialTokens("eod", after=(sep,)))
    first = bert("brown fox", add_special_tokens=False)["input_ids"]
    second = bert("lazy dogs", add_special_tokens=False)["input_ids"]
    assert ended("brown fox")["input_ids"] == [*first, sep]
    assert ended("brown fox", "lazy dogs")["input_ids"] == [*first, sep, *second, sep]
    assert ended("")["input_ids"] == [sep]
    begun = set_special_tokens(bert, SpecialTokens("template", before=(cls,)))
    assert begun("brown fox", "lazy dogs")["input_ids"] == [cls, *first, cls, *second]
    one_text = set_template(bert, SpecialTokens("template", (cls,), (sep,)), between=())
    assert one_text("brown fox", "lazy dogs")["input_ids"] == [cls, *first, *second, sep]
    assert bert("brown fox")["input_ids"] == [cls, *first, sep], "the tokenizer itself is unchanged"


def test_offsets_of_byte_level_tokens_survive_a_change():
    tokenizer = small_tokenizer()
    changed = set_special_tokens(tokenizer, SpecialTokens("eod", after=(tokenizer.eos_token_id,)))
    before = tokenizer("the quick fox", return_offsets_mapping=True)["offset_mapping"]
    after = changed("the quick fox", return_offsets_mapping=True)["offset_mapping"]
    assert after == [*before, (0, 0)]


def test_json_is_read_back_and_any_other_refused():
    special = SpecialTokens("template", (1, 2), (3,))
    values = special.to_json()
    assert SpecialTokens.from_json(values, "corpus.json") == special
    for other in (
        {},
        [],
        values | {"mode": "all"},
        values | {"after": ["x"]},
        values | {"after": [-1]},
        values | {"after": 3},
    ):
        with pytest.raises(InputError, match=r"corpus\.json: found .*, expected"):
            SpecialTokens.from_json(other, "corpus.json")


def test_a_tokenizer_without_letters_has_a_template_too():
    """A vocabulary of amino acids has neither `a` nor an unknown token."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({"[CLS]": 0, "[SEP]": 1, "A": 2, "C": 3}, []))
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]"
    )
    assert read_template(tokenizer) == SpecialTokens("template", (0,), (1,))
