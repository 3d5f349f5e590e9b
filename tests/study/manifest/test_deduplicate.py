"""Models of the same columns with different training are kept apart."""

import manifests
import pytest
from manifests import TOY

VARIANT = TOY | {"name": "no-decay", "pretrain": {"weight_decay": 0.0}}
APART = {"toy-mlm40-400": "", "no-decay": "mlm(mask=0.4) with weight_decay=0"}
ON_THE_WAY = TOY | {"checkpoints": [100]}
LONGER = ON_THE_WAY | {"steps": 600}
FASTER = "mlm(mask=0.4) with lr=0.001"
CLM_FIRST = TOY | {"clm_steps": 100}
TURNS = {"size": "toy", "steps": 400, "name": "turns", "schedule": "2x(clm:50,mlm:150)"}
CASES = {
    # entries, and the schedules by which models are told apart beyond the columns
    "the one without flags of its own keeps the columns": ([TOY, VARIANT], APART),
    "in any order": ([VARIANT, TOY], APART),
    "alone it has them whatever its flags": (
        [TOY | {"peak_rate": 1e-3}],
        {"toy-mlm40-400-lr1e-03": ""},
    ),
    "of two peak rates neither stands for them": (
        [TOY | {"peak_rate": [1e-3, 5e-4]}],
        {"toy-mlm40-400-lr1e-03": FASTER, "toy-mlm40-400-lr5e-04": "mlm(mask=0.4) with lr=0.0005"},
    ),
    "so do checkpoints on the way of runs of different lengths": (
        [ON_THE_WAY, LONGER | {"peak_rate": 1e-3}],
        {
            "toy-mlm40-400-100": "",
            "toy-mlm40-400": "",
            "toy-mlm40-600-lr1e-03-100": FASTER,
            "toy-mlm40-600-lr1e-03": FASTER,
        },
    ),
    "the same weights under two names": (
        [ON_THE_WAY, LONGER],
        dict.fromkeys(
            ("toy-mlm40-400-100", "toy-mlm40-400", "toy-mlm40-600-100", "toy-mlm40-600"), ""
        ),
    ),
}


@pytest.mark.parametrize(("entries", "schedules"), CASES.values(), ids=CASES)
def test_a_schedule_tells_apart_what_the_columns_do_not(entries, schedules, tmp_path):
    keys = manifests.read(tmp_path, *entries).model_keys()
    assert {name: key.schedule for name, key in keys.items()} == schedules


def test_what_continues_one_of_them_is_apart_too(tmp_path):
    continued = {"after": ["toy-clm-100-mlm40-400", "turns"], "steps": 100, "mask": 0.4}
    keys = list(manifests.read(tmp_path, CLM_FIRST, TURNS, continued).model_keys().values())
    assert len(set(keys)) == 4 and [bool(one.schedule) for one in keys] == [
        False,
        True,
        False,
        True,
    ]
