"""Identity of a study's model: the columns of tables, and the name of artifacts.

610m-mlm40-42k                 MLM with 40 % of the tokens masked, 42,000 steps
610m-clm-10k-mlm40-42k         CLM up to step 10,000, then MLM up to 42,000, in one run
610m-clm-dec42k-mlm40-64k      22,000 MLM steps continuing a CLM model from its decayed end
610m-mlm40-42k-1000            intermediate checkpoint of the first at step 1,000
610m-clm-42k-seed2             another pretraining seed
"""

import re
from dataclasses import dataclass, field

DEFAULT_BUDGET = 42_000
"""Total steps of published runs, assumed for an intermediate checkpoint whose key has none."""

_STEPS = r"\d+k?"
_MASK = r"\d+(?:\.\d+)?"
_NAME = re.compile(
    rf"([a-z0-9.]+(?:-[a-z0-9.]+)*?)((?:-(?:clm|mlm{_MASK})-(?:dec)?{_STEPS})+)(?:-(\d+))?(?:-seed(\d+))?"
)
_CONTINUED = re.compile(rf"(.+-)dec({_STEPS})-mlm({_MASK})-({_STEPS})")
_RUN = re.compile(rf"(?:-clm-({_STEPS}))?(?:-mlm({_MASK})-({_STEPS}))?")
# Sizes given as a number of parameters: 610m, 1b.
_PARAMETER_COUNT = re.compile(r"\d+(\.\d+)?[kmb]")


@dataclass(frozen=True, order=True)
class ModelKey:
    """Identity of a model or of an intermediate checkpoint, for tables and names.

    `size` is a name, such as "610M". `clm_steps`, then `mlm_steps`, are those of the first run;
    `cpt_mlm_steps` are MLM steps after its decayed end (0: none). `mask_ratio` is a fraction, None
    if nothing is masked. `decayed` is False for an intermediate checkpoint. `schedule` is the
    objective schedule if the columns cannot express it, else "". `seed` is that of pretraining.
    `budget`, which is not compared, is the total of an intermediate checkpoint's run; 0: 42,000.
    """

    size: str
    """"210M", "610M", "1B", or a name of the manifest's `sizes`"""
    clm_steps: int = 0
    mlm_steps: int = 0
    """MLM steps after the CLM steps, in the same run"""
    cpt_mlm_steps: int = 0
    """MLM steps after the decayed end of the first clm_steps + mlm_steps"""
    mask_ratio: float | None = None
    """share of the tokens that MLM masks; None if nothing is masked"""
    decayed: bool = True
    """False for an intermediate checkpoint, before the learning rate decays"""
    schedule: str = ""
    """objective schedule of the last run if the columns above cannot express it (alternating, MNTP,
    ...)
    """
    seed: int = 1
    """pretraining seed"""
    budget: int = field(default=0, compare=False)
    """for an intermediate checkpoint: total steps of its run (the one after the decayed end, if
    any); 0: DEFAULT_BUDGET. It affects only the name: the weights do not depend on later steps
    """

    @property
    def steps(self) -> int:
        """Return the number of all CLM and MLM steps behind the weights."""
        return self.clm_steps + self.mlm_steps + self.cpt_mlm_steps

    @property
    def clm_share(self) -> float:
        """Return clm_steps / (clm_steps + mlm_steps), 0 to 1; 0.0 if both are 0.

        Not counted are `cpt_mlm_steps`, MLM that continues from the decayed end of these steps.
        """
        first = self.clm_steps + self.mlm_steps
        return self.clm_steps / first if first else 0.0


