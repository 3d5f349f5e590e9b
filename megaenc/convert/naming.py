"""Names of exports in the study's scheme, such as `610m-clm-10k-mlm40-42k`.

This model has 610 million parameters; it was trained on CLM up to step 10,000, then on MLM with 40
% masking up to step 42,000.
"""

import re
from pathlib import Path

from megaenc.convert.run_checkpoint import RunCheckpoint
from megaenc.errors import InputError
from megaenc.model.config import PRESETS
from megaenc.objectives import Objective, Phase, Schedule
from megaenc.training.run_init import Ancestor


def export_name(run: RunCheckpoint, schedule: Schedule, step: int) -> str:
    """Return the directory name of the export of `step`.

    It is `610m-clm-42k` at the end of a run, and `610m-clm-42k-1000` before it, at `step` 1000. An
    objective is followed by its last step (multiples of 1,000 as `42k`), which includes the steps
    of the runs that the first weights come from: in `610m-clm-dec42k-mlm40-64k`, `dec` means that
    the earlier run reached its end, so that its learning rate had decayed. A converted Hugging Face
    model keeps its name; a merge ends in its method.

    Args:
        schedule: Schedule of the run, by `RunCheckpoint.schedule`.
        step: Step of the run, without the steps of earlier runs.
    """
    name = run.settings.model_name
    if run.origin:
        name = _slugify(Path(run.origin.run).name)
    elif name not in PRESETS:
        parameters = run.model.parameter_count(run.vocab_size)
        name = f"{parameters / 1e9:.3g}b" if parameters >= 10**9 else f"{parameters / 1e6:.3g}m"
    parts = [name]
    done = 0
    for stage in run.start.before:
        if not stage.family:
            parts += _ancestor_parts(stage, schedule, done)
            done += stage.step
    if run.converted:
        return "-".join([*parts, *([run.merge.method] if run.merge else [])])
    parts += _schedule_parts(schedule, run.settings.schedule_text, done)
    if step < run.settings.total_iters:
        parts.append(str(step))
    return "-".join(parts)


def _ancestor_parts(stage: Ancestor, schedule: Schedule, done: int) -> list[str]:
    """Return the name parts of an earlier run up to its last used step.

    Args:
        schedule: Schedule of the current run, for its vocabulary.
        done: Steps before the earlier run.
    """
    try:
        vocabulary = schedule.phases[0].choices[0].start.vocabulary
        parts = _schedule_parts(
            Schedule.build(stage.schedule, stage.total or stage.step, vocabulary),
            stage.schedule,
            done,
            stage.step,
        )
    except InputError:  # the objective is not installed
        parts = [f"{_slugify(stage.schedule)}-{_format_step(done + stage.step)}"]
    if stage.step == stage.total:
        parts[-1] = re.sub(r"-([0-9]+k?)$", r"-dec\1", parts[-1])
    return parts


def _schedule_parts(schedule: Schedule, text: str, done: int, last: int | None = None) -> list[str]:
    """Return the name parts of a schedule, such as `clm-10k`, `mlm40-42k`.

    Args:
        done: Steps of earlier runs, which are added.
        last: Last step of the schedule that counts; all if None.
    """
    last = schedule.phases[-1].last_step if last is None else last
    phases = [
        (_phase_label(phase), min(phase.last_step, last))
        for phase in schedule.phases
        if phase.first_step <= last
    ]
    # Repeated phases would make the name too long: use the text of the schedule.
    if len(phases) > 4:
        phases = [(_slugify(text), last)]
    next_labels = [*(label for label, _ in phases[1:]), None]
    return [
        f"{label}-{_format_step(done + end)}"
        for (label, end), next_label in zip(phases, next_labels, strict=True)
        if next_label != label
    ]


def _phase_label(phase: Phase) -> str:
    """Return the label of a phase: its objective's if it is constant, else its text."""
    if len(phase.choices) > 1:
        return _slugify(phase.text)
    (choice,) = phase.choices
    return _objective_label(choice.start) if choice.start == choice.end else _slugify(choice.text)


def _objective_label(objective: Objective) -> str:
    """Return the label of an objective, such as `mlm40`.

    It has the name, the mask percentage and the other options without their default.
    """
    label = objective.name
    if (mask := getattr(objective, "mask", None)) is not None:
        label += f"{100 * mask:g}"
    option_texts = [
        f"{field.name}{getattr(objective, field.name):g}"
        for field in objective.options()
        if field.name != "mask"
        and isinstance(field.default, float | int)
        and getattr(objective, field.name) != field.default
    ]
    return "-".join([label, *option_texts])


def _format_step(steps: int) -> str:
    """Return a step count as text, multiples of 1,000 as `42k`."""
    return f"{steps // 1000}k" if steps and steps % 1000 == 0 else str(steps)


def _slugify(text: str) -> str:
    """Return `text` as a name of lowercase letters, digits, points and hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace("->", "to")).strip("-.") or "model"
