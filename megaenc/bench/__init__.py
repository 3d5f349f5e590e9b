"""Benchmarks of speed and memory against peers, each in one run, in turns, after a check that the results agree."""
