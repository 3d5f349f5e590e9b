"""`megaenc study run` and `status`: execution of a plan, here or on Slurm."""
