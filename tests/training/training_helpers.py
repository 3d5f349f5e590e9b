"""Plans of runs, for the tests that look into them."""

from megaenc.training.config import parse_config
from megaenc.training.plan import Plan
from megaenc.training.planning import build_plan


def plan_of(*flags) -> Plan:
    """The plan of a run with these flags."""
    return build_plan(parse_config([str(flag) for flag in flags], "test"))
