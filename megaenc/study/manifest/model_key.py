"""What a model of the study is: the columns of its published tables, and the names that its artefacts have.

610m-mlm40-42k                 MLM with 40 % of the tokens hidden, 42,000 steps
610m-clm-10k-mlm40-42k         CLM up to step 10,000, then MLM up to 42,000, in one run
610m-clm-dec42k-mlm40-64k      22,000 MLM steps on a CLM model that had reached its end, decayed
610m-mlm40-42k-1000            step 1,000 on the way of the first
610m-clm-42k-seed2             another seed of the pretraining
"""

import re
from dataclasses import dataclass, field

DEFAULT_BUDGET = (
    42_000  # steps of the study's own runs, and so what an intermediate checkpoint is on the way to where nobody says
)

_STEPS, _MASK = r"\d+k?", r"\d+(?:\.\d+)?"
_NAME = re.compile(rf"([a-z0-9.]+(?:-[a-z0-9.]+)*?)((?:-(?:clm|mlm{_MASK})-(?:dec)?{_STEPS})+)(?:-(\d+))?(?:-seed(\d+))?")
_CONTINUED = re.compile(rf"(.+-)dec({_STEPS})-mlm({_MASK})-({_STEPS})")
_RUN = re.compile(rf"(?:-clm-({_STEPS}))?(?:-mlm({_MASK})-({_STEPS}))?")
_PARAMETER_COUNT = re.compile(r"\d+(\.\d+)?[kmb]")  # a size that is a number of parameters: 610m, 1b


@dataclass(frozen=True, order=True)
class ModelKey:
    """A model, or a checkpoint on the way to one. Steps are optimizer steps of pretraining."""

    size: str
    """"210M", "610M", "1B", or what a manifest calls its sizes"""
    clm_steps: int = 0
    mlm_steps: int = 0
    """after those of CLM, in the same run"""
    cpt_mlm_steps: int = 0
    """MLM steps after the decayed end of the first clm_steps + mlm_steps"""
    mask_ratio: float | None = None
    """share of the tokens that MLM hides; None where nothing is masked"""
    decayed: bool = True
    """False for an intermediate checkpoint, on the way at these steps"""
    schedule: str = ""
    """the objective schedule of the last run where the columns above cannot say it (alternating, MNTP, ...)"""
    seed: int = 1
    """of the pretraining"""
    budget: int = field(default=0, compare=False)
    """of an intermediate checkpoint: the steps of the run that it is on the way of (of the one after the decayed end, if there is
    one); 0: BUDGET. Part of its name alone: its weights are the same whatever comes after"""

    @property
    def steps(self) -> int:
        """All optimizer steps that went into the weights."""
        return self.clm_steps + self.mlm_steps + self.cpt_mlm_steps

    @property
    def clm_share(self) -> float:
        """CLM steps among those of the first run, 0 to 1."""
        return self.clm_steps / first if (first := self.clm_steps + self.mlm_steps) else 0.0


def format_model_name(setting: ModelKey) -> str:
    """Return the name that the study's artefacts give this setting, or would.

    Raises ValueError where there is MLM without a mask ratio, or an intermediate checkpoint lies behind the end of its run.
    """
    size = setting.size.lower() if _PARAMETER_COUNT.fullmatch(setting.size.lower()) else setting.size
    first, last = setting.clm_steps + setting.mlm_steps, setting.cpt_mlm_steps
    at = last or first
    end = at if setting.decayed else setting.budget or DEFAULT_BUDGET
    if not setting.decayed and at >= end:
        raise ValueError(f"{setting}: step {at} is not on the way to {end}")
    if setting.schedule:  # letters, digits, points and single hyphens of it
        label = re.sub(r"[^a-z0-9.]+", "-", setting.schedule.lower().replace("->", "to")).strip("-.") or "model"
    else:
        label = _format_mlm(setting) if setting.mlm_steps or last else "clm"
    parts = [size]
    if setting.clm_steps and setting.mlm_steps and (last or not setting.schedule):
        parts.append(f"clm-{_format_steps(setting.clm_steps)}")
    if last:
        parts.append(f"{_format_mlm(setting) if setting.mlm_steps else 'clm'}-dec{_format_steps(first)}")
        end += first
    parts.append(f"{label}-{_format_steps(end)}")
    if not setting.decayed:
        parts.append(str(at))
    if setting.seed != 1:
        parts.append(f"seed{setting.seed}")
    return "-".join(parts)


def parse_model_name(name: str) -> ModelKey | None:
    """Return the setting that a name stands for; None where it is no such name. `format_model_name` gives the name back."""
    if not (match := _NAME.fullmatch(name)):
        return None
    size, stages, step, seed = match.groups()
    more_mask = end = None
    if continued := _CONTINUED.fullmatch(stages):
        before, first_end, more_mask, end = continued.groups()
        stages = before + first_end
    if not (run := _RUN.fullmatch(stages)):
        return None
    clm_end, mask, mlm_end = run.groups()
    clm = _parse_steps(clm_end or "0")
    mlm = _parse_steps(mlm_end) - clm if mlm_end else 0
    cpt = _parse_steps(end) - clm - mlm if end else 0
    masks = {float(percent) for percent in (mask, more_mask) if percent}
    if len(masks) > 1 or not all(0 < percent <= 100 for percent in masks):  # one column holds one of them
        return None
    if (clm_end and not clm) or (mlm_end and mlm < 1) or (end and cpt < 1):
        return None
    budget = 0
    if step:
        at, budget = int(step), cpt or clm + mlm
        if not 0 < at < budget:
            return None
        clm, mlm, cpt = (clm, mlm, at) if cpt else (min(clm, at), max(0, at - clm), 0)
    ratio = round(masks.pop() / 100, 6) if mlm or cpt else None
    size = size.upper() if _PARAMETER_COUNT.fullmatch(size) else size
    return ModelKey(size, clm, mlm, cpt, ratio, decayed=not step, seed=int(seed or 1), budget=budget)


def _format_mlm(setting: ModelKey) -> str:
    if setting.mask_ratio is None:
        raise ValueError(f"{setting}: MLM without a mask ratio")
    return f"mlm{100 * setting.mask_ratio:g}"


def _format_steps(steps: int) -> str:
    return f"{steps // 1000}k" if steps and steps % 1000 == 0 else str(steps)


def _parse_steps(count: str) -> int:
    return 1000 * int(count[:-1]) if count.endswith("k") else int(count)
