"""What was found of a kernel that was tried on this very machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Of a kernel or an attention backend. What `error` and `allowed` are relative to, the check that made it says."""

    name: str
    available: bool
    """Whether it could be tried at all."""
    error: float | None
    """The largest that was found; None where nothing was computed."""
    allowed: float
    why: str
    """What speaks against it, for the console; empty where it is right."""

    @property
    def right(self) -> bool:
        """Whether a run may use it."""
        return not self.why
