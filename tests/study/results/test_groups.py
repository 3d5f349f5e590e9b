"""Which models stand in which table, and in what order."""

from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.study.results.groups import (
    dataset_label,
    datasets_by_family,
    group_by_setup,
    is_size_order_known,
    reference_mask_ratio,
    sort_sizes,
)
from megaenc.study.results.published import published


def test_the_base_is_what_both_objectives_have_or_the_plan_says():
    """CLM that got further than MLM is not the base alone, nor is a shorter budget."""
    mlm = parse_model_name("1b-mlm40-20")
    clm = ModelKey("1B", 20)
    longer = ModelKey("1B", 40)
    assert group_by_setup([longer, clm, mlm]) == {"base": [mlm, clm], "pfs": [longer]}
    assert group_by_setup([longer, mlm])["base"] == [longer]
    plan = [longer, parse_model_name("1b-mlm40-40"), mlm, clm]
    assert group_by_setup([clm, mlm], plan) == {"pfs": [mlm, clm]}
    alternating = ModelKey("1B", 10, 10, mask_ratio=0.4, schedule="alternating")
    second = parse_model_name("1b-clm-20-seed2")
    assert group_by_setup([alternating, second, clm]) == {
        "base": [clm, second],
        "other": [alternating],
    }


def test_order_of_sizes_data_sets_and_masks():
    assert sort_sizes([ModelKey(size) for size in ("1B", "mini", "610M", "210M", "40k")]) == [
        "40k",
        "210M",
        "610M",
        "1B",
        "mini",
    ]
    words = [ModelKey(size) for size in ("large", "medium", "small")]
    assert sort_sizes(words, ["small", "medium", "large"]) == ["small", "medium", "large"]
    assert is_size_order_known(words, ["small", "medium", "large"]) and not is_size_order_known(
        words
    )
    assert is_size_order_known(words[:1]) and is_size_order_known(
        [ModelKey("1B"), ModelKey("210M")]
    )
    pairs = [("IR", "msmarco"), ("SC", "average"), ("SC", "own"), ("SC", "qqp"), ("SC", "sst2")]
    assert datasets_by_family(pairs) == {"SC": ["sst2", "qqp", "own", "average"], "IR": ["msmarco"]}
    assert dataset_label("IR", "average after msmarco") == "Average after MS MARCO"
    assert reference_mask_ratio(published().model_keys()) == 0.4
    assert reference_mask_ratio([ModelKey("1B", 9)]) is None
