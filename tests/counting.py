"""How much work a call is, without a clock."""

import cProfile
import pstats
from collections.abc import Callable
from typing import Any


def counted(function: Callable, *arguments: Any) -> tuple[Any, int]:
    """What the call returns, and how many calls of functions it took."""
    profile = cProfile.Profile()
    result = profile.runcall(function, *arguments)
    return result, pstats.Stats(profile).total_calls
