"""Names of exports as the study gives them: `610m-clm-10k-mlm40-42k` is a model of 610 million parameters, trained on CLM up to
step 10,000, then with 40 % of the tokens hidden up to 42,000."""

import re
from pathlib import Path

from megaenc.convert.saved_run import SavedRun
from megaenc.model.config import PRESETS
from megaenc.objectives import Objective, Phase, Schedule


def study_name(run: SavedRun, schedule: Schedule, step: int) -> str:
    """The name of the export of `step`; one that is not the last has its number at the end: `610m-clm-42k-1000`.

    Steps count on from those of the runs that the first weights come from. A Hugging Face model that came in keeps its name.
    """
    done, parts = 0, [_model(run)]
    if run.converted:
        return parts[0]
    for stage in run.start.before:
        if not stage.family:
            done += stage.step
            parts.append(f"{_slug(stage.schedule)}-{_count(done)}")
    phases = [(_phase(phase), phase.last_step) for phase in schedule.phases]
    # A repetition would make a name without end: it is spelled as it was written.
    if len(phases) > 4:
        phases = [(_slug(run.settings.objective_schedule), run.settings.total_iters)]
    for number, (label, last) in enumerate(phases):
        if number + 1 == len(phases) or phases[number + 1][0] != label:
            parts.append(f"{label}-{_count(done + last)}")
    if step < run.settings.total_iters:
        parts.append(str(step))
    return "-".join(parts)


def _model(run: SavedRun) -> str:
    if run.origin:
        return _slug(Path(run.origin.run).name)
    name, parameters = run.settings.model_name, run.model.parameters(run.vocab_size)
    return name if name in PRESETS else f"{parameters / 1e9:.3g}b" if parameters >= 10**9 else f"{parameters / 1e6:.3g}m"


def _phase(phase: Phase) -> str:
    if len(phase.choices) > 1:
        return _slug(phase.text)
    (choice,) = phase.choices
    return _objective(choice.start) if choice.start == choice.end else _slug(choice.text)


def _objective(objective: Objective) -> str:
    """`mlm40` for 40 % hidden, the other options that are not as usual behind it."""
    label = objective.name
    if (mask := getattr(objective, "mask", None)) is not None:
        label += f"{100 * mask:g}"
    others = [
        f"{field.name}{getattr(objective, field.name):g}"
        for field in objective.options()
        if field.name != "mask" and isinstance(field.default, float | int) and getattr(objective, field.name) != field.default
    ]
    return "-".join([label, *others])


def _count(steps: int) -> str:
    return f"{steps // 1000}k" if steps and steps % 1000 == 0 else str(steps)


def _slug(text: str) -> str:
    """Letters, digits, points and single hyphens, for the name of a folder."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace("->", "to")).strip("-.") or "model"
