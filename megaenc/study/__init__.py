"""Studies from one manifest: plan, runs, results, statistics, claims, report."""
