"""Which checkpoints stay."""

from collections.abc import Collection, Iterable


def superfluous(
    older: Iterable[int], keep_last: int | None, keep_every: int | None, keep_steps: Collection[int] = ()
) -> list[int]:
    """The steps of `older` checkpoints that may go beside a newer one: none where neither rule is given.

    The `keep_last` newest stay, the newer one counted (1 if only `keep_every` is given), the multiples of `keep_every`
    and `keep_steps`.
    """
    if keep_last is None and keep_every is None:
        return []
    steps = sorted(older)
    others = (keep_last or 1) - 1
    old = (step for step in steps[: max(0, len(steps) - others)] if step not in keep_steps)
    return [step for step in old if not keep_every or step % keep_every]