def format_model_name(key: ModelKey) -> str:
    """Return the name of a key, such as `610m-clm-10k-mlm40-42k`.

    A name has size, phases with end steps, step of an intermediate checkpoint, and seed unless it
    is 1. An objective schedule stands in place of the phases of the last run.

    Raises:
        ValueError: MLM has no mask ratio, or an intermediate checkpoint is not before the end of
            its run.
    """
    size = key.size.lower() if _PARAMETER_COUNT.fullmatch(key.size.lower()) else key.size
    first = key.clm_steps + key.mlm_steps
    last = key.cpt_mlm_steps
    checkpoint_step = last or first
    end = checkpoint_step if key.decayed else key.budget or DEFAULT_BUDGET
    if not key.decayed and checkpoint_step >= end:
        raise ValueError(
            f"{key}: step {checkpoint_step} is not before the end of its run, step {end}"
        )
    if key.schedule:  # keep letters, digits, points and single hyphens
        label = (
            re.sub(r"[^a-z0-9.]+", "-", key.schedule.lower().replace("->", "to")).strip("-.")
            or "model"
        )
    else:
        label = _format_mlm(key) if key.mlm_steps or last else "clm"
    parts = [size]
    if key.clm_steps and key.mlm_steps and (last or not key.schedule):
        parts.append(f"clm-{_format_steps(key.clm_steps)}")
    if last:
        parts.append(f"{_format_mlm(key) if key.mlm_steps else 'clm'}-dec{_format_steps(first)}")
        end += first
    parts.append(f"{label}-{_format_steps(end)}")
    if not key.decayed:
        parts.append(str(checkpoint_step))
    if key.seed != 1:
        parts.append(f"seed{key.seed}")
    return "-".join(parts)


def parse_model_name(name: str) -> ModelKey | None:
    """Return the ModelKey of a name by `format_model_name`; None for any other name.

    It is None too for names with an objective schedule, with a suffix such as a learning rate, or
    with two different mask ratios. A size that is a number gets capitals: 610m becomes 610M.
    `budget` of an intermediate checkpoint is that of its name, else it is 0.
    """
    match = _NAME.fullmatch(name)
    if not match:
        return None
    size, phases, step, seed = match.groups()
    continued_mask = end = None
    continued = _CONTINUED.fullmatch(phases)
    if continued:
        before, first_run_end, continued_mask, end = continued.groups()
        phases = before + first_run_end
    run = _RUN.fullmatch(phases)
    if not run:
        return None
    clm_end, mask, mlm_end = run.groups()
    clm = _parse_steps(clm_end or "0")
    mlm = _parse_steps(mlm_end) - clm if mlm_end else 0
    cpt = _parse_steps(end) - clm - mlm if end else 0
    masks = {float(percent) for percent in (mask, continued_mask) if percent}
    # The key has only one mask ratio.
    if len(masks) > 1 or not all(0 < percent <= 100 for percent in masks):
        return None
    if (clm_end and not clm) or (mlm_end and mlm < 1) or (end and cpt < 1):
        return None
    budget = 0
    if step:
        checkpoint_step = int(step)
        budget = cpt or clm + mlm
        if not 0 < checkpoint_step < budget:
            return None
        if cpt:
            cpt = checkpoint_step
        else:
            mlm = max(0, checkpoint_step - clm)
            clm = min(clm, checkpoint_step)
    ratio = round(masks.pop() / 100, 6) if mlm or cpt else None
    size = size.upper() if _PARAMETER_COUNT.fullmatch(size) else size
    return ModelKey(
        size, clm, mlm, cpt, ratio, decayed=not step, seed=int(seed or 1), budget=budget
    )


def _format_mlm(key: ModelKey) -> str:
    """Return the name's part for MLM, as `mlm40`."""
    if key.mask_ratio is None:
        raise ValueError(f"{key}: MLM without a mask ratio")
    return f"mlm{100 * key.mask_ratio:g}"


def _format_steps(steps: int) -> str:
    """Return a number of steps as in names: 42000 is `42k`, 150 is `150`."""
    return f"{steps // 1000}k" if steps and steps % 1000 == 0 else str(steps)


def _parse_steps(count: str) -> int:
    """Return the number of steps that `42k` or `150` stands for."""
    return 1000 * int(count[:-1]) if count.endswith("k") else int(count)
