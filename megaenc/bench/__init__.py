"""Speed and memory on this machine, beside the peers': each comparison in one run, in turns, after a check of the results."""
