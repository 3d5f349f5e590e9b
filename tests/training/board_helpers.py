"""TensorBoard and Weights & Biases records of a run, next to its own files."""

import json

import runs

from megaenc.training.callbacks.backends import flatten_row


def numbers(directory) -> dict[str, dict[int, float]]:
    """Return the numbers in the run directory by their name on the boards and by step."""
    values: dict[str, dict[int, float]] = {}
    for group, rows in (
        ("train", runs.metrics(directory)),
        ("validation", runs.validations(directory)),
    ):
        for row in rows:
            for name, value in flatten_row(row, group).items():
                if not isinstance(value, str):
                    values.setdefault(name, {})[row["step"]] = value
    return values


def tensorboard_shows(directory):
    """Return the events that TensorBoard reads, and the numbers by name and step."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import (
        TENSORS,
        EventAccumulator,
    )
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(directory), size_guidance={TENSORS: 0})
    events.Reload()
    logged = {}
    for tag in events.Tags()["tensors"]:
        if not tag.endswith("text_summary"):
            steps = [
                (event.step, float(make_ndarray(event.tensor_proto)))
                for event in events.Tensors(tag)
            ]
            assert len(dict(steps)) == len(steps), f"{tag}: a step stands there twice"
            logged[tag] = dict(steps)
    return events, logged


def wandb_records(directory):
    """Return (run id, configuration, rows) of each start of the run, in order."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    for file in sorted((directory / "wandb").glob("offline-run-*/*.wandb")):
        store = DataStore()
        run = None
        rows = []
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                run = record.run
            elif record.WhichOneof("record_type") == "history":
                items = {
                    (item.key or ".".join(item.nested_key)): json.loads(item.value_json)
                    for item in record.history.item
                }
                rows.append(
                    {name: value for name, value in items.items() if not name.startswith("_")}
                )
        yield (
            run.run_id,
            {item.key: json.loads(item.value_json) for item in run.config.update},
            rows,
        )


def wandb_shows(rows):
    """Return the numbers of `rows` by name and step; later rows replace earlier ones."""
    logged: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and not isinstance(value, str):
                logged.setdefault(name, {})[row["step"]] = value
    return logged
