"""`megaenc study run` and `status`: execution of the stages of a plan, here or on Slurm."""
