"""Models that have the same columns and are not the same: in tables and claims one of them can stand for the columns."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from megaenc.study.entries import Model
from megaenc.study.setting import Setting


def set_apart(models: Iterable[Model]) -> tuple[Model, ...]:
    """The models, in their order, with no setting that two of them, or checkpoints on their way, were trained to differently.

    Of those with the same columns the one without flags of its own keeps them. For the others these become part of the
    `schedule`, by which they are shown in a table of their own, beside those of the study and its claims.
    """
    models = tuple(models)
    flags: dict[Setting, set[str]] = defaultdict(set)
    for model in models:
        for setting in _settings(model):
            flags[setting].add(model.own)
    return tuple(_by_its_flags(model) if any(len(flags[one]) > 1 for one in _settings(model)) else model for model in models)


def _settings(model: Model) -> list[Setting]:
    own = [model.setting] if model.evaluate else []
    return own + [model.checkpoint_setting(step) for step in model.checkpoints]


def _by_its_flags(model: Model) -> Model:
    if not model.own:
        return model
    return replace(model, setting=replace(model.setting, schedule=f"{model.setting.schedule or model.schedule} with {model.own}"))
