"""Models of the same columns that were trained to differently are not taken for one another."""

import manifests

PLAIN = {"size": "toy", "steps": 400, "mask": 0.4}


def settings(folder, *entries):
    return manifests.read(folder, **manifests.models(*entries)).model_keys()


def test_the_one_without_flags_of_its_own_keeps_the_columns(tmp_path):
    variant = PLAIN | {"name": "no-decay", "pretrain": {"weight_decay": 0.0}}
    for order in ([PLAIN, variant], [variant, PLAIN]):
        keys = settings(tmp_path, *order)
        assert (keys["toy-mlm40-400"].schedule, keys["no-decay"].schedule) == ("", "mlm(mask=0.4) with weight_decay=0")


def test_alone_it_has_them_whatever_its_flags(tmp_path):
    (only,) = settings(tmp_path, PLAIN | {"peak_rate": 1e-3}).values()
    assert only.schedule == ""


def test_of_two_peak_rates_neither_stands_for_the_columns(tmp_path):
    keys = settings(tmp_path, PLAIN | {"peak_rate": [1e-3, 5e-4]})
    assert [one.schedule for one in keys.values()] == ["mlm(mask=0.4) with lr=0.001", "mlm(mask=0.4) with lr=0.0005"]


def test_so_do_checkpoints_on_the_way_of_runs_of_different_lengths(tmp_path):
    longer = {"size": "toy", "steps": 600, "mask": 0.4, "checkpoints": [100], "peak_rate": 1e-3}
    keys = settings(tmp_path, PLAIN | {"checkpoints": [100]}, longer)
    assert keys["toy-mlm40-600-lr1e-03-100"].schedule.endswith("with lr=0.001")
    assert keys["toy-mlm40-400-100"].schedule == ""
    same = settings(tmp_path, PLAIN | {"checkpoints": [100]}, longer | {"peak_rate": []})
    assert not any(one.schedule for one in same.values()), "the same weights under two names"


def test_what_continues_one_of_them_is_apart_too(tmp_path):
    turns = {"size": "toy", "steps": 400, "name": "turns", "schedule": "2x(clm:50,mlm:150)"}
    usual = {"size": "toy", "steps": 400, "clm_steps": 100, "mask": 0.4}
    continued = {"after": ["toy-clm-100-mlm40-400", "turns"], "steps": 100, "mask": 0.4}
    keys = list(settings(tmp_path, usual, turns, continued).values())
    assert len(set(keys)) == 4 and [bool(one.schedule) for one in keys] == [False, True, False, True]
