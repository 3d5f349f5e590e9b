"""The directory of benchmark scripts, for imports."""

import sys

import runs

sys.path.insert(0, str(runs.ROOT / "benchmarks"))
